"""A run from beginning to end: its folder, its tracker, its executor, and what it leaves behind."""

from __future__ import annotations

import csv
import hashlib
import logging
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from raysim import files, lock, processes, startup
from raysim.config import loading
from raysim.config.loading import parse_overrides
from raysim.config.schema import Config
from raysim.config.tracking_uri import redacted
from raysim.data import partition_plot, partitions, summary
from raysim.diagnostics import forgetting
from raysim.engine import checkpoint, client_store, schedule
from raysim.engine.executor import Executor, Inline
from raysim.engine.loop import Engine, Record
from raysim.engine.plan import Plan, prepare
from raysim.engine.server import Server
from raysim.errors import ConfigError, RaysimError, in_a_line
from raysim.runs import git
from raysim.signals import Signals, Stopped, stoppable
from raysim.tracking import mlflow as tracking
from raysim.tracking.mlflow import Tracker
from raysim.tracking.spool import FILE, Recorder, Status, flatten
from raysim.training.task import Facts
from raysim.training.vmap import VmapTask
from raysim.version import __version__

logger = logging.getLogger("raysim")

Progress = Callable[[Record], bool | str | None]
"""Called with the record of each round. If it returns True, or a text that says why, the run ends gracefully."""

FINAL = "parameters.safetensors"
"""What a finished run leaves in its folder."""

KEPT = ("config.yaml", FINAL, "history.csv", "learning_curve.png", "partition.png", "arrivals.png", "forgetting.png")
"""Files of the run's folder that MLflow gets."""

SOURCES = "source"
"""The folder, in that of a run and among its artifacts, of the code that is not raysim's: a folder for each section
that names some."""

ROUNDS_SHOWN = 60
"""Of which a picture of the virtual clock is drawn."""


@dataclass
class Finished:
    """What a run leaves behind. `parameters` is the final vector [P], `state_dict` the same by name, with BatchNorm
    statistics; `history` one record for each round (0: before training)."""

    run_id: str
    run_dir: Path
    history: list[Record]
    parameters: Tensor
    state_dict: dict[str, Tensor]
    digest: str
    seconds: float
    stopped: str = ""
    """Why `progress` ended the run before its last round; empty if all rounds are done."""

    @property
    def rounds(self) -> int:
        return int(self.history[-1]["round"])

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return last_and_best(self.history)

    @property
    def clients_per_second(self) -> float:
        """Clients trained a second, over the rounds."""
        clients, seconds = (sum(r.get(key, 0.0) for r in self.history) for key in ("clients", "seconds"))
        return clients / seconds if seconds else 0.0

    def as_object(self) -> dict[str, Any]:
        """What can be said of it in a line of JSON."""
        return {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir.absolute()),
            "rounds": self.rounds,
            "metrics": self.metrics,
            "seconds": round(self.seconds, 3),
            "clients_per_second": round(self.clients_per_second, 3),
            "digest": self.digest,
            **({"stopped": self.stopped} if self.stopped else {}),
        }


def last_and_best(history: Iterable[Record]) -> dict[str, dict[str, float]]:
    """The last and the best value of accuracy and the losses."""
    found, history = {}, list(history)
    for name, best in (("accuracy", max), ("loss", min), ("train_loss", min)):
        if values := [r[name] for r in history if name in r and np.isfinite(r[name])]:
            found[name] = {"last": values[-1], "best": best(values)}
    return found


def run(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    progress: Progress | None = None,
    **keys: Any,
) -> Finished:
    """Runs one experiment.

    Args:
        source: a configuration file, the name of a shipped one ("quickstart"), or a mapping.
        overrides: "key=value" with dots, or a mapping; `keys` are the same as keyword arguments.
        progress: called with each round's record. If it returns True, or a text that says why, the run ends gracefully
            after the rounds that are trained by then: their result is returned, a checkpoint of them is written, and
            `resume` trains the rest. In MLflow the run is KILLED, with the tag `stopped_early`.

    Raises:
        ConfigError: a mistake in the configuration, before anything has started.
        RaysimError: anything else that stopped the run; its run directory and MLflow run keep what was done.
    """
    return execute(prepare(source, {**parse_overrides(overrides), **keys}), progress=progress or (lambda record: None))


