"""Execution of a run.

It opens the folder, the tracker and the executor, trains all rounds, and closes everything, also
after an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysim.config.tracking_uri import database_of
from raysim.engine.executor import Executor
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine, Record
from raysim.engine.plan import Plan
from raysim.engine.process_setup import gradients
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError, RaysimError, in_a_line, round_name
from raysim.imports import uncollected
from raysim.prepare.checks.machine import check_address
from raysim.prepare.resolve import prepare
from raysim.runs.artifacts.export import log_models
from raysim.runs.artifacts.written_files import write_artifacts
from raysim.runs.progress import ProgressCallback, shown
from raysim.runs.python_inputs import named_inputs, named_source
from raysim.runs.result import (
    RunResult,
    best_figures,
    digest_of_state,
    parameters_digest,
    write_parameters,
)
from raysim.runs.run_dir import (
    RESULT_FILES,
    STORE_TO_KEEP,
    TEMPORARY_PREFIX,
    forget,
    make_run_dir,
    make_temporary_dir,
    refuse_links,
    warn_if_deleted_with_job,
    without_secrets,
    write_config,
    write_sources,
)
from raysim.runs.tracked_start import ForkOrigin, start_tracking
from raysim.runs.training_calls import how_to_continue, trains
from raysim.server.central_server import evaluated_params
from raysim.system import files, lock, output, processes, startup_stages
from raysim.system.signals import Signals, stoppable
from raysim.tracking.followers import FollowedRun, require_packages
from raysim.tracking.mlflow_process import connection
from raysim.tracking.recorder import Recorder, Status, Untracked
from raysim.tracking.spool import SPOOL_FILE
from raysim.tracking.tracker import Tracker

logger = logging.getLogger("raysim")


@trains
def run(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    progress: ProgressCallback | None = None,
    tracking: bool | Mapping[str, Any] = True,
    **keys: Any,
) -> RunResult:
    """Run one experiment.

    Args:
        source: a configuration file, the name of a shipped one ("quickstart"), or a mapping; None:
            the overrides are the whole configuration.
        overrides: "key=value" with dots, or a mapping; `keys` are the same as keyword arguments.
            In a mapping, `data` may be (x, y, x_test, y_test), a mapping of them, two torch data
            sets, or a function that returns one of these; `partition` a function, or the positions
            of each client's examples; `task` a LearningTask or a loss function of outputs and
            targets; `model` a torch.nn.Module or a function that returns one; `client`, `server`
            and `algorithm` a rule, its class, or an Algorithm. Metrics, probes, upload stages,
            sampling rules and the client rules of groups may be classes or instances, too.
        progress: called with each round's record; None: a notebook shows one line that changes,
            and elsewhere nothing is shown. If it returns True, or a text with
            the reason, the run ends gracefully after the rounds that are trained by then: the last
            parameters are evaluated, their result is returned, a checkpoint is written, and
            `resume` trains the rest. In MLflow the run has the status KILLED and the tag
            `stopped_early`. If it raises an error, so does the run, after that checkpoint.
        tracking: False for a run without MLflow, such as that of a test: nothing is imported from
            it or sent to it, and no pictures are drawn. Its folder is `run_dir`, or a temporary one
            that is removed when Python exits. For many runs of a large net set
            `checkpoint.every=0`, or their checkpoints fill the disk until then. A mapping is the
            section `tracking`.
        **keys: further overrides, such as rounds=10.

    Returns:
        History, parameters and folder of the run. A warning is logged for each default that may not
        be expected, such as that clients of different sizes count equally.

    Raises:
        ConfigError: a mistake in the configuration, before anything has started.
        RaysimError: anything else that stopped the run; its folder and its MLflow run keep the
            completed rounds. A note of the error names the folder and how to continue.
        KeyboardInterrupt: a signal such as that of Ctrl-C stopped the run; the message names the
            folder and how to continue.
    """
    if isinstance(tracking, Mapping):
        keys["tracking"] = tracking
    if tracking:
        connection.start()
    with shown(progress) as shown_for:
        with startup_stages.notes_logged():
            given = {**named_inputs(overrides), **named_inputs(keys)}
            plan = prepare(named_source(source), given, tracked=bool(tracking))
        check_address(plan.config)
        progress = shown_for(plan)
        if tracking:
            return execute(plan, progress=progress)
        folder = make_temporary_dir() if plan.config.run_dir is None else None
        return execute(plan, folder, progress=progress, tracker=Untracked())


def execute(
    plan: Plan,
    run_dir: Path | None = None,
    saved: checkpoint.Checkpoint | None = None,
    origin: ForkOrigin | None = None,
    *,
    progress: ProgressCallback = lambda record: None,
    log: Callable[[str], None] = logger.warning,
    tracker: Recorder | None = None,
) -> RunResult:
    """Execute a plan in its folder, which is locked for other processes.

    Args:
        plan: the plan of the run.
        run_dir: an existing folder, as that of a resumed or forked run; None creates a new one.
        saved: the checkpoint to start from; None: the run starts at the beginning.
        origin: the origin of a fork; None if the run is not a fork.
        progress: as for `run`.
        log: called with the text of each warning.
        tracker: receives the metrics; the default is MLflow, as configured, or nothing if the
            run is resumed or forked and began untracked.

    Returns:
        The run's result.

    Raises:
        ConfigError: the machine, the cluster or the folder does not allow the run. A new run then
            leaves no files.
        RaysimError: anything else that stopped the run.
    """
    began, is_new = time.perf_counter(), run_dir is None or origin is not None
    run_dir = run_dir or make_run_dir(plan)
    may_be_refused = is_new

    def is_refusal(error: Exception) -> bool:
        # A new run can be resumed when a dead store is back; a fork is forked again.
        kind = ConfigError if origin is None else RaysimError
        return may_be_refused and isinstance(error, kind)

    with gradients(), ExitStack() as closing:
        closing.enter_context(_own_folder(plan, run_dir, is_refusal))
        # A tracked run has a spool before its first checkpoint.
        tracks = origin.tracks if origin else not saved or (run_dir / SPOOL_FILE).exists()
        tracker = tracker or (None if tracks else Untracked())
        run = _OpenRun(plan, run_dir, tracker, origin)
        closing.enter_context(processes.at_last(run.give_up))
        signals = closing.enter_context(stoppable())
        for title, step in reversed(run.last_steps()):
            closing.callback(run.end.attempt, title, step)
        with run.end.recorded(signals):
            executor = run.executor = choose(plan, log)
            executor.open(plan)
            # The start of Ray has replaced the handlers.
            signals.install()
            engine = run.start(executor, saved, signals)
            may_be_refused = False
            if not is_new:
                # Only now: a resume that is refused leaves the run as it was.
                for name in RESULT_FILES:
                    files.remove(run_dir / name)
                write_config(plan, run_dir)
            run.log_forked(engine, progress)
            startup_stages.begin(_first_stage(plan, saved))
            with signals.held():
                for record in engine.rounds():
                    run.log(engine, record, progress)
                # After an error of `progress` too: the last round may have been trained.
                result = run.result(engine, time.perf_counter() - began)
                if run.progress_error is not None:
                    raise run.progress_error
    if run.tracker.failure:
        raise RaysimError(run.tracker.failure)
    # A store that did not answer at the start may have received the run only now.
    result.run_id = run.tracker.run_id
    return result


def _first_stage(plan: Plan, saved: checkpoint.Checkpoint | None) -> str:
    """Return what follows the start of a run, for its progress."""
    if saved is None:
        return "round 0 (before training)"
    done = saved.facts["round"]
    # The run may have been killed between its last checkpoint and its end.
    return round_name(done) if done < plan.config.rounds else "the end of the run"


@contextmanager
def _own_folder(
    plan: Plan, run_dir: Path, is_refusal: Callable[[Exception], bool]
) -> Iterator[None]:
    """Lock the folder of a run and write its sources; forget a new run that is refused.

    The error of a run that fails later gets a note on how to continue it. Its end by a signal has a
    text on that, and the folder.
    """
    try:
        with lock.alone(run_dir):
            output.keep_rest_in(run_dir)
            refuse_links(plan.config, run_dir)
            if not (run_dir / "config.yaml").exists():
                write_config(plan, run_dir)
            write_sources(plan, run_dir)
            try:
                yield
            except KeyboardInterrupt as stop:
                stop.args = (f"stopped; {how_to_continue(run_dir, in_python=True)}",)
                vars(stop)["folder"] = run_dir
                raise
            except Exception as error:
                if is_refusal(error):
                    forget(run_dir)
                is_left = (run_dir / "config.yaml").exists()
                is_kept = is_left and not run_dir.name.startswith(TEMPORARY_PREFIX)
                if is_kept and not isinstance(error, ConfigError):
                    error.add_note(how_to_continue(run_dir))
                raise
    finally:
        # Only the folder of a refused run is empty; rmdir fails for all others.
        with suppress(OSError):
            run_dir.rmdir()


@dataclass
class _RunEnd:
    """End of a run: its error and the last steps that failed.

    A step that fails is logged and listed in `failures`. It never hides why the run ended.
    """

    error: BaseException | None = None
    """Exception that stopped the run, or None."""
    result: RunResult | None = None
    """Result of the run; None after an error."""
    failures: list[str] = field(default_factory=list)
    """Last steps that failed, each with its error."""

    @property
    def status(self) -> Status:
        """Status of the run in MLflow."""
        if self.error is None:
            return "KILLED" if self.result and self.result.stopped else "FINISHED"
        return "FAILED" if isinstance(self.error, Exception) else "KILLED"

    @property
    def tags(self) -> dict[str, str]:
        """Tags with the error and the failed last steps; empty after a successful run."""
        tags = {}
        if isinstance(self.error, Exception):
            tags["error"] = (
                str(self.error) if isinstance(self.error, RaysimError) else in_a_line(self.error)
            )
        if self.failures:
            tags["error_at_end"] = "; ".join(self.failures)
        return tags

    @contextmanager
    def recorded(self, signals: Signals) -> Iterator[None]:
        """Record an exception that ends the run; afterwards a first signal is ignored."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise
        finally:
            signals.close()

    def attempt(self, title: str, step: Callable[[], object]) -> None:
        """Call a last step of the run; log and list its failure under this title."""
        try:
            step()
        except Exception as error:
            self.failures.append(f"{title}: {in_a_line(error)}")
            logger.warning("at the end of the run: %s", self.failures[-1])


