"""Finished runs as reports use them: parameters, history of a metric, and cost.

`runs` finds them in MLflow, and `ledger_runs` in ledgers.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

import pandas as pd

from raysim.config.sections.evaluation import DEFAULT_BEST
from raysim.errors import ConfigError, counted
from raysim.metrics import accumulates, declare_own, find_metric, without_figure
from raysim.spelling import did_you_mean

T = TypeVar("T")

CostUnit = Literal["rounds", "bytes", "virtual time", "seconds"]
"""Unit of the cost of a run."""

KEYS_WITHOUT_EFFECT = (
    "name",
    "run_dir",
    "tracking.",
    "checkpoint.",
    "data.root",
    "data.download",
    "evaluate.batch_size",
)
KEYS_WITHOUT_EFFECT += ("resources.executor", "resources.actors", "resources.cpus")
KEYS_WITHOUT_EFFECT += ("resources.server_threads", "resources.address")
KEYS_WITHOUT_EFFECT += ("resources.timeout", "resources.call_timeout", "sweep.", "client_state.")
KEYS_WITHOUT_EFFECT += ("own_metrics", "own_defaults")
"""Prefixes of parameters that cannot change the results of a run."""

LAST_EVALUATIONS = 10
"""Number of last evaluated values over which the final mean is computed."""

Statistic = Literal["best", "last", "last10"]
"""Value of a metric in a run: at its best round, at the last round, or the mean of the last
`LAST_EVALUATIONS` evaluations."""

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
"""All statistics."""


@dataclass(frozen=True)
class TrackedRun:
    """Tracked run with the history of one metric."""

    run_id: str
    """Id of the run in MLflow; in a sweep's summary, the name of the trial's folder."""

    params: Mapping[str, str]
    """Resolved parameters as text."""

    history: Sequence[tuple[int, float]]
    """(round, value) of the metric, by ascending rounds."""

    costs: Mapping[int, float] = field(default_factory=dict)
    """Cumulative cost by round; if empty, the cost is the round number."""

    unfinished: str = ""
    """Reason why the run is not finished, or ""."""

    metric: str = DEFAULT_BEST.metric
    """Name of the metric."""

    chosen: tuple[int, float] | None = None
    """Round that another metric chose, and the value of that metric there; None: this metric's
    best round is its own."""

    known: frozenset[str] = frozenset()
    """Names of the parameters that some run of the same source has, selected or not."""

    def value(self, statistic: Statistic, lower: bool) -> float:
        """Return a statistic of the metric over all rounds but round 0.

        "best" is the value at the chosen round if another metric chose one. A metric that
        accumulates has only its last value.

        Args:
            statistic: One of `STATISTICS`.
            lower: True if smaller values are better.
        """
        if statistic == "best" and self.chosen is not None:
            return dict(self.history)[self.chosen[0]]
        if statistic == "last" or accumulates(self.metric):
            return self.history[-1][1]
        if statistic == "best":
            return (min if lower else max)(self.trained)
        return statistics.fmean(self.trained[-LAST_EVALUATIONS:])

    @property
    def trained(self) -> list[float]:
        """Values after round 0, or the last value if there are none."""
        return [value for t, value in self.history if t > 0] or [self.history[-1][1]]

    def arrival(self, target: float, lower: bool) -> int | None:
        """Return the first round that reaches a target, or None if no round does.

        Args:
            target: Value to reach.
            lower: True if smaller values are better.
        """
        for t, value in self.history:
            if (value <= target) if lower else (value >= target):
                return t
        return None

    def cost(self, round: int) -> float:
        """Return the cumulative cost at the end of a round, from the last logged value.

        Args:
            round: Number of completed rounds.
        """
        if not self.costs:
            return float(round)
        return self.costs[max((t for t in self.costs if t <= round), default=min(self.costs))]


CLIENTS_USED = "clients/used"
"""Metric that every round of a run logs."""


def _is_count(metric: str) -> bool:
    """Return True if a metric is a count, so runs that do not log it have a count of 0."""
    entry = find_metric(metric)
    return entry is not None and entry.is_count


def _may_be_of_method(metric: str) -> bool:
    """Return whether a shipped method may declare a metric, with its unit and direction."""
    entry = find_metric(metric)
    if entry is not None and entry.unit == "as the metric":
        entry = find_metric(without_figure(metric))
    return entry is None or entry.users_own


class MetricMissing(ConfigError):
    """Error for a metric that no run has."""


@dataclass(frozen=True)
class FinishedRun:
    """Finished run, with the function that reads its histories."""

    run_id: str
    """Id of the run in MLflow, or the place of its row in a ledger."""

    params: Mapping[str, str]
    """Resolved parameters as text."""

    metrics: frozenset[str]
    """Names of the metrics that it has logged."""

    history: Callable[[str], list[tuple[int, float]]]
    """Function from a metric to its values as (round, value), by ascending rounds."""

    place: tuple[int, int] = (0, 0)
    """Place in reports: start of its sweep, and position there."""


def kept(
    runs: Collection[Any], remaining: Iterable[T], why: str, say: Callable[[str], None]
) -> list[T]:
    """Return the remaining runs, and report how many were left out.

    Args:
        runs: All runs.
        remaining: Those that remain of them.
        why: Reason for which the others are left out.
        say: Called with one line if there are others.
    """
    remaining = list(remaining)
    if len(remaining) < len(runs):
        say(f"{counted(len(runs) - len(remaining), 'run')} left out: {why}")
    return remaining


def with_histories(
    done: Sequence[FinishedRun],
    title: str,
    metric: str | None,
    say: Callable[[str], None],
    cost_unit: CostUnit,
    first_counts: bool = False,
) -> list[TrackedRun]:
    """Return finished runs with the history of a metric and their cost.

    Args:
        done: Finished runs. Of several with the same parameters and seed the last one is used.
        title: Names of the runs, for errors.
        metric: Metric of the histories; None: `default_metric`. Runs without a value are omitted.
        say: Called with one line for each group of omitted runs.
        cost_unit: Unit of the runs' cost.
        first_counts: Use the first one of several instead.

    Raises:
        MetricMissing: No run has the metric.
        ConfigError: No run is left, or `metric` is None and the runs select by different ones.
    """
    metric = metric or _compared_metric(done)
    own = _declare_own_metrics(done, say)
    if without_figure(metric) not in own and _may_be_of_method(metric):
        # The import takes seconds, which reports on the engine's metrics save.
        from raysim.rules.methods.registry import discover

        discover()
    needed = {metric, CLIENTS_USED} if _is_count(metric) else {metric}
    measured = [_comparable(run) for run in done if needed & run.metrics]
    if not measured:
        raise MetricMissing(f"{title}: {_why_without(done, metric)}")
    measured = kept(done, measured, f"without '{metric}'", say)
    single = _one_each(measured, first_counts)
    single = kept(measured, single, "another one has the same parameters and seed", say)
    single.sort(key=lambda run: run.place)
    histories = [run.history(metric) for run in single]
    undefined = [points for points in histories if numbers(points) and math.isnan(points[-1][1])]
    if undefined:
        say(
            f"{counted(len(undefined), 'run')} whose last '{metric}' is not a number: the last "
            "number before it is shown (the run diverged, or the metric has no value there)"
        )
    runs = [
        _with_history(run, numbers(points), metric, cost_unit)
        for run, points in zip(single, histories, strict=True)
    ]
    with_values = filter(attrgetter("history"), runs)
    runs = kept(runs, with_values, f"their '{metric}' is never a number after round 0", say)
    if cost_unit != "rounds":
        with_costs = filter(attrgetter("costs"), runs)
        runs = kept(runs, with_costs, f"they do not log their {cost_unit}", say)
    if not runs:
        raise ConfigError(
            f"{title}: no run is left; the warnings above say why. Use another "
            "metric (--metric) or x_axis (--x-axis)"
        )
    return runs


def _declare_own_metrics(done: Sequence[FinishedRun], say: Callable[[str], None]) -> set[str]:
    """Declare the metrics of users' files as runs have recorded them; return their names.

    If the file has changed in between, the last run counts.
    """
    own: dict[str, tuple[str, str]] = {}
    for run in done:
        for key, direction in run.params.items():
            declared = re.fullmatch(r"own_metrics\.(.+)\.larger_is_better", key)
            if declared is None:
                continue
            name = declared[1]
            recorded = (run.params.get(f"own_metrics.{name}.unit", ""), direction)
            if own.setdefault(name, recorded) != recorded:
                say(
                    f"'{name}' has another unit or direction in some runs than in others; those of "
                    "the last run are used"
                )
            own[name] = recorded
    for name, (unit, direction) in own.items():
        declare_own(name, unit, {"true": True, "false": False}.get(direction))
    return set(own)


def _comparable(run: FinishedRun) -> FinishedRun:
    """Return a run with the parameters by which runs are compared.

    With clients on CPUs `resources.server_gpus` is 0 or null, which say the same; older versions
    wrote 0.
    """
    gpus, of_server = (run.params.get(f"resources.{key}") for key in ("gpus", "server_gpus"))
    if of_server in ("0", "0.0") and gpus in (None, "0", "0.0"):
        return replace(run, params={**run.params, "resources.server_gpus": "null"})
    return run


def numbers(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the values of a metric that are not NaN; none if all of them after round 0 are NaN.

    A metric may have no value in some rounds. But that of round 0, before any training, is not the
    result of a run that diverged.

    Args:
        points: (round, value) by ascending rounds.
    """
    kept = [(t, value) for t, value in points if not math.isnan(value)]
    last = max((t for t, _ in points), default=0)
    return [] if last > 0 and not any(t > 0 for t, _ in kept) else kept


