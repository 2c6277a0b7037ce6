"""Matching of the rows of a ledger with runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysim.config.schema import Config
from raysim.ledger.kept import cut_history, evaluated_rounds, kept_config
from raysim.ledger.ledger_row import Row

_HOW_OFTEN = ("every", "batch_size")
"""Keys of `evaluate` that do not change what an evaluation measures."""


def matching_row(
    rows: Sequence[Row], config: Config, stopping: Mapping[str, Any] | None
) -> Row | None:
    """Return the row that replaces a trial: the first of a full run, else of a stopped one.

    Args:
        rows: rows with the trial's fingerprint, in the order of the files.
        config: resolved configuration of the trial.
        stopping: settings of early stopping; None: trials are not stopped early.

    Returns:
        A row of exactly this run; None: no row stands for it.
    """
    covering = [_cut_to(row, config) for row in rows]
    for row in rows if stopping else ():
        # A row that was not stopped has no settings.
        if row.early_stopping == stopping and row.config == kept_config(config):
            covering.append(row)
    return next(filter(None, covering), None)


def _cut_to(row: Row, config: Config) -> Row | None:
    """Return the row of a run of this configuration, or None if `row` does not cover it.

    The row covers the run if its identity is the same, and if it has at least its rounds and its
    evaluations. A trial that was stopped early covers the rounds that it completed, and a run that
    its section `stop` ended covers longer ones too.
    """
    wanted = kept_config(config)
    if row.fingerprint != config.fingerprint or not _has_results(row, wanted):
        return None
    # The digest holds only for a run that this row has to its end.
    whole = row.rounds < config.rounds or (row.rounds == config.rounds and not row.stopped)
    renamed = replace(row, config=wanted, experiment=config.tracking.experiment)
    if whole and row.config["evaluate"]["every"] == config.evaluate.every:
        return renamed
    rounds = range(config.rounds + 1)
    due = {t for t in rounds if config.evaluate.due(t, config.rounds)}
    if not due or not due <= evaluated_rounds(row.history):
        return None
    return replace(
        renamed,
        rounds=config.rounds,
        history=cut_history(row.history, rounds, due),
        digest=row.digest if whole else None,
        stopped="",
        early_stopping=None,
    )


def _has_results(row: Row, wanted: Mapping[str, Any]) -> bool:
    """Return whether a row has the rounds and the measurements of a run of its identity."""
    if row.rounds < wanted["rounds"] and not row.ended:
        return False
    if wanted["record_updates"] is not None:
        return False
    measured = _without_frequency(row.config["evaluate"])
    asked = _without_frequency(wanted["evaluate"])
    # What these measure depends on the rounds before.
    follows = any(asked.get(key) for key in ("forgetting", "theory", "probes"))
    return measured == asked and (not follows or row.rounds == wanted["rounds"])


def _without_frequency(evaluate: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in evaluate.items() if key not in _HOW_OFTEN}
