"""How much of the spread of runs each parameter explains, held against a hand calculation and
analysis of variance."""

import numpy as np
import pytest

from raysim.errors import ConfigError
from raysim.reports.analysis import sensitivity
from raysim.reports.analysis.aggregate import result_of_run
from raysim.reports.tracked import TrackedRun


def runs_of(table):
    """Runs with these parameters and results."""
    return [
        TrackedRun(str(i), {key: str(value) for key, value in params.items()}, [(10, result)])
        for i, (params, result) in enumerate(table)
    ]


def test_a_share_is_the_adjusted_r2_of_a_hand_calculation():
    # groups (1, 3) and (5, 9): mean 4.5, SS_total 35, SS_within 2 + 8 = 10, so (25 - 1 * 10 / 2) /
    # 35
    assert sensitivity.explained_share([1, 5, 3, 9], ["a", "b", "a", "b"]) == pytest.approx(20 / 35)
    assert sensitivity.explained_share([1, 1, 2, 2], [0, 0, 1, 1]) == 1
    assert sensitivity.explained_share([1, 1, 1], [0, 0, 1]) == 0
    assert np.isnan(sensitivity.explained_share([1, 2, 3], [0, 1, 2]))


def test_what_does_nothing_explains_nothing_on_average():
    rng = np.random.default_rng(0)
    shares = [
        sensitivity.explained_share(list(rng.normal(size=30)), [i % 3 for i in range(30)])
        for _ in range(2000)
    ]
    assert abs(np.mean(shares)) < 0.01  # R², which is not adjusted, has 2/29


def test_parameters_come_by_what_they_explain_and_seeds_are_the_rest():
    # 6 values of a, so thirds of two; b does nothing; the seed adds or takes away 1
    table = [
        ({"server.a": a, "server.b": b, "seed": seed}, 10 * a + (1 if seed else -1))
        for a in range(6)
        for b in ("x", "y")
        for seed in (0, 1)
    ]
    a, b, together = sensitivity.effects(runs_of(table), [], "best")
    assert [a.name, b.name, together.name] == ["server.a", "server.b", "all together"]
    assert [group for group, _ in a.means] == ["0 to 1", "2 to 3", "4 to 5"]
    assert [mean for _, mean in a.means] == pytest.approx([5, 25, 45])
    assert b.share < 0 < together.share < 1


def test_the_last_ten_evaluations_are_those_of_tables():
    history = [(0, 100.0), *((t, float(t)) for t in range(1, 21))]
    run = TrackedRun("0", {}, history, metric="loss")
    assert result_of_run(run, "last10") == np.mean(range(11, 21))
    assert result_of_run(run, "best") == 1


def test_too_few_runs_are_refused():
    with pytest.raises(ConfigError, match="--keys"):
        runs = runs_of([({"server.a": 1}, 1.0), ({"server.a": 2}, 2.0)])
        sensitivity.effects(runs, [], "best")