def _with_history(
    run: FinishedRun, history: list[tuple[int, float]], metric: str, cost_unit: CostUnit
) -> TrackedRun:
    """Return a run with the history of a metric and its cost."""
    if not history and _is_count(metric):
        history = [(t, 0.0) for t, _ in run.history(CLIENTS_USED)]
    cost = _costs_by_round(run, cost_unit)
    return TrackedRun(run.run_id, run.params, history, cost, metric=metric)


def default_metric(best: str, logged: Collection[str]) -> str:
    """Return the metric by which runs are compared unless another one is asked for.

    Args:
        best: Metric by which they select their best model (`evaluate.best`).
        logged: Metrics that some run has.

    Returns:
        That metric, or the first of it at the clients, loss, clients/loss and train_loss that a
        run has.
    """
    candidates = (best, f"clients/{best}", "loss", "clients/loss", "train_loss")
    return next((name for name in candidates if name in logged), best)


def _compared_metric(done: Sequence[FinishedRun]) -> str:
    """Return the metric by which runs are compared unless another one is asked for."""
    metrics = {run.params.get("evaluate.best.metric", DEFAULT_BEST.metric) for run in done}
    if len(metrics) > 1:
        raise ConfigError(
            f"metric (--metric): these runs select their best model by different metrics "
            f"({', '.join(sorted(metrics))}); name one"
        )
    best = metrics.pop() if metrics else DEFAULT_BEST.metric
    return default_metric(best, frozenset().union(*(run.metrics for run in done)))


