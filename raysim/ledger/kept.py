"""Parts of a configuration and of the metrics of a run that a row of a ledger keeps.

The history has the evaluations and other sparse metrics whole. What is logged every round is kept
for the evaluated rounds, and of that only the loss, the costs and the user's own metrics.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from raysim.config.schema import Config
from raysim.ledger.ledger_row import Series
from raysim.metrics import find_metric

EVALUATIONS = ("accuracy", "loss", "val/accuracy", "val/loss")
"""Metrics that only evaluations log."""

KEPT_OF_EVERY_ROUND = (
    "train_loss",
    "bytes_down",
    "bytes_up",
    "virtual_time",
    "system/round_seconds",
    "clients/used",
    "staleness/mean",
    "staleness/max",
)
"""Registered metrics of every round that a row keeps."""

_SECONDS = "system/round_seconds"
"""Metric whose values are added up between the rounds that are kept."""

_WITHOUT_EFFECT = ("tracking", "checkpoint", "client_state", "run_dir")
"""Sections of the configuration that a row leaves out."""

_RESOURCES = ("executor", "actors", "threads", "gpus", "server_gpus")
"""Keys of `resources` that a row keeps."""


def kept_config(config: Config) -> dict[str, Any]:
    """Return the part of a resolved configuration that a row keeps.

    Args:
        config: Resolved configuration.
    """
    kept = config.model_dump(mode="json", exclude=set(_WITHOUT_EFFECT))
    for key in ("stop", "own_metrics", "own_defaults"):
        if kept[key] is None:  # as in rows of versions that do not have it
            kept.pop(key)
    resources = kept["resources"]
    kept["resources"] = {key: resources[key] for key in _RESOURCES}
    if not resources["deterministic"]:
        kept["resources"]["deterministic"] = False
    kept["data"] = {k: v for k, v in kept["data"].items() if k not in ("root", "download")}
    return kept


def kept_history(records: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Series]:
    """Return what a row keeps of the metrics of all rounds.

    Args:
        records: (round, metrics) of each round, by ascending rounds.

    Returns:
        Values by metric and round.
    """
    history: dict[str, dict[int, float]] = {}
    for t, record in records:
        for name, value in record.items():
            history.setdefault(name, {})[t] = value
    rounds = _evaluated_rounds(history, len(records))
    last, _ = records[-1]
    # Without an evaluation the metrics of every round are all that the run has.
    rounds = {*rounds, last} if rounds else {t for t, _ in records}
    kept: dict[str, Series] = {}
    for name, series in history.items():
        if not _is_kept(name):
            continue
        if name == _SECONDS:
            series = _summed(series, rounds)
        elif _is_cut(name):
            series = {t: value for t, value in series.items() if t in rounds}
        if series:
            kept[name] = series
    return kept


def _evaluated_rounds(history: Mapping[str, Series], n_records: int) -> set[int]:
    """Return the rounds in which something is evaluated, such as the model or the clients."""
    rounds: set[int] = set()
    for name, series in history.items():
        is_sparse = _is_kept(name) and not _is_cut(name) and len(series) < n_records
        if name in EVALUATIONS or is_sparse:
            rounds |= series.keys()
    return rounds


def _summed(series: Series, rounds: Container[int]) -> Series:
    """Return for each of some rounds the sum of the values since the last of these."""
    kept: dict[int, float] = {}
    total = before = 0.0
    for t, value in series.items():
        total += value
        if t in rounds:
            kept[t] = round(total - before, 4)
            before = total
    return kept


def _is_kept(name: str) -> bool:
    """Return True if a row keeps a metric."""
    metric = find_metric(name)
    if metric is None or _is_of_all_rounds(name):
        return True
    return not metric.logged.startswith("every round") and not name.startswith("system/")


def _is_cut(name: str) -> bool:
    """Return True if a row keeps a metric only for the evaluated rounds."""
    prefixes = ("accuracy/", "privacy/")
    return _is_of_all_rounds(name) or name in EVALUATIONS or name.startswith(prefixes)


def _is_of_all_rounds(name: str) -> bool:
    """Return True if a row keeps a metric that rounds without an evaluation have, too."""
    metric = find_metric(name)
    own = metric is None or metric.users_own or metric.is_count
    return own or name in KEPT_OF_EVERY_ROUND
