"""A row of a table of results, with its figures; `table_columns` writes rows."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raysim.metrics import is_share
from raysim.reports.published import PublishedResult
from raysim.reports.tracked import LAST_EVALUATIONS, Statistic


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
        """Return the statistics of values as `over` does, or None without values.

        Args:
            values: One value for each run.
        """
        return cls.over(values) if values else None

    @classmethod
    def over(cls, values: Sequence[float]) -> MeanStd:
        """Return the statistics of values.

        If a value is not finite, the mean is not finite either and there is no deviation.

        Args:
            values: One value for each run, at least one.

        Returns:
            Mean, sample standard deviation (None for one value) and number of values.
        """
        if not all(map(math.isfinite, values)):
            return cls(sum(values), None, len(values))
        std = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), std, len(values))


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
    def unit(self) -> str:
        """End of a header with a value of the metric: " %", or nothing."""
        return " %" if self.percent else ""

    @property
    def selected(self) -> bool:
        """Whether another metric chooses the round."""
        return self.statistic == "best" and self.select_by not in ("", self.metric)

    def header(self, alone: bool) -> str:
        """Return the header of the column.

        Args:
            alone: Whether the table has no other metric.
        """
        if self.selected:
            return f"{self.metric}{self.unit} at best {self.select_by}"
        if self.statistic != "last10":
            return f"{self.statistic} {self.metric}{self.unit}"
        subject = "" if alone else f"{self.metric}, "
        return f"{subject}mean of last {LAST_EVALUATIONS} evaluations{self.unit}"

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

    unfinished: str | None = None
    """Number of unfinished runs by reason, as text; None if all runs are finished."""

    rank: Rank | None = None
    """Rank among the methods, if requested."""

    printed: PublishedResult | None = None
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
    def reached(self) -> int | None:
        """Number of runs that reach the target; None without a target."""
        if self.target is None:
            return None
        return self.to_target.n if self.to_target else 0

    @property
    def difference(self) -> float | None:
        """Mean result minus the published one, in published standard deviations."""
        return self._difference_over(self.printed.std if self.printed else None)

    @property
    def is_near(self) -> bool:
        """True if the result is within two standard deviations of the published figure."""
        return self.difference is not None and abs(self.difference) <= 2

    @property
    def difference_in_own_stds(self) -> float | None:
        """Mean result minus the published one, in standard deviations over these runs."""
        return self._difference_over(self.result.std if self.result else None)

    def _difference_over(self, std: float | None) -> float | None:
        if self.result and self.printed and self.printed.best is not None and std:
            return (self.result.mean - self.printed.best) / std
        return None


def place_of_row(
    row: TableRow, keys: Iterable[str], place: Callable[[str, str | None], tuple]
) -> tuple:
    """Return the place of a row by its values of some parameters.

    Args:
        row: The row.
        keys: Full names of the parameters.
        place: Sort key of a value, as from `grouping.order_of_values`.
    """
    # `shared` has the values as the runs have them, `parameters` as readers see them.
    return tuple(place(key, row.shared.get(key, row.parameters.get(key))) for key in keys)


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


def differs(value: MeanStd | None, other: MeanStd | None) -> bool:
    """Return whether two means lie more than a standard deviation of the first one apart.

    Args:
        value: Value. Of one run there is no deviation, and any other mean differs.
        other: Another statistic of the same runs.
    """
    if value is None or other is None:
        return False
    return abs(value.mean - other.mean) > (value.std or 0.0)


def short(key: str) -> str:
    """Return the short form of a key, as users write it: "algorithm" for "algorithm.name".

    That of a file's content is "file my.py" for "files.client./home/me/my.py".

    Args:
        key: Dotted key of a configuration.
    """
    if key.startswith("files.") and (file := re.search(r"[^./]+\.\w+$", key)):
        return f"file {file[0]}"
    return key.removesuffix(".name")
