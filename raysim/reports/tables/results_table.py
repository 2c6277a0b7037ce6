"""Columns of a table of results: as a data frame of numbers, and as texts that pandas writes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pandas as pd

from raysim.errors import counted
from raysim.metrics import accumulates
from raysim.reports.grouping import order_of_values, split_scenario
from raysim.reports.published import PublishedResult
from raysim.reports.table_row import (
    Figure,
    Rank,
    TableRow,
    place_of_row,
    short,
    value_key,
)
from raysim.reports.tables.cell_texts import (
    MISSING_TEXT,
    aim,
    arrival,
    cell_of,
    difference_text,
    in_latex,
    mean_text,
    number,
    published_rounds,
    rounded,
    share_of_seeds,
)
from raysim.reports.tracked import CostUnit, TrackedRun
from raysim.reports.value_names import Names, named

Columns = dict[str, list[str]]
"""Text of every row, by the header of its column."""

T = TypeVar("T")

NUMBERS_OF_OPTIONS = (
    {"chosen_round": "chosen_round.mean", "chosen_round_std": "chosen_round.std"},
    {
        "target": "target",
        "COST_to_target": "to_target.mean",
        "COST_to_target_std": "to_target.std",
        "reached": "reached",
    },
    {"not_finished": "unfinished"},
    {"rank": "rank.place", "mean_rank": "rank.mean"},
    {
        "paper_best": "printed.best",
        "paper_std": "printed.std",
        "paper_rounds_to_target": "printed.rounds",
        "difference_in_paper_stds": "difference",
        "difference_in_own_stds": "difference_in_own_stds",
    },
    {
        "versus": "versus.mean",
        "versus_low": "versus.low",
        "versus_high": "versus.high",
        "versus_p": "versus.p_value",
        "versus_seeds": "versus.n",
    },
)
"""Attributes of a row by the column of the data frame: those of an option together."""


@dataclass(frozen=True)
class ResultsTable:
    """A table of results, which can be written."""

    rows: Sequence[TableRow]
    """Rows, as from `aggregate.rows`."""

    cost_unit: CostUnit = "rounds"
    """Unit of the cost of reaching the target."""

    names: Names = field(default_factory=dict)
    """Names of values, parameters and headers. LaTeX has them as they are, so that they may hold
    LaTeX such as `$\\alpha$`."""

    runs: Sequence[TrackedRun] = ()
    """Runs of the table, with the history of the first metric."""

    def markdown(self) -> str:
        """Return the table as Markdown; accuracies are shown in percent."""
        return as_markdown(self._named(self._texts(), self.names))

    def latex(self) -> str:
        """Return the table as a LaTeX tabular that uses booktabs; a comment says so.

        The best mean of each column of results is bold: that of each scenario, if one has several
        rows.
        """
        names = {in_latex(text): name for text, name in self.names.items()}
        shown = self._named(self._texts().map(in_latex).rename(columns=in_latex), names)
        for i, column in self._best_cells():
            shown.iat[i, column] = rf"\textbf{{{shown.iat[i, column]}}}"
        alignment = ("l" * len(self._parameters())).ljust(shown.shape[1], "r")
        tabular = shown.to_latex(index=False, escape=False, column_format=alignment)
        return f"% needs \\usepackage{{booktabs}}\n{tabular.rstrip()}"

    def csv(self) -> str:
        """Return the table as CSV, with the columns of `frame`; missing values are empty."""
        numbers = self._named(self._numbers(), self.names)
        return numbers.to_csv(index=False, lineterminator="\n").rstrip("\n")

    @property
    def frame(self) -> pd.DataFrame:
        """Return the table as a data frame, without the columns that were not requested.

        Its columns: the parameters that differ; seeds (number of runs); best, best_std, last,
        last_std, last10, last10_std, as far as `statistic` names them (selected, selected_std in
        place of best with `select_by`; with several metrics best_accuracy, best_loss, …);
        chosen_round, chosen_round_std (by `select_by`); target, rounds_to_target (or bytes_,
        virtual_time_, seconds_to_target) with its _std over the runs that reached the target,
        reached (their number); rounds_min, rounds_max; not_finished; rank, mean_rank; paper_best,
        paper_std, paper_rounds_to_target, difference_in_paper_stds, difference_in_own_stds; versus
        (mean difference to `compare_with` over the seeds of both), versus_low, versus_high (its
        95 % interval), versus_p (of the paired t-test), versus_seeds.

        Missing values are NaN, such as the deviation of one run, and the rounds to a target that no
        run reaches.
        """
        frame = self._named(self._numbers(), self.names)
        return with_numbers(frame, list(frame)[: len(self._parameters())])

    def nameable(self) -> list[str]:
        """Return all that may have a name: values, KEY=VALUE, and headers with their parts."""
        things: list[str] = []
        for key, header in _headers(self.rows).items():
            for row in self.rows:
                if key in row.parameters:
                    value = row.parameters[key]
                    things += [value, f"{header}={value}"]
        for header in self._texts():
            things += [header, *header.split(", ")]
        return list(dict.fromkeys(things))

    def _parameters(self) -> dict[str, str]:
        """Return the headers of the columns of parameters, by parameter."""
        return _headers(self.rows)

    def _best_cells(self) -> Iterable[tuple[int, int]]:
        """Yield row and column of the best mean of each column of results."""
        headers = list(self._texts())
        scenarios: list[tuple] = [split_scenario(row.parameters)[0] for row in self.rows]
        if len(set(scenarios)) == len(scenarios):
            scenarios = [()] * len(scenarios)
        for figure in self.rows[0].values:
            column = headers.index(figure.header(_alone(self.rows)))
            for i in _best_rows(self.rows, figure, scenarios):
                yield i, column

    def _named(self, frame: pd.DataFrame, names: Names) -> pd.DataFrame:
        """Return texts or numbers with names of headers, and of values of parameters."""
        named_frame = frame.copy()
        for header in list(frame)[: len(self._parameters())]:

            def name_of(value: str, header: str = header) -> str:
                return names.get(f"{header}={value}") or named(value, names)

            named_frame[header] = frame[header].map(name_of, na_action="ignore")
        return named_frame.rename(columns=lambda header: named(header, names))

    def _numbers(self) -> pd.DataFrame:
        """Return a frame with parameters as text, without columns that were not requested."""
        numbers: dict[str, Any] = {}
        for key, header in _headers(self.rows).items():
            numbers[header] = [row.parameters.get(key) for row in self.rows]
        numbers["seeds"] = [row.seeds for row in self.rows]
        rounds = [row.rounds for row in self.rows]
        for figure in self.rows[0].values:
            name = figure.column(_alone(self.rows))
            values = [row.values[figure] for row in self.rows]
            numbers[name] = _attributes(values, "mean")
            numbers[f"{name}_std"] = _attributes(values, "std")
        numbers["rounds_min"] = [least for least, _ in rounds]
        numbers["rounds_max"] = [most for _, most in rounds]
        cost = self.cost_unit.replace(" ", "_")
        for attributes in NUMBERS_OF_OPTIONS:
            option = {}
            for name, attribute in attributes.items():
                option[name.replace("COST", cost)] = _attributes(self.rows, attribute)
            # They are in the frame if some row has a value of one of them.
            if any(values.notna().any() for values in option.values()):
                numbers |= option
        return pd.DataFrame(numbers)

    def _texts(self) -> pd.DataFrame:
        """Return the table as a frame of texts for readers."""
        return pd.DataFrame(self._columns())

    def _columns(self) -> Columns:
        """Return the columns of the table for readers, without those that would be empty."""
        table = self.rows
        first, *others = table[0].values
        columns: Columns = {}
        for key, header in _headers(table).items():
            columns[header] = [row.parameters.get(key, MISSING_TEXT) for row in table]
        columns[f"{_noun(table)}s"] = [str(row.seeds) for row in table]
        columns |= _values(table, first)
        columns |= _published_best_values(table, first)
        columns |= _filled(_paired_differences(table, first))
        for figure in others:
            columns |= _values(table, figure)
        chosen = _texts([row.chosen_round for row in table], lambda t: rounded(t.mean, t.std))
        columns |= _filled({"chosen round": chosen})
        columns |= _costs_of_target(table, self.cost_unit, first)
        columns |= _ranks([row.rank for row in table if row.rank])
        columns["rounds done"] = ["–".join(map(str, dict.fromkeys(row.rounds))) for row in table]
        if any(row.unfinished for row in table):
            columns["not finished"] = [row.unfinished or "" for row in table]
        return columns


@dataclass(frozen=True)
class CrossTable(ResultsTable):
    """A table with a column for each value of some parameters.

    Its cells are the first figure, and the others where they lie more than a deviation from it.
    """

    across: Sequence[str] = ()
    """Full names of the parameters whose values are the columns."""

    def markdown(self) -> str:
        """Return the table as Markdown, below a line that says what its cells are."""
        return f"{self._caption()}\n\n{super().markdown()}"

    def latex(self) -> str:
        """Return the table as LaTeX, below a comment that says what its cells are.

        The best mean of each line is bold, of columns that are scenarios that of each column.
        """
        return f"% {self._caption()}\n{super().latex()}"

    def _caption(self) -> str:
        """Return what the cells are: metric, statistics and number of seeds."""
        figure, *others = self.rows[0].values
        seeds = max(row.seeds for row in self.rows)
        text = figure.header(alone=False)
        if others:
            statistics = " and ".join(other.statistic for other in others)
            where = "more than a standard deviation away" if seeds > 1 else "different"
            text += f" (and {statistics} where {where})"
        if seeds > 1:
            return f"{text}, mean ± std over {_counted(self.rows, seeds)}"
        return f"{text}, {_counted(self.rows, seeds)}"

    def _parameters(self) -> dict[str, str]:
        headers = _headers(self.rows)
        return {key: header for key, header in headers.items() if key not in self.across}

    def _best_cells(self) -> Iterable[tuple[int, int]]:
        left = self._parameters()
        lines, columns = self._places(left), self._places(self.across)
        _, methods = split_scenario(dict.fromkeys(self.across, ""))
        for i in _best_rows(self.rows, self.rows[0].figure, lines if methods else columns):
            yield lines[i], len(left) + columns[i]

    def _numbers(self) -> pd.DataFrame:
        return self._crossed([row.result and row.result.mean for row in self.rows])

    def _texts(self) -> pd.DataFrame:
        most = max(row.seeds for row in self.rows)
        texts = []
        for row in self.rows:
            text = cell_of(row)
            if row.seeds != most:
                text += f", {_counted(self.rows, row.seeds)}"
            texts.append(text)
        return self._crossed(texts).fillna(MISSING_TEXT)

    def _crossed(self, cells: Sequence[Any]) -> pd.DataFrame:
        """Return a frame of parameters and of a column for each value; missing cells are NaN."""
        lines, columns = self._places(self._parameters()), self._places(self.across)
        left: dict[int, dict[str, str]] = {}
        headers: dict[int, str] = {}
        for row, line, column in zip(self.rows, lines, columns, strict=True):
            values = [row.parameters[key] for key in self.across if key in row.parameters]
            headers[column] = ", ".join(values) or MISSING_TEXT
            left.setdefault(line, {}).update(row.parameters)
        parameters = self._parameters()
        beside = pd.DataFrame([left[line] for line in sorted(left)], columns=list(parameters))
        crossed: pd.DataFrame = pd.Series(cells, [lines, columns], dtype=object).unstack()
        crossed = crossed.infer_objects()
        return beside.rename(columns=parameters).join(crossed.rename(columns=headers))

    def _places(self, keys: Collection[str]) -> list[int]:
        """Return the line or column of each row by its values of some parameters."""
        place = order_of_values(self.runs)
        places = [place_of_row(row, keys, place) for row in self.rows]
        ordered = sorted(set(places))
        return [ordered.index(place) for place in places]


def as_markdown(texts: pd.DataFrame) -> str:
    """Return a data frame of texts as a Markdown table.

    Args:
        texts: Cells and headers; a "|" in them is escaped.
    """
    lines = [list(texts), ["---"] * texts.shape[1], *texts.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines
    )


def with_numbers(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Convert those text columns to numbers whose values are all numbers.

    Args:
        frame: The frame, which is changed.
        names: Names of the columns.
    """
    for name in names:
        try:
            frame[name] = pd.to_numeric(frame[name])
        except (ValueError, TypeError):
            continue
    return frame


