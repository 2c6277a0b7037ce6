"""Matching of the rows of a ledger with runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysim.config.schema import Config
from raysim.ledger.kept import kept_config
from raysim.ledger.ledger_row import Row


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
    wanted = kept_config(config)
    if wanted["record_updates"] is not None:  # a row has no updates
        return None
    stopped_rows = []
    asked = wanted["rounds"], _without_batch_size(wanted["evaluate"])
    for row in rows:
        # The fingerprint says nothing of rounds and evaluations.
        if (row.config["rounds"], _without_batch_size(row.evaluate)) != asked:
            continue
        own = replace(row, config=wanted, experiment=config.tracking.experiment)
        if not row.stopped:
            return own
        if stopping is not None and row.early_stopping == stopping:
            stopped_rows.append(own)
    return stopped_rows[0] if stopped_rows else None


def _without_batch_size(evaluate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `evaluate` without what changes no metric."""
    return {key: value for key, value in evaluate.items() if key != "batch_size"}
