"""Training examples that change over the rounds, against their definitions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.programs import program

from raysim.config import explain
from raysim.data import Clients, Dataset, load_dataset, partition_digest, split_dataset
from raysim.data.partition.clients import SizesByRound
from raysim.errors import ConfigError

BASE = {"data": "digits", "rounds": 20, "algorithm": "fedavg"}
DIRICHLET = {"name": "dirichlet", "clients": 12, "alpha": 0.5}


def split(partition: dict[str, Any], held_out: float = 0.0, seed: int = 3) -> Clients:
    """Return the partition of the digits."""
    config = explain.validate({**BASE, "partition": partition})
    clients = split_dataset(config.partition, digits(), seed, held_out)
    assert isinstance(clients, Clients)
    return clients


def digits() -> Dataset:
    return load_dataset(explain.validate(BASE).data)


@pytest.fixture
def own(source):
    """own(function): a reference to a function of `own_phases`."""
    file = source("own_phases", program("own_phases"))
    return lambda function: f"{file}:{function}"


def test_in_a_task_each_client_has_its_examples_of_the_tasks_classes():
    plain = split(DIRICHLET)
    phased = split({**DIRICHLET, "phases": {"name": "classes", "rounds": 4, "count": 3}})
    y = digits().y
    # numpy.array_split: 4, 3 and 3 classes.
    tasks = {
        0: [0, 1, 2, 3],
        3: [0, 1, 2, 3],
        4: [4, 5, 6],
        7: [4, 5, 6],
        8: [7, 8, 9],
        99: [7, 8, 9],
    }
    for t, classes in tasks.items():
        for client in range(12):
            expected = [i for i in plain.client(client) if y[i] in classes]
            assert phased.at(t).client(client).tolist() == expected
            assert phased.sizes_by_round.at(t)[client] == len(expected)
    for client in range(12):  # the lists themselves hold the examples of all tasks
        assert phased.client(client).tolist() == plain.client(client).tolist()


def test_the_order_of_classes_is_drawn_by_the_seed_of_the_partition():
    def first_task(of_run: int, **keys: Any) -> set[int]:
        phases = {"name": "classes", "rounds": 4, "count": 5, "shuffle": True}
        clients = split({**DIRICHLET, **keys, "phases": phases}, seed=of_run)
        return set(digits().y[clients.at(0).indices].tolist())

    assert len(first_task(3)) == 2
    assert first_task(3) != {0, 1} and first_task(3) != first_task(4)
    assert first_task(3, seed=9) == first_task(4, seed=9)


def test_tests_are_those_of_the_tasks_so_far_and_evaluated_after_their_rounds():
    phases = {"name": "classes", "rounds": 4, "count": 5}
    clients = split({**DIRICHLET, "phases": phases, "test": {"fraction": 0.3}})
    y, test = digits().y, clients.test
    assert test is not None
    for t, known in ((0, 2), (3, 2), (4, 4), (19, 10)):
        for client in range(12):
            expected = [i for i in test.client(client) if y[i] < known]
            assert test.at(t).client(client).tolist() == expected
            assert test.after_rounds().at(t + 1).client(client).tolist() == expected
    assert not set(test.indices) & set(clients.indices)


@pytest.mark.parametrize(
    "keys", [{}, {"test": {"fraction": 0.3}, "val": {"fraction": 0.2}, "val_fraction": 0.1}]
)
def test_a_redrawn_partition_trains_on_the_same_examples(keys):
    phases = {"name": "redraw", "rounds": 5, "count": 3}
    plain = split({**DIRICHLET, **keys}, held_out=0.2)
    clients = split({**DIRICHLET, **keys, "phases": phases}, held_out=0.2)
    assert clients.at(4).indices.tolist() == plain.indices.tolist()
    kinds = [clients.at(t) for t in (0, 5, 10)]
    trains = next(i for i in range(12) if i not in clients.held_out)
    mixes = [np.bincount(digits().y[kind.client(trains)], minlength=10) for kind in kinds]
    assert not np.array_equal(mixes[0], mixes[1]) and not np.array_equal(mixes[1], mixes[2])
    for kind in kinds:
        assert set(kind.indices) <= set(plain.indices)  # nothing that is kept out of training
        assert len(set(kind.indices)) == len(kind.indices)
        assert not kind.sizes[clients.held_out].any()
    assert clients.reserved is not None and len(clients.reserved.indices)


def test_a_draw_that_leaves_examples_out_draws_from_all_of_them():
    heavy = {
        "name": "heavy_tail",
        "clients": 12,
        "phases": {"name": "redraw", "rounds": 5, "count": 3},
    }
    sizes = [len(split(heavy).at(t).indices) for t in (0, 5, 10)]
    assert min(sizes) > 0.7 * max(sizes)


def test_validation_examples_are_those_of_the_tasks_so_far():
    phases = {"name": "classes", "rounds": 4, "count": 5}
    clients = split({**DIRICHLET, "phases": phases, "val": {"fraction": 0.3}})
    y, val = digits().y, clients.val
    assert val is not None
    for t, known in ((0, 2), (4, 4), (19, 10)):
        assert sorted(val.at(t).indices) == sorted(i for i in val.indices if y[i] < known)


def test_clients_that_never_train_get_no_examples_from_a_users_function(own):
    phases = {"name": own("rotated"), "rounds": 2, "count": 2}
    with pytest.raises(ConfigError, match=r"phase 1 examples for client \d+, which never trains"):
        split({**DIRICHLET, "phases": phases}, held_out=0.3)


def test_a_users_function_gets_each_clients_examples(own):
    plain = split(DIRICHLET)
    phases = {"name": own("arrivals"), "rounds": 2, "count": 4, "share": 0.3}
    clients = split({**DIRICHLET, "phases": phases})
    for t in range(10):
        share = min(1, 0.3 * (min(t // 2, 3) + 1))
        for client in range(12):
            mine = plain.client(client)
            assert (
                clients.at(t).client(client).tolist()
                == mine[: int(np.ceil(share * len(mine)))].tolist()
            )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("few", "phase 0 11 clients; partition.clients is 12"),
        ("outside", "phase 0: client 0 has example 1438, outside 0 to 1437"),
        ("twice", r"phase 0: client \d+ has example \d+ twice"),
        ("kept_out", r"phase 0 example \d+, which is kept out of training"),
        ("nothing", "phase 1: no client has an example"),
        ("missing", "missing"),
        ("unkeyed", "phase 0 other lists when it was called again"),
    ],
)
def test_what_a_users_function_may_not_return(function, message, own):
    phases = {"name": own(function), "rounds": 2, "count": 2}
    with pytest.raises(ConfigError, match=rf"^partition\.phases.*{message}"):
        split({**DIRICHLET, "val_fraction": 0.2, "phases": phases})


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (DIRICHLET | {"phases": {"name": "classes", "rounds": 2, "count": 11}}, "phases.count: 11 tasks of 10"),
        (DIRICHLET | {"phases": {"name": "classes", "count": 2}}, "phases.rounds: missing"),
        (DIRICHLET | {"phases": "klasses"}, "phases"),
        ({"name": "virtual", "clients": 9, "phases": {"name": "redraw", "rounds": 2, "count": 2}}, "virtual"),
    ],
)  # fmt: skip
def test_mistakes_are_named(partition, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split(partition)


def test_the_digest_and_the_fingerprint_know_the_phases():
    phases = {"name": "classes", "rounds": 4, "count": 5}
    partitions = [
        DIRICHLET,
        DIRICHLET | {"phases": phases},
        DIRICHLET | {"phases": {**phases, "rounds": 5}},
    ]
    assert len({partition_digest(split(p)) for p in partitions}) == 3
    prints = {explain.validate({**BASE, "partition": p}).fingerprint for p in partitions}
    assert len(prints) == 3
    assert (
        explain.validate({**BASE, "partition": {**DIRICHLET, "phases": None}}).fingerprint in prints
    )


def test_sizes_that_do_not_change_are_those_of_each_round():
    sizes = np.array([3, 0, 5])
    by_round = SizesByRound.of(sizes)
    assert by_round.at(7) is sizes and by_round.largest is sizes and by_round.phase(7) == 0
