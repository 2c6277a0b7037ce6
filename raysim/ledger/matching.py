"""Matching of the rows of a ledger with runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from raysim.config.schema import Config
from raysim.config.sections.evaluation import Evaluate
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
    for row in rows:
        if _asked_of_run(row.config) != _asked_of_run(wanted):
            continue
        own = replace(row, config=wanted, experiment=config.tracking.experiment)
        if not row.stopped:
            return own
        if stopping is not None and row.early_stopping == stopping:
            stopped_rows.append(own)
    return stopped_rows[0] if stopped_rows else None


def _asked_of_run(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the rounds and the evaluations of a run, of which its fingerprint says nothing."""
    evaluate = config["evaluate"]
    with suppress(ValidationError):  # else it has keys of another version
        # A row may lack keys that were added since.
        evaluate = Evaluate.model_validate(evaluate).model_dump(mode="json")
    return config["rounds"], {k: v for k, v in evaluate.items() if k != "batch_size"}
