"""Trials of a sweep and the rows of its ledger.

A trial whose row is in the ledger is not trained. Its result, its metrics and its tracked run are
restored from the row, so that tables, plots and MLflow are those of a trained trial. It has no
checkpoint and no parameters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.config.schema import Config
from raysim.errors import ConfigError
from raysim.ledger.ledger_file import append_rows, check_writable, read_rows
from raysim.ledger.ledger_row import VERSIONS, Row, kept_config, kept_history
from raysim.runs.provenance import versions
from raysim.runs.result import best_figures, last_and_best, write_history
from raysim.runs.run_dir import HISTORY_FILE, without_secrets
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.early_stopping import EarlyStopping
from raysim.sweeps.trial import labels_of
from raysim.system import files
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import Tail

logger = logging.getLogger("raysim")

RESULT_FILE = "result.json"
"""Result of an ended trial."""


class SweepLedger:
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
        is_new = not self.path.exists()
        rows = read_rows([self.path], say)
        self._stopping = sweep.settings.early_stopping
        self._known = {row.key for row in rows}
        by_identity: dict[str, list[Row]] = {}
        for row in rows:
            by_identity.setdefault(row.fingerprint, []).append(row)
        self.taken: dict[Path, Row] = {}
        """Rows by the folders of the trials that they replace."""
        found = 0
        for trial in sweep.trials:
            candidates = by_identity.get(trial.config.fingerprint, [])
            if row := _row_for(trial.config, candidates, self._stopping):
                found += 1
                if not sweep.done(trial):
                    self.taken[trial.folder] = row
        self.note = f"{self.path}: a new ledger, written after the first run" if is_new else ""
        """Warning that the file may be the wrong one: it is new or of other runs; or ""."""
        if rows and not found:
            self.note = f"{self.path}: none of its {len(rows)} rows is of one of these trials"
        _name_versions([*self.taken.values()], say)

    def restore(self, trial: Trial, parent: str) -> None:
        """Write the folder of a trial that a row replaces.

        Args:
            trial: a trial in `taken`.
            parent: id of the sweep's run in the tracking store.
        """
        tracking = without_secrets(trial.config).tracking
        recorder = Recorder(tracking.uri, tracking.experiment, trial.folder, parent)
        _restore(trial, self.taken[trial.folder], self.path, recorder)

    def add(self, trials: Iterable[Trial]) -> None:
        """Append the rows of ended trials that the ledger does not have.

        Args:
            trials: trials with a result.

        Raises:
            ConfigError: the ledger cannot be written.
        """
        rows = [row for trial in trials if (row := _row_of(trial)) is not None]
        new = {row.key: row for row in rows if row.key not in self._known}
        append_rows(self.path, new.values())
        self._known |= set(new)

    def add_ended(self, sweep: Sweep) -> None:
        """Append the rows of all trials of a sweep that have ended.

        Args:
            sweep: the sweep.

        Raises:
            ConfigError: the ledger cannot be written.
        """
        self.add(trial for trial in sweep.trials if sweep.done(trial))

    def watched(self, watch: WatchCallback) -> WatchCallback:
        """Return a watch that also appends the row of each trial that ends.

        A row that cannot be written does not stop the other trials; it is tried again at the end.

        Args:
            watch: called with all events.
        """

        def adding(trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
            if state in ("finished", "stopped"):
                try:
                    self.add([trial])
                except ConfigError as error:
                    logger.warning("%s", error)
            watch(trial, state, facts)

        return adding


def _row_for(config: Config, rows: Sequence[Row], stopping: EarlyStopping | None) -> Row | None:
    """Return the row that replaces a trial: the first of a full run, else of a stopped one."""
    for row in rows:
        if (covering := row.cut_to(config)) is not None:
            return covering
    settings = stopping and stopping.model_dump(mode="json")
    for row in rows:
        same = row.config == kept_config(config) and row.early_stopping == settings
        if row.stopped and settings is not None and same:
            return row
    return None


def _name_versions(rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Name the versions of rows that other versions computed than those that are installed."""
    installed = versions()
    strange: dict[str, int] = {}
    for row in rows:
        differing = [f"{k} {row.versions[k]}" for k in VERSIONS if row.versions[k] != installed[k]]
        if differing:
            text = ", ".join(differing)
            strange[text] = strange.get(text, 0) + 1
    for text, count in strange.items():
        say(f"{count} of the ledger's rows are of other versions than this machine's: {text}")


def _row_of(trial: Trial) -> Row | None:
    """Return the row of an ended trial; its versions are those of the process that trained it.

    None: the trial was stopped early, and its result does not say by which settings.
    """
    result = trial.result or {}
    tags = Tail(trial.folder).tags()
    stopped = result.get("stopped", "")
    settings = result.get("early_stopping")
    if stopped and settings is None:
        logger.warning(
            "%s: no row for the ledger: result.json does not say by which settings the trial was "
            "stopped early; delete %s to train it again",
            trial.title,
            trial.folder,
        )
        return None
    return Row(
        trial.config.fingerprint,
        trial.config.tracking.experiment,
        trial.title,
        trial.label,
        trial.config.seed,
        result["rounds"],
        result.get("digest") or None,
        tags.get("cpu_capability", "unknown"),
        {name: tags.get(name, "unknown") for name in VERSIONS},
        result["seconds"],
        kept_config(trial.config),
        kept_history(trial.history()),
        stopped,
        settings,
    )


def _restore(trial: Trial, row: Row, ledger: Path, recorder: Recorder) -> None:
    """Write the spool, the history and the result of a trial from its row."""
    by_round: dict[int, dict[str, float]] = {}
    for name, series in row.history.items():
        for t, value in series.items():
            by_round.setdefault(t, {})[name] = value
    history = [{"round": float(t), **by_round[t]} for t in sorted(by_round)]
    tags = {
        "algorithm": row.method,
        "seed": str(row.seed),
        "fingerprint": row.fingerprint,
        "cpu_capability": row.cpu,
        **row.versions,
        "ledger": str(ledger),
        "run_dir": str(trial.folder),
        **({"digest": row.digest} if row.digest else {}),
        **({"stopped_early": row.stopped} if row.stopped else {}),
        **labels_of(trial),
    }
    params = without_secrets(trial.config).model_dump(mode="json")
    recorder.start(row.method, params, tags, run_id=recorder.earlier)
    for record in history:
        values = {name: value for name, value in record.items() if name != "round"}
        recorder.metrics(values, step=int(record["round"]))
    metrics = last_and_best(history, trial.config.evaluate.best)
    recorder.metrics(best_figures(metrics), step=row.rounds)
    recorder.finish("KILLED" if row.stopped else "FINISHED")
    write_history(history, trial.folder / HISTORY_FILE)
    result = {
        "run_id": recorder.run_id,
        "run_dir": str(trial.folder),
        "rounds": row.rounds,
        "metrics": metrics,
        "seconds": row.seconds,
        "digest": row.digest or "",
        "ledger": str(ledger),
        **({"stopped": row.stopped, "early_stopping": row.early_stopping} if row.stopped else {}),
    }
    files.write_file(trial.folder / RESULT_FILE, json.dumps(result))
