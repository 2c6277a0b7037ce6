"""Rows of tables: mean and standard deviation over the seeds of tracked runs, and their ranks.

Reports read only the tracking store and therefore work for runs of other machines and users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd

from raysim.by_key import by_key
from raysim.errors import ConfigError
from raysim.metrics import accumulates, lower_is_better
from raysim.reports import published
from raysim.reports.grouping import group_keys, grouped, split_scenario, varied
from raysim.reports.selecting import PARTITION_SEED, resolved, value_of
from raysim.reports.table_row import Figure, MeanStd, Rank, TableRow, sort_key, value_key
from raysim.reports.tracked import Statistic, TrackedRun

Goal = Callable[[Sequence[TrackedRun]], float | None]
"""Function from runs that differ only in their seed to their target (None: no target)."""


DEFAULT_STATISTICS: tuple[Statistic, ...] = ("best", "last")
"""Statistics of a table's metrics."""


def direction(runs: Sequence[TrackedRun], metric: str) -> bool:
    """Return whether smaller values of a metric are better.

    Args:
        runs: Runs with the metric. If it selects their best model, `evaluate.best.mode` counts.
        metric: Name of the metric.
    """
    modes = {
        run.params.get("evaluate.best.mode")
        for run in runs
        if run.params.get("evaluate.best.metric") == metric
    }
    return modes == {"min"} if len(modes) == 1 else lower_is_better(metric)


def result_of_run(run: TrackedRun, statistic: Statistic) -> float:
    """Return the result of a run with a history.

    Args:
        run: The run.
        statistic: Which of its values is its result.
    """
    return run.value(statistic, direction([run], run.metric))


def figures_of(
    runs: Sequence[TrackedRun], statistics: Sequence[Statistic], select_by: str = ""
) -> list[Figure]:
    """Return the columns of the metric of runs.

    Args:
        runs: Runs with a history of the metric, at least one.
        statistics: Its statistics. Of a metric that accumulates only the last value is one, and
            that at the chosen round.
        select_by: Metric that chooses the round; "": the metric itself.
    """
    metric = runs[0].metric
    lower = direction(runs, metric)
    if accumulates(metric):
        at_chosen_round: list[Statistic] = ["best"] if select_by and "best" in statistics else []
        statistics = [*at_chosen_round, "last"]
    return [Figure(metric, statistic, lower, select_by) for statistic in statistics]


