"""Rows of a table of results, as the command line and the data frames show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysim.errors import ConfigError, did_you_mean
from raysim.reports import aggregate, comparisons, published, targets
from raysim.reports.runs import RunSource
from raysim.reports.tables import TableRow
from raysim.reports.tracked import CostUnit, TrackedRun


def table_rows(
    source: RunSource,
    metric: str | None,
    target: float | str | None,
    group: Sequence[str] | None,
    best_of: Sequence[str] | None,
    relative_to: str | None,
    cost_unit: CostUnit,
    ranks: bool,
    paper: str | None,
    compare_with: str | None,
    say: Callable[[str], None],
) -> tuple[list[TrackedRun], list[TableRow], float | None]:
    """Return the data of a table; `frames.table_frame` describes the arguments.

    Args:
        source: Source of the runs.
        metric: See `frames.table_frame`.
        target: See `frames.table_frame`.
        group: See `frames.table_frame`.
        best_of: See `frames.table_frame`.
        relative_to: See `frames.table_frame`.
        cost_unit: Unit of the cost, as `cost_unit_of` returns it.
        ranks: See `frames.table_frame`.
        paper: See `frames.table_frame`.
        compare_with: See `frames.table_frame`.
        say: Called with one line for each group of omitted runs.

    Returns:
        The runs, the rows, and the target if it is the same number for all rows (else None).

    Raises:
        ConfigError: See `frames.table_frame`.
    """
    value = _target_number(target, bool(paper))
    if relative_to and value is None:
        raise ConfigError(
            "relative_to (--relative-to): needs a target to scale; pass target (--target) too, "
            "as a number"
        )
    if paper and metric:
        _check_published(metric)
    printed = published.read_published(paper) if paper else []
    tracked_runs = source.finished(metric, say, cost_unit)
    metric = tracked_runs[0].metric
    if paper:
        _check_published(metric)
    goal: Any = value
    if relative_to and value is not None:
        goal = targets.share_of(tracked_runs, relative_to, value, metric, say)
    elif value is not None:
        targets.refuse_unreachable(value, metric)
    elif target == "paper":
        goal = lambda members: published.published_target(printed, members[0].params)  # noqa: E731
    rows = aggregate.rows(tracked_runs, metric, target=goal, group=group, best_of=best_of, say=say)
    if paper:
        rows = aggregate.add_published(rows, printed, value, relative_to)
        differences = [row.difference for row in rows if row.difference is not None]
        if differences:
            near = sum(abs(difference) <= 2 for difference in differences)
            say(f"{near} of {len(differences)} rows lie within two of the paper's deviations")
        if not any(row.printed for row in rows):
            say(
                f"paper (--paper): {paper} has no result for these runs; use group (--group) so "
                "that each row has one algorithm and one scenario"
            )
    if compare_with:
        rows = comparisons.compared(rows, tracked_runs, compare_with, metric, say)
    if ranks:
        rows = aggregate.ranked(rows, metric, say)
    return tracked_runs, rows, None if relative_to else value


def _check_published(metric: str) -> None:
    """Raise ConfigError if papers do not publish a metric."""
    if metric != "accuracy":
        raise ConfigError(
            f"paper (--paper): published results are accuracies, not {metric}; leave out paper or "
            "metric (--metric)"
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
