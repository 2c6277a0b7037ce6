"""The report "table": which runs become which rows, compared with what."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

from raysim.errors import ConfigError, counted
from raysim.metrics import accumulates
from raysim.reports import published
from raysim.reports.analysis import aggregate, comparisons, targets
from raysim.reports.grouping import group_keys
from raysim.reports.runs import RunSource
from raysim.reports.selecting import resolved
from raysim.reports.table_row import TableRow
from raysim.reports.tables.results_table import CrossTable, ResultsTable
from raysim.reports.tracked import (
    LAST_EVALUATIONS,
    STATISTICS,
    CostUnit,
    MetricMissing,
    Statistic,
    TrackedRun,
)
from raysim.reports.value_names import Names, names_given
from raysim.spelling import did_you_mean

Say = Callable[[str], None]

KeyNames = str | Sequence[str]
"""Names of parameters or metrics: a list, or one comma-separated string."""


def table_report(
    source: RunSource,
    say: Say,
    *,
    metric: KeyNames | None = None,
    statistic: KeyNames | None = None,
    select_by: str | None = None,
    target: float | str | None = None,
    group: KeyNames | None = None,
    best_of: KeyNames | None = None,
    relative_to: str | None = None,
    x_axis: str = "rounds",
    ranks: bool = False,
    paper: str | None = None,
    compare_with: str | None = None,
    columns: KeyNames | None = None,
    label: str | Sequence[str] | Names = (),
) -> ResultsTable:
    """Return a table of results, one row for all runs that differ only in their seed.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        metric: Metrics to report. Default: that of `evaluate.best`, or else the first of it at the
            clients, loss, clients/loss and train_loss that a run has. Rows are compared by the
            first one: for `target`, `best_of`, `ranks`, `paper` and `compare_with`.
        statistic: Values of a metric in a run: best (its best value after round 0), last (that of
            the last round), last10 (the mean of the last ten evaluations). Rows are compared by the
            first one. Default: best and last.
        select_by: Metric that chooses a round in each run, such as val/accuracy: the one with its
            best value, among the rounds with a value of every metric. `best` then means the value
            at this round, and `best_of` chooses rows by this metric.
        target: Value of the first metric whose first round is reported. "paper" uses the target
            that `paper` gives for each row.
        group: Parameters that distinguish rows; `side` is allowed too. Default: all that differ.
        best_of: Parameters; only the best row of each combination of their values is kept.
        relative_to: KEY=VALUE. `target` is then a share of the best value of the runs with this
            parameter value.
        x_axis: Unit of the cost of reaching the target: rounds, bytes, virtual-time or seconds.
        ranks: Rank the methods in each scenario, and by their mean rank.
        paper: Published results to show beside the runs: gradma, fedreg, fedhist or a FILE.csv.
        compare_with: KEY=VALUE, the method with which each row is compared in the same scenario,
            seed by seed.
        columns: Parameters whose values become columns, as of a table of attacks and defences; its
            cells are the first statistic, with a paper's figure in brackets, and the others where
            they lie more than a standard deviation away.
        label: Names of values, parameters and headers: {value: name}, or texts VALUE=NAME.

    Returns:
        The table; its `frame` lists the columns.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    cost_unit = cost_unit_of(x_axis)
    metrics = split_keys(metric)
    named = split_keys(statistic) or aggregate.DEFAULT_STATISTICS
    statistics: list[Statistic] = [known_statistic(name) for name in named]
    chooser = select_by or ""
    target_value = _target_number(target, bool(paper))
    if relative_to and target_value is None:
        raise ConfigError(
            "relative_to (--relative-to): needs a target to scale; pass target (--target) too, "
            "as a number"
        )
    printed = published.read_published(paper) if paper else []
    say = cache(say)  # each line once: all metrics are read from the same runs
    runs, *runs_of_others = _runs_by_metric(source, say, metrics, chooser, cost_unit)
    if paper:
        check_published(runs[0].metric, statistics)
    rows = aggregate.rows(
        runs,
        statistics=statistics,
        select_by=chooser,
        target=_goal(target, target_value, relative_to, runs, printed, say, chooser),
        group=split_keys(group),
        across=split_keys(columns),
        best_of=split_keys(best_of),
        say=say,
    )
    if "last10" in statistics:
        _say_few_evaluations([*runs, *itertools.chain.from_iterable(runs_of_others)], say)
    for others in runs_of_others:
        rows = _with_metric(rows, others, statistics, chooser)
    if paper:
        rows = aggregate.add_published(rows, printed, target_value, relative_to)
        _report_agreement(rows, paper, say)
    if compare_with:
        rows = comparisons.compared(rows, runs, compare_with, say)
    if ranks:
        rows = aggregate.ranked(rows, say)
    table = ResultsTable(rows, cost_unit, runs=runs)
    if columns:
        crossed = {
            "target": target,
            "compare_with": compare_with,
            "ranks": ranks,
            "all but one metric": runs_of_others,
        }
        across = _across(columns, split_keys(group), runs, crossed)
        table = CrossTable(rows, cost_unit, runs=runs, across=across)
    return replace(table, names=names_given(label, table.nameable()))


def _say_few_evaluations(runs: Sequence[TrackedRun], say: Say) -> None:
    """Say of how many runs last10 is a mean of fewer evaluations."""
    few = set()
    for run in runs:
        if len(run.trained) < LAST_EVALUATIONS and not accumulates(run.metric):
            few.add(run.run_id)
    if few:
        say(f"last10 of {counted(len(few), 'run')} with fewer evaluations is the mean of all")


