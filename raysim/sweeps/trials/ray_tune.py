"""Trials of a sweep on Ray Tune: their resources and processes, progress, retries.

A small trial is one process on one core. A large one, with actors of its own, gets a placement
group with room for all of them. A trial reports only its progress to Tune.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from raysim.config.schema import Config
from raysim.config.tracking_uri import absolute_uri, redacted_uri
from raysim.distributed.cluster.versions import check_source_code, source_code
from raysim.errors import ConfigError
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.trials.trial import train_trial
from raysim.sweeps.trials.trial_log import TrialLog
from raysim.system import startup_stages
from raysim.system.signals import stoppable

logger = logging.getLogger("raysim")

CONTINUE_ADVICE = (
    "start the sweep again in the same way: finished trials are kept, and the others continue "
    "from their last checkpoints"
)
"""Advice at the end of the error message if Ray dies during a sweep."""

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one is never quite silent
}
"""Environment variables of Tune in this process."""


@contextlib.contextmanager
def ray_with_resources(trials: list[Trial]) -> Iterator[None]:
    """Return a context in which this process is connected to Ray.

    If Ray is lost, Tune waits for ever; then a monitor ends this process with a message.

    Args:
        trials: the trials that will run.

    Raises:
        ConfigError: a trial needs more than the cluster has.
    """
    # Ray is imported when it is used.
    from raysim.distributed.cluster.autoscaling import await_resources
    from raysim.distributed.cluster.connection import connect, leave_cluster
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
    sweep: Sweep,
    missing: list[Trial],
    code: bytes,
    parent: str,
    parallel: int | None,
    watch: WatchCallback,
) -> list[tuple[Trial, str]]:
    """Run trials on Ray Tune.

    Args:
        sweep: the sweep.
        missing: the trials of the sweep to run, at least one.
        code: the users' files and objects that they need, see `pickled_code`.
        parent: id of the sweep's run in the tracking store.
        parallel: largest number of trials at once; None means as many as there is room for.
        watch: called with each trial, its state, and its facts; see `WatchCallback`.

    Returns:
        The failed trials with their errors.

    Raises:
        KeyboardInterrupt: the sweep was interrupted; its trials have been killed.
    """
    os.environ |= ENVIRONMENT
    import ray
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    bundles = [bundles_of(trial.config) for trial in missing]
    log = TrialLog(sweep, missing, watch)
    actors: dict[int, Any] = {}
    try:
        # Once more: the start of Ray has replaced the handlers.
        with stoppable() as signals, signals.allowed():
            tune.run(
                tune.with_resources(
                    _trial_function(sweep, missing, code, parent),
                    lambda choice: tune.PlacementGroupFactory(bundles[choice["trial"]]),
                ),
                config={"trial": tune.grid_search(list(range(len(missing))))},
                max_failures=sweep.settings.retries,
                max_concurrent_trials=parallel,
                reuse_actors=True,
                raise_on_failed_trial=False,
                callbacks=[_follow_trials(log, actors)],
                name="tune",
                storage_path=str(sweep.folder),
                trial_dirname_creator=lambda trial: trial.trial_id,
                verbose=0,
            )
    except KeyboardInterrupt:
        for place in log.running:
            ray.kill(actors[place])
        log.killed()
        raise
    finally:
        shutil.rmtree(sweep.folder / "tune", ignore_errors=True)  # Tune's own notes
    return log.failures


def _trial_function(
    sweep: Sweep, missing: list[Trial], code: bytes, parent: str
) -> Callable[[dict[str, int]], None]:
    """Return the function that Tune calls in a trial's process, with the trial's position."""
    import ray
    from ray import tune

    working_directory = os.getcwd()
    # A trial's actors start in the cluster, not on the machine of its process.
    address = ray.get_runtime_context().gcs_address
    uri, experiment = redacted_uri(absolute_uri(sweep.tracking.uri)), sweep.tracking.experiment
    stopping, retries = sweep.settings.early_stopping, sweep.settings.retries
    command = source_code()

    def run_trial(choice: dict[str, int]) -> None:
        os.chdir(working_directory)
        os.environ["RAY_ADDRESS"] = address
        check_source_code("the process of a trial", source_code(), command)
        cloudpickle.loads(code)
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


def _follow_trials(log: TrialLog, actors: dict[int, Any]) -> Any:
    """Return a callback that passes on Tune's events, in place of Tune's printing callback.

    Trials are not stopped by Tune: a file tells a trial to stop, and it ends with a checkpoint.

    Args:
        log: receives the events.
        actors: receives the handle of each trial's actor, by the trial's position.
    """
    from ray.tune.progress_reporter import TrialProgressCallback

    class Callback(TrialProgressCallback):
        def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            place = trial.config["trial"]
            actors[place] = trial.temporary_state.ray_actor
            log.started(place)

        def on_trial_result(
            self, iteration: int, trials: list, trial: Any, result: dict, **info: Any
        ) -> None:
            if "round" in result and not result.get("done"):
                place = trial.config["trial"]
                if reason := log.reported(place, result):
                    _order(log.trials[place]).write_text(reason)

        def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.again(trial.config["trial"])

        def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.ended(trial.config["trial"])

        def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
            log.ended(trial.config["trial"], died=True)

    return Callback()
