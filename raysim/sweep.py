"""Many runs as one: a grid of values, its trials on Ray Tune, one MLflow parent run above them.

A sweep is a configuration and what varies in it: a section `sweep` in the file, and lists on the command line
(`local.lr=0.1,0.01 seed=0..4`). Every trial is an ordinary run. Its folder is named after what it computes (its
configuration's fingerprint and its rounds), not after its place in the grid:

    runs/<experiment>/trials/<label>-<seed>-<hash>/    a run's folder; with result.json once it is finished
    runs/<experiment>/sweeps/<hash of the trials>/     the parent run: its spool, its table

So the same sweep again does only what is missing, and a larger one finds what the smaller one did. Trials run in
processes of Ray's and say what they do to the spools in their folders (which all nodes must see); this process alone
sends that to MLflow.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from raysim import checkpoint, config, data, experiment, layers, plan, report, rules
from raysim.config import NAMED, Config
from raysim.data import digest
from raysim.errors import ConfigError, RaysimError
from raysim.signals import stoppable
from raysim.spool import Recorder, Tail, flatten
from raysim.tracking import Forwarder, Tracker, absolute

logger = logging.getLogger("raysim")

REPORT_EVERY = 2.0
"""Seconds between two figures that a running trial gives of itself."""

Watch = Callable[["Trial", str, Mapping[str, Any]], None]
"""Told of a trial: "running" with its latest record, "finished" with its result, "failed" with its "error"."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `values` are those of the keys that vary, `folder` is where it runs (absolute)."""

    values: dict[str, Any]
    config: Config
    label: str
    folder: Path

    @property
    def title(self) -> str:
        return " ".join(f"{key}={as_text(value)}" for key, value in self.values.items()) or self.label

    @property
    def result(self) -> dict[str, Any] | None:
        """What the finished trial left; None if it is not finished."""
        try:
            return json.loads((self.folder / "result.json").read_text())
        except (OSError, ValueError):
            return None

    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(round, metrics) of the finished trial."""
        with (self.folder / "history.csv").open(newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [(int(row.pop("round")), row) for row in rows]


@dataclass(frozen=True)
class Sweep:
    """Trials, checked and ready to start. `axes` are the keys that vary with all their values, `base` is what the
    trials have in common as it was given, `merged` how many further ones would have computed the same."""

    name: str
    trials: list[Trial]
    axes: dict[str, list[Any]]
    base: dict[str, Any]
    merged: int
    folder: Path

    @property
    def tracking(self) -> config.Tracking:
        return self.trials[0].config.tracking


@dataclass
class Outcome:
    """What a sweep leaves. `failed` holds (trial, what went wrong: a line, and more below it); `table` is Markdown."""

    sweep: Sweep
    run_id: str
    reused: int
    seconds: float = 0.0
    failed: list[tuple[Trial, str]] = field(default_factory=list)
    table: str = ""

    def as_object(self) -> dict[str, Any]:
        """What can be said of it in a line of JSON."""
        errors = {trial.folder: error for trial, error in self.failed}
        trials = []
        for trial in self.sweep.trials:
            known = trial.result or {"run_dir": str(trial.folder), "error": errors[trial.folder]}
            sent_to = Tail(trial.folder).run_id  # what the trial itself knows is a provisional id
            trials.append({"values": trial.values, **known, **({"run_id": sent_to} if sent_to else {})})
        return {
            "run_id": self.run_id,
            "dir": str(self.sweep.folder),
            "finished": len(trials) - len(errors),
            "reused": self.reused,
            "failed": len(errors),
            "seconds": round(self.seconds, 3),
            "trials": trials,
        }


# -- what is to be run -------------------------------------------------------------------------------------------------


def prepare(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), folder: str | Path | None = None
) -> Sweep:
    """Reads a sweep and checks every one of its trials; nothing is started or written.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping; its section `sweep` says what varies.
        overrides: "key=value"; "key=a,b" and "key=0..4" (whole numbers, both ends included) vary the key, in every
            grid of the file, and replace what the file has to say of it.
        folder: instead of `runs`.

    Raises:
        ConfigError: with the values of the first trial that cannot run, or with what is wrong about the grid.
    """
    given, axes = _split(overrides)
    raw = layers.read(source, (), plan.keys, rules.defaults)
    section = raw.get("sweep")
    if section is None and not axes:
        raise ConfigError(
            "sweep: nothing varies; give lists of values, seed=0..4 local.lr=0.1,0.01, or a section sweep"
        )
    grids = [_laid_over(grid, given, axes) for grid in _grids(section)]
    points = [dict(zip(grid, values, strict=True)) for grid in grids for values in itertools.product(*grid.values())]
    axes = _axes(points)
    trials: dict[str, Trial] = {}
    for point in points:
        values = {key: point[key] for key in axes if key in point}
        try:
            ready = plan.resolve(_trial(layers.read(source, {**given, **point}, plan.keys, rules.defaults)), _load_once)
        except ConfigError as error:
            where = " ".join(f"{k}={as_text(v)}" for k, v in point.items())
            raise ConfigError(f"trial {where}: {error}" if where else str(error)) from None
        c = ready.config
        root = Path(folder or "runs").absolute() / c.tracking.experiment
        key = _key(c)
        trials.setdefault(key, Trial(values, c, ready.label, root / "trials" / f"{ready.label}-{c.seed}-{key[:12]}"))
    everything = list(trials.values())
    name = "sweep" if isinstance(source, Mapping) else Path(source).stem
    base = _trial(layers.read(source, given, plan.keys, rules.defaults))
    whole = hashlib.sha256(" ".join(sorted(trials)).encode()).hexdigest()[:12]
    sweeps = everything[0].folder.parents[1] / "sweeps"
    return Sweep(name, everything, axes, base, len(points) - len(trials), sweeps / whole)


def _split(overrides: Iterable[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Overrides of one value, and those of several."""
    given: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        pieces = _pieces(value) if equals else []
        if len(pieces) > 1 and "" in pieces:
            raise ConfigError(f"override '{text}': a value is empty")
        values = [layers.parse_overrides([f"{key}={piece}"])[key] for piece in pieces or [value]] if equals else []
        if not values or (len(values) == 1 and not _is_range(values[0])):
            given |= layers.parse_overrides([text])
        else:
            axes[key] = _values(key, values)
    return given, axes


