"""A trial of a sweep: an ordinary run in a separate process that reports its progress.

<run_dir>/result.json     result of an ended trial; why and by which settings it was `stopped` early
<run_dir>/error.txt       error of the last attempt; error-1.txt, … of earlier attempts
<run_dir>/log.txt         log of the run
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from raysim.config.tracking_uri import mask_secrets
from raysim.engine.loop import Record
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.errors import RaysimError
from raysim.prepare import resolve
from raysim.runs import run as experiment
from raysim.runs.run_dir import refuse_links
from raysim.sweeps.definition import Trial
from raysim.sweeps.early_stopping import EarlyStopping, RungTracker
from raysim.sweeps.preparation import load_once
from raysim.sweeps.search_space import as_text
from raysim.system import files, lock
from raysim.tracking.recorder import POSITION, Recorder

logger = logging.getLogger("raysim")

REPORT_INTERVAL_S = 2.0
"""Minimum seconds between two progress reports of a trial; rungs are always reported."""

ReportCallback = Callable[[dict[str, float]], str]
"""Receives a progress report; returns the reason to stop the trial, or "" to continue."""


def train_trial(
    trial: Trial,
    uri: str,
    name: str,
    parent: str,
    stopping: EarlyStopping | None,
    report: ReportCallback,
) -> str:
    """Run a trial, from its last checkpoint if there is one.

    Args:
        trial: trial to run.
        uri: address of the tracking store, without secrets.
        name: name of the experiment in the tracking store.
        parent: id of the sweep's run in the tracking store.
        stopping: settings of early stopping; None: the trial is not stopped early.
        report: called with the progress of the trial; it decides whether the trial stops.

    Returns:
        The error, which error.txt holds too: one line, possibly followed by a traceback. "" if the
        trial succeeded.
    """
    files.make_private(trial.folder)
    refuse_links(trial.config, trial.folder)
    set_aside_error(trial)
    labels = labels_of(trial)
    if trial.failures:
        labels |= {"error": "", "failed_attempts": str(trial.failures)}
    (trial.folder / "result.json").unlink(missing_ok=True)
    log = logging.FileHandler(trial.folder / "log.txt", delay=True)
    logging.getLogger("raysim").addHandler(log)
    try:
        _await_end(trial.folder)
        ready = resolve.resolve_plan(trial.config.plain(), load_once)
        saved = _where_it_stopped(trial, ready)
        recorder = Recorder(uri, name, trial.folder, parent, labels)
        reporter = TrialReporter(
            RungTracker(stopping, trial.config.rounds),
            report,
            saved.facts["history"] if saved else (),
            (trial.config.evaluate.best_by.metric, "loss"),
        )
        result = experiment.execute(
            ready, trial.folder, saved, progress=reporter, tracker=recorder
        ).as_object()
        if stopping is not None and result.get("stopped"):
            result["early_stopping"] = stopping.model_dump(mode="json")
        files.write_file(trial.folder / "result.json", json.dumps(result))
        return ""
    except RaysimError as error:
        message = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    finally:
        logging.getLogger("raysim").removeHandler(log)
        log.close()
    message = mask_secrets(message)
    files.write_file(trial.folder / "error.txt", message)
    return message


def set_aside_error(trial: Trial) -> None:
    """Rename error.txt of an earlier attempt, if there is one, so that the attempt is counted.

    Args:
        trial: A trial of a sweep.
    """
    earlier = trial.folder / "error.txt"
    if earlier.exists():
        earlier.rename(trial.folder / f"error-{trial.failures + 1}.txt")


def labels_of(trial: Trial) -> dict[str, str]:
    """Return the tags of a trial in MLflow: its name, its position and the values that vary.

    Args:
        trial: A trial of a sweep.
    """
    return {
        "mlflow.runName": trial.title[:250],
        POSITION: str(trial.position),
        **{f"sweep.{key}": as_text(v) for key, v in trial.values.items()},
    }


def _await_end(folder: Path) -> None:
    """Wait until the process of an earlier, killed sweep has left a trial's folder."""
    end = time.monotonic() + lock.STALE_AFTER_S + 5
    while lock.running(folder) and time.monotonic() < end:
        time.sleep(0.1)


def _where_it_stopped(trial: Trial, ready: Plan) -> checkpoint.Checkpoint | None:
    """Return the last checkpoint of a trial if it is intact and of the same data, else None.

    Checkpoints that do not count are removed: of rounds beyond the trial's, to which somebody has
    resumed its run, and all if the trial starts again. Its new ones would have lower numbers, so
    they would be the ones that are not kept.
    """
    last = trial.config.rounds
    rounds = files.of_rounds(checkpoint.checkpoints_folder(trial.folder))
    if max(rounds, default=0) > last:
        # Of a longer run; the one after the trial's last round lacks the last evaluation.
        checkpoint.remove_after(trial.folder, last - 1)
    try:
        saved = checkpoint.read_latest(trial.folder)
        reason = "" if saved is None else checkpoint.differs_in(saved, ready)
        if not reason:
            return saved
        reason = f"{trial.folder}: its checkpoint is of another {reason}"
    except RaysimError as error:
        reason = str(error)
    logger.warning("%s; the trial starts again", reason)
    checkpoint.remove_after(trial.folder, 0)
    return None


class TrialReporter:
    """Progress callback of a run that reports at each rung, and in between at intervals.

    `stopped` is the reason to stop the trial, or "".

    Args:
        ladder: tracker of the rungs.
        report: receives the reports.
        before: records of the rounds before a resumed run; the trial is judged by them too.
        shown: metrics that reports show in addition to that of the rungs.
    """

    def __init__(
        self,
        ladder: RungTracker,
        report: ReportCallback,
        before: Iterable[Record],
        shown: Sequence[str],
    ):
        self.ladder = ladder
        self.report = report
        self.shown = shown
        self.earlier = list(before)
        self.last = time.monotonic()
        self.stopped = ""

    def __call__(self, record: Record) -> str:
        """Report a round; return the reason to stop the run, or ""."""
        records = [*self.earlier, record]
        self.earlier = []
        for past_record in records:
            if not self.stopped and (rung := self.ladder.climb(past_record)):
                self._say(past_record, rung)
        if time.monotonic() - self.last >= REPORT_INTERVAL_S:
            self._say(record, {})
        return self.stopped

    def _say(self, record: Record, rung: dict[str, float]) -> None:
        """Report a record; at a rung, keep the reason to stop."""
        figures = {
            key: record[key] for key in ("round", *self.shown, self.ladder.metric) if key in record
        }
        reason = self.report({**figures, **rung})
        self.last = time.monotonic()
        if rung and reason:
            self.stopped = reason