def choose(plan: Plan, log: Callable[[str], None]) -> Executor:
    """Return the configured executor, which is not open yet.

    Args:
        plan: the plan of the run.
        log: called with the text of each warning.
    """
    if plan.config.resources.executor == "inline":
        return Inline()
    # Importing Ray is slow.
    with uncollected():
        from raysim.distributed.ray_executor import RayExecutor

    return RayExecutor(log)


class _OpenRun:
    """A run that is being executed: its tracker, its engine and the steps that close it."""

    def __init__(
        self, plan: Plan, run_dir: Path, tracker: Recorder | None, origin: ForkOrigin | None
    ):
        """Open the tracker; nothing is tracked yet.

        Args:
            plan: the plan of the run.
            run_dir: the folder of the run.
            tracker: receives the metrics; None: MLflow, as configured.
            origin: the origin of a fork; None if the run is not a fork.
        """
        self.plan = plan
        self.run_dir = run_dir
        self.origin = origin
        self.also = plan.config.tracking.also if tracker is None or tracker.tracks else []
        require_packages(self.also)
        if tracker is None:
            warn_if_deleted_with_job(database_of(plan.config.tracking.uri), STORE_TO_KEEP)
        self.tracker = tracker or Tracker(plan.config.tracking, run_dir, origin and origin.run_id)
        self.end = _RunEnd()
        self.executor: Executor | None = None
        self.engine: Engine | None = None
        self.followed: FollowedRun | None = None
        self.progress_error: Exception | None = None

    def start(
        self, executor: Executor, saved: checkpoint.Checkpoint | None, signals: Signals
    ) -> Engine:
        """Start the tracked run and return its engine, in the state of a checkpoint if given."""
        if self.tracker.tracks:
            startup_stages.begin("opening MLflow")
        run_id = start_tracking(self.tracker, self.plan, self.run_dir, saved, self.origin)
        self.followed = FollowedRun(self.also, self.run_dir)
        self.engine = engine = Engine(self.plan, executor, self.run_dir, run_id, signals)
        if saved is not None:
            engine.restore(saved)
        return engine

    def log(self, engine: Engine, record: Record, progress: ProgressCallback) -> None:
        """Log a round's record and call `progress`, which may end the run.

        If `progress` fails, the run ends as if it had said so, which saves what is done.
        """
        self._track(record)
        if self.progress_error is not None:
            return
        try:
            reason = progress({**record})
        except Exception as error:
            self.progress_error = error
            reason = f"progress failed: {in_a_line(error)}"
        if reason:
            if not isinstance(reason, str):
                reason = f"round {record['round']:g}: progress returned True"
            engine.end_early(reason)

    def log_forked(self, engine: Engine, progress: ProgressCallback) -> None:
        """Log the rounds before a fork, which `progress` sees but cannot end.

        The history of a fork begins with that of the forked run.
        """
        if self.origin is not None:
            for record in engine.history:
                self._track(record)
                progress({**record})

    def _track(self, record: Record) -> None:
        """Send a round's record to the tracker."""
        metrics = {k: v for k, v in record.items() if k != "round"}
        self.tracker.metrics(metrics, step=int(record["round"]))

    def result(self, engine: Engine, seconds: float) -> RunResult:
        """Return the run's result; write the parameters if all rounds are completed."""
        plan = self.plan
        x = evaluated_params(engine.final)
        named = plan.state_dict(engine.final, x)
        state_digest = ""
        # The parameter file marks a finished run. A stopped run has them in its checkpoint.
        if not engine.stopped:
            state_digest = digest_of_state(engine.final, engine.store.checksums())
            write_parameters(plan, named, state_digest, self.run_dir)
        result = RunResult(
            engine.run_id,
            self.run_dir,
            without_secrets(plan.config),
            engine.history,
            x,
            named,
            parameters_digest(x),
            seconds,
            engine.stopped,
            state_digest,
        )
        self.end.result = result
        if engine.last_evaluation:
            self.tracker.metrics(engine.last_evaluation, step=result.rounds)
        self.tracker.metrics(best_figures(result.metrics), step=result.rounds)
        self.tracker.tags(
            {"stopped_early": result.stopped}
            if result.stopped
            else {"digest": result.digest, "state_digest": state_digest}
        )
        if engine.ended:
            logger.info("the run ends early: %s", engine.ended)
            self.tracker.tags({"early_stop": engine.ended})
        return result

    def last_steps(self) -> list[tuple[str, Callable[[], object]]]:
        """Return the steps that close the run, in order.

        Each comes with the title of its failure, which does not skip the steps after it.
        """
        return [
            ("the executor is not closed", lambda: self.executor and self.executor.close()),
            ("rows on disk are not removed", lambda: self.engine and self.engine.close()),
            ("tables and pictures are not kept", self._track_artifacts),
            ("MLflow is not given the error", self._track_error),
            ("MLflow's run is not ended", lambda: self.tracker.finish(self.end.status)),
            ("models are not logged", self._log_models),
            (
                "further trackers do not end",
                lambda: self.followed and self.followed.finish(self.end.status),
            ),
        ]

    def _track_artifacts(self) -> None:
        """Write the tables and pictures and upload them."""
        if self.engine is None:
            return
        for path in write_artifacts(
            self.plan,
            self.run_dir,
            self.engine.history,
            self.end.attempt,
            measurements=self.tracker.tracks,
            overview=self.tracker.draws,
        ):
            self.tracker.artifact(path)

    def _track_error(self) -> None:
        """Log the error and the failed last steps."""
        if self.tracker.run_id and self.end.tags:
            self.tracker.tags(self.end.tags)

    def _log_models(self) -> None:
        """Log the nets of a finished run, if configured; MLflow's run has ended."""
        result, asked = self.end.result, self.plan.config.tracking.models
        if self.tracker.tracks and asked and result and not result.stopped:
            log_models(self.plan, result)

    def give_up(self, why: str) -> None:
        """End the tracked run as FAILED because this process hangs."""
        if self.tracker.run_id:
            self.tracker.tags({"error": why})
        self.tracker.finish("FAILED")