def _pieces(text: str) -> list[str]:
    """Cut at the commas that stand in no brackets, braces or quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return pieces


def _grids(section: Any) -> list[dict[str, list[Any]]]:
    """The section `sweep`: one grid or several, each key with its values."""
    grids = section if isinstance(section, list) else [section or {}]
    if not all(isinstance(grid, Mapping) and all(isinstance(key, str) for key in grid) for grid in grids) or not grids:
        raise ConfigError("sweep: expected a mapping of keys to lists of values, or a list of such mappings")
    return [{key: _values(key, given) for key, given in grid.items()} for grid in grids]


def _values(key: str, given: Any) -> list[Any]:
    """All values of a key: a list, "0..4", or the one that is given."""
    if re.match(r"(sweep|extends|run_dir|tracking)\b", key):
        raise ConfigError(f"sweep: {key} cannot vary; the trials of a sweep have it in common")
    values: list[Any] = []
    for value in given if isinstance(given, list) else [given]:
        if _is_range(value):
            first, last = map(int, value.split(".."))
            if last < first:
                raise ConfigError(f"{key}: the range {value} is empty; write {last}..{first}")
            values += range(first, last + 1)
        else:
            values.append(value)
    if not values:
        raise ConfigError(f"sweep: {key}: the list of values is empty")
    return values


def _is_range(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+\.\.\d+", value) is not None


def _laid_over(
    grid: Mapping[str, list[Any]], given: Mapping[str, Any], axes: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """A grid of the file with what the command line says of the same keys, and more."""
    said = {_plain_key(key) for key in (*given, *axes)}
    return {**{key: values for key, values in grid.items() if _plain_key(key) not in said}, **axes}


def _plain_key(key: str) -> str:
    """`algorithm` for `algorithm.name`, which means the same."""
    return key.removesuffix(".name") if key.removesuffix(".name") in NAMED else key


def _axes(points: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The keys of which there are several values, with these."""
    axes: dict[str, list[Any]] = {}
    for point in points:
        for key, value in point.items():
            values = axes.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: values for key, values in axes.items() if len(values) > 1}


