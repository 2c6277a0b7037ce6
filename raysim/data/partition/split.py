"""Partitions of the training examples over clients.

Most partitions assign one owner to each example (-1: no client), so clients cannot overlap, and the
examples of a client are in ascending order; `file`, `virtual` and a user's own do not. The order of
training is drawn elsewhere, anew for each pass. All partitions except `virtual` can hold out
examples for validation, and keep examples or whole clients for the evaluation of clients: these are
removed from training after the partition is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config.sections.data import (
    IID,
    Dirichlet,
    FromFile,
    HeavyTail,
    Natural,
    OwnPartition,
    Partition,
    Shards,
    SlowClass,
    Virtual,
    slow_clients,
)
from raysim.data.dataset import Dataset
from raysim.data.partition.clients import Clients, ExampleLists, VirtualClients
from raysim.data.partition.given_partitions import divide_by_function, read_partition
from raysim.data.partition.kept_out import (
    add_tests,
    add_validation,
    held_out_clients,
    hold_out,
    hold_out_clients,
)
from raysim.data.partition.phases import Drawn, add_phases
from raysim.errors import ConfigError
from raysim.randomness import generator

DIVIDED_BY_CLASS = (Dirichlet, SlowClass, Shards, HeavyTail)
"""Partitions that divide the examples by their labels."""


def split_dataset(
    partition: Partition, dataset: Dataset, seed: int, held_out: float = 0.0
) -> Clients | VirtualClients:
    """Partition the training half over clients.

    Args:
        partition: the kind of partition and its parameters.
        dataset: the data set.
        seed: seed of the run; the same seed gives the same partition on every machine.
            `partition.seed` takes its place in all but the clients that never train.
        held_out: share of the clients that never train, at least 0 and below 1.

    Returns:
        The clients, with the examples that are held out for validation and their test examples.

    Raises:
        ConfigError: the data set is too small for the partition or lacks natural groups or class
            labels, the file or the user's function is invalid, or no example is left to train
            on.
    """
    own_seed = seed if partition.seed is None else partition.seed
    n = len(dataset.y)
    _refuse_unused_users(partition, dataset)
    if isinstance(partition, Virtual):
        _require(partition.samples <= n, dataset, f"partition.samples={partition.samples}")
        return VirtualClients(partition.clients, partition.samples, n, own_seed)
    draw: Drawn | None = None
    if isinstance(partition, FromFile):
        lists = read_partition(Path(partition.path).expanduser(), n)
    else:
        draw = partial(_drawn, partition, dataset)
        lists = draw(generator(own_seed, "partition"))
    clients = Clients(lists.indices, lists.offsets)
    users = _users(clients, dataset) if isinstance(partition, Natural) else None
    if isinstance(partition, Natural) and partition.clients is None:
        draw = None  # one client for each user is no draw
    rng = generator(own_seed, "validation")
    clients = hold_out(clients, "val", partition.val_fraction, rng)
    rng = generator(own_seed, "public data")
    clients = hold_out(clients, "public", partition.public_fraction, rng)
    if partition.test is not None:
        rng = generator(own_seed, "local test")
        clients = add_tests(clients, partition.test, dataset, users, rng)
    if partition.val is not None:
        rng = generator(own_seed, "local validation")
        clients = add_validation(clients, partition.val.fraction, rng)
    clients = hold_out_clients(clients, held_out_clients(len(clients), held_out, seed))
    if partition.phases is not None:
        clients = add_phases(clients, partition.phases, dataset, own_seed, draw)
    return clients


def _drawn(partition: Any, dataset: Dataset, rng: np.random.Generator) -> ExampleLists:
    """Return a draw of a partition."""
    if isinstance(partition, OwnPartition):
        return divide_by_function(partition, dataset.y, rng)
    if isinstance(partition, DIVIDED_BY_CLASS):
        dataset.check_labels("partition.name", f"'{partition.name}' divides by class and")
    owner = OWNERS[type(partition)](partition, dataset, rng)
    return ExampleLists.of(owner, partition.clients or len(dataset.group_names))


def _users(clients: Clients, dataset: Dataset) -> np.ndarray:
    """Return the client of each user of the data set, int64 [users]; -1 for none."""
    assert dataset.groups is not None  # `_natural` has refused other data sets
    users = np.full(len(dataset.group_names), -1, dtype=np.int64)
    of_examples = dataset.groups[clients.indices]
    users[of_examples[of_examples >= 0]] = clients.owners[of_examples >= 0]
    return users


def _refuse_unused_users(partition: Partition, dataset: Dataset) -> None:
    """Refuse test examples with users that the run would not use."""
    if dataset.test_groups is None or (partition.test is not None and partition.test.natural):
        return
    if isinstance(partition, Natural):
        raise ConfigError(
            f"partition.test: the test examples of {dataset.name} have users; set "
            "partition.test=natural, so that each client has those of its users (the test set of "
            "all of them is evaluated too), or leave the users of the test examples out"
        )
    raise ConfigError(
        f"partition.name: '{partition.name}' does not use the users of {dataset.name}, which its "
        "test examples have too; set partition=natural and partition.test=natural, or leave the "
        "users of the test examples out"
    )


def _require(enough: bool, dataset: Dataset, keys: str) -> None:
    """Raise `ConfigError` naming `keys` unless the data set has enough examples."""
    if not enough:
        raise ConfigError(
            f"{keys}: too many for the {len(dataset.y)} training examples of {dataset.name}; lower "
            "them"
        )


def _iid(p: IID, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Divide all examples uniformly at random; sizes differ by at most one."""
    n = len(dataset.y)
    _require(p.clients <= n, dataset, f"partition.clients={p.clients}")
    owner = np.empty(n, dtype=np.int64)
    owner[rng.permutation(n)] = np.arange(n) * p.clients // n
    return owner


