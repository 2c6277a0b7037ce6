"""Trials of a sweep on Ray Tune: their resources and processes, progress, early stopping, retries.

A small trial is one process on one core. A large one, with actors of its own, gets a placement
group with room for all of them. A trial reports only its progress to Tune.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from raysim.config.schema import Config
from raysim.config.tracking_uri import absolute_uri, redacted_uri
from raysim.distributed.cluster.versions import check_source_code, source_code
from raysim.errors import ConfigError, RaysimError
from raysim.prepare import file_digests
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.trial import train_trial
from raysim.sweeps.trial_stopping import WORST_VALUE, EarlyStopping, RungTracker
from raysim.system import startup_stages
from raysim.system.signals import stoppable
from raysim.tracking.recorder import Recorder

logger = logging.getLogger("raysim")

CONTINUE_ADVICE = (
    "start the sweep again in the same way: finished trials are kept, and the others continue "
    "from their last checkpoints"
)
"""Advice at the end of the error message if Ray dies during a sweep."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Between two rungs trials do not report the metric by which they are compared.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one is never quite silent
}
"""Environment variables of Tune in this process."""


@contextlib.contextmanager
def ray_with_resources(trials: list[Trial]) -> Iterator[None]:
    """Return a context in which this process is connected to Ray; without trials it is not.

    If Ray is lost, Tune waits for ever; then a monitor ends this process with a message.

    Args:
        trials: the trials that will run.

    Raises:
        ConfigError: a trial needs more than the cluster has.
    """
    if not trials:
        yield
        return
    # Ray is imported when it is used.
    from raysim.distributed.cluster.autoscaling import await_resources
    from raysim.distributed.cluster.nodes import connect, leave_cluster
    from raysim.distributed.heartbeats import Monitor

    wanted = [
        {kind: sum(b.get(kind, 0) for b in bundles_of(t.config)) for kind in ("CPU", "GPU")}
        for t in trials
    ]
    startup_stages.begin("starting Ray")
    resources = trials[0].config.resources
    ours = connect(resources.address, max(w["CPU"] for w in wanted), logger.warning)
    monitor = Monitor(resources.timeout, advice=CONTINUE_ADVICE)
    try:
        # Tune asks for the resources of several trials at once by itself.
        for trial, kinds in zip(trials, wanted, strict=True):
            await_resources(
                bundles_of(trial.config),
                lambda trial=trial, kinds=kinds: _check_resources(trial, kinds),
                trial.config.resources.timeout,
            )
        yield
    finally:
        monitor.stop()
        if ours:
            leave_cluster(bool(monitor.broken))


def _check_resources(trial: Trial, wanted: dict[str, float]) -> None:
    """Raise ConfigError if a trial needs more than the cluster has."""
    import ray

    have = ray.cluster_resources()
    for kind, share in wanted.items():
        if share > have.get(kind, 0) + 1e-9:
            raise ConfigError(
                f"trial {trial.title}: resources: it needs {share:g} {kind}s, the cluster "
                f"has {have.get(kind, 0):g}; lower resources.actors or the share of each"
            )


def bundles_of(config: Config) -> list[dict[str, float]]:
    """Return a trial's resource bundles: one core per thread inline, else its actors' ones.

    Args:
        config: the configuration of the trial.

    Returns:
        The CPUs and GPUs of each bundle; {} for the trial's own process if it has actors.
    """
    r = config.resources
    if r.executor == "inline":
        return [{"CPU": r.threads, **({"GPU": r.gpus} if r.gpus else {})}]
    actor = {kind: share for kind, share in (("CPU", r.cpus), ("GPU", r.gpus)) if share}
    server = {"GPU": r.server_share} if r.server_share else {}
    return [{}, *filter(None, [actor] * r.actors), *filter(None, [server] * 2)]