def _why_without(done: Sequence[FinishedRun], metric: str) -> str:
    """Return the reason why no run has a metric, with the fix."""
    known = frozenset().union(*(run.metrics for run in done))
    hint = did_you_mean(metric, known)
    if not hint:
        hint = f"; set metric (--metric) to one of {', '.join(sorted(known)) or 'none'}"
    entry = find_metric(metric)
    when = "" if entry is None or entry.users_own else f" (logged: {entry.logged})"
    return f"no run has a metric '{metric}'{hint}{when}"


def _one_each(runs: Sequence[FinishedRun], first_counts: bool) -> list[FinishedRun]:
    """Return the first or the last run for each combination of parameters and seed."""
    chosen: dict[str, FinishedRun] = {}
    for run in runs:
        # A key that a newer version has added is null where an older run lacks it.
        kept = {
            k: v
            for k, v in run.params.items()
            if v != "null" and not k.startswith(KEYS_WITHOUT_EFFECT)
        }
        key = json.dumps(kept, sort_keys=True)
        if not first_counts or key not in chosen:
            chosen[key] = run
    return list(chosen.values())


def _costs_by_round(run: FinishedRun, kind: CostUnit) -> Mapping[int, float]:
    """Return the cumulative cost by round: bytes in both directions, virtual time, or seconds."""

    def series(metric: str) -> pd.Series:
        return pd.Series(dict(numbers(run.history(metric))), dtype=float)

    if kind == "rounds":
        return {}
    if kind == "virtual time":
        logged = dict(numbers(run.history("virtual_time")))
        if logged or run.params.get("schedule.name") != "sync":
            return logged
        # On a synchronous schedule it is the number of rounds.
        return {0: 0.0} | {t: float(t) for t, _ in run.history(CLIENTS_USED)}
    if kind == "seconds":
        costs = series("system/round_seconds").cumsum()
    else:
        costs = (series("bytes_down") + series("bytes_up")).dropna()
    return {} if costs.empty else {0: 0.0} | costs.to_dict()
