"""Rows of a table of results, and their output as Markdown, LaTeX, CSV or a data frame."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from raysim.config.schema import SECTIONS_WITH_NAME
from raysim.metrics import accumulates, best_label, is_share, lower_is_better
from raysim.reports import published
from raysim.reports.tracked import LAST_EVALUATIONS, CostUnit

MISSING_TEXT = "–"
"""Text of a cell without a value."""


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation over runs."""

    mean: float
    """Mean of the values."""

    std: float | None
    """Sample standard deviation (divisor n - 1); None for one run or infinite values."""

    n: int
    """Number of runs."""

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanStd | None:
        """Return the statistics of values, or None without values.

        If a value is not finite, the mean is not finite either and there is no deviation.

        Args:
            values: One value for each run.

        Returns:
            Mean, sample standard deviation (None for one value) and number of values.
        """
        if not values:
            return None
        if not all(map(math.isfinite, values)):
            return cls(sum(values), None, len(values))
        return cls(
            statistics.fmean(values),
            statistics.stdev(values) if len(values) > 1 else None,
            len(values),
        )


@dataclass(frozen=True)
class PairedDifference:
    """Difference to another method over the seeds of both; see `raysim.reports.comparisons`."""

    mean: float
    """Mean difference of the best values."""

    low: float | None
    """Lower end of the 95 % interval of the mean; None for one seed or equal differences."""

    high: float | None
    """Upper end."""

    p_value: float | None
    """Two-sided p-value of the paired t-test; None where there is no interval."""

    n: int
    """Number of seeds."""


@dataclass(frozen=True)
class Rank:
    """Rank of a method in a scenario."""

    place: float
    """Rank among the rows of the scenario; 1 is best, ties share the mean of their ranks."""

    mean: float
    """Mean rank of the method over all its scenarios."""

    scenarios: int
    """Number of scenarios of the method."""


@dataclass(frozen=True)
class TableRow:
    """Results of runs that differ only in their seed, unless they are `pooled`.

    Runs without a value count only in `seeds`. If no run has a value, all figures are None.
    """

    parameters: dict[str, str]
    """Parameters that distinguish this row, as text; a parameter that its runs lack is absent."""

    seeds: int
    """Number of runs."""

    best: MeanStd | None
    """Best value over all evaluated rounds."""

    last: MeanStd | None
    """Mean of the last `LAST_EVALUATIONS` evaluated values after round 0."""

    to_target: MeanStd | None
    """Cost of first reaching the target, over the runs that do (`to_target.n` of `seeds`).

    The unit is rounds unless the runs have another cost. None if no run reaches the target, or
    without a target.
    """

    rounds: tuple[int, int]
    """Smallest and largest number of completed rounds."""

    run_ids: tuple[str, ...]
    """Ids of the runs."""

    shared: Mapping[str, str]
    """Parameters that all runs have in common."""

    target: float | None = None
    """Target value of the metric."""

    unfinished: str = ""
    """Number of unfinished runs by reason, as text."""

    rank: Rank | None = None
    """Rank among the methods, if requested."""

    printed: published.PublishedResult | None = None
    """Published result of such runs, if requested."""

    versus: PairedDifference | None = None
    """Difference to the reference method, if requested; None for the reference itself."""

    reference: str = ""
    """Parameter of the reference method as KEY=VALUE, if `versus` is requested."""

    pooled: bool = False
    """Whether its runs differ in more than their seed."""

    @property
    def difference(self) -> float | None:
        """Mean best value minus the published one, in published standard deviations."""
        return self._difference_over(self.printed.std if self.printed else None)

    @property
    def difference_in_own_stds(self) -> float | None:
        """Mean best value minus the published one, in standard deviations over these runs."""
        return self._difference_over(self.best.std if self.best else None)

    def _difference_over(self, std: float | None) -> float | None:
        if self.best and self.printed and self.printed.best is not None and std:
            return (self.best.mean - self.printed.best) / std
        return None


def sort_key(row: TableRow, lower: bool) -> float:
    """Return the sort key of a row: best rows first, rows without a figure last.

    Means that differ only by rounding are equal.

    Args:
        row: Row to sort.
        lower: Whether smaller values are better.
    """
    if row.best is None or math.isnan(row.best.mean):
        return math.inf
    mean = float(f"{row.best.mean:.12g}")
    return mean if lower else -mean


