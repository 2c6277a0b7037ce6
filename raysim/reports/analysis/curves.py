"""Curves of tracked runs: over rounds or cost, over a parameter, and over two as a grid."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raysim.errors import ConfigError
from raysim.reports.analysis.aggregate import add_published, rows
from raysim.reports.analysis.targets import refuse_unreachable
from raysim.reports.grouping import apart, group_keys, grouped, label, order_of_values
from raysim.reports.published import PublishedResult
from raysim.reports.selecting import resolved
from raysim.reports.table_row import MeanStd, place_of_row
from raysim.reports.tables.cell_texts import MISSING_TEXT
from raysim.reports.tracked import Statistic, TrackedRun


@dataclass(frozen=True)
class Curve:
    """Metric of runs that differ only in their seed, over the rounds that all of them evaluated."""

    label: str
    """Label of the curve: the parameters that distinguish it."""

    costs: list[float]
    """Mean cost at each point, in the unit of the runs; in a sweep, the value of the parameter."""

    figures: list[MeanStd]
    """Metric at each point."""

    panel: str = ""
    """Label of the panel in which the curve is drawn."""


def curves(
    runs: Sequence[TrackedRun],
    group: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    panels: Sequence[str] = (),
) -> list[Curve]:
    """Return a curve for each row that `rows` returns for the same runs.

    Args:
        runs: Runs of any experiments; those without a history are omitted.
        group: Parameters that distinguish curves. Default: all that differ.
        say: Called with one line if curves hold runs that differ in more than their seed.
        panels: Parameters whose values distinguish panels.

    Raises:
        ConfigError: No run has a parameter of `group` or `panels`.
    """
    panel_keys = resolved(runs, panels, "panels (--panels)")
    keys = list(dict.fromkeys([*panel_keys, *group_keys(runs, group)]))
    result = []
    for named, members in grouped(runs, keys, say, settings=not group):
        panel = {key: named.pop(key) for key in panel_keys if key in named}
        with_history = [run for run in members if run.history]
        if with_history:
            result.append(_curve(label(named) or "all", label(panel), with_history))
    return result


def _curve(text: str, panel: str, members: Sequence[TrackedRun]) -> Curve:
    """Return the curve of runs that differ only in their seed."""
    histories = [dict(run.history) for run in members]
    rounds = sorted(set.intersection(*map(set, histories)))
    costs = [statistics.fmean(run.cost(t) for run in members) for t in rounds]
    figures = [MeanStd.over([history[t] for history in histories]) for t in rounds]
    return Curve(text, costs, figures, panel)


def along(
    runs: Sequence[TrackedRun],
    x: str,
    say: Callable[[str], None] = lambda line: None,
    target: float | None = None,
    statistic: Statistic = "best",
) -> list[Curve]:
    """Return results over a numeric parameter, a curve for each combination of the others.

    Args:
        runs: Runs of any experiments.
        x: Parameter on the x-axis.
        say: Called with one line if points hold runs that differ in more than their seed.
        target: Use the cost of reaching this value instead of a result; points that do not reach
            it are omitted.
        statistic: Result of a run.

    Raises:
        ConfigError: No run has the parameter, its values are not numbers, or no run can reach
            the target.
    """
    if target is not None:
        refuse_unreachable(target, runs[0].metric)
    result = []
    for text, members in apart(runs, [x], say):
        (key,) = resolved(members, [x], "x (--x)")
        table = rows(members, statistics=[statistic], target=target, group=[x], say=say)
        values: list[str] = []
        figures: list[MeanStd] = []
        for row in table:
            figure = row.result if target is None else row.to_target
            if figure:
                values.append(row.parameters[key])
                figures.append(figure)
        try:
            result.append(Curve(text or "all", list(map(float, values)), figures))
        except ValueError:
            raise ConfigError(
                f"x (--x): the values of {x} are not numbers; use raysim report table, or add "
                "y (--y)"
            ) from None
    return result


def grid(
    runs: Sequence[TrackedRun],
    x: str,
    y: str,
    say: Callable[[str], None] = lambda line: None,
    statistic: Statistic = "best",
    printed: Sequence[PublishedResult] = (),
) -> tuple[list[str], list[str], dict[tuple[str, str], float], dict[tuple[str, str], float]]:
    """Return the mean result for each pair of values of two parameters.

    Args:
        runs: Runs of a part, as from `apart`.
        x: First parameter; KEY,KEY: several together, of which runs may lack all but the first.
        y: Second parameter, or several.
        say: Called with one line if cells hold runs that differ in more than their seed.
        statistic: Result of a run.
        printed: Published results, as from `published.read_published`.

    Returns:
        The values of x and those of y in the order of `order_of_values`, the mean result by (value
        of x, value of y), and the published best value of the pairs that have one. The value of
        several parameters is their values, with commas, that of none of them `MISSING_TEXT`.

    Raises:
        ConfigError: No run has a parameter.
    """
    keys = [resolved(runs, axis.split(","), "x and y (--x and --y)") for axis in (x, y)]
    table = rows(runs, statistics=[statistic], group=[*keys[0], *keys[1]], say=say)
    table = add_published(table, printed)
    cells: dict[tuple[str, str], float] = {}
    published: dict[tuple[str, str], float] = {}
    orders: list[dict[str, tuple]] = [{}, {}]
    place = order_of_values(runs)
    for row in table:
        if row.result:
            pair = []
            for of_axis, order in zip(keys, orders, strict=True):
                values = [row.parameters.get(key) for key in of_axis]
                pair.append(", ".join(filter(None, values)) or MISSING_TEXT)
                order[pair[-1]] = place_of_row(row, of_axis, place)
            first, second = pair
            cells[first, second] = row.result.mean
            best = getattr(row.printed, "best", None)
            if best is not None:
                published[first, second] = best
    columns, lines = (sorted(order, key=order.__getitem__) for order in orders)
    return columns, lines, cells, published
