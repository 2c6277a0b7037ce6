"""Client sampling: probabilities against their definitions, and runs with each kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.programs import program

import raysim
from raysim.config import explain
from raysim.errors import ConfigError
from raysim.schedule import make_schedule

SIZES = np.array([5, 0, 20, 3, 40, 12])
ROUNDS = 4000
BASE = {"data": "digits", "rounds": 3, "algorithm": "fedavg", "partition": {"clients": 6}}

OWN = program("sampling_own")


def cohorts(schedule: dict, rounds: int = ROUNDS) -> np.ndarray:
    """Return how often each client was drawn in each round, [rounds, N]."""
    config = explain.validate({**BASE, "schedule": schedule})
    made = make_schedule(config, SIZES)
    counts = np.zeros((rounds, len(SIZES)))
    for t in range(rounds):
        for arrival in made.next_round(t).arrivals:
            counts[t, arrival.client] = arrival.draws
    return counts


def assert_mean(samples: np.ndarray, expected: np.ndarray | float) -> None:
    """Check means [N] of independent samples [n, N] to five standard errors."""
    error = samples.std(0) / np.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(0) - expected) <= 5 * error + 1e-12)


def test_with_replacement_each_draw_follows_the_shares_of_samples():
    """The count of a client is binomial: S draws with probability n_i / n (Li 2020, scheme I)."""
    counts = cohorts({"cohort": 4, "sampling": "samples"})
    shares = SIZES / SIZES.sum()
    assert_mean(counts, 4 * shares)
    assert_mean((counts - 4 * shares) ** 2, 4 * shares * (1 - shares))
    assert (counts.sum(1) == 4).all() and counts.max() > 1


def test_without_replacement_the_first_draw_follows_the_shares_of_samples():
    counts = cohorts({"cohort": 1, "sampling": {"name": "samples", "replace": False}})
    assert_mean(counts, SIZES / SIZES.sum())
    many = cohorts({"cohort": 5, "sampling": {"name": "samples", "replace": False}}, 50)
    assert (many.sum(1) == 5).all() and many.max() == 1


def test_poisson_sampling_is_independent_with_probability_cohort_over_clients():
    counts = cohorts({"cohort": 2, "sampling": "poisson"})
    nonempty = SIZES > 0
    assert_mean(counts[:, nonempty], 2 / 6)
    both = counts[:, [2]] * counts[:, [4]]
    assert_mean(both, (2 / 6) ** 2)
    assert counts.max() == 1 and (counts.sum(1) == 0).any()


def test_weights_of_a_client_that_was_drawn_twice_count_twice():
    """The weighted mean is then an unbiased estimate of the mean over all samples."""
    config = explain.validate({**BASE, "schedule": {"cohort": 4, "sampling": "samples"}})
    made = make_schedule(config, SIZES)
    from raysim.algorithms.fedavg import FedAvgServer
    from raysim.rules import Cohort

    value = np.array([3.0, 9.0, -1.0, 4.0, 0.5, 2.0])
    means = []
    for t in range(ROUNDS):
        arrivals = made.next_round(t).arrivals
        ids = [a.client for a in arrivals]
        cohort = Cohort(t, ids, 6, samples=SIZES[ids].tolist(), draws=[a.draws for a in arrivals])
        means.append(np.dot(FedAvgServer().weigh(cohort), value[ids]))
    assert_mean(np.array(means)[:, None], float((SIZES * value).sum() / SIZES.sum()))


@pytest.mark.parametrize(
    "sampling", ["samples", {"name": "samples", "replace": False}, "poisson", "OWN"]
)
def test_a_run_uses_the_sampled_clients_and_resumes(sampling, tmp_path):
    """A run that stops and resumes draws the same cohorts as one that does not."""
    rules = tmp_path / "rules.py"
    rules.write_text(OWN)
    if sampling == "OWN":
        sampling = {"name": f"{rules}:Newest", "skip": 1}
    config = {
        **BASE,
        "model": {"name": "mlp", "hidden": [4]},
        "schedule": {"cohort": 3, "sampling": sampling},
        "resources": {"executor": "inline"},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 1},
        "tracking": {"uri": f"sqlite:///{tmp_path}/m.db"},
    }
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    stopped = raysim.run(
        config, run_dir=str(tmp_path / "part"), progress=lambda record: record["round"] == 1
    )
    assert stopped.stopped
    assert raysim.resume(tmp_path / "part").state_digest == whole.state_digest
    uniform = raysim.run({**config, "schedule": {"cohort": 3}}, run_dir=str(tmp_path / "uniform"))
    assert uniform.digest != whole.digest


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"sampling": "power"}, r"schedule\.sampling\.name: unknown name 'power'"),
        ({"sampling": {"name": "poisson", "q": 1}}, r"schedule\.sampling\.q: unknown key"),
        ({"sampling": {"name": "FILE:Newest", "skip": "x"}}, r"schedule\.sampling\.skip: "),
        ({"sampling": {"name": "FILE:Newest", "jump": 1}}, r"schedule\.sampling\.jump: unknown"),
        ({"sampling": "FILE:NoRule"}, r"schedule\.sampling\.name: .*ClientSampling"),
        ({"sampling": "FILE:Missing"}, r"schedule\.sampling\.name: .*Missing"),
        ({"name": "kasync", "k": 2, "sampling": "poisson"}, r"schedule\.sampling: unknown key"),
        ({"cohort": 7, "sampling": "poisson"}, r"schedule\.cohort: "),
    ],
)
def test_bad_sampling_is_refused_with_its_key(schedule, message, tmp_path):
    (tmp_path / "rules.py").write_text(OWN)
    text = repr({"cohort": 3, **schedule} if "name" not in schedule else schedule)
    schedule = eval(text.replace("FILE", str(tmp_path / "rules.py")))
    with pytest.raises(ConfigError, match=message):
        raysim.run({**BASE, "schedule": schedule, "resources": {"executor": "inline"}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stranger", "returns client 99, which is not in pool.ids"),
        ("Crowd", "returned 6 clients"),
        ("Unkeyed", r"schedule\.sampling Unkeyed draws from NumPy's global generator"),
    ],
)
def test_a_rule_that_samples_wrongly_is_refused_before_the_run(name, message, tmp_path):
    rules = Path(tmp_path / "rules.py")
    rules.write_text(OWN)
    config = {
        **BASE,
        "schedule": {"cohort": 3, "sampling": f"{rules}:{name}"},
        "resources": {"executor": "inline"},
        "tracking": {"uri": f"sqlite:///{tmp_path}/m.db"},
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.raises(ConfigError, match=message):
        raysim.run(config)
