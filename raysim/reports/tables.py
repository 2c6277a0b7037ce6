"""Rows of a table of results, and their output as Markdown, LaTeX, CSV or a data frame."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from raysim.config.schema import SECTIONS_WITH_NAME
from raysim.metrics import accumulates, is_share
from raysim.reports import published
from raysim.reports.tracked import LAST_EVALUATIONS, CostUnit, Statistic
from raysim.reports.value_names import NO_NAMES, Names

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
class Figure:
    """A column of results: a statistic of a metric over the rounds of a run."""

    metric: str
    """Name of the metric."""

    statistic: Statistic = "best"
    """Which of its values; `best` is the one at the chosen round if `select_by` is given."""

    lower: bool = False
    """Whether smaller values of the metric are better."""

    select_by: str = ""
    """Metric whose best round is used; "": the metric's own."""

    @property
    def percent(self) -> bool:
        """Whether values are shown in percent."""
        return is_share(self.metric)

    @property
    def selected(self) -> bool:
        """Whether another metric chooses the round."""
        return self.statistic == "best" and self.select_by not in ("", self.metric)

    def header(self, names: Names, alone: bool) -> str:
        """Return the header of the column.

        Args:
            names: Names of metrics.
            alone: Whether the table has no other metric.
        """
        metric = names.get(self.metric, self.metric)
        if self.selected:
            text = f"{metric}{_unit(self.percent)}"
            return f"{text} at best {names.get(self.select_by, self.select_by)}"
        if self.statistic == "last10":
            text = f"mean of last {LAST_EVALUATIONS} evaluations"
            text = text if alone else f"{metric}, {text}"
        else:
            text = f"{self.statistic} {metric}"
        return f"{text}{_unit(self.percent)}"

    def column(self, alone: bool) -> str:
        """Return the name of the column in a data frame, such as "best" or "best_loss".

        Args:
            alone: Whether the table has no other metric.
        """
        name = "selected" if self.selected else self.statistic
        return name if alone else f"{name}_{self.metric}"


@dataclass(frozen=True)
class PairedDifference:
    """Difference to another method over the seeds of both; see `analysis.comparisons`."""

    mean: float
    """Mean difference of the results."""

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

    scenario: tuple = field(default=(), compare=False)
    """Parameters of the scenario."""


@dataclass(frozen=True)
class TableRow:
    """Results of runs that differ only in their seed, unless they are `pooled`.

    Runs without a value count only in `seeds`. If no run has a value, all figures are None.
    """

    parameters: dict[str, str]
    """Parameters that distinguish this row, as text; a parameter that its runs lack is absent."""

    seeds: int
    """Number of runs."""

    values: Mapping[Figure, MeanStd | None]
    """Value of each column of results. Rows are compared by the first one."""

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

    choice: MeanStd | None = None
    """Best value of the metric that chooses the rounds, if there is such a metric."""

    choice_lower: bool = False
    """Whether smaller values of that metric are better."""

    chosen_round: MeanStd | None = None
    """Round that this metric chooses."""

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
    def figure(self) -> Figure:
        """Column of results by which rows are compared."""
        return next(iter(self.values))

    @property
    def result(self) -> MeanStd | None:
        """Value by which rows are compared."""
        return self.values[self.figure]

    @property
    def difference(self) -> float | None:
        """Mean result minus the published one, in published standard deviations."""
        return self._difference_over(self.printed.std if self.printed else None)

    @property
    def difference_in_own_stds(self) -> float | None:
        """Mean result minus the published one, in standard deviations over these runs."""
        return self._difference_over(self.result.std if self.result else None)

    def _difference_over(self, std: float | None) -> float | None:
        if self.result and self.printed and self.printed.best is not None and std:
            return (self.result.mean - self.printed.best) / std
        return None


def sort_key(row: TableRow) -> float:
    """Return the sort key of a row: best rows first, rows without a result last.

    Args:
        row: Row to sort.
    """
    return value_key(row.result, row.figure.lower)


