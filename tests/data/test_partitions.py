"""Partitions: who holds what, to the index, and with the right statistics."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import claiming
from support.real_data import real_data_set

from raysim.config import explain
from raysim.config.explain import validate
from raysim.config.sections.data import Data
from raysim.data import Clients, Dataset, load_dataset, partition_digest, split_dataset
from raysim.data.partition.split import _log_dirichlet
from raysim.errors import ConfigError
from raysim.randomness import generator

RNG = np.random.default_rng(0)


def partition(**keys):
    return validate(
        {"rounds": 1, "data": "digits", "partition": keys, "algorithm": "fedavg"}
    ).partition


def dataset(labels, groups=None, n_groups=0) -> Dataset:
    y = np.asarray(labels, dtype=np.int64)
    x = np.zeros((len(y), 1, 2, 2), dtype=np.uint8)
    one = np.ones(1, dtype=np.float32)
    classes = tuple(map(str, range(int(y.max()) + 1)))
    groups = None if groups is None else np.asarray(groups, dtype=np.int32)
    return Dataset(
        "toy",
        x,
        y,
        x,
        y,
        classes,
        one,
        one,
        groups=groups,
        group_names=tuple(map(str, range(n_groups))),
    )


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(Data(name="digits"))


def lists(clients) -> list[list[int]]:
    return [clients.client(i).tolist() for i in range(len(clients))]


def assert_strict(clients: Clients, n: int) -> None:
    """Every example belongs to exactly one client."""
    assert np.array_equal(np.sort(clients.indices), np.arange(n))
    assert (
        clients.indices.dtype
        == clients.offsets.dtype
        == clients.sizes.dtype
        == clients.client(0).dtype
        == np.int64
    )


STRICT = [
    {"name": "iid", "clients": 7},
    {"name": "dirichlet", "clients": 20, "alpha": 0.1},
    {"name": "dirichlet", "clients": 20, "alpha": 0.1, "kind": "client_over_classes"},
    {"name": "shards", "clients": 30, "classes": 2},
    {"name": "dirichlet", "clients": 20, "alpha": 1.0, "min_samples": 0, "redraw_below": 20},
    {"name": "slow_class", "clients": 50, "alpha": 0.5, "label": 3},
]
EVERY = [
    *STRICT,
    {"name": "heavy_tail", "clients": 100, "classes": 1},
    {"name": "heavy_tail", "clients": 100, "classes": 2},
    {"name": "virtual", "clients": 50, "samples": 20},
]


@pytest.mark.parametrize("keys", STRICT, ids=str)
def test_strict_partitions_give_every_example_to_one_client(keys, digits):
    clients = split_dataset(partition(**keys), digits, 0)
    assert_strict(clients, len(digits.y))
    assert len(clients) == keys["clients"]
    assert clients.sizes.sum() == len(digits.y)
    assert [len(clients.client(i)) for i in range(len(clients))] == clients.sizes.tolist()


@pytest.mark.parametrize("keys", EVERY, ids=str)
def test_the_seed_alone_decides(keys, digits):
    first, again, other = (split_dataset(partition(**keys), digits, seed) for seed in (3, 3, 4))
    assert lists(first) == lists(again) != lists(other)
    assert partition_digest(first) == partition_digest(again) != partition_digest(other)
    for i in range(len(first)):
        assert len(set(first.client(i).tolist())) == first.sizes[i]


def test_partitions_are_pinned_to_the_index():
    """Changing these changes every published result: it must be deliberate."""
    toy = dataset(np.arange(12) % 3)
    found = {str(keys): lists(split_dataset(partition(**keys), toy, 5)) for keys in PINNED_KEYS}
    assert list(found.values()) == PINNED


PINNED_KEYS = [
    {"name": "iid", "clients": 3},
    {"name": "dirichlet", "clients": 3, "alpha": 0.5, "min_samples": 1},
    {
        "name": "dirichlet",
        "clients": 3,
        "alpha": 0.5,
        "min_samples": 1,
        "kind": "client_over_classes",
    },
    {"name": "shards", "clients": 3, "classes": 2},
    {"name": "heavy_tail", "clients": 3, "mean": 0.0},
    {"name": "virtual", "clients": 2, "samples": 3},
]
PINNED = [
    [[2, 6, 7, 11], [0, 3, 8, 9], [1, 4, 5, 10]],
    [[9], [2, 3, 4, 5, 6, 10, 11], [0, 1, 7, 8]],
    [[6, 7, 9, 11], [1, 3, 8, 10], [0, 2, 4, 5]],
    [[2, 5, 7, 10], [3, 6, 8, 11], [0, 1, 4, 9]],
    [[0, 6, 9], [5], [8, 11]],
    [[11, 6, 7], [9, 2, 7]],
]


@given(n=st.integers(1, 60), clients=st.integers(1, 60))
def test_iid_sizes_differ_by_at_most_one(n, clients):
    toy = dataset(np.zeros(n))
    if clients > n:
        with pytest.raises(ConfigError, match=r"partition\.clients"):
            split_dataset(partition(name="iid", clients=clients), toy, 0)
        return
    dealt = split_dataset(partition(name="iid", clients=clients), toy, 0)
    assert_strict(dealt, n)
    assert np.ptp(dealt.sizes) <= 1


# Dirichlet


def literal_class_over_clients(y, n_classes, n_clients, alpha, min_samples, seed):
    """Section 9.1 in plain lists: pops from the end of a random class, then shuffle, cumsum, cut."""
    rng = generator(seed, "partition")
    pools = [[k for k, label in enumerate(y) if label == c] for c in range(n_classes)]
    clients = [[] for _ in range(n_clients)]
    for mine in clients:
        for _ in range(min_samples):
            c = rng.integers(n_classes)
            while len(pools[c]) == 0:
                c = rng.integers(n_classes)
            mine.append(pools[c].pop())
    for pool in pools:
        pool = [pool[k] for k in rng.permutation(len(pool))]
        q = np.exp(_log_dirichlet(rng, alpha, (n_clients,)))
        start, total = 0, 0.0
        for k in range(n_clients):
            total += q[k]
            end = len(pool) if k == n_clients - 1 else int(total * len(pool))
            clients[k] += pool[start:end]
            start = end
    return [sorted(mine) for mine in clients]


@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("min_samples", [0, 2, 10])
def test_class_over_clients_is_the_published_procedure(alpha, min_samples, digits):
    keys = {"name": "dirichlet", "clients": 40, "alpha": alpha, "min_samples": min_samples}
    clients = split_dataset(partition(**keys), digits, 1)
    assert lists(clients) == literal_class_over_clients(
        digits.y.tolist(), 10, 40, alpha, min_samples, 1
    )
    assert clients.sizes.min() >= min_samples


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any),
    n_clients=st.integers(1, 12),
    alpha=st.sampled_from([0.001, 0.01, 0.3, 5.0]),
    min_samples=st.integers(0, 3),
    kind=st.sampled_from(["class_over_clients", "client_over_classes"]),
    seed=st.integers(0, 5),
)
def test_dirichlet_is_strict_and_keeps_its_minimum(
    counts, n_clients, alpha, min_samples, kind, seed
):
    """Tiny and empty classes: the guards (draw another class, renormalise) are met all the time."""
    toy = dataset(np.repeat(np.arange(len(counts)), counts))
    keys = {"clients": n_clients, "alpha": alpha, "min_samples": min_samples, "kind": kind}
    p = partition(name="dirichlet", **keys)
    needed = max(min_samples, 1) if kind == "client_over_classes" else min_samples
    if n_clients * needed > sum(counts):
        with pytest.raises(
            ConfigError,
            match=r"partition\.clients=\d+ with partition\.min_samples=\d+: too many for",
        ):
            split_dataset(p, toy, seed)
        return
    clients = split_dataset(p, toy, seed)
    assert_strict(clients, sum(counts))
    assert clients.sizes.min() >= min_samples
    if kind == "client_over_classes":
        assert np.ptp(clients.sizes) <= 1


@pytest.mark.parametrize("alpha", [1e-4, 0.001, 0.01, 0.1, 1.0, 50.0])
def test_log_dirichlet_has_the_moments_of_dirichlet(alpha):
    """E q = 1/K, Var q = (K - 1) / (K^2 (K alpha + 1)); finite where gamma variates underflow."""
    k, n = 10, 20_000
    log_q = _log_dirichlet(generator(0, "test"), alpha, (n, k))
    assert np.isfinite(log_q).all()
    q = np.exp(log_q)
    np.testing.assert_allclose(q.sum(axis=1), 1, rtol=1e-12)
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    np.testing.assert_allclose(q.mean(axis=0), 1 / k, atol=5 * np.sqrt(variance / n))
    np.testing.assert_allclose(q.var(axis=0).mean(), variance, rtol=0.05)


def literal_client_over_classes(y, n_classes, n_clients, alpha, rng):
    """Place by place: a class from the client's mix, renormalised over the classes that have
    examples left."""
    prior = rng.dirichlet([alpha] * n_classes, n_clients)
    left = np.bincount(y, minlength=n_classes)
    counts = np.zeros((n_clients, n_classes), dtype=int)
    for client in rng.permutation(np.arange(len(y)) % n_clients):
        weights = prior[client] * (left > 0)
        c = int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))
        left[c] -= 1
        counts[client, c] += 1
    return counts


def test_client_over_classes_has_the_statistics_of_drawing_place_by_place():
    """How concentrated the clients are (sum of squared class shares), in the mean over many
    partitions."""
    y, n_clients, alpha, repeats = np.repeat(np.arange(5), [5, 10, 15, 20, 25]), 5, 0.5, 150
    toy = dataset(y)
    p = partition(name="dirichlet", clients=n_clients, alpha=alpha, kind="client_over_classes")

    def concentration(counts):
        return np.mean(np.sum((counts / counts.sum(axis=1, keepdims=True)) ** 2, axis=1))

    rng = generator(0, "test")
    theirs = [
        concentration(literal_client_over_classes(y, 5, n_clients, alpha, rng))
        for _ in range(repeats)
    ]
    ours = []
    for seed in range(repeats):
        clients = split_dataset(p, toy, seed)
        ours.append(
            concentration(
                np.stack([np.bincount(y[clients.client(i)], minlength=5) for i in range(n_clients)])
            )
        )
    error = np.sqrt((np.var(theirs) + np.var(ours)) / repeats)
    assert abs(np.mean(theirs) - np.mean(ours)) < 4 * error
    assert error < 0.02


# The others


def test_shards_are_of_few_classes_and_equal_sizes():
    toy = dataset(np.repeat(np.arange(10), 60))
    for classes in (1, 2, 3):
        clients = split_dataset(partition(name="shards", clients=20, classes=classes), toy, 0)
        assert_strict(clients, 600)
        assert set(clients.sizes) == {30}
        held = [len(set(toy.y[clients.client(i)])) for i in range(20)]
        assert max(held) <= classes
        assert classes == 1 or max(held) == classes
    with pytest.raises(
        ConfigError, match=r"partition\.classes=2: too many for the 600 training examples of toy"
    ):
        split_dataset(partition(name="shards", clients=301), toy, 0)


def test_shards_of_one_class_are_random_within_the_class():
    toy = dataset(np.repeat(np.arange(2), 50))
    clients = split_dataset(partition(name="shards", clients=10, classes=1), toy, 0)
    assert any(np.ptp(clients.client(i)) > 10 for i in range(10))


@pytest.mark.parametrize("classes", [1, 2])
def test_heavy_tail(classes):
    toy = dataset(np.arange(60_000) % 10)
    clients = split_dataset(partition(name="heavy_tail", classes=classes), toy, 0)
    assert len(clients) == 5000
    assert len(np.unique(clients.indices)) == len(clients.indices) < 60_000
    assert all(len(set(toy.y[clients.client(i)])) == classes for i in range(5000))
    # the law of 1 + floor(lognormal(1.25, 1)): median 1 + floor(e^1.25) = 4, mean about 6.2, at
    # most 100
    assert clients.sizes.min() == classes
    assert np.median(clients.sizes) == 4
    assert 5.9 < clients.sizes.mean() < 6.6
    assert 50 < clients.sizes.max() <= 100


def test_heavy_tail_splits_two_classes_at_random():
    toy = dataset(np.arange(60_000) % 10)
    clients = split_dataset(partition(name="heavy_tail", classes=2), toy, 0)
    shares = []
    for i in np.flatnonzero(clients.sizes == 5):
        labels = toy.y[clients.client(i)]
        shares.append(np.count_nonzero(labels == labels[0]))
    assert set(shares) == {1, 2, 3, 4}


def test_heavy_tail_needs_examples_enough(digits):
    with pytest.raises(
        ConfigError, match=r"partition\.clients=5000 .*: too many for the 1438 training examples"
    ):
        split_dataset(partition(name="heavy_tail"), digits, 0)


def test_natural_keeps_groups_together_and_spreads_the_rest_in_proportion():
    groups = np.repeat([0, 1, 2, -1], [10, 20, 30, 120])
    toy = dataset(np.zeros(180), groups, 3)
    clients = split_dataset(partition(name="natural"), toy, 0)
    assert_strict(clients, 180)
    assert clients.sizes.tolist() == [30, 60, 90]
    for i in range(3):
        assert set(groups[clients.client(i)]) == {i, -1}
    merged = split_dataset(partition(name="natural", clients=2), toy, 0)
    assert_strict(merged, 180)
    held = [set(groups[merged.client(i)]) - {-1} for i in range(2)]
    assert held[0] | held[1] == {0, 1, 2} and not held[0] & held[1]
    assert sorted(map(len, held)) == [1, 2]


def test_natural_needs_groups(digits):
    with pytest.raises(ConfigError, match=r"partition\.name: natural .* digits has none"):
        split_dataset(partition(name="natural"), digits, 0)
    toy = dataset(np.zeros(4), [0, 0, 1, 1], 2)
    with pytest.raises(
        ConfigError,
        match=r"clients: 3 are asked for, but toy has only 2 users; lower it, or write partition=\{",
    ):
        split_dataset(partition(name="natural", clients=3), toy, 0)


def test_natural_covid_ct_is_32_papers():
    covid = real_data_set("covid_ct")
    clients = split_dataset(partition(name="natural"), covid, 0)
    assert_strict(clients, 425)
    assert len(clients) == 32
    positives = np.array([covid.y[clients.client(i)].sum() for i in range(32)])
    assert positives.sum() == 191 and positives.min() > 0
    assert np.abs(clients.sizes - positives * 425 / 191).max() <= 1


def test_virtual_clients_cost_nothing(digits):
    clients = split_dataset(partition(name="virtual", clients=10**9, samples=20), digits, 0)
    assert len(clients) == 10**9
    assert (
        clients.sizes.shape == (10**9,)
        and clients.sizes[-1] == 20
        and clients.sizes.dtype == np.int64
    )
    last = clients.client(10**9 - 1)
    assert last.dtype == np.int64 and len(set(last.tolist())) == 20
    assert last.min() >= 0 and last.max() < len(digits.y)
    with pytest.raises(IndexError, match="client 1000000000 of"):
        clients.client(10**9)
    with pytest.raises(ConfigError, match=r"partition\.samples=2000: too many for the 1438"):
        split_dataset(partition(name="virtual", clients=3, samples=2000), digits, 0)


def test_virtual_clients_draw_uniformly():
    toy = dataset(np.zeros(10))
    clients = split_dataset(partition(name="virtual", clients=3000, samples=3), toy, 0)
    counts = np.bincount(np.concatenate([clients.client(i) for i in range(3000)]), minlength=10)
    assert np.abs(counts - 900).max() < 5 * np.sqrt(3000 * 0.3 * 0.7)


BY_CLASS = [
    {"name": "dirichlet", "alpha": 0.5},
    {"name": "dirichlet", "alpha": 0.1, "min_samples": 0, "kind": "client_over_classes"},
    {"name": "heavy_tail"},
    {"name": "heavy_tail", "classes": 2},
    {"name": "shards"},
]


@pytest.mark.parametrize("keys", BY_CLASS, ids=str)
@pytest.mark.parametrize("numbers", [(0, 99_999), (3, 7), (0, 10, 20), (1, 2, 3, 900_000)])
def test_partitions_by_class_depend_on_the_classes_that_have_examples(keys, numbers):
    """Neither time nor clients depend on the numbers of the labels."""
    order = RNG.integers(0, len(numbers), 600)
    p = partition(clients=20, **keys)
    renumbered = split_dataset(p, dataset(order), 4)
    clients = split_dataset(p, dataset(np.array(numbers)[order]), 4)
    assert partition_digest(clients) == partition_digest(renumbered)


# Validation


@pytest.mark.parametrize(
    "keys", [*EVERY[:-1], {"name": "dirichlet", "clients": 5, "alpha": 9.0}], ids=str
)
@pytest.mark.parametrize(
    ("fraction", "part"), [("val_fraction", "validation"), ("public_fraction", "public")]
)
def test_held_out_examples_are_taken_from_the_same_clients(fraction, part, keys, digits):
    """Nobody else's examples move: clients and validation set together are the partition without
    one."""
    whole = split_dataset(partition(**keys), digits, 2)
    clients = split_dataset(partition(**keys, **{fraction: 0.25}), digits, 2)
    moved = getattr(clients, part)
    held_out = set(moved.tolist())
    assert moved.dtype == clients.offsets.dtype == np.int64
    assert len(held_out) == len(moved) == len(whole.indices) - len(clients.indices)
    for i in range(len(whole)):
        assert clients.client(i).tolist() == [
            k for k in whole.client(i).tolist() if k not in held_out
        ]
    assert held_out <= set(whole.indices.tolist())
    n = len(whole.indices)
    assert abs(len(held_out) - n / 4) < 4 * (n * 3 / 16) ** 0.5, "each with probability 1/4"


def test_public_data_and_validation_set_share_no_example(digits):
    keys = {"name": "iid", "clients": 9, "val_fraction": 0.3}
    validated = split_dataset(partition(**keys), digits, 0)
    clients = split_dataset(partition(**keys, public_fraction=0.3), digits, 0)
    assert np.array_equal(clients.validation, validated.validation)
    parts = [clients.validation, clients.public, clients.indices]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(digits.y)))
    assert np.array_equal(clients.kept_out, np.sort(np.concatenate(parts[:2])))
    assert partition_digest(clients) != partition_digest(validated)


def test_without_a_fraction_nothing_changes(digits):
    plain, none = (
        split_dataset(partition(name="iid", clients=9, **k), digits, 0)
        for k in ({}, {"val_fraction": 0, "public_fraction": 0})
    )
    assert (
        partition_digest(plain)
        == partition_digest(none)
        == "c2aec5a092117d735393633d008501cf8126c7de1e583734f38fe7033f5df6b6"
    )
    assert len(plain.validation) == 0 and plain.validation.dtype == np.int64


def test_the_seed_decides_what_is_held_out(digits):
    p = partition(name="iid", clients=9, val_fraction=0.1)
    assert (
        partition_digest(split_dataset(p, digits, 0))
        == partition_digest(split_dataset(p, digits, 0))
        != partition_digest(split_dataset(p, digits, 1))
    )
    clients = split_dataset(p, digits, 0)
    assert partition_digest(clients) != partition_digest(Clients(clients.indices, clients.offsets))


@pytest.mark.parametrize("keys", EVERY, ids=str)
def test_a_seed_of_its_own_gives_every_run_the_same_clients(keys, digits):
    held_out = {} if keys["name"] == "virtual" else {"val_fraction": 0.2, "test": {"fraction": 0.2}}
    split = partition(**keys, **held_out)
    fixed = partition(**keys, **held_out, seed=5)
    wanted = partition_digest(split_dataset(split, digits, 5))
    assert partition_digest(split_dataset(fixed, digits, 0)) == wanted
    assert partition_digest(split_dataset(fixed, digits, 1)) == wanted
    assert partition_digest(split_dataset(split, digits, 1)) != wanted


def test_clients_that_never_train_are_drawn_from_the_seed_of_the_run(digits):
    fixed = partition(name="iid", clients=40, seed=5)
    left = [tuple(np.flatnonzero(split_dataset(fixed, digits, s, 0.25).sizes == 0)) for s in (0, 1)]
    assert left[0] != left[1]


def test_a_client_may_be_left_with_nothing(tmp_path):
    toy = dataset(np.zeros(400))
    clients = split_dataset(partition(name="iid", clients=400, val_fraction=0.5), toy, 0)
    assert (
        len(clients) == 400
        and set(clients.sizes) == {0, 1}
        and len(clients.validation) == (clients.sizes == 0).sum()
    )
    (tmp_path / "p.json").write_text("[[3, 1], [], [5, 0, 2]]")
    kept = split_dataset(
        partition(name="file", path=str(tmp_path / "p.json"), val_fraction=0.5), toy, 1
    )
    assert [k for k in [3, 1, 5, 0, 2] if k not in kept.validation] == kept.indices.tolist() != []
    for fraction, outcome in ((0.999, "all"), (0.001, "none")):
        given = partition(name="file", path=str(tmp_path / "p.json"), val_fraction=fraction)
        said = rf"partition\.val_fraction: {fraction:g} takes {outcome} of the clients' 5 examples"
        with pytest.raises(ConfigError, match=said):
            split_dataset(given, toy, 1)


@pytest.mark.parametrize("key", ["val_fraction", "public_fraction"])
def test_fractions_that_cannot_be(key):
    with pytest.raises(
        ConfigError, match=rf"^partition\.{key}: virtual clients share their examples"
    ):
        partition(name="virtual", clients=3, **{key: 0.1})
    with pytest.raises(ConfigError, match="clients share cannot be held out"):
        partition(name="p.py:few", clients=3, overlap=True, **{key: 0.1})
    for wrong in (1, -0.1):
        with pytest.raises(ConfigError, match=rf"^partition\.{key}: "):
            partition(name="iid", **{key: wrong})
    assert getattr(partition(name="virtual", clients=3, **{key: 0}), key) == 0


# From a file


def test_file_round_trip(tmp_path):
    toy = dataset(np.zeros(6))
    (tmp_path / "p.json").write_text("[[3, 1], [], [5]]")
    clients = split_dataset(partition(name="file", path=str(tmp_path / "p.json")), toy, 0)
    assert lists(clients) == [[3, 1], [], [5]]
    np.savez(tmp_path / "p.npz", indices=clients.indices.astype(np.int32), offsets=clients.offsets)
    again = split_dataset(partition(name="file", path=str(tmp_path / "p.npz")), toy, 99)
    assert lists(again) == lists(clients) and partition_digest(again) == partition_digest(clients)
    assert again.client(1).dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([[0], [1, 6]], "client 1 has example 6, outside 0 to 5"),
        ([[0], [-1]], "client 1 has example -1, outside 0 to 5"),
        ([[0, 1], [2, 1]], "client 1 has example 1 which is also client 0's; .*overlap is true"),
        ([[0], [3, 2, 3]], "client 1 has example 3 twice"),
        ([[0], [1.5]], "neither a JSON list of lists of indices nor"),
        ([0, 1], "neither a JSON list of lists of indices nor"),
        ({"a": [1]}, "neither a JSON list of lists of indices nor"),
        (3, "neither a JSON list of lists of indices nor"),
        ([[[0]]], "neither a JSON list of lists of indices nor"),
        ([[0], [[1], [2, 3]]], "neither a JSON list of lists of indices nor"),
        ([], "offsets must rise"),
        ([[], []], "no client has an example"),
        ([[0], [True, False]], "expected whole numbers, found true and false; take np.flatnonzero"),
    ],
)
def test_file_mistakes_name_the_client(content, message, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"partition\.path: .*p\.json.*{message}"):
        split_dataset(partition(name="file", path=str(path)), dataset(np.zeros(6)), 0)


def test_a_file_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "p.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match=r"p\.json is neither .*it is not JSON"):
        split_dataset(
            partition(name="file", path=str(tmp_path / "p.json")), dataset(np.zeros(6)), 0
        )


def test_arrays_that_claim_more_than_the_memory(tmp_path):
    path = claiming(tmp_path / "p.npz", 10**13, indices=np.arange(4), offsets=np.array([0, 4]))
    with pytest.raises(ConfigError, match=r"partition\.path: .*p\.npz does not fit in memory"):
        split_dataset(partition(name="file", path=str(path)), dataset(np.zeros(6)), 0)


def test_file_missing_or_damaged(tmp_path):
    toy = dataset(np.zeros(6))
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read: No such file"):
        split_dataset(partition(name="file", path=str(tmp_path / "nowhere.json")), toy, 0)
    np.savez(tmp_path / "p.npz", indices=np.arange(4), offsets=np.array([0, 5, 4]))
    with pytest.raises(ConfigError, match="offsets must rise from 0 to the number of indices, 4"):
        split_dataset(partition(name="file", path=str(tmp_path / "p.npz")), toy, 0)
    np.savez(tmp_path / "q.npz", indices=np.arange(4))
    with pytest.raises(ConfigError, match="offsets"):
        split_dataset(partition(name="file", path=str(tmp_path / "q.npz")), toy, 0)
    for content in (b"", b"not a zip file"):
        (tmp_path / "r.npz").write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"r\.npz is no whole \.npz file; .*indices and offsets"
        ):
            split_dataset(partition(name="file", path=str(tmp_path / "r.npz")), toy, 0)


def test_every_configured_partition_is_known(digits):
    """A new kind in the configuration must be dealt with in `split_dataset`."""
    kinds = set(explain.choices("partition"))
    assert kinds == {keys["name"] for keys in EVERY} | {"natural", "file"}