def run_on_tune(
    sweep: Sweep, missing: list[Trial], parent: str, parallel: int | None, watch: WatchCallback
) -> list[tuple[Trial, str]]:
    """Run trials on Ray Tune.

    Args:
        sweep: the sweep.
        missing: the trials of the sweep to run, at least one.
        parent: id of the sweep's run in the tracking store.
        parallel: largest number of trials at once; None means as many as there is room for.
        watch: called with each trial, its state, and its facts; see `WatchCallback`.

    Returns:
        The failed trials with their errors.

    Raises:
        KeyboardInterrupt: the sweep was interrupted; its trials have been killed.
    """
    os.environ |= ENVIRONMENT
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    bundles = [bundles_of(trial.config) for trial in missing]
    stopping = sweep.settings.early_stopping
    log = TrialLog(missing, watch)
    try:
        # Once more: the start of Ray has replaced the handlers.
        with stoppable() as signals, signals.allowed():
            tune.run(
                tune.with_resources(
                    _trial_function(sweep, missing, parent),
                    lambda choice: tune.PlacementGroupFactory(bundles[choice["trial"]]),
                ),
                config={"trial": tune.grid_search(list(range(len(missing))))},
                scheduler=_halving(sweep, missing, stopping) if stopping else None,
                max_failures=sweep.settings.retries,
                max_concurrent_trials=parallel,
                reuse_actors=True,
                raise_on_failed_trial=False,
                callbacks=[_follow_trials(log)],
                name="tune",
                storage_path=str(sweep.folder),
                trial_dirname_creator=lambda trial: trial.trial_id,
                verbose=0,
            )
    except KeyboardInterrupt:
        log.kill_running()
        raise
    finally:
        shutil.rmtree(sweep.folder / "tune", ignore_errors=True)  # Tune's own notes
    return log.failures


def _trial_function(
    sweep: Sweep, missing: list[Trial], parent: str
) -> Callable[[dict[str, int]], None]:
    """Return the function that Tune calls in a trial's process, with the trial's position."""
    import ray
    from ray import tune

    working_directory = os.getcwd()
    # A trial's actors start in the cluster, not on the machine of its process.
    address = ray.get_runtime_context().gcs_address
    uri, experiment = redacted_uri(absolute_uri(sweep.tracking.uri)), sweep.tracking.experiment
    stopping, retries = sweep.settings.early_stopping, sweep.settings.retries
    code = [file_digests.code(trial.config) for trial in missing]
    command = source_code()

    def run_trial(choice: dict[str, int]) -> None:
        os.chdir(working_directory)
        os.environ["RAY_ADDRESS"] = address
        check_source_code("the process of a trial", source_code(), command)
        assert len(code) == len(missing)  # brings objects of Python to the trial's process
        trial = missing[choice["trial"]]
        order = _order(trial)
        order.unlink(missing_ok=True)

        def report(figures: dict[str, float]) -> str:
            tune.report(figures)  # returns after the scheduler has decided
            return order.read_text() if order.exists() else ""

        error = train_trial(trial, uri, experiment, parent, stopping, report)
        if error and retries:
            # Without retries Tune need not know: the process continues with another trial.
            raise RuntimeError(error)

    return run_trial


def _order(trial: Trial) -> Path:
    """Return the file that stops a trial; it holds the reason."""
    return trial.folder / "stop.txt"


def _halving(sweep: Sweep, missing: list[Trial], stopping: EarlyStopping) -> Any:
    """Return Tune's ASHA scheduler, informed about trials that were finished before.

    Trials are not killed: the scheduler writes a file, and the trial ends with a checkpoint.
    """
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    class Halving(ASHAScheduler):
        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict) -> str:
            at_a_rung = "value" in result and not result.get("done")
            if not at_a_rung:
                return TrialScheduler.CONTINUE
            decision = super().on_trial_result(tune_controller, trial, result)
            if decision == TrialScheduler.STOP:
                finite = abs(result["value"]) < WORST_VALUE
                value = f"{result['value']:.4g}" if finite else "not finite"
                reason = f"round {result['round']:g}: {stopping.metric} {value}"
                _order(missing[trial.config["trial"]]).write_text(reason)
            return TrialScheduler.CONTINUE

        def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict) -> None:
            pass  # the scheduler has the results of all rungs

    longest = max(trial.config.rounds for trial in sweep.trials)
    scheduler = Halving(
        time_attr="rung",
        metric="value",
        mode="min" if stopping.lower else "max",
        max_t=min(longest, stopping.max_rounds or longest),
        grace_period=stopping.grace_period,
        reduction_factor=stopping.reduction_factor,
    )
    _replay_finished(scheduler, sweep, missing, stopping)
    return scheduler


