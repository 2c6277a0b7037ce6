"""Run a sweep: the trials that are missing, and a run of its own in the tracking store.

A trial writes its records to the spool in its folder. This process alone writes to the tracking
store. `trials` runs them in parallel.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from raysim.config.tracking_uri import absolute_uri, database_of, restored_uri
from raysim.errors import ConfigError, RaysimError
from raysim.runs.provenance import command_tag
from raysim.runs.python_inputs import named_inputs, named_source
from raysim.runs.result import best_values
from raysim.runs.run_dir import STORE_TO_KEEP, warn_if_deleted_with_job
from raysim.runs.training_calls import trains
from raysim.sweeps import search_space, summary
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.preparation import prepare_sweep
from raysim.sweeps.summary import SweepResult
from raysim.sweeps.sweep_ledger import NoLedger, SweepLedger
from raysim.sweeps.trials import local_processes, ray_tune
from raysim.sweeps.trials.code import pickled_code
from raysim.sweeps.trials.trial import labels_of
from raysim.system import files, output, processes, startup_stages
from raysim.system.signals import stoppable
from raysim.tracking.followers import NOTE_TAG
from raysim.tracking.mlflow_process import connection
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool_sender import Writer
from raysim.tracking.tracker import Tracker

logger = logging.getLogger("raysim")

RunAll = Callable[[str, WatchCallback], list[tuple[Trial, str]]]
"""Runs the missing trials, from the id of the sweep's run and a watch; returns the failed ones."""


@trains
def sweep(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    parallel: int | None = None,
    folder: str | Path | None = None,
    ledger: str | Path | None = None,
    where: Sequence[str] = (),
    watch: WatchCallback = lambda trial, state, facts: None,
    **keys: Any,
) -> SweepResult:
    """Run an experiment for many values of its keys; a repeated call runs what is missing.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping; its section `sweep`
            defines the values. None: the overrides are the whole configuration.
        overrides: "key=value" as on the command line ("seed=0..4"), or a mapping in which a list
            holds several values ({"local.lr": [0.1, 0.01]}); `keys` are the same as keyword
            arguments. They replace the values of the file. Objects are given as to `run`.
        parallel: number of trials at once; by default as many as the machine or the cluster has
            room for.
        folder: folder of the trials; the default is `runs`.
        ledger: file with a row for each finished run; None: no ledger. Trials whose rows are there
            are not trained; the rows of the others are appended.
        where: "key=value" or "key=value,value" texts; only trials with these values are trained.
        watch: called with each trial, its state and its facts; see `WatchCallback`.
        **keys: further overrides, such as rounds=10, seed=[0, 1] or seed="0..4".

    Returns:
        The trials with their results, the failed ones, and a table of results. A warning is logged
        for each failed trial, and before the first one for each default that may not be expected.

    Raises:
        ConfigError: a trial cannot run, or the ledger cannot be used; nothing has started.
        RaysimError: the tracking store cannot be used, or another sweep runs in the same folder.
    """
    connection.start()
    if isinstance(overrides, Mapping):
        inputs = named_inputs({**overrides, **keys}, several=True)
    else:  # which hold no objects, but may be draws
        inputs = {**search_space.as_mapping(overrides), **named_inputs(keys, several=True)}
    with startup_stages.notes_logged():
        planned = prepare_sweep(named_source(source), inputs, folder, where)
    book = NoLedger() if ledger is None else SweepLedger(ledger, planned, logger.warning)
    if book.note:
        logger.warning("%s", book.note)
    outcome = run_sweep(planned, parallel, watch, book)
    for trial, error in outcome.failed:
        line = error.splitlines()[0]
        logger.warning("failed: %s: %s (%s/error.txt)", trial.title, line, trial.folder)
    return outcome


def run_sweep(
    sweep: Sweep,
    parallel: int | None = None,
    watch: WatchCallback = lambda trial, state, facts: None,
    ledger: NoLedger | None = None,
) -> SweepResult:
    """Run the missing trials of a sweep, as many at once as there is room for.

    A failed trial does not stop the others. A stopped trial resumes from its last checkpoint.

    Args:
        sweep: the sweep.
        parallel: largest number of trials at once; None: as many as there is room for.
        watch: as for `sweep`.
        ledger: its rows replace trials, and the rows of the others are appended; None: no ledger.

    Returns:
        The trials with their results, the failed ones, and a table of results.

    Raises:
        ConfigError: a trial with actors or GPUs needs more than the machine or the cluster has, or
            the ledger cannot be written.
        RaysimError: the tracking store cannot be used, or another sweep runs in the same folder.
        KeyboardInterrupt: the sweep was interrupted; finished trials are kept.
    """
    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel: {parallel} trials at once; it must be at least 1")
    began = time.monotonic()
    ledger = ledger or NoLedger()
    others = [trial for trial in sweep.trials if trial.folder not in ledger.taken]
    missing = list(itertools.filterfalse(sweep.done, others))
    with stoppable(), _lock_trials(sweep.folder), _processes(sweep, missing, parallel) as run_all:
        parent = Tracker(sweep.tracking, sweep.folder)
        status: Any = "FAILED"
        try:
            _start_parent(parent, sweep)
            with processes.at_last(lambda why: _give_up(parent, why)):
                outcome = _run_trials(sweep, missing, run_all, watch, ledger, parent)
            _log_summary(parent, outcome)
            status = "FAILED" if outcome.failed else "FINISHED"
        except KeyboardInterrupt as stop:
            status = "KILLED"
            stop.args = (
                f"stopped; finished trials are kept below {sweep.folder}, and the same "
                "raysim.sweep(...) runs the rest",
            )
            raise
        finally:
            parent.finish(status)
    outcome.seconds = time.monotonic() - began
    return outcome


