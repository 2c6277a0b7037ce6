"""Data kept out of training: validation and public examples, clients' tests, whole clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from raysim.config.sections.data import LocalTest
from raysim.data.dataset import Dataset
from raysim.data.own.natural_users import listed
from raysim.data.partition.clients import Clients, ExampleLists
from raysim.errors import ConfigError
from raysim.randomness import generator


def hold_out(
    clients: Clients, part: Literal["val", "public"], fraction: float, rng: np.random.Generator
) -> Clients:
    """Move examples of clients to the validation set or the public data.

    Args:
        clients: the partition.
        part: where they move.
        fraction: probability that an example moves; 0 returns the partition as it is.
        rng: generator of the draws.

    Raises:
        ConfigError: all examples move, or none.
    """
    if not fraction:
        return clients
    chosen = rng.random(len(clients.indices)) < fraction
    if chosen.all() or not chosen.any():
        outcome, fix = ("all", "lower") if chosen.all() else ("none", "raise")
        raise ConfigError(
            f"partition.{part}_fraction: {fraction:g} takes {outcome} of the clients' "
            f"{len(chosen)} examples; {fix} it"
        )
    lists, moved = clients.separated(chosen)
    name = "validation" if part == "val" else "public"
    return clients.with_lists(lists, **{name: moved.indices})


def held_out_clients(n_clients: int, share: float, seed: int) -> np.ndarray:
    """Return the numbers of the clients that never train, in ascending order, int64 [H].

    Args:
        n_clients: number of all clients.
        share: the share of them that is held out; if it is not 0, at least one client is.
        seed: seed of the run.
    """
    count = max(1, round(share * n_clients)) if share else 0
    drawn = generator(seed, "held-out clients").permutation(n_clients)[:count]
    return np.sort(drawn).astype(np.int64)


def hold_out_clients(clients: Clients, held_out: np.ndarray) -> Clients:
    """Take the clients out of training whose numbers are in `held_out`.

    Args:
        clients: the partition.
        held_out: numbers of the clients, int64 [H], ascending; their examples are reserved for
            evaluation.

    Raises:
        ConfigError: no remaining client has an example.
    """
    if not len(held_out):
        return clients
    lists, reserved = clients.separated(np.isin(clients.owners, held_out))
    if not len(lists.indices):
        raise ConfigError(
            f"evaluate.clients.held_out: {len(held_out)} of {len(clients)} clients are held out, "
            "which leaves no client with data to train; lower it"
        )
    return clients.with_lists(lists, held_out=held_out, reserved=reserved)


def add_tests(
    clients: Clients,
    test: LocalTest,
    dataset: Dataset,
    users: np.ndarray | None,
    rng: np.random.Generator,
) -> Clients:
    """Give each client test examples of its own.

    Args:
        clients: the clients, without test examples.
        test: where the test examples come from.
        dataset: the data set.
        users: the client of each user of the data set, int64 [users]; None: users are no clients.
        rng: generator of the draws.

    Raises:
        ConfigError: `test.matched` needs class labels, or `test.natural` users with test examples,
            which the data set does not have.
    """
    if test.natural:
        return _users_tests(clients, dataset, users)
    if test.fraction is None:
        return _matched_tests(clients, dataset, rng)
    lists, kept = _divided(clients, test.fraction, rng)
    return clients.with_lists(lists, test=kept)


def add_validation(clients: Clients, fraction: float, rng: np.random.Generator) -> Clients:
    """Move a share of each client's examples to its validation examples.

    Args:
        clients: the clients, with their test examples.
        fraction: the share; at least one example stays in training.
        rng: generator of the draws.
    """
    lists, kept = _divided(clients, fraction, rng)
    return clients.with_lists(lists, val=kept)


def _divided(
    clients: Clients, fraction: float, rng: np.random.Generator
) -> tuple[ExampleLists, ExampleLists]:
    """Return each client's examples without a random share of them, and this share."""
    owners, sizes = clients.owners, clients.sizes
    shuffled = np.lexsort((rng.random(len(owners)), owners))
    rank = np.empty_like(owners)
    rank[shuffled] = np.arange(len(owners)) - clients.offsets[owners]
    counts = np.minimum(np.floor(fraction * sizes + 0.5), np.maximum(sizes - 1, 0))
    return clients.separated(rank < counts[owners])


def _users_tests(clients: Clients, dataset: Dataset, users: np.ndarray | None) -> Clients:
    """Give each client the test examples of its users; those without a user go to nobody."""
    key = "partition.test.natural"
    if users is None:
        raise ConfigError(
            f"{key}: each user's own test examples need clients that are users; set "
            "partition.name=natural, or use partition.test.fraction or matched"
        )
    if dataset.test_groups is None:
        training_users = listed(dataset.group_names)
        why = (
            f"the users of the test examples of {dataset.name} ({listed(dataset.new_test_users)}) "
            f"have no training examples; give them the names of users who have ({training_users})"
            if dataset.new_test_users
            else f"the test examples of {dataset.name} have no users who have training examples "
            f"({training_users}); give them such users"
        )
        raise ConfigError(f"{key}: {why}, or use partition.test.fraction or matched")
    # One more entry, so that -1, no user, leads to -1, no client.
    owner = np.append(users, -1)[dataset.test_groups]
    return replace(clients, test=ExampleLists.of(owner, len(clients)), test_half="test")


def _matched_tests(clients: Clients, dataset: Dataset, rng: np.random.Generator) -> Clients:
    """Deal out the test half: of each class, a client gets its share of the training examples.

    The shares are cumulated over the clients in random order and rounded down, so a client's number
    of test examples of a class differs from its share by less than one.
    """
    y, y_test = dataset.y, dataset.y_test
    dataset.check_labels("partition.test.matched", "it deals out by class and")
    owner = np.full(len(y_test), -1, dtype=np.int64)
    labels, owners = y[clients.indices], clients.owners
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(y_test == c))
        counts = np.bincount(owners[labels == c], minlength=len(clients))
        order = rng.permutation(len(clients))
        cuts = np.cumsum(counts[order]) * len(members) // counts.sum()
        owner[members] = order[np.searchsorted(cuts, np.arange(len(members)), side="right")]
    return replace(clients, test=ExampleLists.of(owner, len(clients)), test_half="test")