def _trial(raw: dict[str, Any]) -> dict[str, Any]:
    """A trial's configuration: where it does not say otherwise, small, in one process, on one core."""
    raw.pop("sweep", None)
    if raw.get("run_dir") is not None:
        raise ConfigError("run_dir: each trial of a sweep has a folder of its own; leave it out (--dir is for all)")
    resources = raw.get("resources", {})
    if isinstance(resources, Mapping) and resources.get("executor", "inline") == "inline":
        raw["resources"] = {"executor": "inline", "threads": 1, "server_threads": 1, **resources}
    return raw


def _key(c: Config) -> str:
    """What a trial is known by: equal keys, equal results under equal names in the same place."""
    facts = [c.fingerprint, c.rounds, c.evaluate.model_dump(), c.name, c.tracking.uri]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def as_text(value: Any) -> str:
    """A value as one would write it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


# -- running it --------------------------------------------------------------------------------------------------------


def run(sweep: Sweep, parallel: int | None = None, watch: Watch = lambda trial, state, facts: None) -> Outcome:
    """Runs what of a sweep is not finished yet: as many trials at once as there is room for, at most `parallel`.

    A trial that fails does not stop the others. One that was stopped goes on from its last checkpoint.

    Raises:
        ConfigError: a trial asks for more than the machine or the cluster has.
        RaysimError: the tracking store cannot be used, or another sweep is at work in the same folder.
        KeyboardInterrupt: it was stopped; what is finished is kept.
    """
    began, tracking = time.monotonic(), sweep.tracking
    missing = [trial for trial in sweep.trials if trial.result is None]
    with stoppable(), _alone(sweep.folder), _room(missing):
        parent = Tracker(tracking, sweep.folder)
        forwarder: Forwarder | None = None
        status: Any = "FAILED"
        try:
            axes = {f"sweep.{key}": values for key, values in sweep.axes.items()}
            about = {"raysim.sweep": "true", "trials": str(len(sweep.trials)), "sweep_dir": str(sweep.folder)}
            parent.start(sweep.name, {**sweep.base, **axes}, about, run_id=parent.earlier)
            forwarder = Forwarder(absolute(tracking.uri), tracking.experiment)
            outcome = Outcome(sweep, parent.run_id, len(sweep.trials) - len(missing))
            for trial in sweep.trials:
                if trial.result is not None:
                    _adopt(trial, parent.run_id)
                forwarder.follow(trial.folder)
            if missing:
                outcome.failed = _on_tune(sweep, missing, parent.run_id, parallel, watch)
            outcome.table = table(sweep)
            (sweep.folder / "table.md").write_text(outcome.table)
            parent.artifact(sweep.folder / "table.md")
            status = "FAILED" if outcome.failed else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if forwarder:
                forwarder.finish()
            parent.finish(status)
    outcome.seconds = time.monotonic() - began
    return outcome


def table(sweep: Sweep) -> str:
    """The finished trials, averaged over seeds, as Markdown."""
    finished = [(trial, trial.history()) for trial in sweep.trials if trial.result]
    if not finished:
        return "no trial has finished"
    metric = "accuracy" if any("accuracy" in row for _, rows in finished for _, row in rows) else "train_loss"
    runs = [
        report.Run(
            trial.folder.name,
            flatten(trial.config.model_dump(mode="json")),
            [(t, row[metric]) for t, row in rows if metric in row],
        )
        for trial, rows in finished
    ]
    runs = [run for run in runs if run.history]
    return report.markdown(report.rows(runs, metric), metric)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other sweep shares the trials' folder meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RaysimError(
                f"{folder.parents[1]}: another sweep is at work there; wait for it, or give this one another --dir"
            ) from None
        yield


@contextlib.contextmanager
def _room(trials: list[Trial]) -> Iterator[None]:
    """Ray with room for each of these trials; one that fits nowhere would wait for ever."""
    if not trials:
        yield
        return
    from raysim.nodes import connect  # Ray is imported when it is used

    wanted = [{kind: sum(b.get(kind, 0) for b in _bundles(t.config)) for kind in ("CPU", "GPU")} for t in trials]
    ours = connect(trials[0].config.resources.address, max(w["CPU"] for w in wanted), logger.warning)
    import ray

    try:
        have = ray.cluster_resources()
        for trial, kinds in zip(trials, wanted, strict=True):
            for kind, share in kinds.items():
                if share > have.get(kind, 0) + 1e-9:
                    raise ConfigError(
                        f"trial {trial.title}: resources: it wants {share:g} {kind}s, there are {have.get(kind, 0):g}; "
                        "lower resources.actors or the share of each"
                    )
        yield
    finally:
        if ours:
            ray.shutdown()


def _bundles(c: Config) -> list[dict[str, float]]:
    """What a trial occupies: a core for each thread; on actors nothing by itself, but what each of them asks for."""
    r = c.resources
    if r.executor == "inline":
        return [{"CPU": r.threads, **({"GPU": r.gpus} if r.gpus else {})}]
    actor = {kind: share for kind, share in (("CPU", r.cpus), ("GPU", r.gpus)) if share}
    server = {"GPU": r.server_gpus} if r.server_gpus else {}
    return [{}, *filter(None, [actor] * r.actors), *filter(None, [server] * 2)]


def _labels(trial: Trial) -> dict[str, str]:
    return {f"sweep.{key}": as_text(value) for key, value in trial.values.items()}


def _adopt(trial: Trial, parent: str) -> None:
    """A trial that is finished already is shown under this sweep's run."""
    recorder = Recorder("", "", trial.folder)
    recorder.adopt(parent, _labels(trial))
    recorder.close()


