"""Trials of a sweep and the rows of its ledger.

A trial whose row is in the ledger is not trained. Its result, its metrics and its tracked run are
restored from the row, so that tables, plots and MLflow are those of a trained trial. It has no
checkpoint and no parameters.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raysim.by_key import by_key
from raysim.errors import ConfigError
from raysim.ledger.kept import kept_config, kept_history
from raysim.ledger.ledger_file import append_rows, check_writable, read_rows
from raysim.ledger.ledger_row import VERSIONS, Row
from raysim.ledger.matching import matching_row
from raysim.runs.provenance import versions
from raysim.runs.result import best_figures, last_and_best, write_history
from raysim.runs.run_dir import HISTORY_FILE, without_secrets
from raysim.sweeps.definition import Sweep, Trial
from raysim.sweeps.trials.trial import labels_of
from raysim.system import files
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import Tail

logger = logging.getLogger("raysim")

RESULT_FILE = "result.json"
"""Result of an ended trial."""


class NoLedger:
    """Ledger of a sweep that has none: it replaces no trial and keeps no row."""

    note = ""
    """Warning that the file may be the wrong one: it is new or of other runs; or ""."""

    taken: Mapping[Path, Row] = MappingProxyType({})
    """Rows by the folders of the trials that they replace."""

    n_taken: int | None = None
    """Number of these rows; None without a ledger."""

    def restore_taken(self, sweep: Sweep, parent: str) -> None:
        """Write the folders of the trials that rows replace.

        Args:
            sweep: the sweep.
            parent: id of the sweep's run in the tracking store.
        """

    def add_ended(self, sweep: Sweep) -> None:
        """Append the rows of all trials of a sweep that have ended.

        Args:
            sweep: the sweep.

        Raises:
            ConfigError: the ledger cannot be written.
        """

    def note_end(self, trial: Trial, state: str) -> None:
        """Append the row of a trial if it has ended with a result.

        A row that cannot be written does not stop the other trials; it is tried again at the end.

        Args:
            trial: a trial of the sweep.
            state: its state; see `WatchCallback`.
        """


class SweepLedger(NoLedger):
    """Ledger of a sweep: the rows that replace trials, and those that trials add.

    Args:
        path: file of the ledger; it need not exist yet.
        sweep: the sweep.
        say: called with one line for each damaged row, and for rows of other versions.

    Raises:
        ConfigError: the file cannot be read or written.
    """

    def __init__(self, path: str | Path, sweep: Sweep, say: Callable[[str], None]):
        self.path = Path(path)
        check_writable(self.path)
        if not self.path.exists():
            self.note = f"{self.path}: a new ledger, written after the first run"
        rows = read_rows([self.path], say)
        self._known = {row.key for row in rows}
        matching = _matching_rows(rows, sweep)
        if rows and not matching:
            self.note = f"{self.path}: none of its {len(rows)} rows is of one of these trials"
        done = {trial.folder for trial in sweep.trials if sweep.done(trial)}
        self.taken = {folder: row for folder, row in matching.items() if folder not in done}
        self.n_taken = len(self.taken)
        _name_versions([*self.taken.values()], say)

    def restore_taken(self, sweep: Sweep, parent: str) -> None:
        """Write the folders of the trials that rows replace. See `NoLedger.restore_taken`."""
        tracking = without_secrets(sweep.trials[0].config).tracking
        for trial in sweep.trials:
            if row := self.taken.get(trial.folder):
                recorder = Recorder(tracking.uri, tracking.experiment, trial.folder, parent)
                _restore(trial, row, self.path, recorder)

    def add(self, trials: Iterable[Trial]) -> None:
        """Append the rows of ended trials that the ledger does not have.

        Args:
            trials: trials with a result.

        Raises:
            ConfigError: the ledger cannot be written.
        """
        new: dict[str, Row] = {}
        for trial in trials:
            row = _row_of(trial)
            if row.key not in self._known:
                new[row.key] = row
        append_rows(self.path, new.values())
        self._known |= set(new)

    def add_ended(self, sweep: Sweep) -> None:
        """Append the rows of all trials that have ended. See `NoLedger.add_ended`."""
        self.add(trial for trial in sweep.trials if sweep.done(trial))

    def note_end(self, trial: Trial, state: str) -> None:
        """Append the row of a trial if it has ended. See `NoLedger.note_end`."""
        if state in ("finished", "stopped"):
            try:
                self.add([trial])
            except ConfigError as error:
                logger.warning("%s", error)


def _matching_rows(rows: Sequence[Row], sweep: Sweep) -> dict[Path, Row]:
    """Return the rows that stand for trials, by the folders of these."""
    by_identity = by_key(rows, attrgetter("fingerprint"))
    stopping = sweep.settings.early_stopping
    settings = stopping and stopping.model_dump(mode="json")
    matching = {}
    for trial in sweep.trials:
        candidates = by_identity.get(trial.config.fingerprint, [])
        if row := matching_row(candidates, trial.config, settings):
            matching[trial.folder] = row
    return matching


def _name_versions(rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Name the versions of rows that other versions computed than those that are installed."""
    installed = versions()
    strange: Counter[str] = Counter()
    for row in rows:
        differing = [f"{k} {row.versions[k]}" for k in VERSIONS if row.versions[k] != installed[k]]
        strange[", ".join(differing)] += 1
    for text, count in strange.items():
        if text:
            say(f"{count} of the ledger's rows are of other versions than this machine's: {text}")