def value_key(value: MeanStd | None, lower: bool) -> float:
    """Return the sort key of a value: best values first. Means that rounding tells apart are equal.

    Args:
        value: Value; None sorts last.
        lower: Whether smaller values are better.
    """
    if value is None or math.isnan(value.mean):
        return math.inf
    mean = float(f"{value.mean:.12g}")
    return mean if lower else -mean


def markdown_table(
    table: Sequence[TableRow],
    target: float | None = None,
    cost_unit: CostUnit = "rounds",
    names: Names = NO_NAMES,
) -> str:
    """Return rows as a Markdown table; accuracies are shown in percent.

    Args:
        table: Rows, as from `aggregate.rows`.
        target: Common target of the rows, if their runs do not hold it.
        cost_unit: Unit of the cost of reaching the target.
        names: Names of values, parameters, metrics and headers.
    """
    return as_markdown(_lines(table, _columns_of_text(table, target, cost_unit, names), names))


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
    target: float | None = None,
    cost_unit: CostUnit = "rounds",
    names: Names = NO_NAMES,
) -> str:
    r"""Return rows as a LaTeX tabular that uses booktabs; a comment says so.

    The best mean of each column of results is bold; if rows have ranks, that of each scenario is.

    Args:
        table: Rows, as from `aggregate.rows`.
        target: Common target of the rows, if their runs do not hold it.
        cost_unit: Unit of the cost of reaching the target.
        names: Names of values, parameters, metrics and headers. They are written as they are, so
            that they may hold LaTeX such as `$\alpha$`.
    """
    special = {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    special |= {"\\": r"\textbackslash{}", "±": r"$\pm$", MISSING_TEXT: "--"}
    # Private-use characters stand for the names while the rest is escaped.
    marks = {key: chr(0xE000 + i) for i, key in enumerate(names)}
    special |= {marks[key]: name for key, name in names.items()}
    columns_of_text = _columns_of_text(table, target, cost_unit, marks)
    head, *lines = [
        ["".join(special.get(c, c) for c in cell) for cell in line]
        for line in _lines(table, columns_of_text, marks)
    ]
    places = list(columns_of_text)
    for figure in table[0].values:
        column = places.index(figure.header(NO_NAMES, _alone(table)))
        for i in _best_rows(table, figure):
            lines[i][column] = rf"\textbf{{{lines[i][column]}}}"
    body = [" & ".join(line) + r" \\" for line in lines]
    n_parameters = len(_headers(table))
    columns = "l" * n_parameters + "r" * (len(head) - n_parameters)
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    package = r"% needs \usepackage{booktabs}"
    return "\n".join([package, *top, *body, r"\bottomrule", r"\end{tabular}"])


def _best_rows(table: Sequence[TableRow], figure: Figure) -> list[int]:
    """Return the positions of the rows with the best value, of each scenario if rows have ranks.

    A metric that accumulates has none: more bytes are neither better nor worse.
    """
    if accumulates(figure.metric):
        return []
    keys = [value_key(row.values[figure], figure.lower) for row in table]
    scenarios = [row.rank.scenario if row.rank else () for row in table]
    best = []
    for i, row in enumerate(table):
        rivals = [key for key, other in zip(keys, scenarios, strict=True) if other == scenarios[i]]
        if row.values[figure] and keys[i] == min(rivals):
            best.append(i)
    return best


Columns = dict[str, list[str]]
"""Text of every row, by the header of its column as it is without names."""


def _columns_of_text(
    table: Sequence[TableRow], target: float | None, cost_unit: CostUnit, names: Names
) -> Columns:
    """Return the columns of a table for readers, without empty ones."""
    first, *others = table[0].values
    columns = {
        **_parameters(table, names),
        **_number_of_runs(table),
        **_values(table, first),
        **_published_best_values(table, first.percent),
        **_paired_differences(table, first.percent),
    }
    for figure in others:
        columns |= _values(table, figure)
    return {
        **columns,
        **_chosen_rounds(table),
        **_costs_of_target(table, target, cost_unit, first.percent),
        **_ranks(table),
        **_progress(table),
    }


def _lines(table: Sequence[TableRow], columns: Columns, names: Names) -> list[list[str]]:
    """Return the header and the lines of a table."""
    alone = _alone(table)
    headers = {
        figure.header(NO_NAMES, alone): figure.header(names, alone) for figure in table[0].values
    }
    head = [names.get(header, headers.get(header, header)) for header in columns]
    return [head, *map(list, zip(*columns.values(), strict=True))]


def _alone(table: Sequence[TableRow]) -> bool:
    """Return whether a table has one metric."""
    return len({figure.metric for figure in table[0].values}) == 1


def _parameters(table: Sequence[TableRow], names: Names) -> Columns:
    """Return a column for each parameter that distinguishes rows."""
    return {
        header: [_value_name(header, row.parameters.get(key, MISSING_TEXT), names) for row in table]
        for key, header in _headers(table).items()
    }


def _value_name(header: str, value: str, names: Names) -> str:
    """Return the name of a parameter's value, by the value or by KEY=VALUE."""
    return names.get(f"{header}={value}", names.get(value, value))


def nameable(
    table: Sequence[TableRow], target: float | None = None, cost_unit: CostUnit = "rounds"
) -> list[str]:
    """Return all that may have a name: values, KEY=VALUE, metrics and headers.

    Args:
        table: Rows, as from `aggregate.rows`.
        target: Common target of the rows, if their runs do not hold it.
        cost_unit: Unit of the cost of reaching the target.
    """
    things: dict[str, None] = {}
    for key, header in _headers(table).items():
        for row in table:
            value = row.parameters.get(key)
            if value is not None:
                things |= {value: None, f"{header}={value}": None}
    for figure in table[0].values:
        things |= {figure.metric: None, figure.select_by: None}
    things |= dict.fromkeys(_columns_of_text(table, target, cost_unit, NO_NAMES))
    return [thing for thing in things if thing]


def _number_of_runs(table: Sequence[TableRow]) -> Columns:
    """Return the column of numbers of runs, which are seeds unless rows are pooled."""
    header = "runs" if any(row.pooled for row in table) else "seeds"
    return {header: [str(row.seeds) for row in table]}


def _values(table: Sequence[TableRow], figure: Figure) -> Columns:
    """Return a column of results."""
    header = figure.header(NO_NAMES, _alone(table))
    return {header: [_mean_std_text(row.values[figure], figure.percent) for row in table]}


def _chosen_rounds(table: Sequence[TableRow]) -> Columns:
    """Return the column of rounds that another metric chooses; none without such a metric."""
    rounds = [row.chosen_round for row in table]
    if not any(rounds):
        return {}
    return {"chosen round": [rounded(t.mean, t.std) if t else MISSING_TEXT for t in rounds]}


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


def _costs_of_target(
    table: Sequence[TableRow], common_target: float | None, cost_unit: CostUnit, percent: bool
) -> Columns:
    """Return the columns of costs of reaching the target; none without a target.

    Targets have a column of their own if they differ.
    """
    targets = {row.target for row in table if row.target is not None}
    if not targets and common_target is not None:
        targets = {common_target}
    aim = _aim(targets, percent)
    columns: Columns = {}
    if len(targets) > 1:
        columns[f"target{_unit(percent)}"] = [number(row.target, None, percent) for row in table]
    if targets:
        shown_unit = "MB" if cost_unit == "bytes" else cost_unit
        columns[f"{shown_unit} to {aim}"] = [_arrival(row, cost_unit) for row in table]
    # Papers publish rounds, which no other unit can be compared with.
    if cost_unit == "rounds" and any(row.printed and row.printed.rounds for row in table):
        columns[f"paper: rounds to {aim}"] = [_rounds(row.printed) for row in table]
    return columns


def _aim(targets: set[float], percent: bool) -> str:
    """Return the common target as text, or "target" if rows have none or different ones."""
    if len(targets) != 1:
        return "target"
    (common,) = targets
    return f"{100 * common:.4g} %" if percent else f"{common:.4g}"


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


def frame(
    table: Sequence[TableRow], cost_unit: CostUnit = "rounds", names: Names = NO_NAMES
) -> pd.DataFrame:
    """Return rows as a data frame.

    Args:
        table: Rows, as from `aggregate.rows`.
        cost_unit: Unit of the cost of reaching the target; it names the column.
        names: Names of values and parameters.

    Returns:
        A frame with parameters as text, numbers that are not rounded, and None for figures that
        were not requested.
    """
    headers = _headers(table)
    alone = _alone(table)
    records = []
    for row in table:
        record: dict[str, Any] = {}
        for key, header in headers.items():
            value = row.parameters.get(key)
            named = None if value is None else _value_name(header, value, names)
            record[names.get(header, header)] = named
        record["seeds"] = row.seeds
        for figure, mean_std in row.values.items():
            record |= _mean_and_std(figure.column(alone), mean_std)
        records.append(record | _further_figures(row, cost_unit))
    return pd.DataFrame(records)


def _further_figures(row: TableRow, cost_unit: CostUnit) -> dict[str, Any]:
    """Return the figures of a row in a data frame beside its results."""
    return {
        **_mean_and_std("chosen_round", row.chosen_round),
        "target": row.target,
        **_mean_and_std(f"{cost_unit.replace(' ', '_')}_to_target", row.to_target),
        "reached": row.to_target.n if row.to_target else 0,
        "rounds_min": row.rounds[0],
        "rounds_max": row.rounds[1],
        "not_finished": row.unfinished,
        **_attributes(row.rank, rank="place", mean_rank="mean"),
        **_attributes(row.printed, paper_best="best", paper_std="std"),
        "difference_in_paper_stds": row.difference,
        "difference_in_own_stds": row.difference_in_own_stds,
        **_attributes(row.versus, versus="mean", versus_low="low", versus_high="high"),
        **_attributes(row.versus, versus_p="p_value", versus_seeds="n"),
        **_attributes(row.printed, paper_rounds_to_target="rounds"),
    }


def _mean_and_std(column: str, figure: MeanStd | None) -> dict[str, float | None]:
    """Return a mean and its deviation as columns of a data frame."""
    return _attributes(figure, **{column: "mean", f"{column}_std": "std"})


def _attributes(source: object | None, /, **columns: str) -> dict[str, Any]:
    """Return attributes by the name of their column; all None without a source."""
    return {
        column: None if source is None else getattr(source, attribute)
        for column, attribute in columns.items()
    }


def as_csv(
    table: Sequence[TableRow], cost_unit: CostUnit = "rounds", names: Names = NO_NAMES
) -> str:
    """Return rows as CSV, with the columns of `frame`; missing figures are empty.

    Args:
        table: Rows, as from `aggregate.rows`.
        cost_unit: Unit of the cost of reaching the target; it names the column.
        names: Names of values and parameters.
    """
    return frame(table, cost_unit, names).to_csv(index=False, lineterminator="\n").rstrip("\n")


def _headers(table: Sequence[TableRow]) -> dict[str, str]:
    """Return the header of each parameter of the rows, in order of first appearance."""
    keys = list(dict.fromkeys(key for row in table for key in row.parameters))
    headers = [short(key) for key in keys]
    return {
        key: header if headers.count(header) == 1 else key
        for key, header in zip(keys, headers, strict=True)
    }


def short(key: str) -> str:
    """Return the short form of a key: "algorithm" for "algorithm.name".

    That of a file's content is "file my.py" for "files.client./home/me/my.py".

    Args:
        key: Dotted key of a configuration.
    """
    if key.startswith("files.") and (file := re.search(r"[^./]+\.\w+$", key)):
        return f"file {file[0]}"
    return key.removesuffix(".name") if key.removesuffix(".name") in SECTIONS_WITH_NAME else key
