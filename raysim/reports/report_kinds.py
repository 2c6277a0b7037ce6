"""Kinds of reports: curves, sweeps, sensitivity, speedup and claims; `table_rows` has tables.

Each kind is a function with the kind's options. Its report has a data frame and, for the command
line, a text or a plot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

from raysim.errors import ConfigError
from raysim.metrics import best_label
from raysim.reports.analysis import plots, sensitivity, speedup
from raysim.reports.analysis.curves import Curve, along, curves, grid
from raysim.reports.claims import claim_section, verdicts
from raysim.reports.grouping import apart, having, label
from raysim.reports.runs import RunSource
from raysim.reports.table_rows import (
    KeyNames,
    Say,
    cost_unit_of,
    known_statistic,
    split_keys,
    with_numbers,
)
from raysim.reports.tracked import CostUnit, TrackedRun


@dataclass(frozen=True)
class CurvesReport:
    """Curves of a metric."""

    runs: Sequence[TrackedRun]
    """Runs of the curves."""

    curves: Sequence[Curve]
    """The curves."""

    unit: CostUnit
    """Unit of the x-axis."""

    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each point of each curve.

        Its columns: panel, curve (their labels); rounds (or bytes, virtual_time, seconds); mean,
        std (NaN for one run) and n of the metric over the seeds.
        """
        return _points(self.curves, self.unit.replace(" ", "_"))

    def plot(self, path: Path) -> str:
        """Plot the curves; return what was drawn.

        Args:
            path: File to write.
        """
        plots.plot_curves(self.curves, self.runs[0].metric, self.unit, path)
        return f"{len(self.curves)} curves in {path}"


def curves_report(
    source: RunSource,
    say: Say,
    *,
    metric: str | None = None,
    group: KeyNames | None = None,
    panels: KeyNames | None = None,
    x_axis: str = "rounds",
) -> CurvesReport:
    """Return the curves of a metric.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        metric: Metric on the y-axis. Default: that of `evaluate.best`.
        group: Parameters that distinguish curves; `side` is allowed too. Default: all that differ.
        panels: Parameters whose values distinguish panels.
        x_axis: Unit of the x-axis: rounds, bytes, virtual-time or seconds.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    unit = cost_unit_of(x_axis)
    runs = source.finished(metric, say, unit)
    return CurvesReport(runs, curves(runs, split_keys(group), say, split_keys(panels) or ()), unit)


@dataclass(frozen=True)
class SweepReport:
    """Best value of a metric over one parameter or two."""

    runs: Sequence[TrackedRun]
    """Runs of the report."""

    x: str
    """First parameter."""

    y: str | None
    """Second parameter."""

    target: float | None
    """Value whose first round is reported instead of the best value."""

    say: Say
    """Called with one line if values are of runs that differ in more than their seed."""

    def lines(self) -> list[Curve]:
        """Return the lines over one parameter."""
        return along(self.runs, self.x, self.runs[0].metric, self.say, self.target)

    def grids(self) -> list[tuple[str, list[str], list[str], dict[tuple[str, str], float]]]:
        """Return a grid over two parameters for each combination of the others, with its label."""
        metric = self.runs[0].metric
        y = self.y or ""
        parts = apart(self.runs, [self.x, y])
        return [(name, *grid(members, self.x, y, metric, self.say)) for name, members in parts]

    def frame(self) -> pd.DataFrame:
        """Return the values as a frame.

        For one parameter its columns are curve (label of the other parameters that differ), the
        parameter, mean, std and n. For two parameters: panel (label of the other parameters that
        differ), both parameters, mean.
        """
        if self.y is None:
            return _points(self.lines(), self.x).drop(columns="panel")
        records = []
        for panel, _, _, cells in self.grids():
            records += [(panel, *pair, mean) for pair, mean in cells.items()]
        frame = pd.DataFrame(records, columns=["panel", self.x, self.y, "mean"])
        return with_numbers(frame, [self.x, self.y])

    def plot(self, path: Path, log_x: bool = False) -> str:
        """Plot lines over one parameter, or heatmaps over two; return what was drawn.

        Args:
            path: File to write.
            log_x: Whether the x-axis of lines is logarithmic.
        """
        metric = self.runs[0].metric
        if self.y is not None:
            grids = self.grids()
            plots.plot_heatmap(grids, self.x, self.y, metric, path)
            return f"{sum(len(cells) for *_, cells in grids)} values in {path}"
        lines = self.lines()
        target = self.target
        title = best_label(metric) if target is None else f"rounds to {metric} {target:g}"
        plots.plot_curves(lines, title, self.x, path, logarithmic=log_x)
        return f"{len(lines)} line{'s'[: len(lines) != 1]} in {path}"


def sweep_report(
    source: RunSource,
    say: Say,
    *,
    x: str,
    y: str | None = None,
    metric: str | None = None,
    target: float | None = None,
) -> SweepReport:
    """Return the best value of a metric over one or two parameters.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        x: First parameter. Without `y` its values must be numbers.
        y: Second parameter.
        metric: Metric whose best value is reported. Default: that of `evaluate.best`.
        target: Report the first round with this value of the metric instead. Not allowed with `y`.

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    if y is not None and target is not None:
        raise ConfigError(
            "target (--target): a heatmap shows best values; leave out target or y (--y)"
        )
    return SweepReport(source.finished(metric, say), x, y, target, say)