def _on_tune(
    sweep: Sweep, missing: list[Trial], parent: str, parallel: int | None, watch: Watch
) -> list[tuple[Trial, str]]:
    """Runs trials on Ray Tune; returns those that failed, and why."""
    os.environ |= {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_AIR_NEW_OUTPUT": "0",  # the new one is never quite silent
    }
    import ray
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    here, uri, name = os.getcwd(), absolute(sweep.tracking.uri), sweep.tracking.experiment
    address, bundles = ray.get_runtime_context().gcs_address, [_bundles(trial.config) for trial in missing]
    course = _Course(missing, watch)

    def train(choice: dict[str, int]) -> None:
        os.chdir(here)
        os.environ["RAY_ADDRESS"] = address  # a trial's actors are the cluster's matter, not this machine's
        _train(missing[choice["trial"]], uri, name, parent)

    try:
        with stoppable():  # once more: to start Ray was to put its own handlers in place
            tune.run(
                tune.with_resources(train, lambda choice: tune.PlacementGroupFactory(bundles[choice["trial"]])),
                config={"trial": tune.grid_search(list(range(len(missing))))},
                max_concurrent_trials=parallel,
                reuse_actors=True,
                raise_on_failed_trial=False,
                callbacks=[_follow(course)],
                name="tune",
                storage_path=str(sweep.folder),
                trial_dirname_creator=lambda trial: trial.trial_id,
                verbose=0,
            )
    except KeyboardInterrupt:
        for actor in course.actors.values():
            ray.kill(actor)
        for trial in course.running.values():
            _close(trial, "KILLED")
        raise
    finally:
        shutil.rmtree(sweep.folder / "tune", ignore_errors=True)  # Tune's own notes
    return [(trial, course.failed[trial.folder]) for trial in missing if trial.folder in course.failed]