DEFAULT_MAX_REDRAWS = 1000
"""Draws of a partition before it counts as impossible."""


def _dirichlet(p: Dirichlet, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Draw a Dirichlet partition until all clients have at least `redraw_below` examples."""
    draw = _class_over_clients if p.kind == "class_over_clients" else _client_over_classes
    _require(
        p.clients * p.redraw_below <= len(dataset.y),
        dataset,
        f"partition.clients={p.clients}, redraw_below={p.redraw_below}",
    )
    for _ in range(DEFAULT_MAX_REDRAWS):
        owner = draw(p, dataset, rng)
        if not p.redraw_below or np.bincount(owner, minlength=p.clients).min() >= p.redraw_below:
            return owner
    raise ConfigError(
        f"partition.redraw_below: in each of {DEFAULT_MAX_REDRAWS} draws a client had fewer than "
        f"{p.redraw_below} examples; lower it, or raise partition.alpha, or set "
        "partition.min_samples"
    )


def _slow_class(p: SlowClass, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Divide all classes except one by `_class_over_clients`; the slow clients share that class.

    The slow clients are the last ones. There is no minimal number of examples.
    """
    if p.label >= dataset.n_classes:
        raise ConfigError(
            f"partition.label: {dataset.name} has classes 0 to {dataset.n_classes - 1} (given: "
            f"{p.label})"
        )
    owner = _class_over_clients(
        Dirichlet(name="dirichlet", clients=p.clients, alpha=p.alpha, min_samples=0), dataset, rng
    )
    members = np.flatnonzero(dataset.y == p.label)
    slow = slow_clients(p.clients, p.slow)
    owner[rng.permutation(members)] = p.clients - slow + np.arange(len(members)) % slow
    return owner


def _class_over_clients(p: Dirichlet, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Draw the partition Dp(alpha) of Luo 2023, as the authors' code does.

    First every client receives `min_samples` examples, each from the end of a class that is drawn
    uniformly. Then each class is shuffled and cut at floor(cumsum(q) n_c), where n_c is the number
    of its remaining examples and q ~ Dirichlet(alpha) over the clients.
    """
    y = dataset.y
    keys = f"partition.clients={p.clients} with partition.min_samples={p.min_samples}"
    _require(p.clients * p.min_samples <= len(y), dataset, keys)
    pools = _pools(y)
    n_classes = len(pools)
    left = [len(pool) for pool in pools]
    owner = np.empty(len(y), dtype=np.int64)
    for client in np.repeat(np.arange(p.clients), p.min_samples):
        while not left[c := int(rng.integers(n_classes))]:
            pass
        left[c] -= 1
        owner[pools[c][left[c]]] = client
    for c in range(n_classes):
        members = rng.permutation(pools[c][: left[c]])
        q = np.exp(_log_dirichlet(rng, p.alpha, (p.clients,)))
        cuts = np.floor(np.cumsum(q[:-1]) * len(members))
        owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    return owner


def _client_over_classes(p: Dirichlet, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Draw clients of equal size, each with class probabilities q_i ~ Dirichlet(alpha).

    This is Hsu 2019 with concentration alpha * classes, as in the code of FedDyn (Acar 2021). The
    places of all clients are filled in random order. The class of a place is drawn from its
    client's q_i, renormalised over the classes that still have examples. All places are drawn at
    once; where a class runs out, the places after that are drawn again.
    """
    _, y = np.unique(dataset.y, return_inverse=True)  # classes without examples take no part
    n = len(y)
    n_classes = int(y.max()) + 1
    keys = f"partition.clients={p.clients} with partition.min_samples={p.min_samples}"
    _require(p.clients * max(p.min_samples, 1) <= n, dataset, keys)
    log_q = _log_dirichlet(rng, p.alpha, (p.clients, n_classes))
    client = rng.permutation(np.arange(n) % p.clients)
    label = np.empty(n, dtype=np.int64)
    left = np.bincount(y, minlength=n_classes)
    done = 0
    while done < n:
        label[done:] = _draw_classes(rng, np.where(left > 0, log_q, -np.inf), client[done:])
        drawn = np.argsort(label[done:], kind="stable")
        counts = np.bincount(label[done:], minlength=len(left))
        starts = np.cumsum(counts) - counts
        overdrawn = np.flatnonzero(counts > left)
        # The first place whose class is empty ends this pass.
        end = done + min([n - done, *(drawn[starts[c] + left[c]] for c in overdrawn)])
        left = left - np.bincount(label[done:end], minlength=len(left))
        done = end
    owner = np.empty(n, dtype=np.int64)
    owner[_by_class(y, rng)] = client[np.argsort(label, kind="stable")]
    return owner


def _draw_classes(rng: np.random.Generator, log_q: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Draw a column for each entry of `rows`, with probability proportional to exp(log_q[row])."""
    cumulative = np.cumsum(np.exp(log_q - log_q.max(axis=1, keepdims=True)), axis=1)
    # u is in (0, total], so that no column of weight 0 is drawn.
    u = (1 - rng.random(len(rows))) * cumulative[rows, -1]
    return (cumulative[rows] < u[:, None]).sum(axis=1)


def _shards(p: Shards, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Assign shards of examples sorted by label to clients at random (McMahan 2017).

    There are clients * classes shards. Examples of one label are shuffled.
    """
    n = len(dataset.y)
    n_shards = p.clients * p.classes
    _require(
        n_shards <= n, dataset, f"partition.clients={p.clients} with partition.classes={p.classes}"
    )
    owner = np.empty(n, dtype=np.int64)
    owner_of_shard = rng.permutation(n_shards) // p.classes
    order = _by_class(dataset.y, rng)
    owner[order] = owner_of_shard[np.arange(n) * n_shards // n]
    return owner


def _heavy_tail(p: HeavyTail, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Draw clients of one or two classes whose sizes are log-normal (Xu 2022).

    The size is min(1 + floor(k), max_samples) with k ~ lognormal(mean, sigma). With two classes it
    is at least 2, and the division between the classes is drawn uniformly such that both are
    present. A class is drawn uniformly among those with enough examples left. Examples that remain
    belong to no client.
    """
    sizes = np.minimum(
        1 + np.floor(rng.lognormal(p.mean, p.sigma, p.clients)), p.max_samples
    ).astype(np.int64)
    sizes = np.maximum(sizes, p.classes)
    pools = [rng.permutation(pool) for pool in _pools(dataset.y)]
    left = np.array([len(pool) for pool in pools])
    owner = np.full(len(dataset.y), -1, dtype=np.int64)
    for client, size in enumerate(sizes):
        first = int(rng.integers(1, size)) if p.classes == 2 else size
        previous = -1
        for count in (first, size - first)[: p.classes]:
            possible = np.flatnonzero((left >= count) & (np.arange(len(left)) != previous))
            _require(
                possible.size > 0,
                dataset,
                f"partition.clients={p.clients} with {sizes.sum()} examples in all",
            )
            c = possible[rng.integers(possible.size)]
            previous = c
            left[c] -= count
            owner[pools[c][left[c] : left[c] + count]] = client
    return owner


def _natural(p: Natural, dataset: Dataset, rng: np.random.Generator) -> np.ndarray:
    """Assign natural groups to clients: one each, or at random to fewer clients.

    Clients' numbers of groups differ by at most one. Examples without a group are shuffled and
    divided in proportion to the clients' examples with a group (Xu 2022, COVID-CT).
    """
    if dataset.groups is None:
        raise ConfigError(
            f"partition.name: natural needs a data set with users; {dataset.name} has none: take "
            "another partition, or give `users` with your own data"
        )
    n_groups = len(dataset.group_names)
    n_clients = p.clients or n_groups
    if n_clients > n_groups:
        raise ConfigError(
            f"partition.clients: {n_clients} are asked for, but {dataset.name} has only {n_groups} "
            "users; lower it, or write partition={name: natural, clients: null} for one client for "
            "each user"
        )
    client = rng.permutation(n_groups) % n_clients if p.clients else np.arange(n_groups)
    grouped = dataset.groups >= 0
    owner = np.empty(len(dataset.y), dtype=np.int64)
    owner[grouped] = client[dataset.groups[grouped]]
    others = rng.permutation(np.flatnonzero(~grouped))
    ends = (
        np.cumsum(np.bincount(owner[grouped], minlength=n_clients))
        * len(others)
        // np.count_nonzero(grouped)
    )
    owner[others] = np.searchsorted(ends, np.arange(len(others)), side="right")
    return owner


OWNERS: dict[type, Callable[[Any, Dataset, np.random.Generator], np.ndarray]] = {
    IID: _iid,
    Dirichlet: _dirichlet,
    SlowClass: _slow_class,
    Shards: _shards,
    HeavyTail: _heavy_tail,
    Natural: _natural,
}
"""For each kind of partition the function that returns the owner of each example, int [n]; -1: no
client."""


def _pools(y: np.ndarray) -> list[np.ndarray]:
    """Return the examples of each class that has any, in ascending order."""
    ends = np.cumsum(np.unique(y, return_counts=True)[1])
    return np.split(np.argsort(y, kind="stable"), ends[:-1])


def _by_class(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return all examples sorted by class, in random order within a class."""
    order = rng.permutation(len(y))
    return order[np.argsort(y[order], kind="stable")]


def _log_dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Draw logarithms of Dirichlet(alpha) vectors along the last axis.

    They stay exact where all gamma variates underflow, because log G(alpha) =
    log G(alpha + 1) + log(U) / alpha (Marsaglia and Tsang 2000, section 6). Gamma variates divided
    by their sum would give NaN if alpha is so small that all of them are 0.
    """
    log_gamma = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    top = log_gamma.max(axis=-1, keepdims=True)
    return log_gamma - top - np.log(np.exp(log_gamma - top).sum(axis=-1, keepdims=True))