def _replay_finished(
    scheduler: Any, sweep: Sweep, missing: list[Trial], stopping: EarlyStopping
) -> None:
    """Report to the scheduler the rungs of the trials that were finished before."""
    from ray.tune.schedulers import ASHAScheduler

    for trial in sweep.trials:
        if trial in missing:
            continue
        ladder = RungTracker(stopping, trial.config.rounds)
        of_tune = SimpleNamespace(trial_id=str(trial.folder))  # the scheduler reads no more of it
        scheduler.on_trial_add(None, of_tune)
        for t, record in trial.history():
            if rung := ladder.climb({"round": t, **record}):
                ASHAScheduler.on_trial_result(scheduler, cast(Any, None), cast(Any, of_tune), rung)


class TrialLog:
    """Bookkeeping of the trials that Tune runs, by their positions among them.

    Args:
        trials: the trials that run, in the order of their positions.
        watch: called with each trial, its state, and its facts.
    """

    def __init__(self, trials: list[Trial], watch: WatchCallback):
        self.trials, self.watch = trials, watch
        self.running: dict[int, Trial] = {}
        self.actors: dict[int, Any] = {}
        self.failed: dict[Path, str] = {}

    def started(self, place: int, actor: Any) -> None:
        """Log that a trial has started.

        Args:
            place: position of the trial among those that run.
            actor: handle of the actor that runs it.
        """
        self.running[place], self.actors[place] = self.trials[place], actor
        self.watch(self.trials[place], "running", {})

    def again(self, place: int) -> None:
        """Log that a trial is tried again.

        Args:
            place: position of the trial, whose process has ended without a result.
        """
        trial, mistake = self._gone(place), self.trials[place].folder / "error.txt"
        text = self._error(trial, died=True)
        mistake.write_text(text)  # if its process died, it could not
        self.watch(trial, "again", {"error": text})

    def ended(self, place: int, died: bool = False) -> None:
        """Log that a trial has ended: finished, stopped early or failed.

        Args:
            place: position of the trial among those that run.
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

    @property
    def failures(self) -> list[tuple[Trial, str]]:
        """The failed trials with their errors, in the order of the sweep."""
        return [
            (trial, self.failed[trial.folder])
            for trial in self.trials
            if trial.folder in self.failed
        ]

    def kill_running(self) -> None:
        """Kill the trials that run, and record that they were killed."""
        import ray

        for actor in self.actors.values():
            ray.kill(actor)
        for trial in self.running.values():
            _close(trial, "KILLED")

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


def _follow_trials(log: TrialLog) -> Any:
    """Return a callback that passes on Tune's events, in place of Tune's printing callback."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Callback(TrialProgressCallback):
        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.started(trial.config["trial"], trial.temporary_state.ray_actor)

        def on_trial_result(
            self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
        ) -> None:
            if "round" in result:
                log.watch(log.trials[trial.config["trial"]], "running", result)

        def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.again(trial.config["trial"])

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.ended(trial.config["trial"])

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.ended(trial.config["trial"], died=True)

    return Callback()


def _close(trial: Trial, status: Any) -> None:
    """End the record of a trial whose process has ended."""
    for _ in range(50):  # the process may need a while to end
        try:
            recorder = Recorder("", "", trial.folder)
        except RaysimError:
            time.sleep(0.1)
            continue
        recorder.end(status)
        return
