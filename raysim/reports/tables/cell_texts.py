"""Texts of the cells of tables: means, differences, costs, and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Collection

from raysim.reports.table_row import MeanStd, PairedDifference, TableRow, differs
from raysim.reports.tracked import CostUnit

MISSING_TEXT = "–"
"""Text of a cell without a value."""

NEAR, FAR = "✓", "✗"
"""Marks of a published figure: whether the result lies within two of its deviations."""

LATEX_TEXTS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    MISSING_TEXT: "--",
    "✓": r"$\checkmark$",
    "✗": r"$\times$",
}
"""LaTeX of the characters that have a meaning there, or that it lacks."""


def in_latex(text: str) -> str:
    """Return a text as LaTeX.

    Args:
        text: the text.
    """
    return text.translate(str.maketrans(LATEX_TEXTS))


def number(mean: float | None, std: float | None, percent: bool) -> str:
    """Return a mean, with its standard deviation if there is one, as text.

    Args:
        mean: Mean, or None for a missing value.
        std: Standard deviation; None: it is left out.
        percent: True to multiply both by 100.
    """
    if mean is None:
        return MISSING_TEXT
    scale, form = (100, ".2f") if percent else (1, ".4g")
    text = f"{mean * scale:{form}}"
    return text if std is None else f"{text} ± {std * scale:{form}}"


def mean_text(value: MeanStd | None, percent: bool) -> str:
    """Return a mean with its deviation as text.

    Args:
        value: the mean; None for a missing one.
        percent: True to multiply both by 100.
    """
    return MISSING_TEXT if value is None else number(value.mean, value.std, percent)


def rounded(mean: float, std: float | None) -> str:
    """Return a mean cost, with its deviation if there is one: to one decimal place from 1 on.

    Args:
        mean: Mean.
        std: Standard deviation; None: it is left out.
    """
    form = ".1f" if mean >= 1 else ".3g"
    if std is not None:
        return f"{mean:{form}} ± {std:{form}}"
    return f"{mean:.0f}" if mean == int(mean) else f"{mean:{form}}"


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
    if not math.isfinite(difference.mean):
        return text
    if difference.low is None or difference.high is None:
        return f"{text} ({'one seed' if difference.n == 1 else 'on each seed'})"
    ends = f"{difference.low * scale:{form}}, {difference.high * scale:{form}}"
    return f"{text} [{ends}], p {difference.p_value:.2g}"


def aim(targets: Collection[float], percent: bool) -> str:
    """Return the common target as text, or "target" if rows have none or different ones.

    Args:
        targets: the different targets of the rows.
        percent: True to multiply it by 100.
    """
    if len(targets) != 1:
        return "target"
    (common,) = targets
    return f"{100 * common:.4g} %" if percent else f"{common:.4g}"


def arrival(row: TableRow, cost_unit: CostUnit) -> str:
    """Return the mean cost of reaching the target, with its deviation over the runs that do.

    Unless all runs do, their number follows.

    Args:
        row: the row.
        cost_unit: unit of its cost.
    """
    cost = row.to_target
    if cost is None:
        return MISSING_TEXT
    if cost_unit == "bytes":
        cost = MeanStd(cost.mean / 1e6, cost.std and cost.std / 1e6, cost.n)
    return rounded(cost.mean, cost.std) + share_of_seeds(cost.n, row)


def share_of_seeds(n: int, row: TableRow) -> str:
    """Return how many of a row's runs have a value, as text; "" if all do.

    Args:
        n: number of runs with a value.
        row: the row.
    """
    return f" ({n}/{row.seeds})" if 0 < n < row.seeds else ""


def published_rounds(rounds: float) -> str:
    """Return the published rounds to the target as text.

    Args:
        rounds: the rounds; infinite if the method never reached it.
    """
    return "never" if rounds == float("inf") else f"{rounds:g}"


def cell_of(row: TableRow) -> str:
    """Return the result of a row as text, with the published one and whether it is near.

    The other statistics follow where they differ. Only finished runs come into such tables, so that
    all rows have results.

    Args:
        row: the row.
    """
    percent, printed = row.figure.percent, row.printed
    text = mean_text(row.result, percent)
    if printed is not None and printed.best is not None:
        mark = ""
        if row.difference is not None:
            mark = f" {NEAR if row.is_near else FAR}"
        text += f" ({number(printed.best, printed.std, percent)}{mark})"
    for figure, value in row.values.items():
        if differs(row.result, value):
            text += f", {figure.statistic} {mean_text(value, percent)}"
    return text
