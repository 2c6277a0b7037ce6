"""Paired differences over seeds, against the formulas of the paired t-test written out."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from raysim.errors import ConfigError
from raysim.reports.analysis import aggregate
from raysim.reports.analysis.comparisons import compared, mean_of, paired_difference
from raysim.reports.published import PublishedResult
from raysim.reports.tables.results_table import ResultsTable
from raysim.reports.tracked import TrackedRun

T_975 = {2: 12.7062, 3: 4.30265, 5: 2.77645}
"""97.5 % quantiles of Student's t with n - 1 degrees of freedom, from a printed table."""


def run(best: float, seed: int, **params: Any) -> TrackedRun:
    named = {"seed": str(seed), **{k.replace("__", "."): str(v) for k, v in params.items()}}
    history = [(0, 0.1), (5, best), (10, best - 0.05)]
    return TrackedRun(f"{sorted(named.items())}", named, history)


@pytest.mark.parametrize("n", sorted(T_975))
def test_the_interval_is_that_of_the_paired_t_test(n):
    ours, theirs = [0.61, 0.70, 0.55, 0.66, 0.72][:n], [0.50, 0.64, 0.53, 0.52, 0.69][:n]
    found = paired_difference(ours, theirs)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / n
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    half = T_975[n] * deviation / math.sqrt(n)
    assert (found.mean, found.n) == (pytest.approx(mean), n)
    assert (found.low, found.high) == (
        pytest.approx(mean - half, rel=1e-4),
        pytest.approx(mean + half, rel=1e-4),
    )
    assert (found.p_value < 0.05) == (found.low > 0)


def test_one_seed_and_equal_differences():
    one = paired_difference([0.6], [0.5])
    assert (one.low, one.high, one.p_value, one.n) == (None, None, None, 1)
    for ours, theirs in (
        ([0.5, 0.75], [0.25, 0.5]),
        ([0.5, 0.75], [0.5, 0.75]),
        ([0.1, 0.2, 0.3], [0.05, 0.15, 0.25]),  # equal up to rounding
    ):
        same = paired_difference(ours, theirs)
        assert same.mean == pytest.approx(ours[0] - theirs[0])
        assert (same.low, same.high, same.p_value, same.n) == (None, None, None, len(ours))


def test_rows_are_compared_with_the_best_reference_of_their_scenario():
    values = {
        ("fedavg", 0.1, 0.01): [0.40, 0.50, 0.45],
        ("fedavg", 0.1, 0.1): [0.50, 0.55, 0.60],  # the better step size is the reference
        ("gradma", 0.1, 0.01): [0.70, 0.65, 0.72],
        ("fedavg", 1.0, 0.1): [0.90, 0.91, 0.92],
        ("gradma", 1.0, 0.01): [0.91, 0.90, 0.95],
    }
    runs = [
        run(best, seed, algorithm__name=name, partition__alpha=alpha, local__lr=lr)
        for (name, alpha, lr), bests in values.items()
        for seed, best in enumerate(bests)
    ]
    table = compared(aggregate.rows(runs), runs, "algorithm=fedavg")
    found = {
        (row.parameters["algorithm.name"], row.parameters["partition.alpha"]): row.versus
        for row in table
        if row.parameters["algorithm.name"] == "gradma"
    }
    for alpha in (0.1, 1.0):
        ours, theirs = values["gradma", alpha, 0.01], values["fedavg", alpha, 0.1]
        expected = statistics.fmean(a - b for a, b in zip(ours, theirs, strict=True))
        assert found["gradma", str(alpha)].mean == pytest.approx(expected)
    references = [row for row in table if row.parameters["local.lr"] == "0.1"]
    assert [row.versus for row in references] == [None, None]


