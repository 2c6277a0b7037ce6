"""Paired comparisons: how much better a method is than a reference method with the same seeds.

Runs with the same seed share their data split, their initial model and their cohorts. So the
difference of two methods is taken seed by seed (and where `partition.seed` is set, for each pair of
both seeds), which removes what both have in common. The interval and the p-value are those of the
paired t-test (`scipy.stats.ttest_rel`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from raysim.errors import ConfigError
from raysim.reports.analysis.aggregate import choice_key
from raysim.reports.grouping import split_scenario
from raysim.reports.selecting import replicate, with_values
from raysim.reports.table_row import PairedDifference, TableRow
from raysim.reports.tracked import TrackedRun

CONFIDENCE = 0.95
"""Confidence level of the intervals."""

OPTION = "compare_with (--compare-with)"

_ROUNDING = 1e-12
"""Differences that are this close, relative to the values, are equal."""

_Results = dict[str, tuple[str, float]]
"""(seed, result) by the id of the run."""


def paired_difference(values: Sequence[float], references: Sequence[float]) -> PairedDifference:
    """Return the mean of value minus reference over seeds, with its interval.

    Args:
        values: One value for each seed.
        references: The reference's values with the same seeds, in the same order.

    Returns:
        The difference. A single seed has neither an interval nor a p-value, nor have differences
        that are all equal up to rounding: without a deviation there is no test.
    """
    differences = [value - reference for value, reference in zip(values, references, strict=True)]
    mean = mean_of(differences)
    if not math.isfinite(mean):
        return PairedDifference(mean, None, None, None, len(differences))
    size = max(map(abs, [*values, *references]))
    if all(math.isclose(difference, mean, abs_tol=_ROUNDING * size) for difference in differences):
        return PairedDifference(mean, None, None, None, len(differences))
    from scipy import stats  # takes half a second, which other reports save

    test = stats.ttest_rel(values, references)
    low, high = test.confidence_interval(CONFIDENCE)
    return PairedDifference(mean, float(low), float(high), float(test.pvalue), len(differences))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values, also of infinite ones, which runs have that diverge.

    Args:
        values: at least one value.
    """
    if all(map(math.isfinite, values)):
        return statistics.fmean(values)
    return sum(values) / len(values)  # fmean fails for infinite values of both signs


def compared(
    table: Sequence[TableRow],
    runs: Sequence[TrackedRun],
    reference: str,
    say: Callable[[str], None] = lambda line: None,
) -> list[TableRow]:
    """Return rows with their difference to the reference row of the same scenario.

    The scenario of a row is its parameters of data, partition, model, groups, schedule and
    privacy. If it has several reference rows (of several step sizes, say), the best one is the
    reference.

    Args:
        table: Rows, as from `aggregate.rows`.
        runs: The runs of the rows, which have histories.
        reference: Parameter of the reference rows as KEY=VALUE.
        say: Called with one line if seeds are left out because only one of both has them.

    Raises:
        ConfigError: `reference` is not KEY=VALUE, or no row has this parameter and value.
    """
    references = _reference_rows(table, runs, reference)
    figure = table[0].figure
    results: _Results = {
        run.run_id: (replicate(run.params), run.value(figure.statistic, figure.lower))
        for run in runs
    }
    compared_rows = []
    n_unpaired = 0
    for row in table:
        partner = references.get(_scenario(row))
        if partner is None or row is partner or row.pooled:
            compared_rows.append(row)
            continue
        values = _finite_by_seed(row, results)
        others = _finite_by_seed(partner, results)
        n_unpaired += len(values.keys() ^ others.keys())
        difference = _difference_on_shared_seeds(values, others)
        compared_rows.append(replace(row, versus=difference, reference=reference))
    if not any(row.versus for row in compared_rows):
        say(f"{OPTION}: no other row shares a scenario and a seed with {reference}")
    if n_unpaired:
        say(f"differences leave out {n_unpaired} runs whose seed the other method does not have")
    return compared_rows


def _reference_rows(
    table: Sequence[TableRow], runs: Sequence[TrackedRun], reference: str
) -> dict[tuple, TableRow]:
    """Return the best reference row of each scenario."""
    of_reference = with_values(runs, [reference], "run", attrgetter("params"), OPTION)
    chosen = {run.run_id for run in of_reference}
    references: dict[tuple, TableRow] = {}
    for row in sorted(table, key=choice_key):
        if not row.pooled and chosen.issuperset(row.run_ids):
            references.setdefault(_scenario(row), row)
    if not references:
        raise ConfigError(
            f"{OPTION}: no row has only runs with {reference}; name a value that runs have, and "
            "use group (--group) so that it has a row of its own"
        )
    return references


def _scenario(row: TableRow) -> tuple:
    """Return the parameters that a row shares with the rows it can be compared with."""
    return split_scenario(row.parameters)[0]


def _finite_by_seed(row: TableRow, results: _Results) -> dict[str, float]:
    """Return the finite results of a row by seed."""
    by_seed = dict(results[run_id] for run_id in row.run_ids)
    return {seed: value for seed, value in by_seed.items() if math.isfinite(value)}


def _difference_on_shared_seeds(
    values: Mapping[str, float], others: Mapping[str, float]
) -> PairedDifference | None:
    """Return the difference over the seeds that both have; None without such a seed."""
    seeds = sorted(values.keys() & others.keys())
    if not seeds:
        return None
    return paired_difference([values[s] for s in seeds], [others[s] for s in seeds])
