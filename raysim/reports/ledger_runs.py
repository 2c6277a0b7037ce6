"""Finished runs of ledgers, for reports without a tracking store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from raysim.config import explain
from raysim.errors import ConfigError
from raysim.ledger.kept import kept_config
from raysim.ledger.ledger_file import read_rows, unique
from raysim.ledger.ledger_row import Row
from raysim.reports.tracked import FinishedRun, kept
from raysim.spelling import did_you_mean, lacking


def finished_rows(
    ledgers: Sequence[str | Path], wanted: Sequence[str], title: str, say: Callable[[str], None]
) -> list[FinishedRun]:
    """Return the finished runs of ledgers, in the order of their rows.

    Args:
        ledgers: The files. Of several rows of one run the first one counts.
        wanted: Names of experiments; empty: all rows.
        title: Names of the runs, for errors.
        say: Called with one line for each group of rows that are left out, and each bad row.

    Raises:
        ConfigError: A file cannot be read, an experiment has no row, or no run is finished.
    """
    rows = read_rows(ledgers, say, missing="ledger (--ledger)")
    experiments = sorted({row.experiment for row in rows})
    wanted = wanted or experiments
    for name in lacking(wanted, experiments):
        files = ", ".join(map(str, ledgers))
        names = f"; there are {', '.join(experiments)}" if experiments else ""
        hint = did_you_mean(name, experiments) or names
        raise ConfigError(f"runs: no row of {files} is of an experiment '{name}'{hint}")
    selected = [row for row in rows if row.experiment in wanted]
    finished = kept(selected, (row for row in selected if not row.stopped), "stopped early", say)
    if not finished:
        raise ConfigError(f"{title}: no run is finished; raysim sweep --ledger adds rows")
    return [_finished_run(_completed(row)) for row in unique(finished)]


def _completed(row: Row) -> Row:
    """Return a row with the keys that were added to the configuration since, at their defaults.

    Otherwise rows of different versions of raysim would seem to differ in these keys.
    """
    try:
        config = explain.validate(row.config)
    except ConfigError:
        return row
    same = config.fingerprint == row.fingerprint
    return replace(row, config=kept_config(config)) if same else row


def _finished_run(row: Row) -> FinishedRun:
    """Return a row as a finished run."""

    def history(metric: str) -> list[tuple[int, float]]:
        return sorted(row.history.get(metric, {}).items())

    return FinishedRun(row.place, row.params, frozenset(row.history), history)