def test_seeds_that_only_one_method_has_are_left_out_and_said():
    runs = [run(0.5 + seed / 10, seed, algorithm__name="fedavg") for seed in (1, 2)]
    runs += [run(0.6 + seed / 10, seed, algorithm__name="gradma") for seed in (2, 3, 4)]
    lines: list[str] = []
    table = compared(aggregate.rows(runs), runs, "algorithm=fedavg", say=lines.append)
    assert table[1].versus.n == 1 and table[1].versus.mean == pytest.approx(0.1)
    assert len(lines) == 1 and "3 runs" in lines[0]


def test_partitions_and_seeds_are_paired():
    """A pair is one partition with one seed; each pair here has a difference of its own."""
    gains = {(3, 1): 0.01, (3, 2): 0.02, (4, 1): 0.03, (4, 2): 0.05}
    runs = []
    for (partition, seed), gain in gains.items():
        same = {"partition__seed": partition, "partition__alpha": 0.1}
        runs.append(run(0.4 + partition / 20, seed, algorithm__name="fedavg", **same))
        runs.append(run(0.4 + partition / 20 + gain, seed, algorithm__name="gradma", **same))
    table = aggregate.rows(runs, group=["algorithm"])
    (fedavg, gradma) = compared(table, runs, "algorithm=fedavg")
    assert fedavg.versus is None and gradma.versus.n == 4
    assert gradma.versus.mean == pytest.approx(statistics.fmean(gains.values()))
    deviation = statistics.stdev(gains.values())
    assert gradma.versus.high - gradma.versus.mean == pytest.approx(
        3.18245 * deviation / 2, rel=1e-4
    )


def test_a_reference_that_no_run_has_is_named():
    runs = [run(0.5, seed, algorithm__name="fedavg") for seed in (1, 2)]
    with pytest.raises(
        ConfigError, match=r"no run has algorithm\.name=fedavgg; did you mean 'fedavg'"
    ):
        compared(aggregate.rows(runs), runs, "algorithm=fedavgg")


def test_the_columns_of_a_table():
    """Against FedAvg and against a published 0.5 ± 0.1."""
    values = {"fedavg": [0.5, 0.6, 0.7], "gradma": [0.7, 0.7, 0.7], "mifa": [0.8]}
    runs = [
        run(best, seed, algorithm__name=name)
        for name, bests in values.items()
        for seed, best in enumerate(bests)
    ]
    printed = PublishedResult({}, 0.5, 0.1, None, None)
    rows = [replace(row, printed=printed) for row in aggregate.rows(runs)]
    head, _, fedavg, gradma, mifa = (
        ResultsTable(compared(rows, runs, "algorithm=fedavg")).markdown().splitlines()
    )
    assert head.startswith(
        "| algorithm | seeds | best accuracy % | paper: best % | difference / paper's std "
        "| difference / our std | difference to algorithm=fedavg, points [95 % interval] |"
    )
    assert "| 60.00 ± 10.00 | 50.00 ± 10.00 | +1.00 | +1.00 | – |" in fedavg
    # Differences 20, 10, 0: mean 10, deviation 10, 10 ± 4.30265 · 10 / √3.
    assert "| +2.00 | – | +10.00 [-14.84, +34.84], p 0.23 |" in gradma
    assert "| +3.00 | – | +30.00 (one seed) |" in mifa


@pytest.mark.parametrize("reference", ["fedavg", "algorithm=fedprox", "algoritm=fedavg"])
def test_a_reference_that_is_not_there_is_refused(reference):
    runs = [run(0.5, seed, algorithm__name=name) for name in ("fedavg", "mifa") for seed in (1, 2)]
    with pytest.raises(ConfigError, match="compare_with"):
        compared(aggregate.rows(runs), runs, reference)


def test_runs_that_diverge_on_different_seeds_have_no_difference():
    assert math.isnan(mean_of([math.inf, -math.inf])) and mean_of([1.0, math.inf]) == math.inf
    difference = paired_difference([math.inf, 1.0], [1.0, math.inf])
    assert math.isnan(difference.mean) and difference.p_value is None and difference.n == 2