def _train(trial: Trial, uri: str, name: str, parent: str) -> None:
    """One trial, in a process of its own. What goes wrong is left in error.txt; Tune need not know."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    mistake = trial.folder / "error.txt"
    labels = _labels(trial)
    if mistake.exists():  # of an earlier attempt
        mistake.unlink()
        labels["error"] = ""
    log = logging.FileHandler(trial.folder / "log.txt", delay=True)
    logging.getLogger("raysim").addHandler(log)
    try:
        ready = plan.resolve(trial.config.model_dump(mode="json"), _load_once)
        saved = _where_it_stopped(trial, ready)
        recorder = Recorder(uri, name, trial.folder, parent, labels)
        done = experiment.execute(ready, trial.folder, saved, progress=_Pulse(), tracker=recorder)
        partial = trial.folder / ".result.json"
        partial.write_text(json.dumps(done.as_object()))
        partial.rename(trial.folder / "result.json")
    except RaysimError as error:
        mistake.write_text(str(error))
    except Exception as error:
        mistake.write_text(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
    finally:
        logging.getLogger("raysim").removeHandler(log)
        log.close()


def _load_once(wanted: config.Data) -> data.Dataset:
    """A process that prepares trial after trial reads its data once."""
    return _load(wanted.model_dump_json())


@lru_cache(maxsize=2)
def _load(wanted: str) -> data.Dataset:
    return data.load(config.Data.model_validate_json(wanted))


def _where_it_stopped(trial: Trial, ready: plan.Plan) -> checkpoint.Checkpoint | None:
    """The last checkpoint of a trial that was stopped, if it is whole and of the same data."""
    try:
        saved = checkpoint.read_latest(trial.folder, logger.warning)
    except RaysimError as error:
        logger.warning("%s; the trial begins anew", error)
        return None
    same = {"fingerprint": ready.config.fingerprint, "data": ready.dataset.digest, "partition": digest(ready.clients)}
    return saved if saved and all(saved.facts[what] == now for what, now in same.items()) else None


class _Pulse:
    """Tells the sweep now and then how far a trial is."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, record: Mapping[str, float]) -> None:
        from ray import tune

        if time.monotonic() - self.last >= REPORT_EVERY:
            tune.report({key: record[key] for key in ("round", "accuracy", "loss") if key in record})
            self.last = time.monotonic()


class _Course:
    """What is known of the trials that were started, by their place in the list."""

    def __init__(self, trials: list[Trial], watch: Watch):
        self.trials, self.watch = trials, watch
        self.running: dict[int, Trial] = {}
        self.actors: dict[int, Any] = {}
        self.failed: dict[Path, str] = {}

    def started(self, place: int, actor: Any) -> None:
        self.running[place], self.actors[place] = self.trials[place], actor
        self.watch(self.trials[place], "running", {})

    def ended(self, place: int, died: bool = False) -> None:
        trial = self.running.pop(place, self.trials[place])
        self.actors.pop(place, None)
        if result := trial.result:
            self.watch(trial, "finished", result)
            return
        if died:
            _close(trial, "FAILED")
        mistake = trial.folder / "error.txt"
        if mistake.exists():
            text = mistake.read_text().strip()
        elif died:
            text = "its process died (out of memory?)"
        else:
            text = f"nothing is seen of it in {trial.folder}; every node of the cluster must see that folder"
        self.failed[trial.folder] = text
        self.watch(trial, "failed", {"error": text})


def _follow(course: _Course) -> Any:
    """What Tune tells of its trials, passed on. It stands where Tune would have put a callback that prints."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Callback(TrialProgressCallback):
        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.started(trial.config["trial"], trial.temporary_state.ray_actor)

        def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
            if "round" in result:
                course.watch(course.trials[trial.config["trial"]], "running", result)

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.ended(trial.config["trial"])

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.ended(trial.config["trial"], died=True)

    return Callback()


def _close(trial: Trial, status: Any) -> None:
    """Says of a trial whose process is gone that it has ended."""
    for _ in range(50):  # the process may take a while to go
        try:
            recorder = Recorder("", "", trial.folder)
        except RaysimError:
            time.sleep(0.1)
            continue
        recorder.end(status)
        return