def _texts(things: Iterable[T | None], text: Callable[[T], str]) -> list[str]:
    """Return the text of each thing, of those that are None that of a missing value."""
    return [MISSING_TEXT if thing is None else text(thing) for thing in things]


def _filled(columns: Columns) -> Columns:
    """Return the columns in which some cell has a value."""
    return {header: cells for header, cells in columns.items() if set(cells) != {MISSING_TEXT}}


def _alone(table: Sequence[TableRow]) -> bool:
    """Return whether a table has one metric."""
    return len({figure.metric for figure in table[0].values}) == 1


def _noun(table: Sequence[TableRow]) -> str:
    """Return what the runs of a row are: its seeds, unless they differ in more."""
    return "run" if any(row.pooled for row in table) else "seed"


def _counted(table: Sequence[TableRow], count: int) -> str:
    """Return a number of runs as text: "2 seeds"."""
    return counted(count, _noun(table))


def _headers(table: Sequence[TableRow]) -> dict[str, str]:
    """Return the header of each parameter of the rows, in order of first appearance."""
    keys = dict.fromkeys(itertools.chain.from_iterable(row.parameters for row in table))
    counts = Counter(map(short, keys))
    return {key: short(key) if counts[short(key)] == 1 else key for key in keys}


def _values(table: Sequence[TableRow], figure: Figure) -> Columns:
    """Return a column of results, of which some runs of a row may have none."""
    texts = []
    for row in table:
        value = row.values[figure]
        seeds = share_of_seeds(value.n, row) if value else ""
        texts.append(mean_text(value, figure.percent) + seeds)
    return {figure.header(_alone(table)): texts}


