"""Rows of a table of results, as the command line and the data frames show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from raysim.errors import ConfigError, did_you_mean
from raysim.reports import published, tables
from raysim.reports.analysis import aggregate, comparisons, targets
from raysim.reports.runs import RunSource
from raysim.reports.tables import TableRow
from raysim.reports.tracked import (
    STATISTICS,
    CostUnit,
    MetricMissing,
    Statistic,
    TrackedRun,
    counted,
)
from raysim.reports.value_names import Names, names_given

Say = Callable[[str], None]


@dataclass(frozen=True)
class ResultsTable:
    """A table of results."""

    runs: Sequence[TrackedRun]
    """Runs of the table, with the history of the first metric."""

    rows: Sequence[TableRow]
    """The rows."""

    target: float | None
    """Target, if it is the same number for all rows."""

    cost_unit: CostUnit
    """Unit of the cost of reaching the target."""

    names: Names
    """Names of values, parameters, metrics and headers."""

    def text(self, form: str) -> str:
        """Return the table as text.

        Args:
            form: "markdown", "latex" or "csv".
        """
        if form == "csv":
            return tables.as_csv(self.rows, self.cost_unit, self.names)
        write = tables.latex if form == "latex" else tables.markdown_table
        return write(self.rows, self.target, self.cost_unit, self.names)

    def frame(self) -> pd.DataFrame:
        """Return the table as a data frame; see `tables.frame`."""
        return tables.frame(self.rows, self.cost_unit, self.names)


def results_table(
    source: RunSource,
    say: Say,
    *,
    metric: Sequence[str] | None = None,
    statistic: Sequence[str] | None = None,
    select_by: str | None = None,
    target: float | str | None = None,
    group: Sequence[str] | None = None,
    best_of: Sequence[str] | None = None,
    relative_to: str | None = None,
    x_axis: str = "rounds",
    ranks: bool = False,
    paper: str | None = None,
    compare_with: str | None = None,
    label: Sequence[str] | Names = (),
) -> ResultsTable:
    """Return a table of results; `frames.table_frame` describes the arguments.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        metric: See `frames.table_frame`.
        statistic: See `frames.table_frame`.
        select_by: See `frames.table_frame`.
        target: See `frames.table_frame`.
        group: See `frames.table_frame`.
        best_of: See `frames.table_frame`.
        relative_to: See `frames.table_frame`.
        x_axis: See `frames.table_frame`.
        ranks: See `frames.table_frame`.
        paper: See `frames.table_frame`.
        compare_with: See `frames.table_frame`.
        label: See `frames.table_frame`.

    Raises:
        ConfigError: See `frames.table_frame`.
    """
    cost_unit = cost_unit_of(x_axis)
    named = statistic or aggregate.DEFAULT_STATISTICS
    statistics: list[Statistic] = [known_statistic(name) for name in named]
    target_value = _target_number(target, bool(paper))
    if relative_to and target_value is None:
        raise ConfigError(
            "relative_to (--relative-to): needs a target to scale; pass target (--target) too, "
            "as a number"
        )
    printed = _read_paper(paper, metric, statistics)
    say = _once(say)
    runs, *runs_of_others = _runs_by_metric(source, say, metric, select_by, cost_unit)
    if paper:
        _check_published(runs[0].metric, statistics)
    rows = aggregate.rows(
        runs,
        runs[0].metric,
        statistics=statistics,
        select_by=select_by or "",
        target=_goal(target, target_value, relative_to, runs, printed, say),
        group=group,
        best_of=best_of,
        say=say,
    )
    for others in runs_of_others:
        rows = _with_metric(rows, others, statistics, select_by or "")
    if paper:
        rows = aggregate.add_published(rows, printed, target_value, relative_to)
        _report_agreement(rows, paper, say)
    if compare_with:
        rows = comparisons.compared(rows, runs, compare_with, say)
    if ranks:
        rows = aggregate.ranked(rows, say)
    common_target = None if relative_to else target_value
    names = names_given(label, tables.nameable(rows, common_target, cost_unit))
    return ResultsTable(runs, rows, common_target, cost_unit, names)


def _read_paper(
    paper: str | None, metric: Sequence[str] | None, statistics: Sequence[Statistic]
) -> list[published.PublishedResult]:
    """Return the results of a paper; none without a paper."""
    if not paper:
        return []
    # Reading the runs takes long, so a metric that is named is checked before.
    if metric:
        _check_published(metric[0], statistics)
    return published.read_published(paper)


def _goal(
    target: float | str | None,
    value: float | None,
    relative_to: str | None,
    runs: Sequence[TrackedRun],
    printed: Sequence[published.PublishedResult],
    say: Say,
) -> float | aggregate.Goal | None:
    """Return the target of all rows, or the function from the runs of a row to its target."""
    if value is None:
        if target != "paper":
            return None
        return lambda members: published.published_target(printed, members[0].params)
    if relative_to:
        return targets.share_of(runs, relative_to, value, runs[0].metric, say)
    targets.refuse_unreachable(value, runs[0].metric)
    return value


def _report_agreement(rows: Sequence[TableRow], paper: str, say: Say) -> None:
    """Report how many rows agree with their published results."""
    differences = [row.difference for row in rows if row.difference is not None]
    if differences:
        near = sum(abs(difference) <= 2 for difference in differences)
        say(f"{near} of {len(differences)} rows lie within two of the paper's deviations")
    if not any(row.printed for row in rows):
        say(
            f"paper (--paper): {paper} has no result for these runs; use group (--group) so "
            "that each row has one algorithm and one scenario"
        )


def known_statistic(name: str) -> Statistic:
    """Return a statistic by its name.

    Args:
        name: Name as the user wrote it.

    Raises:
        ConfigError: There is no such statistic.
    """
    for statistic in STATISTICS:
        if name == statistic:
            return statistic
    hint = did_you_mean(name, STATISTICS) or f"; there are {', '.join(STATISTICS)}"
    raise ConfigError(f"statistic (--statistic): unknown statistic '{name}'{hint}")


def _runs_by_metric(
    source: RunSource,
    say: Say,
    metrics: Sequence[str] | None,
    select_by: str | None,
    cost_unit: CostUnit,
) -> list[list[TrackedRun]]:
    """Return the runs of each metric; with `select_by` with the round that it chooses."""
    by_metric = [source.finished(metric, say, cost_unit) for metric in metrics or [None]]
    if select_by is None:
        return by_metric
    try:
        choosers = source.finished(select_by, say)
    except MetricMissing as error:
        raise ConfigError(f"select_by (--select-by): {error}") from None
    chosen = chosen_rounds(choosers, by_metric, say)
    missing = sum(run.run_id not in chosen for run in by_metric[0])
    if missing:
        say(counted(missing, f"left out: without '{select_by}'"))
    with_choice = []
    for runs in by_metric:
        kept = [replace(run, chosen=chosen[run.run_id]) for run in runs if run.run_id in chosen]
        if not kept:
            raise ConfigError(
                f"select_by (--select-by): no run has both '{select_by}' and '{runs[0].metric}'"
            )
        with_choice.append(kept)
    return with_choice


def chosen_rounds(
    choosers: Sequence[TrackedRun], by_metric: Sequence[Sequence[TrackedRun]], say: Say
) -> dict[str, tuple[int, float]]:
    """Return the round that a metric chooses in each run, and the metric's value there.

    Only rounds with a value of every metric of the table can be chosen.

    Args:
        choosers: Runs with the history of the metric that chooses.
        by_metric: Runs of each metric of the table.
        say: Called with one line if a better round lacks a metric.
    """
    select_by = choosers[0].metric
    best = min if aggregate.direction(choosers, select_by) else max
    histories = [{run.run_id: dict(run.history) for run in runs} for runs in by_metric]
    chosen: dict[str, tuple[int, float]] = {}
    n_restricted = 0
    for run in choosers:
        values = dict(run.history)
        needed = [history[run.run_id] for history in histories if run.run_id in history]
        if not needed:
            continue
        rounds = [t for t in values if all(t in history for history in needed)]
        if not rounds:
            metrics = ", ".join(f"'{runs[0].metric}'" for runs in by_metric)
            raise ConfigError(
                f"select_by (--select-by): run {run.run_id} has no round with a value of "
                f"'{select_by}' and of {metrics}; leave out a metric (--metric), or log all of "
                "them in the same rounds"
            )
        t = best(rounds, key=values.__getitem__)
        chosen[run.run_id] = (t, values[t])
        n_restricted += values[t] != best(values.values())
    if n_restricted:
        say(
            f"{counted(n_restricted, 'with')} a better '{select_by}' in a round without another "
            "metric of the table: the best round with all of them is used"
        )
    return chosen


def _with_metric(
    rows: Sequence[TableRow],
    runs: Sequence[TrackedRun],
    statistics: Sequence[Statistic],
    select_by: str,
) -> list[TableRow]:
    """Return rows with the columns of a further metric."""
    metric = runs[0].metric
    figures = aggregate.figures_of(metric, statistics, aggregate.direction(runs, metric), select_by)
    by_id: Mapping[str, TrackedRun] = {run.run_id: run for run in runs}
    more = []
    for row in rows:
        members = [by_id[run_id] for run_id in row.run_ids if run_id in by_id]
        more.append(replace(row, values={**row.values, **aggregate.values_of(members, figures)}))
    return more


def _once(say: Say) -> Say:
    """Return `say` without lines that were said before: each metric reads the same runs."""
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return say_once


def _check_published(metric: str, statistics: Sequence[Statistic]) -> None:
    """Raise ConfigError if papers do not publish a metric, or not this statistic of it."""
    if metric != "accuracy":
        raise ConfigError(
            f"paper (--paper): published results are accuracies, not {metric}; leave out paper or "
            "metric (--metric)"
        )
    if statistics[0] != "best":
        raise ConfigError(
            "paper (--paper): published results are best values; let statistic (--statistic) "
            "begin with best"
        )


def _target_number(target: float | str | None, with_paper: bool) -> float | None:
    """Return the target as a number; None without a target or for the targets of a paper."""
    if target is None or (target == "paper" and with_paper):
        return None
    if target == "paper":
        raise ConfigError(
            "target (--target): 'paper' needs a paper; pass paper (--paper), such as gradma"
        )
    try:
        return float(target)
    except ValueError:
        raise ConfigError(
            f"target (--target): '{target}' is neither a number nor 'paper'"
        ) from None


def cost_unit_of(x_axis: str) -> Any:
    """Return the unit of cost for a value of `x_axis`.

    Args:
        x_axis: "rounds", "bytes", "virtual-time" or "seconds".

    Returns:
        The unit, a `raysim.reports.tracked.CostUnit`.

    Raises:
        ConfigError: The unit is unknown.
    """
    known = ("rounds", "bytes", "virtual-time", "seconds")
    if x_axis not in known:
        raise ConfigError(
            f"x_axis (--x-axis): unknown unit '{x_axis}'{did_you_mean(x_axis, known)}"
        )
    return x_axis.replace("-", " ")
