"""Run the trials of a sweep on Ray Tune, in parallel, with early stopping and retries.

A small trial is one process on one core. A large one, with actors of its own, gets a placement
group with room for all of them. A trial writes its records to the spool in its folder, and reports
only its progress to Tune. This process alone writes to the tracking store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock, Timeout

from raysim import files, startup_stages
from raysim.config.schema import Config
from raysim.config.tracking_uri import absolute_uri, redacted_uri, restored_uri
from raysim.engine import file_digests
from raysim.errors import ConfigError, RaysimError
from raysim.runs.description import NOTE
from raysim.runs.provenance import command_tag
from raysim.runs.python_inputs import named_inputs, named_source
from raysim.runs.result import best_values
from raysim.signals import stoppable
from raysim.sweeps import summary
from raysim.sweeps.definition import EarlyStopping, Sweep, Trial, WatchCallback, prepare_sweep
from raysim.sweeps.ledger import SweepLedger
from raysim.sweeps.summary import SweepResult
from raysim.sweeps.trial import WORST_VALUE, RungTracker, labels_of, train_trial
from raysim.tracking.mlflow import Forwarder, Tracker
from raysim.tracking.spool import Recorder

logger = logging.getLogger("raysim")


def sweep(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    parallel: int | None = None,
    folder: str | Path | None = None,
    ledger: str | Path | None = None,
    watch: WatchCallback = lambda trial, state, facts: None,
) -> SweepResult:
    """Run an experiment for many values of its keys; a repeated call runs what is missing.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping; its section `sweep`
            defines the values.
        overrides: "key=value" as on the command line ("seed=0..4"), or a mapping in which a list
            holds several values ({"local.lr": [0.1, 0.01]}). They replace the values of the file.
            Objects are given as to `run`.
        parallel: number of trials at once; by default as many as the machine or the cluster has
            room for.
        folder: folder of the trials; the default is `runs`.
        ledger: file with a row for each finished run. Trials whose rows are there are not trained;
            the rows of the others are appended.
        watch: called with each trial, its state, and its facts.

    Returns:
        The trials with their results, the failed ones, and a table of results.

    Raises:
        ConfigError: a trial cannot run; nothing has started.
        RaysimError: the tracking store cannot be used, or another sweep runs in the same folder.
    """
    planned = prepare_sweep(named_source(source), named_inputs(overrides, several=True), folder)
    book = None if ledger is None else SweepLedger(ledger, planned, logger.warning)
    return run_sweep(planned, parallel, watch, book)


def run_sweep(
    sweep: Sweep,
    parallel: int | None = None,
    watch: WatchCallback = lambda trial, state, facts: None,
    ledger: SweepLedger | None = None,
) -> SweepResult:
    """Run the missing trials of a sweep, as many at once as there is room for.

    A failed trial does not stop the others. A stopped trial resumes from its last checkpoint.

    Args:
        sweep: the sweep.
        parallel: largest number of trials at once.
        watch: as for `sweep`.
        ledger: its rows stand for trials, and it gets the rows of the others.

    Raises:
        ConfigError: a trial needs more than the machine or the cluster has, or the ledger cannot be
            written.
        RaysimError: the tracking store cannot be used, or another sweep runs in the same folder.
        KeyboardInterrupt: the sweep was interrupted; finished trials are kept.
    """
    began, tracking = time.monotonic(), sweep.tracking
    taken = ledger.taken if ledger else {}
    missing = [
        trial for trial in sweep.trials if trial.folder not in taken and not sweep.done(trial)
    ]
    with stoppable(), _lock_trials(sweep.folder), _ray_with_resources(missing):
        parent = Tracker(tracking, sweep.folder)
        forwarder: Forwarder | None = None
        status: Any = "FAILED"
        try:
            varied = {**sweep.axes, **{key: str(draw) for key, draw in sweep.drawn.items()}}
            about = {
                "raysim.sweep": "true",
                "trials": str(len(sweep.trials)),
                "sweep_dir": str(sweep.folder),
            }
            facts = {**varied, **sweep.settings.model_dump(mode="json", exclude_defaults=True)}
            about |= {**command_tag(), NOTE: summary.description(sweep)}
            parent.start(sweep.name, {**sweep.common, "sweep": facts}, about, run_id=parent.earlier)
            for trial in sweep.trials:
                if ledger and trial.folder in taken:
                    ledger.restore(trial, parent.run_id)
            if ledger:
                ledger.add_ended(sweep)
                watch = ledger.watched(watch)
            tally = _Tally(parent, sweep)
            forwarder = Forwarder(absolute_uri(restored_uri(tracking.uri)), tracking.experiment)
            reused = len(sweep.trials) - len(missing)
            from_ledger = len(taken) if ledger else None
            outcome = SweepResult(sweep, parent.run_id, reused, from_ledger)
            for trial in sweep.trials:
                if sweep.done(trial):
                    _adopt(trial, parent.run_id)
                forwarder.follow(trial.folder)
            if missing:
                outcome.failed = _on_tune(
                    sweep, missing, parent.run_id, parallel, tally.watched(watch)
                )
            forwarder.finish()
            forwarder = None
            if ledger:
                ledger.add_ended(sweep)
            outcome.table = summary.write_summary(outcome)
            for path in summary.summary_files(sweep.folder):
                parent.artifact(path)
            parent.tags({**outcome.counts, NOTE: summary.description(sweep, outcome.table)})
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


class _Tally:
    """Metrics of a sweep's own run: how many trials have ended, and the best values among them.

    Their step is the number of trials that have ended. Those of an earlier attempt count from the
    start.
    """

    def __init__(self, parent: Recorder, sweep: Sweep):
        self.parent = parent
        self.results = [trial.result or {} for trial in sweep.trials if sweep.done(trial)]
        self.failed = 0
        if self.results:
            self._log()

    def watched(self, watch: WatchCallback) -> WatchCallback:
        """Return a watch that also counts trials."""

        def counting(trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
            if state in ("finished", "stopped"):
                self.results.append(dict(facts))
            self.failed += state == "failed"
            if state in ("finished", "stopped", "failed"):
                self._log()
            watch(trial, state, facts)

        return counting

    def _log(self) -> None:
        figures: dict[str, float] = {
            "trials_finished": len(self.results),
            "trials_failed": self.failed,
        }
        reached = [result.get("metrics", {}) for result in self.results]
        for name, better in best_values(key for each in reached for key in each).items():
            if values := [each[name]["best"] for each in reached if name in each]:
                figures[f"best_{name}"] = better(values)
        self.parent.metrics(figures, step=len(self.results) + self.failed)


@contextlib.contextmanager
def _lock_trials(folder: Path) -> Iterator[None]:
    """Lock the trials' folder against other sweeps, and remove it at the end if it is empty."""
    files.make_private(folder)
    alone = FileLock(folder.parent / ".lock", timeout=0)
    try:
        alone.acquire()
    except Timeout:
        raise RaysimError(
            f"{folder.parents[1]}: another sweep is at work there; wait for it, or give this one "
            "another --dir"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty, unless the sweep was refused
            folder.rmdir()
        alone.release()


@contextlib.contextmanager
def _ray_with_resources(trials: list[Trial]) -> Iterator[None]:
    """Connect to Ray, and refuse a trial that needs more than the cluster has."""
    if not trials:
        yield
        return
    from raysim.distributed.nodes import connect, leave_cluster  # Ray is imported when it is used

    wanted = [
        {kind: sum(b.get(kind, 0) for b in _bundles(t.config)) for kind in ("CPU", "GPU")}
        for t in trials
    ]
    startup_stages.begin("starting Ray")
    ours = connect(
        trials[0].config.resources.address, max(w["CPU"] for w in wanted), logger.warning
    )
    import ray

    try:
        have = ray.cluster_resources()
        for trial, kinds in zip(trials, wanted, strict=True):
            for kind, share in kinds.items():
                if share > have.get(kind, 0) + 1e-9:
                    raise ConfigError(
                        f"trial {trial.title}: resources: it needs {share:g} {kind}s, the cluster "
                        f"has {have.get(kind, 0):g}; lower resources.actors or the share of each"
                    )
        yield
    finally:
        if ours:
            leave_cluster()


def _bundles(c: Config) -> list[dict[str, float]]:
    """Return a trial's resource bundles: one core per thread inline, else its actors' ones."""
    r = c.resources
    if r.executor == "inline":
        return [{"CPU": r.threads, **({"GPU": r.gpus} if r.gpus else {})}]
    actor = {kind: share for kind, share in (("CPU", r.cpus), ("GPU", r.gpus)) if share}
    server = {"GPU": r.server_gpus} if r.server_gpus else {}
    return [{}, *filter(None, [actor] * r.actors), *filter(None, [server] * 2)]


def _adopt(trial: Trial, parent: str) -> None:
    """Show a trial that was finished before as a child of this sweep's run."""
    recorder = Recorder("", "", trial.folder)
    recorder.adopt(parent, labels_of(trial))
    recorder.close()


def _on_tune(
    sweep: Sweep, missing: list[Trial], parent: str, parallel: int | None, watch: WatchCallback
) -> list[tuple[Trial, str]]:
    """Run trials on Ray Tune; return the failed ones with their errors."""
    os.environ |= {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        # Between two rungs trials do not report the metric by which they are compared.
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_AIR_NEW_OUTPUT": "0",  # the new one is never quite silent
    }
    import ray
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    here, uri, name = (
        os.getcwd(),
        redacted_uri(absolute_uri(sweep.tracking.uri)),
        sweep.tracking.experiment,
    )
    address, bundles = (
        ray.get_runtime_context().gcs_address,
        [_bundles(trial.config) for trial in missing],
    )
    stopping, retries = sweep.settings.early_stopping, sweep.settings.retries
    course = TrialLog(missing, watch)
    code = [file_digests.code(trial.config) for trial in missing]

    def one(choice: dict[str, int]) -> None:
        os.chdir(here)
        os.environ["RAY_ADDRESS"] = (
            address  # a trial's actors are the cluster's matter, not this machine's
        )
        assert len(code) == len(missing)  # brings objects of Python to the trial's process
        trial = missing[choice["trial"]]
        order = _order(trial)
        order.unlink(missing_ok=True)

        def report(figures: dict[str, float]) -> str:
            tune.report(figures)  # comes back when it has been judged
            return order.read_text() if order.exists() else ""

        if (error := train_trial(trial, uri, name, parent, stopping, report)) and retries:
            raise RuntimeError(
                error
            )  # otherwise Tune need not know: the process continues with another trial

    try:
        with stoppable():  # once more: to start Ray was to put its own handlers in place
            tune.run(
                tune.with_resources(
                    one, lambda choice: tune.PlacementGroupFactory(bundles[choice["trial"]])
                ),
                config={"trial": tune.grid_search(list(range(len(missing))))},
                scheduler=_halving(sweep, missing, stopping) if stopping else None,
                max_failures=retries,
                max_concurrent_trials=parallel,
                reuse_actors=True,
                raise_on_failed_trial=False,
                callbacks=[_follow_trials(course)],
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
    return [
        (trial, course.failed[trial.folder]) for trial in missing if trial.folder in course.failed
    ]


def _order(trial: Trial) -> Path:
    """Return the file that tells a trial to stop, and why."""
    return trial.folder / "stop.txt"


def _halving(sweep: Sweep, missing: list[Trial], stopping: EarlyStopping) -> Any:
    """Return Tune's ASHA scheduler, informed about trials that were finished before.

    A trial that is to stop is told so, and ends with a checkpoint instead of being killed.
    """
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    class Halving(ASHAScheduler):
        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
            fresh = "value" in result and not result.get("done")
            if (
                fresh
                and super().on_trial_result(tune_controller, trial, result) == TrialScheduler.STOP
            ):
                value = (
                    f"{result['value']:.4g}" if abs(result["value"]) < WORST_VALUE else "not finite"
                )
                said = f"round {result['round']:g}: {stopping.metric} {value}"
                _order(missing[trial.config["trial"]]).write_text(said)
            return TrialScheduler.CONTINUE

        def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
            pass  # what there was to know of it was said at its rungs

    longest = max(trial.config.rounds for trial in sweep.trials)
    scheduler = Halving(
        time_attr="rung",
        metric="value",
        mode="min" if stopping.lower else "max",
        max_t=min(longest, stopping.max_rounds or longest),
        grace_period=stopping.grace_period,
        reduction_factor=stopping.reduction_factor,
    )
    controller: Any = None
    for trial in sweep.trials:
        if trial in missing:
            continue
        ladder, one = (
            RungTracker(stopping, trial.config.rounds),
            SimpleNamespace(trial_id=str(trial.folder)),
        )
        scheduler.on_trial_add(controller, one)  # pyright: ignore[reportArgumentType]  # has all that it reads of a trial
        for t, record in trial.history():
            if at := ladder.climb({"round": t, **record}):
                ASHAScheduler.on_trial_result(scheduler, controller, one, at)  # pyright: ignore[reportArgumentType]  # has all that it reads of a trial
    return scheduler


class TrialLog:
    """Bookkeeping of started trials, by their position in the sweep."""

    def __init__(self, trials: list[Trial], watch: WatchCallback):
        self.trials, self.watch = trials, watch
        self.running: dict[int, Trial] = {}
        self.actors: dict[int, Any] = {}
        self.failed: dict[Path, str] = {}

    def started(self, place: int, actor: Any) -> None:
        """Log that a trial has started.

        Args:
            place: position of the trial in the sweep.
            actor: handle of the actor that runs it.
        """
        self.running[place], self.actors[place] = self.trials[place], actor
        self.watch(self.trials[place], "running", {})

    def again(self, place: int) -> None:
        """Log that a trial is tried again.

        Args:
            place: position of the trial in the sweep; its process has ended without a result.
        """
        trial, mistake = self._gone(place), self.trials[place].folder / "error.txt"
        text = self._error(trial, died=True)
        mistake.write_text(text)  # if its process died, it could not
        self.watch(trial, "again", {"error": text})

    def ended(self, place: int, died: bool = False) -> None:
        """Log that a trial has ended: finished, stopped early or failed.

        Args:
            place: position of the trial in the sweep.
            died: whether its process has ended without a result.
        """
        trial = self._gone(place)
        if not died and (result := trial.result):
            self.watch(trial, "stopped" if "stopped" in result else "finished", result)
            return
        if died:
            _close(trial, "FAILED")
        self.failed[trial.folder] = text = self._error(trial, died)
        self.watch(trial, "failed", {"error": text})

    def _gone(self, place: int) -> Trial:
        self.actors.pop(place, None)
        return self.running.pop(place, self.trials[place])

    def _error(self, trial: Trial, died: bool) -> str:
        mistake = trial.folder / "error.txt"
        if mistake.exists():
            return mistake.read_text().strip()
        if died:
            return "its process died (out of memory?)"
        return (
            f"there is no record of it in {trial.folder}; every node of the cluster must see that "
            "folder"
        )


def _follow_trials(course: TrialLog) -> Any:
    """Return a callback that passes on Tune's events, in place of Tune's printing callback."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Callback(TrialProgressCallback):
        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.started(trial.config["trial"], trial.temporary_state.ray_actor)

        def on_trial_result(
            self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
        ) -> None:
            if "round" in result:
                course.watch(course.trials[trial.config["trial"]], "running", result)

        def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.again(trial.config["trial"])

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.ended(trial.config["trial"])

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            course.ended(trial.config["trial"], died=True)

    return Callback()


def _close(trial: Trial, status: Any) -> None:
    """End the record of a trial whose process is gone."""
    for _ in range(50):  # the process may take a while to go
        try:
            recorder = Recorder("", "", trial.folder)
        except RaysimError:
            time.sleep(0.1)
            continue
        recorder.end(status)
        return
