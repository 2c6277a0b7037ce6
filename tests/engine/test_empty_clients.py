"""Clients without training examples never train, no method counts them, and the log says so once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import is_plain, small

import raysim
from raysim.rules import ClientRule
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.registry import discover

discover()

SIZES = [6, 5, 4, 5, 4, 4]
Y = np.arange(40) % 3
X = np.random.default_rng(7).normal(size=(40, 5)) + 2 * np.eye(3, 5)[Y]
OWNED = np.split(np.arange(28), np.cumsum(SIZES)[:-1])
SLOW_FOR_MANY = {"name": "kasync", "k": 2, "client_speeds": {"name": "lognormal"}}


def run(n_empty: int, **sections: Any) -> raysim.RunResult:
    """A run of six clients with examples, and of others without any."""
    partition = [owned.tolist() for owned in OWNED] + [[]] * n_empty
    config = {
        "data": (X, Y, X[28:], Y[28:]),
        "model": {"name": "mlp", "hidden": [6]},
        "algorithm": "fedavg",
        "partition": partition,
        "rounds": 4,
        "dtype": "float64",
        "local": {"steps": 2, "batch_size": 3, "lr": 0.2},
        "batching": {"mode": "loop", "size": 2},
        "resources": {"executor": "inline", "threads": 1},
        "seed": 4,
    }
    return raysim.run({**config, **sections}, tracking=False)


def everybody(name: str, n_empty: int) -> dict[str, Any]:
    """The sections of a method in which all clients take part."""
    if "schedule" in ALGORITHMS[name].defaults:
        return {"algorithm": small(name), "schedule": SLOW_FOR_MANY}
    return {"algorithm": small(name), "schedule": {"cohort": len(SIZES) + n_empty}}


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", sorted(k for k, v in ALGORITHMS.items() if is_plain(v)))
def test_clients_without_examples_change_no_method(name):
    """A server rule that adds the uploads itself adds those of another order of the clients."""
    alone, among_empty = (run(n, **everybody(name, n)) for n in (0, 5))
    if "per_client" in ALGORITHMS[name].server().uploads.values():
        torch.testing.assert_close(among_empty.parameters, alone.parameters, rtol=0, atol=1e-12)
    else:
        assert among_empty.digest == alone.digest


@pytest.mark.parametrize("cohort", [1, 3])
@pytest.mark.parametrize("n_empty", [6, 94])
def test_every_round_has_a_client_with_examples(n_empty, cohort):
    """Clients without examples are sampled and left out, but not all of a cohort."""
    used = [row["clients/used"] for row in run(n_empty, schedule={"cohort": cohort}).history[1:]]
    assert min(used) >= 1 and max(used) <= cohort


@pytest.mark.parametrize("replace", [True, False])
def test_sampling_by_samples_does_not_see_clients_without_examples(replace):
    sampling = {"name": "samples", "replace": replace}
    alone, among_empty = (run(n, schedule={"cohort": 3, "sampling": sampling}) for n in (0, 30))
    assert among_empty.digest == alone.digest


def test_the_size_of_the_mean_client_leaves_them_out():
    """FedDyn's `scale_alpha` divides it by a client's own."""
    algorithm = {"name": "feddyn", "scale_alpha": True, "alpha": 0.5}
    alone, among_empty = (run(n, algorithm=algorithm, schedule={"cohort": 6 + n}) for n in (0, 20))
    assert among_empty.digest == alone.digest
    algorithm["scale_alpha"] = False
    assert run(0, algorithm=algorithm, schedule={"cohort": 6}).digest != alone.digest


@dataclass(frozen=True)
class Averages(ClientRule):
    def finish(self, shared, state, client_state, data, task):
        task.log(trained=data.average, tested=data.test.average)
        return super().finish(shared, state, client_state, data, task)


def test_the_mean_number_of_test_examples_leaves_them_out_too():
    halves = {"train": (X[:28], Y[:28]), "test": (X[28:], Y[28:])}
    users = {"users": np.arange(28) % 7, "users_test": np.arange(12) % 3}
    result = run(
        0, data=lambda: halves | users, partition={"name": "natural", "test": "natural"},
        algorithm=None, client=Averages(), server="fedavg", schedule={"cohort": 7},
    )  # fmt: skip
    last = result.history[-1]
    assert last["client/trained"] == last["client/tested"] == 4.0


def test_one_client_among_many_without_examples_trains_in_every_round():
    everything = [list(range(28))]
    schedule = {"cohort": 1}
    alone = run(0, partition=everything, schedule=schedule)
    among_empty = run(0, partition=everything + [[]] * 99, schedule=schedule)
    assert among_empty.digest == alone.digest
    assert [row["clients/used"] for row in among_empty.history[1:]] == [1.0] * 4


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_cohort_may_be_larger_than_the_clients_with_examples(empty_first):
    lists = [owned.tolist() for owned in OWNED]
    partition = [[]] * 3 + lists if empty_first else lists + [[]] * 3
    result = run(0, partition=partition, schedule={"cohort": 9})
    assert [row["clients/used"] for row in result.history[1:]] == [6.0] * 4


def test_private_cohorts_do_not_show_who_has_examples():
    """ε counts on a pool that is the same whatever examples a client has; nothing is drawn again."""
    private = {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 0.5}
    result = run(30, privacy=private, schedule={"cohort": 3})
    used = [row["clients/used"] for row in result.history[1:]]
    assert min(used) < 3
    assert result.history[-1]["virtual_time"] == np.count_nonzero(used)
    epsilon = result.history[-1]["privacy/epsilon"]
    again = run(0, privacy=private, schedule={"cohort": 3}).history[-1]["privacy/epsilon"]
    assert epsilon < again  # 3 of 36, not 3 of 6


@pytest.mark.parametrize(
    ("sections", "way_out"),
    [
        ({"partition": [list(range(28)), [], []]}, "fewer partition.clients"),
        (
            {"partition": {"name": "dirichlet", "clients": 35, "alpha": 0.1, "min_samples": 0}},
            "larger partition.min_samples",
        ),
        (
            {"partition": {"name": "iid", "clients": 30, "val_fraction": 0.4}},
            "partition.val_fraction",
        ),
    ],
)
def test_the_log_says_once_how_many_there_are(sections, way_out, caplog):
    with caplog.at_level(logging.WARNING, logger="raysim"):
        run(0, schedule={"cohort": 2}, **sections)
    lines = [record.getMessage() for record in caplog.records]
    told = [line for line in lines if "have no training examples" in line]
    assert len(told) == 1 and way_out in told[0]
    assert not [line for line in lines if "no client arrived" in line]


def test_nothing_is_said_where_all_clients_have_examples(caplog):
    with caplog.at_level(logging.WARNING, logger="raysim"):
        partition = {"name": "iid", "clients": 7, "test": {"fraction": 0.3}}
        evaluate = {"clients": {"held_out": 0.3}}
        run(0, schedule={"cohort": 2}, evaluate=evaluate, partition=partition)
    assert not [r for r in caplog.records if "no training examples" in r.getMessage()]