def markdown_table(
    table: Sequence[TableRow],
    metric: str = "accuracy",
    target: float | None = None,
    cost_unit: CostUnit = "rounds",
) -> str:
    """Return rows as a Markdown table.

    Args:
        table: Rows, as from `aggregate.rows`.
        metric: Metric of the rows; accuracies are shown in percent.
        target: Common target of the rows, if their runs do not hold it.
        cost_unit: Unit of the cost of reaching the target.
    """
    return as_markdown(_cells(table, metric, target, cost_unit))


def as_markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return cells as a Markdown table; the first line is the header.

    Args:
        cells: Lines of equally many cells.
    """
    head, *lines = cells
    lines = [head, ["---"] * len(head), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def number(mean: float | None, std: float | None, percent: bool) -> str:
    """Return a mean, with its standard deviation if there is one, as text.

    Args:
        mean: Mean, or None for a missing value.
        std: Standard deviation; None: it is left out.
        percent: True to multiply both by 100.
    """
    scale, form = (100, ".2f") if percent else (1, ".4g")
    if mean is None:
        return MISSING_TEXT
    return f"{mean * scale:{form}}" + (f" ± {std * scale:{form}}" if std is not None else "")


def latex(
    table: Sequence[TableRow],
    metric: str = "accuracy",
    target: float | None = None,
    cost_unit: CostUnit = "rounds",
) -> str:
    """Return rows as a LaTeX tabular that uses booktabs.

    The best mean is bold; if rows have ranks, the best mean of each scenario is.

    Args:
        table: Rows, as from `aggregate.rows`.
        metric: Metric of the rows; accuracies are shown in percent.
        target: Common target of the rows, if their runs do not hold it.
        cost_unit: Unit of the cost of reaching the target.
    """
    special = {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    special |= {"\\": r"\textbackslash{}", "±": r"$\pm$", MISSING_TEXT: "--"}
    head, *lines = [
        ["".join(special.get(c, c) for c in cell) for cell in line]
        for line in _cells(table, metric, target, cost_unit)
    ]
    column = len(_columns(table)) + 1
    keys = [sort_key(row, lower_is_better(metric)) for row in table]
    for row, line, key in zip(table, lines, keys, strict=True):
        if row.rank.place == 1 if row.rank else row.best and key == min(keys):
            line[column] = rf"\textbf{{{line[column]}}}"
    body = [" & ".join(line) + r" \\" for line in lines]
    columns = "l" * (column - 1) + "r" * (len(head) - column + 1)
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}"])


Columns = dict[str, list[str]]
"""Text of every row, by the header of its column."""


def _cells(
    table: Sequence[TableRow], metric: str, target: float | None, cost_unit: CostUnit
) -> list[list[str]]:
    """Return the header and the lines of a table for readers, without empty columns."""
    percent = is_share(metric)
    columns = {
        **_parameters(table),
        **_number_of_runs(table),
        **_best_values(table, metric, percent),
        **_published_best_values(table, percent),
        **_paired_differences(table, percent),
        **({} if accumulates(metric) else _last_values(table, percent)),
        **_costs_of_target(table, target, cost_unit, percent),
        **_ranks(table),
        **_progress(table),
    }
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def _parameters(table: Sequence[TableRow]) -> Columns:
    """Return a column for each parameter that distinguishes rows."""
    return {
        short(key): [_parameter_text(row.parameters.get(key, MISSING_TEXT)) for row in table]
        for key in _columns(table)
    }


def _parameter_text(value: str) -> str:
    """Return the value of a parameter as shown: of the digest of a file, the first eight digits."""
    return value[:8] if re.fullmatch("[0-9a-f]{64}", value) else value


def _number_of_runs(table: Sequence[TableRow]) -> Columns:
    """Return the column of numbers of runs, which are seeds unless rows are pooled."""
    header = "runs" if any(row.pooled for row in table) else "seeds"
    return {header: [str(row.seeds) for row in table]}


def _best_values(table: Sequence[TableRow], metric: str, percent: bool) -> Columns:
    """Return the column of best values."""
    return {
        f"{best_label(metric)}{_unit(percent)}": [
            _mean_std_text(row.best, percent) for row in table
        ]
    }


def _published_best_values(table: Sequence[TableRow], percent: bool) -> Columns:
    """Return the columns of published values and of the differences; none without any."""
    if not any(row.printed for row in table):
        return {}
    columns = {
        f"paper: best{_unit(percent)}": [
            number(row.printed.best, row.printed.std, percent) if row.printed else MISSING_TEXT
            for row in table
        ],
        "difference / paper's std": [_signed(row.difference) for row in table],
    }
    if any(row.difference_in_own_stds is not None for row in table):
        columns["difference / our std"] = [_signed(row.difference_in_own_stds) for row in table]
    return columns


def _paired_differences(table: Sequence[TableRow], percent: bool) -> Columns:
    """Return the column of differences to a reference method; none without any."""
    references = {row.reference for row in table if row.versus}
    if not references:
        return {}
    unit = ", points" if percent else ""
    header = f"difference to {references.pop()}{unit} [95 % interval]"
    return {header: [difference_text(row.versus, percent) for row in table]}


def difference_text(difference: PairedDifference | None, percent: bool) -> str:
    """Return a paired difference with its interval and p-value as text.

    Args:
        difference: Difference, or None for a missing one.
        percent: True to multiply it by 100.
    """
    if difference is None:
        return MISSING_TEXT
    scale, form = (100, "+.2f") if percent else (1, "+.4g")
    text = f"{difference.mean * scale:{form}}"
    if difference.low is None or difference.high is None:
        return f"{text} ({'one seed' if difference.n == 1 else 'on each seed'})"
    ends = f"{difference.low * scale:{form}}, {difference.high * scale:{form}}"
    return f"{text} [{ends}], p {difference.p_value:.2g}"


def _signed(number: float | None) -> str:
    """Return a number with its sign as text."""
    return MISSING_TEXT if number is None else f"{number:+.2f}"


def _last_values(table: Sequence[TableRow], percent: bool) -> Columns:
    """Return the column of the means of the last evaluations."""
    header = f"mean of last {LAST_EVALUATIONS} evaluations{_unit(percent)}"
    return {header: [_mean_std_text(row.last, percent) for row in table]}


def _costs_of_target(
    table: Sequence[TableRow], common_target: float | None, cost_unit: CostUnit, percent: bool
) -> Columns:
    """Return the columns of costs of reaching the target; none without a target.

    Targets have a column of their own if they differ.
    """
    targets = {row.target for row in table if row.target is not None}
    if not targets and common_target is not None:
        targets = {common_target}
    aim = "target"
    if len(targets) == 1:
        (common,) = targets
        aim = f"{100 * common:.4g} %" if percent else f"{common:.4g}"
    columns: Columns = {}
    if len(targets) > 1:
        columns[f"target{_unit(percent)}"] = [number(row.target, None, percent) for row in table]
    if targets:
        shown_unit = "MB" if cost_unit == "bytes" else cost_unit
        columns[f"{shown_unit} to {aim}"] = [_arrival(row, cost_unit) for row in table]
    if cost_unit == "rounds" and any(row.printed and row.printed.rounds for row in table):
        columns[f"paper: rounds to {aim}"] = [_rounds(row.printed) for row in table]
    return columns


def _progress(table: Sequence[TableRow]) -> Columns:
    """Return the column of completed rounds, and that of unfinished runs if there are any."""
    columns = {"rounds done": ["–".join(map(str, dict.fromkeys(row.rounds))) for row in table]}
    if any(row.unfinished for row in table):
        columns["not finished"] = [row.unfinished for row in table]
    return columns


def _unit(percent: bool) -> str:
    """Return the unit of a metric as the end of a header."""
    return " %" if percent else ""


def _mean_std_text(figure: MeanStd | None, percent: bool) -> str:
    """Return a figure as text."""
    return number(figure.mean, figure.std, percent) if figure else MISSING_TEXT


def _arrival(row: TableRow, cost_unit: CostUnit) -> str:
    """Return the mean cost of reaching the target, with its deviation over the runs that do.

    Unless all runs do, their number follows.
    """
    cost = row.to_target
    if cost is None:
        return MISSING_TEXT
    missed = f" ({cost.n}/{row.seeds})" if cost.n < row.seeds else ""
    if cost_unit == "bytes":
        cost = MeanStd(cost.mean / 1e6, cost.std and cost.std / 1e6, cost.n)
    return rounded(cost.mean, cost.std) + missed


def rounded(mean: float, std: float | None) -> str:
    """Return a mean cost, with its deviation if there is one: to one decimal place from 1 on.

    Args:
        mean: Mean.
        std: Standard deviation; None: it is left out.
    """
    form = ".1f" if mean >= 1 else ".3g"
    if std is None:
        return f"{mean:.0f}" if mean == int(mean) else f"{mean:{form}}"
    return f"{mean:{form}} ± {std:{form}}"


def _ranks(table: Sequence[TableRow]) -> Columns:
    """Return the columns of ranks: none without ranks, no mean rank for a single scenario."""
    ranks = [row.rank for row in table]
    scenarios = {rank.scenarios for rank in ranks if rank}
    if not scenarios:
        return {}
    columns = {"rank": [f"{rank.place:.3g}" if rank else MISSING_TEXT for rank in ranks]}
    if max(scenarios) == 1:
        return columns
    if len(scenarios) == 1:
        columns[f"mean rank of {min(scenarios)}"] = [
            f"{rank.mean:.3g}" if rank else MISSING_TEXT for rank in ranks
        ]
    else:
        columns["mean rank"] = [
            f"{rank.mean:.3g} (of {rank.scenarios})" if rank else MISSING_TEXT for rank in ranks
        ]
    return columns


def _rounds(printed: published.PublishedResult | None) -> str:
    """Return the published rounds to the target as text."""
    if printed is None or printed.rounds is None:
        return MISSING_TEXT
    return "never" if printed.rounds == float("inf") else f"{printed.rounds:g}"


def frame(table: Sequence[TableRow], cost_unit: CostUnit = "rounds") -> pd.DataFrame:
    """Return rows as a data frame.

    Args:
        table: Rows, as from `aggregate.rows`.
        cost_unit: Unit of the cost of reaching the target; it names the column.

    Returns:
        A frame with parameters as text, numbers that are not rounded, and None for figures that
        were not requested.
    """
    keys = _columns(table)
    records = [
        {short(key): row.parameters.get(key) for key in keys}
        | {
            "seeds": row.seeds,
            "best": row.best and row.best.mean,
            "best_std": row.best and row.best.std,
            "last": row.last and row.last.mean,
            "last_std": row.last and row.last.std,
            "target": row.target,
            f"{cost_unit.replace(' ', '_')}_to_target": row.to_target and row.to_target.mean,
            f"{cost_unit.replace(' ', '_')}_to_target_std": row.to_target and row.to_target.std,
            "reached": row.to_target.n if row.to_target else 0,
            "rounds_min": row.rounds[0],
            "rounds_max": row.rounds[1],
            "not_finished": row.unfinished,
            "rank": row.rank and row.rank.place,
            "mean_rank": row.rank and row.rank.mean,
            "paper_best": row.printed and row.printed.best,
            "paper_std": row.printed and row.printed.std,
            "difference_in_paper_stds": row.difference,
            "difference_in_own_stds": row.difference_in_own_stds,
            "versus": row.versus and row.versus.mean,
            "versus_low": row.versus and row.versus.low,
            "versus_high": row.versus and row.versus.high,
            "versus_p": row.versus and row.versus.p_value,
            "versus_seeds": row.versus and row.versus.n,
            "paper_rounds_to_target": row.printed and row.printed.rounds,
        }
        for row in table
    ]
    return pd.DataFrame(records)


def as_csv(table: Sequence[TableRow], cost_unit: CostUnit = "rounds") -> str:
    """Return rows as CSV, with the columns of `frame`; missing figures are empty.

    Args:
        table: Rows, as from `aggregate.rows`.
        cost_unit: Unit of the cost of reaching the target; it names the column.
    """
    return frame(table, cost_unit).to_csv(index=False, lineterminator="\n").rstrip("\n")


def _columns(table: Sequence[TableRow]) -> list[str]:
    """Return the parameters of all rows, in order of first appearance."""
    return list(dict.fromkeys(key for row in table for key in row.parameters))


def short(key: str) -> str:
    """Return the short form of a key: "algorithm" for "algorithm.name".

    Args:
        key: Dotted key of a configuration.
    """
    return key.removesuffix(".name") if key.removesuffix(".name") in SECTIONS_WITH_NAME else key
