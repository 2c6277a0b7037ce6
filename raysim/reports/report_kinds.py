"""Kinds of reports: curves, sweeps, sensitivity, speedup and claims; `table_report` has tables.

Each kind is a function with the kind's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from raysim.errors import ConfigError, counted
from raysim.metrics import lower_is_better
from raysim.reports.analysis import plots, sensitivity, speedup
from raysim.reports.analysis.aggregate import figures_of, rows
from raysim.reports.analysis.curves import Curve, along, curves, grid
from raysim.reports.claims import claim_section, verdicts
from raysim.reports.grouping import apart, label
from raysim.reports.published import PublishedResult, read_published
from raysim.reports.runs import RunSource
from raysim.reports.table_report import (
    KeyNames,
    Say,
    check_published,
    cost_unit_of,
    known_statistic,
    split_keys,
)
from raysim.reports.table_row import differs
from raysim.reports.tables.results_table import as_markdown, with_numbers
from raysim.reports.tracked import Statistic, TrackedRun
from raysim.reports.value_names import Names, names_given


@dataclass(frozen=True)
class Report:
    """A report of any kind but a table."""

    runs: Sequence[TrackedRun]
    """Runs of the report."""

    frame: pd.DataFrame
    """Numbers of the report."""

    text: str = ""
    """Report in words, as Markdown; "" if there is only a plot."""

    plot: Callable[[Path], Any] = lambda path: ""
    """Function that draws the report into a file; without a text it returns what it drew."""


def curves_report(
    source: RunSource,
    say: Say,
    *,
    metric: str | None = None,
    group: KeyNames | None = None,
    panels: KeyNames | None = None,
    x_axis: str = "rounds",
) -> Report:
    """Return the curves of a metric.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        metric: Metric on the y-axis. Default: that of `evaluate.best`.
        group: Parameters that distinguish curves; `side` is allowed too. Default: all that differ.
        panels: Parameters whose values distinguish panels.
        x_axis: Unit of the x-axis: rounds, bytes, virtual-time or seconds.

    Returns:
        A report whose frame has a row for each point of each curve. Its columns: panel, curve
        (their labels); rounds (or bytes, virtual_time, seconds); mean, std (NaN for one run) and n
        of the metric over the seeds.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    unit = cost_unit_of(x_axis)
    runs = source.finished(metric, say, unit)
    lines = curves(runs, split_keys(group), say, split_keys(panels) or ())

    def plot(path: Path) -> str:
        plots.plot_curves(lines, runs[0].metric, unit, path)
        return f"{len(lines)} curves in {path}"

    return Report(runs, _points(lines, unit.replace(" ", "_")), plot=plot)