@dataclass(frozen=True)
class SensitivityReport:
    """Share of the variance of the results that each parameter explains."""

    runs: Sequence[TrackedRun]
    """Runs of the report."""

    effects: Sequence[sensitivity.Effect]
    """The effects."""

    statistic: str
    """Result of a run."""

    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each parameter and group of its values.

        The last row is for all parameters together. Its columns: parameter, share (of the variance,
        ε²), group (of values; NaN for all parameters together), mean (of the group's results).
        """
        records = []
        for effect in self.effects:
            for group, mean in effect.means or [(None, float("nan"))]:
                records.append((effect.name, effect.share, group, mean))
        return pd.DataFrame(records, columns=["parameter", "share", "group", "mean"])

    def text(self) -> str:
        """Return the report as a Markdown table."""
        return sensitivity.effects_markdown(self.effects, self.runs[0].metric)

    def plot(self, path: Path) -> None:
        """Plot the results over each parameter.

        Args:
            path: File to write.
        """
        title = f"{self.statistic} {self.runs[0].metric}"
        plots.plot_scatter(sensitivity.clouds(self.effects), title, path)


def sensitivity_report(
    source: RunSource,
    say: Say,
    *,
    keys: KeyNames | None = None,
    metric: str | None = None,
    statistic: str = "best",
) -> SensitivityReport:
    """Return the share of the variance of the results that each parameter explains.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        keys: Parameters to compare. Default: all that differ.
        metric: Metric of the results. Default: that of `evaluate.best`.
        statistic: Result of a run: best, last, or last10 (the mean of its last ten evaluations).

    Raises:
        ConfigError: An option is invalid, or a run, the metric or a parameter does not exist.
    """
    known = known_statistic(statistic)
    runs = source.finished(metric, say)
    result = sensitivity.result_of_run(known, runs[0].metric)
    effects = sensitivity.effects(runs, split_keys(keys) or (), result)
    return SensitivityReport(runs, effects, statistic)


@dataclass(frozen=True)
class SpeedupReport:
    """Rounds to a target as a function of a parameter, from runs of several lengths."""

    lines: speedup.SpeedupLines
    """Rounds to the target."""

    slope: speedup.Slope
    """Their slope on log axes."""

    over: str
    """The parameter."""

    metric: str
    """Metric whose last value is the result of a run."""

    target: float
    """Value of the metric to reach."""

    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each seed and value of the parameter.

        Its columns: seed, the parameter, rounds (interpolated). The frame's `attrs` hold the slope
        on log axes: slope, slope_low, slope_high (a 95 % interval) and seeds (their number).
        """
        records = []
        for seed, line in self.lines.items():
            records += [(seed, x, rounds) for x, rounds in line.items()]
        frame = pd.DataFrame(records, columns=["seed", self.over, "rounds"])
        slope = self.slope
        frame.attrs = {"slope": slope.mean, "slope_low": slope.low, "slope_high": slope.high}
        frame.attrs["seeds"] = slope.n
        return frame

    def text(self) -> str:
        """Return the rounds of each seed as a Markdown table."""
        lines = [f"| {self.over} | rounds to {self.target:g} (each seed) |", "| --- | --- |"]
        for x, rounds in self.frame().groupby(self.over)["rounds"]:
            lines.append(f"| {x:g} | {', '.join(map('{:.4g}'.format, rounds))} |")
        return "\n".join(lines)

    def plot(self, path: Path) -> None:
        """Plot the rounds over the parameter, on log axes.

        Args:
            path: File to write.
        """
        aim = f"{self.metric} {self.target:g}"
        plots.plot_speedup(self.lines, self.slope, aim, self.over, path)


def speedup_report(
    source: RunSource,
    say: Say,
    *,
    target: float,
    over: str = "schedule.cohort",
    metric: str = "theory/grad_norm2_mean",
) -> SpeedupReport:
    """Return the rounds to a target as a function of a parameter, from runs of several lengths.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        target: Value of the metric to reach.
        over: Parameter whose values are numbers.
        metric: Metric whose last value is the result of a run.

    Raises:
        ConfigError: Fewer than two seeds reach the target at two values of the parameter, or a run,
            the metric or the parameter does not exist.
    """
    runs = source.finished(metric, say)
    lines = speedup.speedup(speedup.ends(runs, over), target, say)
    return SpeedupReport(lines, speedup.slope(lines), over, metric, target)


@dataclass(frozen=True)
class ClaimsReport:
    """Claims of a configuration, compared with the results of its runs."""

    claims: Sequence[claim_section.Claim]
    """The claims."""

    results: Sequence[verdicts.ClaimResult]
    """Their results."""

    runs_of: Callable[..., Sequence[TrackedRun]]
    """The runs that have a metric, with their cost in a unit."""

    say: Say
    """Called with one line for each group of omitted runs."""

    def frame(self) -> pd.DataFrame:
        """Return a frame with a row for each claim and combination of the values of its `each`.

        Its columns: claim, each (label of these values), left, right (results of the two sides, as
        text), difference (left minus right over seeds, with its 95 % interval, as text), seeds_for,
        seeds_against, verdict.
        """
        records = []
        for line in self.results:
            sides = line.left, line.right, line.difference, *line.seeds
            records.append((line.claim.says, label(line.named), *sides, line.verdict))
        columns = ["claim", "each", "left", "right", "difference", "seeds_for", "seeds_against"]
        return pd.DataFrame(records, columns=[*columns, "verdict"])

    def text(self) -> str:
        """Return the report as a Markdown table."""
        return verdicts.claims_markdown(self.results)

    def plot(self, folder: Path) -> list[Path]:
        """Draw the figures of the claims; return their files.

        Args:
            folder: Folder of the figures.
        """
        drawn: list[Path] = []
        for i, claim in enumerate(self.claims):
            figure = claim.figure
            if figure is None or folder / figure.file in drawn:
                continue
            drawn.append(folder / figure.file)
            unit = cost_unit_of(figure.x_axis)
            place = f"claims.{i}.figure.where"
            runs = having(self.runs_of(figure.metric, unit), figure.where, place)
            if figure.kind == "curves":
                shown = curves(runs, figure.group, self.say, figure.panels)
                self.say(CurvesReport(runs, shown, unit).plot(drawn[-1]))
            else:
                swept = SweepReport(runs, figure.x, figure.y, None, self.say)
                self.say(swept.plot(drawn[-1], figure.log_x))
        return drawn


def claims_report(source: RunSource, say: Say, *, config: str) -> ClaimsReport:
    """Return the claims of a configuration, compared with the results of its runs.

    Args:
        source: Source of the runs.
        say: Called with one line for each group of omitted runs.
        config: YAML file, or name of a shipped configuration, with a section `claims`.

    Raises:
        ConfigError: The configuration has no valid section `claims`, or a run or metric does not
            exist.
    """

    @cache
    def runs_of(metric: str, cost_unit: CostUnit = "rounds") -> Sequence[TrackedRun]:
        return source.finished(metric, say, cost_unit)

    claims = claim_section.require_claims(config)
    return ClaimsReport(claims, verdicts.check_claims(claims, runs_of), runs_of, say)


def _points(lines: Sequence[Curve], x: str) -> pd.DataFrame:
    """Return the points of curves as a frame whose column `x` holds their abscissas."""
    records = []
    for curve in lines:
        for cost, figure in zip(curve.costs, curve.figures, strict=True):
            records.append((curve.panel, curve.label, cost, figure.mean, figure.std, figure.n))
    frame = pd.DataFrame(records, columns=["panel", "curve", x, "mean", "std", "n"])
    return frame.astype({"std": float})