def _row_of(trial: Trial) -> Row:
    """Return the row of an ended trial; its versions are those of the process that trained it."""
    result = trial.result or {}
    tags = Tail(trial.folder).tags()
    return Row(
        trial.config.fingerprint,
        trial.config.tracking.experiment,
        trial.title,
        trial.label,
        trial.config.seed,
        result["rounds"],
        result["digest"],
        tags.get("cpu_capability", "unknown"),
        {name: tags.get(name, "unknown") for name in VERSIONS},
        result["seconds"],
        kept_config(trial.config),
        kept_history(trial.history()),
        result.get("stopped", ""),
        result.get("early_stopping"),
        result.get("state_digest", ""),
    )


def _restore(trial: Trial, row: Row, ledger: Path, recorder: Recorder) -> None:
    """Write the spool, the history and the result of a trial from its row."""
    tags = {
        "algorithm": row.method,
        "seed": str(row.seed),
        "fingerprint": row.fingerprint,
        "cpu_capability": row.cpu,
        **row.versions,
        "digest": row.digest,
        **({"state_digest": row.state_digest} if row.state_digest else {}),
        "ledger": str(ledger),
        "run_dir": str(trial.folder),
        **labels_of(trial),
    }
    if row.stopped:
        tags["stopped_early"] = row.stopped
    params = without_secrets(trial.config).model_dump(mode="json")
    run_id = recorder.start(row.method, params, tags, run_id=recorder.earlier)
    history = _records(row)
    for record in history:
        values = {name: value for name, value in record.items() if name != "round"}
        recorder.metrics(values, step=int(record["round"]))
    metrics = last_and_best(history, trial.config.evaluate.best)
    recorder.metrics(best_figures(metrics), step=row.rounds)
    recorder.finish("KILLED" if row.stopped else "FINISHED")
    write_history(history, trial.folder / HISTORY_FILE)
    result: dict[str, Any] = {
        "run_id": run_id,
        "run_dir": str(trial.folder),
        "rounds": row.rounds,
        "metrics": metrics,
        "seconds": row.seconds,
        "digest": row.digest,
        **({"state_digest": row.state_digest} if row.state_digest else {}),
        "ledger": str(ledger),
    }
    if row.stopped:
        result |= {"stopped": row.stopped, "early_stopping": row.early_stopping}
    files.write_file(trial.folder / RESULT_FILE, json.dumps(result))


def _records(row: Row) -> list[dict[str, float]]:
    """Return the metrics of a row by round, each with the number of its round."""
    records: dict[int, dict[str, float]] = {}
    for name, series in row.history.items():
        for t, value in series.items():
            records.setdefault(t, {"round": float(t)})[name] = value
    return [records[t] for t in sorted(records)]