def _published_best_values(table: Sequence[TableRow], figure: Figure) -> Columns:
    """Return the columns of published values and of the differences; none without any."""

    def best(printed: PublishedResult) -> str:
        return number(printed.best, printed.std, figure.percent)

    if not any(row.printed for row in table):
        return {}
    columns = {
        f"paper: best{figure.unit}": _texts([row.printed for row in table], best),
        "difference / paper's std": _texts([row.difference for row in table], "{:+.2f}".format),
    }
    ours = [row.difference_in_own_stds for row in table]
    return columns | _filled({"difference / our std": _texts(ours, "{:+.2f}".format)})


def _paired_differences(table: Sequence[TableRow], figure: Figure) -> Columns:
    """Return the column of differences to a reference method, which all rows have in common."""
    reference = max(row.reference for row in table)
    unit = ", points" if figure.percent else ""
    header = f"difference to {reference}{unit} [95 % interval]"
    return {header: [difference_text(row.versus, figure.percent) for row in table]}


def _costs_of_target(table: Sequence[TableRow], cost_unit: CostUnit, figure: Figure) -> Columns:
    """Return the columns of costs of reaching the target; none without a target.

    Targets have a column of their own if they differ.
    """
    targets = {row.target for row in table if row.target is not None}
    goal = aim(targets, figure.percent)
    columns: Columns = {}
    if len(targets) > 1:
        columns[f"target{figure.unit}"] = [
            number(row.target, None, figure.percent) for row in table
        ]
    if targets:
        unit = "MB" if cost_unit == "bytes" else cost_unit
        columns[f"{unit} to {goal}"] = [arrival(row, cost_unit) for row in table]
    # Papers publish rounds, which no other unit can be compared with.
    if cost_unit == "rounds":
        published = [getattr(row.printed, "rounds", None) for row in table]
        columns |= _filled({f"paper: rounds to {goal}": _texts(published, published_rounds)})
    return columns