def _across(
    columns: KeyNames,
    group: Sequence[str] | None,
    runs: Sequence[TrackedRun],
    others: Mapping[str, object],
) -> list[str]:
    """Return the full names of the parameters across a table; `others` are options of columns."""
    for option, value in others.items():
        if value:
            raise ConfigError(
                f"columns (--columns): a cell has one figure; leave out columns or {option}"
            )
    across = resolved(runs, split_keys(columns) or (), "columns (--columns)")
    distinguishing = group_keys(runs, group) if group else across
    for key in across:
        if key not in distinguishing:
            raise ConfigError(
                f"columns (--columns): '{key}' does not distinguish rows; add it to group (--group)"
            )
    return across


def split_keys(keys: KeyNames | None) -> list[str] | None:
    """Return names of parameters or metrics as a list, or None if there are none.

    Args:
        keys: The names.
    """
    if not keys:
        return None
    return keys.split(",") if isinstance(keys, str) else list(keys)


def _goal(
    target: float | str | None,
    value: float | None,
    relative_to: str | None,
    runs: Sequence[TrackedRun],
    printed: Sequence[published.PublishedResult],
    say: Say,
    select_by: str,
) -> float | aggregate.Goal | None:
    """Return the target of all rows, or the function from the runs of a row to its target."""
    if value is None:
        if target != "paper":
            return None
        return lambda members: published.published_target(printed, members[0].params)
    if relative_to:
        return targets.share_of(runs, relative_to, value, say, select_by)
    targets.refuse_unreachable(value, runs[0].metric)
    return value


def _report_agreement(rows: Sequence[TableRow], paper: str, say: Say) -> None:
    """Report how many rows agree with their published results."""
    differences = [row.difference for row in rows if row.difference is not None]
    if differences:
        near = sum(row.is_near for row in rows)
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
    if name in STATISTICS:
        return name
    hint = did_you_mean(name, STATISTICS) or f"; there are {', '.join(STATISTICS)}"
    raise ConfigError(f"statistic (--statistic): unknown statistic '{name}'{hint}")


def _runs_by_metric(
    source: RunSource, say: Say, metrics: Sequence[str] | None, select_by: str, cost_unit: CostUnit
) -> list[list[TrackedRun]]:
    """Return the runs of each metric; with `select_by` with the round that it chooses."""
    by_metric = [source.finished(metric, say, cost_unit) for metric in metrics or [None]]
    if not select_by:
        return by_metric
    try:
        choosers = source.finished(select_by, say)
    except MetricMissing as error:
        raise ConfigError(f"select_by (--select-by): {error}") from None
    chosen = chosen_rounds(choosers, by_metric, say)
    missing = sum(run.run_id not in chosen for run in by_metric[0])
    if missing:
        say(f"{counted(missing, 'run')} left out: without '{select_by}'")
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
    histories: dict[str, list[dict[int, float]]] = {}
    for run in itertools.chain.from_iterable(by_metric):
        histories.setdefault(run.run_id, []).append(dict(run.history))
    chosen: dict[str, tuple[int, float]] = {}
    n_restricted = 0
    for run in choosers:
        if run.run_id not in histories:
            continue
        # The untrained model of round 0 is no result of training.
        values = {t: value for t, value in run.history if t > 0} or dict(run.history)
        rounds = set(values).intersection(*histories[run.run_id])
        if not rounds:
            metrics = ", ".join(f"'{runs[0].metric}'" for runs in by_metric)
            raise ConfigError(
                f"select_by (--select-by): run {run.run_id} has no round with a value of "
                f"'{select_by}' and of {metrics}; leave out a metric (--metric), or log all of "
                "them in the same rounds"
            )
        t = best(sorted(rounds), key=values.__getitem__)
        chosen[run.run_id] = (t, values[t])
        n_restricted += values[t] != best(values.values())
    if n_restricted:
        say(
            f"{counted(n_restricted, 'run')} with a better '{select_by}' in a round without "
            "another metric of the table: the best round with all of them is used"
        )
    return chosen


def _with_metric(
    rows: Sequence[TableRow],
    runs: Sequence[TrackedRun],
    statistics: Sequence[Statistic],
    select_by: str,
) -> list[TableRow]:
    """Return rows with the columns of a further metric."""
    figures = aggregate.figures_of(runs, statistics, select_by)
    by_id = {run.run_id: run for run in runs}
    more = []
    for row in rows:
        members = [by_id[run_id] for run_id in row.run_ids if run_id in by_id]
        more.append(replace(row, values={**row.values, **aggregate.values_of(members, figures)}))
    return more


def check_published(metric: str, statistics: Sequence[Statistic]) -> None:
    """Check that papers publish a metric and its statistic.

    Args:
        metric: The metric.
        statistics: Its statistics, the first of which is compared.

    Raises:
        ConfigError: They do not.
    """
    if metric not in ("accuracy", "clients/accuracy", "clients/accuracy_weighted"):
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
    if target == "paper" and not with_paper:
        raise ConfigError(
            "target (--target): 'paper' needs a paper; pass paper (--paper), such as gradma"
        )
    if target in (None, "paper"):
        return None
    try:
        return float(target)
    except ValueError:
        raise ConfigError(
            f"target (--target): '{target}' is neither a number nor 'paper'"
        ) from None


X_AXES: dict[str, CostUnit] = {unit.replace(" ", "-"): unit for unit in get_args(CostUnit)}
"""Unit of cost of each value of `x_axis`."""


def cost_unit_of(x_axis: str) -> CostUnit:
    """Return the unit of cost for a value of `x_axis`.

    Args:
        x_axis: a key of `X_AXES`.

    Raises:
        ConfigError: The unit is unknown.
    """
    if x_axis not in X_AXES:
        raise ConfigError(
            f"x_axis (--x-axis): unknown unit '{x_axis}'{did_you_mean(x_axis, X_AXES)}"
        )
    return X_AXES[x_axis]