def sweep_report(
    source: RunSource,
    say: Say,
    *,
    x: str,
    y: str | None = None,
    metric: str | None = None,
    statistic: str | None = None,
    target: float | None = None,
    log_x: bool = False,
    paper: str | None = None,
    label: str | Sequence[str] | Names = (),
) -> Report:
    """Return results over one or two parameters.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        x: First parameter. Without `y` its values must be numbers.
        y: Second parameter, for a heatmap. There x and y may be KEY,KEY: a column or row for each
            combination of values; runs may lack all but the first.
        metric: Metric of the results. Default: as for a table.
        statistic: Result of a run: best (the default), last or last10, as for a table. Not allowed
            with `target`.
        target: Report the first round with this value of the metric instead. Not allowed with `y`.
        log_x: Whether the x-axis of the plot is logarithmic. Not allowed with `y`.
        paper: Published results, which the cells of a heatmap have in brackets; as for a table.
        label: Names of values, parameters and the colour bar (such as "best accuracy %") in the
            plot of a heatmap; as for a table.

    Returns:
        For one parameter, a report whose frame has the columns curve (label of the other parameters
        that differ), the parameter, mean, std and n. For two parameters: panel (label of the other
        parameters that differ), both parameters, mean, and with `paper` paper_best.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    lines_only = {
        "--log-x: a heatmap has one column per value; leave out --log-x or --y": log_x,
        "target (--target): a heatmap shows results; leave out target or y (--y)": target
        is not None,
    }
    heatmaps_only = {
        "paper (--paper): only a heatmap shows it; leave it out, or add y (--y)": paper,
        "label (--label): only a heatmap shows it; leave it out, or add y (--y)": label,
    }
    for refusal, given in (heatmaps_only if y is None else lines_only).items():
        if given:
            raise ConfigError(refusal)
    if statistic is not None and target is not None:
        raise ConfigError(
            "statistic (--statistic): with a target the rounds to it are shown; leave out "
            "statistic or target (--target)"
        )
    known = known_statistic(statistic or "best")
    runs = source.finished(metric, say)
    if known == "best" and target is None:
        _say_where_last_differs(runs, say)
    if y is not None:
        return _heatmap(runs, x, y, known, say, paper, label)
    return _lines(runs, x, known, target, log_x, say)


def _say_where_last_differs(runs: Sequence[TrackedRun], say: Say) -> None:
    """Say that best values hide how runs end, if they do."""
    metric = runs[0].metric
    table = rows(runs)
    hidden = [row for row in table if any(differs(row.result, v) for v in row.values.values())]
    if hidden:
        say(
            f"best {metric} is that of the best round; in {len(hidden)} of {len(table)} settings "
            "the last value lies more than a standard deviation away (of one seed: is another "
            "one); statistic last (--statistic last) shows it"
        )


def _lines(
    runs: Sequence[TrackedRun],
    x: str,
    statistic: Statistic,
    target: float | None,
    log_x: bool,
    say: Say,
) -> Report:
    """Return results, or the rounds to a target, over one parameter."""
    metric = runs[0].metric
    lines = along(runs, x, say, target, statistic)
    (shown,) = figures_of(runs, [statistic])
    result = f"{shown.statistic} {metric}"
    title = result if target is None else f"rounds to {metric} {target:g}"

    def plot(path: Path) -> str:
        plots.plot_curves(lines, title, x, path, logarithmic=log_x)
        return f"{counted(len(lines), 'line')} in {path}"

    return Report(runs, _points(lines, x).drop(columns="panel"), plot=plot)


def _heatmap(
    runs: Sequence[TrackedRun],
    x: str,
    y: str,
    statistic: Statistic,
    say: Say,
    paper: str | None,
    labels: str | Sequence[str] | Names,
) -> Report:
    """Return results over two parameters."""
    metric = runs[0].metric
    printed: Sequence[PublishedResult] = ()
    if paper:
        check_published(metric, [statistic])
        printed = read_published(paper)
    records = []
    panels: list[plots.Panel] = []
    for title, members in apart(runs, [x, y], say):
        panel = plots.Panel(title, *grid(members, x, y, say, statistic, printed))
        panels.append(panel)
        for pair, mean in panel.cells.items():
            records.append((title, *pair, mean, panel.published.get(pair)))
    if paper and not any(panel.published for panel in panels):
        say(f"paper (--paper): {paper} has no result for these runs")
    frame = pd.DataFrame(records, columns=["panel", x, y, "mean", "paper_best"])
    frame = with_numbers(frame if paper else frame.drop(columns="paper_best"), [x, y])
    (shown,) = figures_of(runs, [statistic])
    names = names_given(labels, _nameable(panels, x, y, shown.header(alone=False)))

    def plot(path: Path) -> str:
        plots.plot_heatmap(panels, x, y, shown, path, names)
        return f"{len(records)} values in {path}"

    return Report(runs, frame, plot=plot)


def _nameable(panels: Sequence[plots.Panel], x: str, y: str, header: str) -> list[str]:
    """Return all that may have a name in heatmaps: parameters, values and the colour bar."""
    things = [*x.split(","), *y.split(","), header]
    for panel in panels:
        for value in (*panel.columns, *panel.lines):
            things += [value, *value.split(", ")]
    return list(dict.fromkeys(things))


def sensitivity_report(
    source: RunSource,
    say: Say,
    *,
    keys: KeyNames | None = None,
    metric: str | None = None,
    statistic: str = "best",
) -> Report:
    """Return the share of the variance of the results that each parameter explains.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        keys: Parameters to compare. Default: all that differ.
        metric: Metric of the results. Default: that of `evaluate.best`.
        statistic: Result of a run: best, last, or last10 (the mean of its last ten evaluations).

    Returns:
        A report whose frame has one row for each parameter and group of its values, and one for all
        parameters together. Columns: parameter, share (of the variance, ε²), group (of values; NaN
        for all parameters together), mean (of the group's results).

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    known = known_statistic(statistic)
    runs = source.finished(metric, say)
    metric = runs[0].metric
    effects = sensitivity.effects(runs, split_keys(keys) or (), known)
    records = []
    for effect in effects:
        for group, mean in effect.means or [(None, float("nan"))]:
            records.append((effect.name, effect.share, group, mean))
    frame = pd.DataFrame(records, columns=["parameter", "share", "group", "mean"])
    title = f"{statistic} {metric}"
    text = f"{sensitivity.effects_markdown(effects, metric)}\n{len(effects[0].points)} runs"
    clouds = sensitivity.clouds(effects)
    return Report(runs, frame, text, lambda path: plots.plot_scatter(clouds, title, path))


def speedup_report(
    source: RunSource,
    say: Say,
    *,
    target: float,
    over: str = "schedule.cohort",
    metric: str = "theory/grad_norm2_mean",
) -> Report:
    """Return the rounds to a target as a function of a parameter, from runs of several lengths.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        target: Value of the metric to reach.
        over: Parameter whose values are numbers.
        metric: Metric whose last value is the result of a run.

    Returns:
        A report whose frame has one row for each seed and value of the parameter. Columns: seed,
        the parameter, rounds (interpolated). The frame's `attrs` hold the slope on log axes: slope,
        slope_low, slope_high (a 95 % interval) and seeds (their number).

    Raises:
        ConfigError: Fewer than two seeds reach the target at two values of the parameter, or a run,
            the metric or the parameter does not exist.
    """
    if not lower_is_better(metric):
        raise ConfigError(
            f"metric (--metric): {metric} rises with the rounds; choose one that falls, like loss"
        )
    runs = source.finished(metric, say)
    lines = speedup.speedup(speedup.ends(runs, over), target, say)
    slope = speedup.slope(lines)
    records = []
    for seed, line in lines.items():
        records += [(seed, x, rounds) for x, rounds in line.items()]
    frame = pd.DataFrame(records, columns=["seed", over, "rounds"])
    frame.attrs = {"slope": slope.mean, "slope_low": slope.low, "slope_high": slope.high}
    frame.attrs["seeds"] = slope.n
    texts = [
        (f"{x:g}", ", ".join(map("{:.4g}".format, rounds)))
        for x, rounds in frame.groupby(over)["rounds"]
    ]
    table = pd.DataFrame(texts, columns=[over, f"rounds to {target:g} (each seed)"])
    text = (
        f"{as_markdown(table)}\nslope {slope.mean:.3f}, 95 % interval "
        f"[{slope.low:.3f}, {slope.high:.3f}] over {slope.n} seeds"
    )

    def plot(path: Path) -> None:
        plots.plot_speedup(lines, slope, f"{metric} {target:g}", over, path)

    return Report(runs, frame, text, plot)


PLOTTED_KINDS: dict[str, Callable[..., Report]] = {
    "curves": curves_report,
    "sweep": sweep_report,
    "sensitivity": sensitivity_report,
    "speedup": speedup_report,
}
"""Functions of the kinds whose plot is a single file."""


def claims_report(source: RunSource, say: Say, *, config: str) -> Report:
    """Return the claims of a configuration, compared with the results of its runs.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        config: YAML file, or name of a shipped configuration, with a section `claims`.

    Returns:
        A report whose frame has one row for each claim and combination of the values of its `each`.
        Columns: claim, each (label of these values), left, right (results of the two sides, as
        text), difference (left minus right over seeds, with its 95 % interval, as text), seeds_for,
        seeds_against, verdict.

    Raises:
        ConfigError: The configuration has no valid section `claims`, or a run or metric does not
            exist.
    """

    @cache
    def runs_of(metric: str) -> Sequence[TrackedRun]:
        return source.finished(metric, say)

    claims = claim_section.read_claims(config)
    if not claims:
        raise ConfigError(
            f"claims: {config} has no such section, a list of claims with says, left, is and right"
        )
    results = verdicts.check_claims(claims, runs_of)
    records = []
    for line in results:
        sides = line.left, line.right, line.difference, *line.seeds
        records.append((line.claim.says, label(line.named), *sides, line.verdict))
    columns = ["claim", "each", "left", "right", "difference", "seeds_for", "seeds_against"]
    frame = pd.DataFrame(records, columns=[*columns, "verdict"])
    runs = runs_of(claims[0].left.metric)
    return Report(runs, frame, verdicts.claims_markdown(results))


def _points(lines: Sequence[Curve], x: str) -> pd.DataFrame:
    """Return the points of curves as a frame whose column `x` holds their abscissas."""
    records = []
    for curve in lines:
        for cost, figure in zip(curve.costs, curve.figures, strict=True):
            records.append((curve.panel, curve.label, cost, figure.mean, figure.std, figure.n))
    frame = pd.DataFrame(records, columns=["panel", "curve", x, "mean", "std", "n"])
    return frame.astype({"std": float})