def _ranks(ranks: Sequence[Rank]) -> Columns:
    """Return the columns of the ranks, which all rows have or none: no mean of one scenario."""
    columns: Columns = {}
    if ranks:
        columns["rank"] = [f"{rank.place:.3g}" for rank in ranks]
    if any(rank.scenarios > 1 for rank in ranks):
        columns["mean rank"] = [f"{rank.mean:.3g} (of {rank.scenarios})" for rank in ranks]
    return columns


def _best_rows(table: Sequence[TableRow], figure: Figure, units: Sequence[Hashable]) -> list[int]:
    """Return the positions of the rows with the best value of each unit that has several rows.

    A metric that accumulates has none: more bytes are neither better nor worse.

    Args:
        table: Rows.
        figure: Column of results.
        units: Of each row what it shares with the rows that it is compared with.
    """
    if accumulates(figure.metric):
        return []
    by_unit: dict[Hashable, list[tuple[float, int]]] = {}
    for i, (row, unit) in enumerate(zip(table, units, strict=True)):
        value = row.values[figure]
        if value is not None:
            by_unit.setdefault(unit, []).append((value_key(value, figure.lower), i))
    best: list[int] = []
    for rivals in by_unit.values():
        if len(rivals) > 1:
            best_key, _ = min(rivals)
            best += [i for key, i in rivals if key == best_key]
    return best


def _attributes(things: Sequence[object], path: str) -> pd.Series:
    """Return an attribute of each thing, such as "rank.mean"; NaN where one is missing."""
    values = []
    for value in things:
        for name in path.split("."):
            value = getattr(value, name, None)
        values.append(math.nan if value is None else value)
    return pd.Series(values)