def rows(
    runs: Sequence[TrackedRun],
    *,
    statistics: Sequence[Statistic] = DEFAULT_STATISTICS,
    select_by: str = "",
    target: float | Goal | None = None,
    group: Sequence[str] | None = None,
    across: Sequence[str] | None = None,
    best_of: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[TableRow]:
    """Return the rows of a table.

    Args:
        runs: Runs of any experiments, with histories of one metric.
        statistics: Columns of results, at least one; rows are compared by the first one.
        select_by: Metric that has chosen the rounds of the runs.
        target: Value whose first round is reported, or a function from the runs of a row to it.
        group: Parameters that distinguish rows; `side` is allowed too. Default: all that differ,
            and those of `across`.
        across: Parameters whose values are columns of the table, also if they do not differ.
        best_of: Parameters; only the row with the best mean of each combination of their values is
            kept: the mean of `select_by`, if it is given.
        say: Called with one line if rows hold runs that differ in more than their seed.

    Returns:
        The rows, sorted by the values of their parameters.

    Raises:
        ConfigError: No run has a parameter of `group` or `best_of`, or `best_of` names one that
            `group` lacks.
    """
    figures = figures_of(runs, statistics, select_by)
    choice_lower = bool(select_by) and direction(runs, select_by)
    keys = group_keys(runs, group)
    if across and not group:
        keys = list(dict.fromkeys([*keys, *resolved(runs, across, "columns (--columns)")]))
    groups = grouped(runs, keys, say, settings=not group)
    table = []
    for named, members in groups:
        goal = target(members) if callable(target) else target
        table.append(_row(named, members, figures, goal, choice_lower))
    if not best_of:
        return table
    choosing = resolved(runs, best_of, "best_of (--best-of)")
    for key in choosing if group else ():
        if key not in keys:
            raise ConfigError(
                f"best_of (--best-of): '{key}' is not a parameter of group (--group); add it there"
            )
    values = {}
    for row, (_, members) in zip(table, groups, strict=True):
        values[row.run_ids] = tuple(value_of(members[0].params, key) for key in choosing)
    # Of rows that are equally good the first one stays.
    rivals = by_key(table, lambda row: values[row.run_ids])
    return [min(rows_of_values, key=choice_key) for rows_of_values in rivals.values()]


def choice_key(row: TableRow) -> float:
    """Return the key by which the best of several rows is chosen: not by the test set, if asked.

    Args:
        row: Row of a table; the best one has the smallest key.
    """
    return sort_key(row) if row.choice is None else value_key(row.choice, row.choice_lower)


def values_of(
    runs: Sequence[TrackedRun], figures: Sequence[Figure]
) -> dict[Figure, MeanStd | None]:
    """Return the values of columns over the runs of a row.

    Args:
        runs: Runs with a history of the figures' metric.
        figures: Columns of one metric.
    """
    return {
        figure: MeanStd.of([run.value(figure.statistic, figure.lower) for run in runs])
        for figure in figures
    }


def _row(
    parameters: dict[str, str],
    members: list[TrackedRun],
    figures: Sequence[Figure],
    target: float | None,
    choice_lower: bool,
) -> TableRow:
    """Return the row of runs that differ only in their seed."""
    runs = [run for run in members if run.history]
    chosen = [run.chosen for run in runs if run.chosen]
    last_rounds = [run.history[-1][0] for run in runs] or [0]
    return TableRow(
        parameters,
        len(members),
        values_of(runs, figures),
        _cost_of_target(runs, target, figures[0].lower),
        (min(last_rounds), max(last_rounds)),
        tuple(run.run_id for run in members),
        dict(set.intersection(*(set(run.params.items()) for run in members))),
        choice=MeanStd.of([value for _, value in chosen]),
        choice_lower=choice_lower,
        chosen_round=MeanStd.of([t for t, _ in chosen]),
        target=target,
        unfinished=_unfinished(members),
        pooled=bool(set(varied(members)) - {PARTITION_SEED}),
    )


def _cost_of_target(
    runs: Sequence[TrackedRun], target: float | None, lower: bool
) -> MeanStd | None:
    """Return the cost of first reaching a target, over the runs that reach it."""
    if target is None:
        return None
    costs = []
    for run in runs:
        t = run.arrival(target, lower)
        if t is not None:
            costs.append(run.cost(t))
    return MeanStd.of(costs)


def _unfinished(members: Sequence[TrackedRun]) -> str | None:
    """Return the number of unfinished runs by reason, as text; None if all are finished."""
    reasons = Counter(run.unfinished for run in members if run.unfinished)
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or None


def ranked(
    table: Sequence[TableRow], say: Callable[[str], None] = lambda line: None
) -> list[TableRow]:
    """Return rows with their ranks by mean result.

    Data, partition, model, groups, schedule and privacy define the scenario of a row;
    its other parameters define the method.

    Args:
        table: Rows, as from `rows`, which have a result.
        say: Called with one line if the methods do not share all scenarios.
    """
    splits = [split_scenario(row.parameters) for row in table]
    ranks = pd.DataFrame(splits, columns=["scenario", "method"])
    ranks["key"] = list(map(sort_key, table))
    ranks["place"] = ranks.groupby("scenario")["key"].rank()
    places = ranks.groupby("method")["place"]
    ranks["mean"] = places.transform("mean")
    ranks["scenarios"] = places.transform("count")
    if len(set(ranks["scenarios"])) > 1:
        say(
            "mean ranks cover different scenarios because not every method is in all of them; use "
            "--group and --best-of"
        )
    figures = ranks[["place", "mean", "scenarios"]].itertuples(index=False)
    return [replace(row, rank=Rank(*known)) for row, known in zip(table, figures, strict=True)]


def add_published(
    table: Sequence[TableRow],
    printed: Sequence[published.PublishedResult],
    share: float | None = None,
    of: str | None = None,
) -> list[TableRow]:
    """Return rows with the published results of such runs.

    Args:
        table: Rows, as from `rows`.
        printed: Published results, as from `published.read_published`.
        share: Target as a share of the best value of the runs `of`; used only with `of`.
        of: Reference runs as KEY=VALUE. Without them the target of each row is used.
    """
    return [
        replace(
            row,
            printed=published.published_values(
                printed, row.shared, share if of else row.target, of
            ),
        )
        for row in table
    ]
