"""Clients' test examples and clients that never train, against their definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import raysim
from raysim.config import explain
from raysim.data import Clients, Dataset, load_dataset, partition_digest, split_dataset
from raysim.errors import ConfigError
from raysim.schedule import make_schedule

BASE = {"data": "digits", "rounds": 2, "algorithm": "fedavg"}


def split(**partition: Any) -> tuple[Dataset, Clients, Clients]:
    """Return the digits, their plain partition, and the same with what is kept out of training."""
    held_out = partition.pop("held_out", 0.0)
    plain = {k: v for k, v in partition.items() if k != "test"}
    config = explain.validate({**BASE, "partition": partition})
    data = load_dataset(config.data)
    before = split_dataset(explain.validate({**BASE, "partition": plain}).partition, data, 3)
    after = split_dataset(config.partition, data, 3, held_out)
    assert isinstance(before, Clients) and isinstance(after, Clients)
    return data, before, after


def test_a_fraction_of_each_client_is_kept_out_of_its_training():
    _, before, after = split(name="dirichlet", clients=40, alpha=0.1, test={"fraction": 0.3})
    assert after.test is not None and after.test_half == "train"
    for i in range(40):
        own, train, test = before.client(i), after.client(i), after.test.client(i)
        n = len(own)
        assert len(test) == min(int(0.3 * n + 0.5), n - 1)
        assert sorted([*train, *test]) == own.tolist()
        assert (np.diff(train) > 0).all() and (np.diff(test) > 0).all()
    assert (before.sizes < 4).any() and (after.sizes >= 1).all()


def test_the_kept_examples_are_a_random_share():
    """Over clients of 45 examples, the mean position of the kept ones is that of all."""
    _, before, after = split(clients=30, test={"fraction": 0.2})
    assert after.test is not None
    ranks = [np.searchsorted(before.client(i), after.test.client(i)) for i in range(30)]
    mean = np.concatenate(ranks).mean() / (before.sizes.mean() - 1)
    assert abs(mean - 0.5) < 5 * np.sqrt(1 / 12 / sum(map(len, ranks)))


def test_the_matched_test_set_is_dealt_out_in_each_clients_class_mix():
    data, before, after = split(name="dirichlet", clients=12, alpha=0.3, test={"matched": True})
    assert after.test is not None and after.test_half == "test"
    assert np.array_equal(before.indices, after.indices)
    dealt = np.sort(after.test.indices)
    assert np.array_equal(dealt, np.arange(len(data.y_test)))
    for c in range(10):
        n_c, m_c = (data.y == c).sum(), (data.y_test == c).sum()
        for i in range(12):
            share = (data.y[before.client(i)] == c).sum() / n_c * m_c
            assert abs((data.y_test[after.test.client(i)] == c).sum() - share) < 1


def test_held_out_clients_keep_their_examples_and_train_nowhere():
    _, before, after = split(clients=20, held_out=0.25, test={"fraction": 0.2})
    assert len(after.held_out) == 5 and after.n_training == 15 and after.test is not None
    every = after.all_examples()
    for i in range(20):
        held = i in after.held_out
        assert (after.sizes[i] == 0) == held
        assert sorted([*every.client(i), *after.test.client(i)]) == before.client(i).tolist()
        assert held or np.array_equal(every.client(i), after.client(i))


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_cohorts_are_sampled_from_the_other_clients(sampling):
    """A uniform cohort stays full; the mean size of a Poisson cohort stays `cohort`."""
    config = explain.validate(
        {
            **BASE,
            "partition": {"clients": 20, "test": {"fraction": 0.2}},
            "schedule": {"cohort": 10, "sampling": sampling},
            "evaluate": {"clients": {"held_out": 0.4}},
        }
    )
    clients = split_dataset(config.partition, load_dataset(config.data), config.seed, 0.4)
    made = make_schedule(config, clients.sizes)
    cohorts = [[a.client for a in made.next_round(t).arrivals] for t in range(300)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    seen = {client for cohort in cohorts for client in cohort}
    assert isinstance(clients, Clients)
    assert seen == set(range(20)) - set(clients.held_out.tolist())
    spread = np.sqrt(12 * 10 / 12 * 2 / 12 / 300)
    assert (sizes == 10).all() if sampling == "uniform" else abs(sizes.mean() - 10) < 5 * spread


def test_what_is_kept_out_of_training_is_part_of_the_identity_and_nothing_else():
    def identity(test: Any = None, **clients: Any) -> str:
        partition = {"clients": 20, "test": test} if test else {"clients": 20}
        evaluate = {"clients": clients} if clients else {}
        return explain.validate({**BASE, "partition": partition, "evaluate": evaluate}).fingerprint

    fraction = {"fraction": 0.2}
    assert identity() != identity(fraction) != identity({"matched": True})
    assert identity(fraction) == identity(fraction, every=2, sample=3, fine_tune={"steps": 2})
    assert (
        identity(fraction) != identity(fraction, held_out=0.1) != identity(fraction, held_out=0.2)
    )


def test_the_digest_of_a_partition_covers_what_is_kept_out():
    digests = {
        partition_digest(split(clients=20, held_out=share, **({"test": test} if test else {}))[2])
        for test in (None, {"fraction": 0.2}, {"matched": True})
        for share in (0.0, 0.1)
    }
    assert len(digests) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": {"test": {}}}, r"partition\.test: give one of"),
        ({"partition": {"test": {"fraction": 0.2, "matched": True}}}, r"partition\.test: give one"),
        ({"partition": {"test": {"fraction": 1}}}, r"partition\.test\.fraction: .*less than 1"),
        ({"partition": {"name": "virtual", "clients": 9, "test": {"fraction": 0.1}}}, "virtual clients share"),
        ({"evaluate": {"clients": {}}}, r"evaluate\.clients: .*partition\.test"),
        ({"partition": {"name": "virtual", "clients": 20}, "evaluate": {"clients": {}}}, r"evaluate\.clients: .*partition\.test"),
        ({"partition": {"clients": 1, "test": {"fraction": 0.1}}, "schedule": {"cohort": 1}, "evaluate": {"clients": {"held_out": 0.1}}}, r"evaluate\.clients\.held_out"),
        ({"partition": {"clients": 10, "test": {"fraction": 0.1}}, "evaluate": {"clients": {"held_out": 0.1}}}, r"schedule\.cohort: .*evaluate\.clients\.held_out leaves only 9"),
        ({"partition": {"name": "natural", "clients": 3, "test": {"matched": True}}, "schedule": {"cohort": 1}}, "natural"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        raysim.run({**BASE, "resources": {"executor": "inline"}, **changes})


def test_unlabelled_examples_cannot_be_matched():
    data, _, _ = split(clients=5)
    numbers = replace(data, y=data.y + 0.5)
    partition = explain.validate({**BASE, "partition": {"test": {"matched": True}}}).partition
    with pytest.raises(ConfigError, match=r"partition\.test\.matched: .*class labels"):
        split_dataset(partition, numbers, 0)