@contextlib.contextmanager
def _processes(sweep: Sweep, missing: list[Trial], parallel: int | None) -> Iterator[RunAll]:
    """Start what the missing trials run on: processes of this machine, or Ray."""
    code = pickled_code(missing)
    if not missing:
        yield lambda parent, watch: []
    elif local_processes.suffices(missing):
        with contextlib.closing(
            local_processes.LocalProcesses(sweep.folder, missing, code, parallel)
        ) as here:
            yield lambda parent, watch: here.run(sweep, missing, parent, watch)
    else:
        with ray_tune.ray_with_resources(missing):
            yield lambda parent, watch: ray_tune.run_on_tune(
                sweep, missing, code, parent, parallel, watch
            )


def _give_up(parent: Tracker, why: str) -> None:
    """End the sweep's own run as FAILED because this process is ended."""
    parent.tags({"error": why})
    parent.finish("FAILED")


def _start_parent(parent: Tracker, sweep: Sweep) -> None:
    """Start the sweep's own run in the tracking store, with what varies and the settings."""
    varied = {**sweep.axes, **{key: str(draw) for key, draw in sweep.drawn.items()}}
    settings = sweep.settings.model_dump(mode="json", exclude_defaults=True)
    tags = {
        "raysim.sweep": "true",
        "trials": str(len(sweep.trials)),
        "sweep_dir": str(sweep.folder),
        **command_tag(),
        NOTE_TAG: summary.description(sweep),
    }
    parameters = {**sweep.common, "sweep": {**varied, **settings}}
    parent.start(sweep.name, parameters, tags, run_id=parent.earlier)


def _run_trials(
    sweep: Sweep,
    missing: list[Trial],
    run_all: RunAll,
    watch: WatchCallback,
    ledger: NoLedger,
    parent: Tracker,
) -> SweepResult:
    """Use the trials that were finished before, and run the missing ones."""
    ledger.restore_taken(sweep, parent.run_id)
    ledger.add_ended(sweep)
    tally = _Tally(parent, sweep)

    def watch_all(trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
        tally.count(state, facts)
        ledger.note_end(trial, state)
        watch(trial, state, facts)

    n_done = len(sweep.trials) - len(missing)
    outcome = SweepResult(sweep, parent.run_id, n_done, ledger.n_taken)
    with _forwarding(sweep, parent.run_id):
        outcome.failed = run_all(parent.run_id, watch_all)
    ledger.add_ended(sweep)
    return outcome


def _log_summary(parent: Tracker, outcome: SweepResult) -> None:
    """Write the table of a sweep, and log it with its files and counts."""
    sweep = outcome.sweep
    outcome.table = summary.write_summary(outcome)
    for path in summary.summary_files(sweep.folder):
        parent.artifact(path)
    parent.tags({**outcome.counts, NOTE_TAG: summary.description(sweep, outcome.table)})


class _Tally:
    """Metrics of a sweep's own run: how many trials have ended, and the best values among them.

    Their step is the number of trials that have ended, and larger than those of an earlier call,
    which had figures of its own at them. Trials that ended in it count from the start.
    """

    def __init__(self, parent: Recorder, sweep: Sweep):
        self.parent = parent
        self.step = parent.latest_step
        self.results = [trial.result or {} for trial in sweep.trials if sweep.done(trial)]
        self.failed = 0
        if self.results:
            self._log()

    def count(self, state: str, facts: Mapping[str, Any]) -> None:
        """Count a trial if it has ended; see `WatchCallback`."""
        if state in ("finished", "stopped"):
            self.results.append(dict(facts))
        self.failed += state == "failed"
        if state in ("finished", "stopped", "failed"):
            self._log()

    def _log(self) -> None:
        figures: dict[str, float] = {
            "trials_finished": len(self.results),
            "trials_failed": self.failed,
        }
        reached = [result.get("metrics", {}) for result in self.results]
        names = itertools.chain.from_iterable(reached)
        for name, better in best_values(names).items():
            figures[f"best_{name}"] = better(of[name]["best"] for of in reached if name in of)
        self.step = max(self.step + 1, len(self.results) + self.failed)
        self.parent.metrics(figures, self.step)


@contextlib.contextmanager
def _lock_trials(folder: Path) -> Iterator[None]:
    """Lock the trials' folder against other sweeps, and remove it at the end if it is empty."""
    try:
        files.make_private(folder)
    except OSError as error:
        raise ConfigError(
            f"--dir: {folder} cannot be created: {error.strerror}; choose another folder"
        ) from None
    output.keep_rest_in(folder)
    warn_if_deleted_with_job(folder, "--dir to a folder on a shared disk")
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
def _forwarding(sweep: Sweep, parent: str) -> Iterator[None]:
    """Send the records of all trials to the tracking store, those of earlier ones too."""
    tracking = sweep.tracking
    warn_if_deleted_with_job(database_of(tracking.uri), STORE_TO_KEEP)
    writer = Writer(absolute_uri(restored_uri(tracking.uri)), tracking.experiment)
    try:
        for trial in sweep.trials:
            if sweep.done(trial):
                _adopt(trial, parent)
            writer.follow(trial.folder)
        yield
    finally:
        writer.finish()


def _adopt(trial: Trial, parent: str) -> None:
    """Show a trial that was finished before as a child of this sweep's run."""
    recorder = Recorder("", "", trial.folder)
    recorder.adopt(parent, labels_of(trial))
    recorder.close()