@dataclass
class Origin:
    """The run that a fork comes from, by its MLflow id, and what the fork changes."""

    run_id: str
    changes: str


def resume(
    run: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    fork: bool = False,
    progress: Progress | None = None,
) -> Finished:
    """Goes on with a run from its last whole checkpoint, in the same MLflow run; the result is the one that never
    stopping would have given.

    Args:
        run: the run's folder, or its MLflow id.
        overrides: keys that do not determine the result: rounds, resources, tracking, checkpoint, evaluate, store,
            faults.
        fork: the overrides may be others too. It goes on as a new run, in a folder of its own, under the old one in
            MLflow; only data, partition and model stay as they were.

    Raises:
        ConfigError: there is no run, it is finished or going on, or an override would change its result.
    """
    reopened = forked(run, overrides) if fork else (*reopen(run, overrides), None)
    return execute(*reopened, progress=progress or (lambda record: None))


def reopen(
    run: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> tuple[Plan, Path, checkpoint.Checkpoint | None]:
    """The plan, folder and last checkpoint of a run that was stopped."""
    folder = find(run, overrides)
    if "run_dir" in parse_overrides(overrides):
        raise ConfigError(f"run_dir: the run stays in {folder}; leave it out, or give --fork for a new run")
    before, plan = prepare(folder / "config.yaml"), prepare(folder / "config.yaml", overrides)
    if changed := _changes(before, plan):
        raise ConfigError(
            f"{', '.join(changed)}: would change the result of the run in {folder}; with --fork it goes on as a new run"
        )
    saved = _saved(folder, before)
    done = saved.facts["round"] if saved is not None else 0
    unwritten = done == plan.config.rounds and not (folder / FINAL).exists()  # the disk was full, say
    if saved is not None and done >= plan.config.rounds and not unwritten:
        raise ConfigError(f"rounds: {done} rounds are done in {folder}; to go on, say rounds=N with a larger N")
    return plan, folder, saved


def forked(
    run: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> tuple[Plan, Path, checkpoint.Checkpoint, Origin]:
    """The plan of a run that goes on from another one's last checkpoint, its new folder, the checkpoint and where it
    comes from."""
    folder = find(run, overrides)
    tracking.finish_abandoned([folder])
    given = parse_overrides(overrides)
    recorded = loading.read(folder / "config.yaml").get("files")
    before = prepare(folder / "config.yaml", {"files": None})
    before = replace(before, config=before.config.model_copy(update={"files": recorded}))
    plan = prepare(folder / "config.yaml", {"run_dir": None, "files": None, **given})
    changed = _changes(before, plan)
    for key in changed:
        section = key.removeprefix("files.").partition(".")[0]
        both_in_step = before.config.schedule.name == plan.config.schedule.name == "sync"
        if section in ("data", "partition", "model", "dtype") or (section == "schedule" and not both_in_step):
            raise ConfigError(
                f"{key.removeprefix('files.')}: a fork keeps its run's data, partition and model, and a virtual clock "
                "its schedule; start a new run instead"
            )
    saved = _saved(folder, before)
    if saved is None:
        raise ConfigError(f"{folder}: there is no checkpoint to fork from; start a new run instead")
    if saved.facts["round"] >= plan.config.rounds:
        raise ConfigError(
            f"rounds: {saved.facts['round']} rounds are done before the fork; say rounds=N with a larger N"
        )
    _check_fork(before, plan, saved)
    changes = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
    origin, own = Origin(saved.facts["run_id"], changes or "nothing"), make_run_dir(plan)
    saved.facts |= {"fingerprint": plan.config.fingerprint, "run_id": ""}
    client_store.inherit(folder, own, plan.config.store.dir)
    checkpoint.write(own, saved, plan.config.checkpoint.keep)  # before it is a run: killed early, it still is a fork
    return plan, own, saved, origin


def _check_fork(before: Plan, plan: Plan, saved: checkpoint.Checkpoint) -> None:
    """What server and clients kept must be something that the new rules can go on with."""
    x0, buffers = plan.initial
    try:
        Server(plan.server, x0, buffers, plan.problem).restore(saved.server)
    except RaysimError as error:
        raise ConfigError(f"algorithm: {error}; fork to a method that keeps the same, or start a new run") from None
    kept = {k.removeprefix("rows/") for k in saved.clients if k.startswith("rows/")}
    wanted = set(plan.client.state(VmapTask(plan.model(), Facts())))
    if kept and wanted and kept != wanted:
        raise ConfigError(
            f"algorithm: clients have kept {', '.join(sorted(kept))} for client rule '{before.client.name}', where "
            f"'{plan.client.name}' wants {', '.join(sorted(wanted))}; fork to another method, or start a new run"
        )


def _changes(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """The keys that determine the result and differ, with both values."""
    old, new = flatten(before.config.identity()), flatten(after.config.identity())
    return {k: (old.get(k, "unset"), new.get(k, "unset")) for k in {**old, **new} if old.get(k) != new.get(k)}


def _saved(folder: Path, plan: Plan) -> checkpoint.Checkpoint | None:
    """The last whole checkpoint of the run that is planned there, if it has one and nothing else has changed."""
    saved = checkpoint.read_latest(folder, logger.warning)
    if saved is None:
        return None
    if saved.facts["fingerprint"] != plan.config.fingerprint:
        raise ConfigError(f"{folder}: the checkpoint was made by another configuration than its config.yaml")
    now = {"data": plan.dataset.digest, "partition": partitions.digest(plan.clients)}
    if changed := [what for what, found in now.items() if saved.facts[what] != found]:
        raise ConfigError(
            f"{changed[0]}: {folder} was run with another {changed[0]} than is there now; put the old one back"
        )
    if saved.facts["torch"] != torch.__version__:
        logger.warning("the run began under torch %s; its bits may change", saved.facts["torch"])
    return saved


def find(run: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Path:
    """The folder of a run, given that or its MLflow id (looked up at `tracking.uri`). Raises ConfigError if there is
    none here, or if it is going on."""
    folder = Path(run)
    if not folder.exists() and re.fullmatch("[0-9a-f]{32}", str(run)):
        folder = Path(tracking.where(str(run), parse_overrides(overrides).get("tracking.uri")))
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} holds no run (no config.yaml); give the folder that `raysim run` printed")
    if other := lock.running(folder):
        raise ConfigError(f"{folder}: {other} is at work on this run; wait for it or end it")
    return folder


def execute(
    plan: Plan,
    run_dir: Path | None = None,
    saved: checkpoint.Checkpoint | None = None,
    origin: Origin | None = None,
    *,
    progress: Progress = lambda record: None,
    log: Callable[[str], None] = logger.warning,
    tracker: Recorder | None = None,
) -> Finished:
    """Runs a plan, from a checkpoint if one is given: opens the run directory, the tracker (its own, unless one is
    given) and the executor, and closes them whatever happens."""
    new, run_dir = run_dir is None, run_dir or make_run_dir(plan)
    try:
        with lock.alone(run_dir):
            files.refuse_links(run_dir, [client_store.FOLDER] if plan.config.store.dir else [])
            (run_dir / FINAL).unlink(missing_ok=True)
            _write_config(plan, run_dir)
            try:
                return _execute(plan, run_dir, saved, origin, progress, log, tracker)
            except ConfigError:
                if new:
                    _forget(run_dir)
                raise
    finally:
        with suppress(OSError):  # it is not empty, unless the run was refused
            run_dir.rmdir()


def _forget(run_dir: Path) -> None:
    """Of a run that was refused before anything was recorded, by the cluster, say, nothing stays."""
    spool = run_dir / FILE
    if not spool.exists() or not spool.stat().st_size:
        spool.unlink(missing_ok=True)
        (run_dir / "config.yaml").unlink(missing_ok=True)
        shutil.rmtree(run_dir / SOURCES, ignore_errors=True)


class _Closing:
    """The steps that end a run; the step added last comes first.

    Each step is tried, whatever became of those before it. A failure is logged and listed in `failures`; it never hides
    why the run ended (`error`, None if all rounds are done; or `stopped`, if `progress` ended it).
    """

    def __init__(self, signals: Signals) -> None:
        self.signals, self.steps = signals, ExitStack()
        self.error: BaseException | None = None
        self.stopped = ""
        self.failures: list[str] = []

    @property
    def status(self) -> Status:
        """The run's status in MLflow."""
        if self.error is None:
            return "KILLED" if self.stopped else "FINISHED"
        return "FAILED" if isinstance(self.error, Exception) else "KILLED"

    def step(self, title: str, close: Callable[[], object]) -> None:
        self.steps.callback(self.attempt, title, close)

    def attempt(self, title: str, close: Callable[[], object]) -> None:
        try:
            close()
        except Exception as error:
            self.failures.append(f"{title}: {in_a_line(error)}")
            logger.warning("at the end of the run: %s", self.failures[-1])

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.signals.close()
        self.error = error
        self.steps.close()


def _execute(
    plan: Plan,
    run_dir: Path,
    saved: checkpoint.Checkpoint | None,
    origin: Origin | None,
    progress: Progress,
    log: Callable[[str], None],
    tracker: Recorder | None,
) -> Finished:
    began = time.perf_counter()
    tracker = tracker or Tracker(plan.config.tracking, run_dir, origin and origin.run_id)
    engine: Engine | None = None

    def say(record: Record) -> None:
        tracker.metrics({k: v for k, v in record.items() if k != "round"}, step=int(record["round"]))
        if (reason := progress(record)) and engine is not None:
            engine.end_early(
                reason if isinstance(reason, str) else f"round {record['round']:g}: progress returned True"
            )

    def keep() -> None:
        for path in _keepsakes(plan, run_dir, engine.history, closing) if engine is not None else ():
            tracker.artifact(path)

    def explain() -> None:
        if tracker.run_id and (said := _how_it_ended(closing)):
            tracker.tags(said)

    def give_up(why: str) -> None:
        if tracker.run_id:
            tracker.tags({"error": why})
        tracker.finish("FAILED")

    with processes.at_last(give_up), stoppable() as signals, _Closing(signals) as closing:
        closing.step("MLflow's run is not ended", lambda: tracker.finish(closing.status))
        closing.step("MLflow is not given the error", explain)
        closing.step("tables and pictures are not kept", keep)
        closing.step("rows on disk are not removed", lambda: engine and engine.close())
        executor = choose(plan, log)
        closing.step("the executor is not closed", executor.close)
        try:
            executor.open(plan)
        except SystemExit:  # what Ray, while it starts, makes of a SIGTERM
            raise Stopped(signal.SIGTERM) from None
        signals.install()  # once more: to start Ray was to put its own handlers in place
        said = {**tags(plan), **_tags_of(origin, saved), "run_dir": str(run_dir.absolute())}
        before = (saved.facts["run_id"] if saved else "") or tracker.earlier
        if before:  # what ended the run before no longer holds
            said |= {"error": "", "stopped_early": ""}
        run_id = tracker.start(plan.label, plan.config.model_dump(mode="json"), said, run_id=before)
        startup.over()
        _track_inputs(tracker, plan)
        if (run_dir / SOURCES).is_dir():
            tracker.artifact(run_dir / SOURCES, SOURCES)
        engine = Engine(plan, executor, run_dir, run_id, signals)
        if saved is not None:
            engine.restore(saved)
        for record in engine.history if origin else []:
            say(record)
        with signals.held():
            for record in engine.rounds():
                say(record)
            finished = _finish(plan, engine, time.perf_counter() - began)
            closing.stopped = finished.stopped
            tracker.tags({"stopped_early": finished.stopped} if finished.stopped else {"digest": finished.digest})
        return finished


def _how_it_ended(closing: _Closing) -> dict[str, str]:
    """Tags that say what ended a run, and what could not be closed; none after a run that went well."""
    said = {}
    if isinstance(closing.error, Exception):
        said["error"] = str(closing.error) if isinstance(closing.error, RaysimError) else in_a_line(closing.error)
    if closing.failures:
        said["error_at_end"] = "; ".join(closing.failures)
    return said


def _finish(plan: Plan, engine: Engine, seconds: float) -> Finished:
    x, run_dir = engine.final["state/x"], engine.run_dir
    assert run_dir is not None
    named = plan.model().state_dict(x, engine.final["buffers"])
    try:
        if not engine.stopped:  # else the checkpoint has them, and what is in this file would look final
            with files.whole(run_dir / FINAL) as partial:
                save_file(named, partial)
    except (OSError, SafetensorError) as error:
        raise checkpoint.Unwritable(
            f"{run_dir / FINAL} cannot be written: {error} ({_free(run_dir)}); make room and `raysim resume` writes it"
        ) from None
    return Finished(engine.run_id, run_dir, engine.history, x, named, digest(x), seconds, engine.stopped)


def digest(x: Tensor) -> str:
    """sha256 of the parameters' bytes."""
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def choose(plan: Plan, log: Callable[[str], None]) -> Executor:
    """The configured executor, not yet open."""
    if plan.config.resources.executor == "inline":
        return Inline()
    from raysim.distributed.executor import RayExecutor  # Ray is imported when it is used

    return RayExecutor(log)


def latest_run_dir(plan: Plan) -> Path | None:
    """The folder that the last run of this plan made; None if there is none."""
    if plan.config.run_dir is not None:
        return Path(plan.config.run_dir) if (Path(plan.config.run_dir) / "config.yaml").exists() else None
    stem = _stem(plan)
    return max(stem.parent.glob(f"{stem.name}*"), key=lambda path: path.stat().st_ctime, default=None)


def _stem(plan: Plan) -> Path:
    c = plan.config
    return Path("runs", c.tracking.folder, f"{plan.file_label}-{c.seed}-{c.fingerprint[:8]}")


def make_run_dir(plan: Plan) -> Path:
    """A new folder for the run: the configured one, or runs/<experiment>/<label>-<seed>-<hash>, numbered if taken."""
    if plan.config.run_dir is not None:
        path = Path(plan.config.run_dir)
        if (path / "config.yaml").exists():
            if other := lock.running(path):
                raise ConfigError(f"run_dir: {other} is at work on a run in {path}; choose another folder")
            end, more = (" that is finished", " rounds=N") if (path / FINAL).exists() else (" that was stopped", "")
            raise ConfigError(
                f"run_dir: {path} already holds a run{end}; `raysim resume {path}{more}` goes on with it, or choose "
                "another folder"
            )
        _make(path, exist_ok=True)
        return path
    stem = _stem(plan)
    for number in range(1, 10_000):
        path = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        if not path.exists():
            with suppress(FileExistsError):  # somebody was quicker
                _make(path)
                return path
    raise ConfigError(f"run_dir: {stem} and its numbered followers are all taken; give run_dir")


def _make(path: Path, exist_ok: bool = False) -> None:
    try:
        path.mkdir(files.PRIVATE, parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"run_dir: {path} cannot be made: {error.strerror}; choose another folder") from None


def _write_config(plan: Plan, run_dir: Path) -> None:
    """Write what the run can be resumed by, without passwords, and the code that its methods and net consist of."""
    path = run_dir / "config.yaml"
    try:
        files.write(path, without_secrets(plan.config).dump())
        for path, text in _sources(plan, run_dir / SOURCES):
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(path) as partial:
                partial.write_bytes(text)
    except OSError as error:
        raise ConfigError(
            f"run_dir: {path} cannot be written: {error.strerror} ({_free(run_dir)}); choose another folder"
        ) from None


def _sources(plan: Plan, folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield where the code of a run is kept, and its text; what two sections share is kept once."""
    kept: list[Mapping[str, bytes]] = []
    for section, texts in plan.sources.items():
        if texts not in kept:
            kept.append(texts)
            for file, text in texts.items():
                yield folder / section / file.replace("..", "above"), text


def tags(plan: Plan) -> dict[str, str]:
    """What to filter runs by in MLflow."""
    c = plan.config
    return {
        "algorithm": plan.label,
        "client_rule": plan.client.name,
        "server_rule": plan.server.name,
        "data": c.data.name,
        "partition": c.partition.name,
        "model": c.model.name,
        "seed": str(c.seed),
        "fingerprint": c.fingerprint,
        "parameters": str(plan.problem.size),
        **git.tags(),
        "raysim": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **({"privacy.unprotected": ", ".join(plan.client.exposes)} if c.privacy and plan.client.exposes else {}),
    }


def _tags_of(origin: Origin | None, saved: checkpoint.Checkpoint | None) -> dict[str, str]:
    """What sets a fork apart from the run that it comes from."""
    if origin is None or saved is None:
        return {}
    return {"fork.of": origin.run_id, "fork.round": str(saved.facts["round"]), "fork.changes": origin.changes}


def _track_inputs(tracker: Recorder, plan: Plan) -> None:
    data, sizes = plan.dataset, plan.clients.sizes
    tracker.inputs(data.name, data.digest, plan.config.data.root or data.name, "training", summary(data))
    low, middle, high = (int(q) for q in np.quantile(sizes, (0, 0.5, 1)))
    tracker.inputs(
        f"partition-{plan.config.partition.name}",
        partitions.digest(plan.clients),
        data.name,
        "partition",
        {"clients": len(plan.clients), "samples_min": low, "samples_median": middle, "samples_max": high},
    )


def without_secrets(config: Config) -> Config:
    """A configuration as it is written to files."""
    tracking = config.tracking.model_copy(update={"uri": redacted(config.tracking.uri)})
    return config.model_copy(update={"tracking": tracking})


def _keepsakes(plan: Plan, run_dir: Path, history: list[Record], closing: _Closing) -> list[Path]:
    """Write the tables and pictures of a run, one independently of the other; return the files that are there."""
    from raysim.diagnostics.plots import forgetting as forgetting_plot  # matplotlib is imported when it is needed
    from raysim.runs.plots import arrivals, learning_curve

    def draw(name: str, picture: Callable[[Path], object]) -> None:
        def whole() -> None:
            with files.whole(run_dir / name) as partial:
                picture(partial)

        closing.attempt(f"{run_dir / name} is not written", whole)

    if history:
        draw("history.csv", lambda path: _write_table(history, path))
        draw("learning_curve.png", lambda path: learning_curve(history, path))
    draw("partition.png", lambda path: partition_plot(plan.clients, plan.dataset.y, plan.dataset.n_classes, path))
    if turns := schedule.preview(plan.config, plan.clients.sizes, min(plan.config.rounds, ROUNDS_SHOWN)):
        draw("arrivals.png", lambda path: arrivals(turns, path))
    forgotten: dict[int, dict[str, list[float]]] = {}
    closing.attempt("what was forgotten cannot be read", lambda: forgotten.update(forgetting.read(run_dir)))
    if forgotten:
        draw("forgetting.png", lambda path: forgetting_plot(forgotten, path))
    return [path for name in KEPT if (path := run_dir / name).exists()]


def _write_table(history: list[Record], path: Path) -> None:
    """Write a CSV file with a row for each round."""
    columns = list(dict.fromkeys(k for record in history for k in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB free there"
