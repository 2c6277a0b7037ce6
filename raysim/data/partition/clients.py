"""The examples of each client: with which it trains, and which are kept out of training."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np

from raysim.randomness import generator


def mean_size(sizes: np.ndarray) -> float:
    """Return the mean number of examples of the clients that have any; 0 if none has.

    Args:
        sizes: number of examples of each client, [N].
    """
    return float(sizes.sum() / max(np.count_nonzero(sizes), 1))


@dataclass(frozen=True)
class SizesByRound:
    """Numbers of examples of clients that change over the rounds."""

    starts: tuple[int, ...]
    """First round of each phase; the first is 0."""

    phases: tuple[np.ndarray, ...]
    """Number of examples of each client in each phase, int64 [N]."""

    @staticmethod
    def of(sizes: np.ndarray | SizesByRound) -> SizesByRound:
        """Return sizes that may be the same in all rounds.

        Args:
            sizes: number of examples of each client, [N], or these by round.
        """
        return SizesByRound((0,), (sizes,)) if isinstance(sizes, np.ndarray) else sizes

    def phase(self, t: int) -> int:
        """Return the number of the phase in which round `t` is.

        Args:
            t: number of the round, from 0.
        """
        return bisect_right(self.starts, t) - 1

    def at(self, t: int) -> np.ndarray:
        """Return the number of examples of each client in round `t`, int64 [N].

        Args:
            t: number of the round, from 0.
        """
        return self.phases[self.phase(t)]

    @property
    def largest(self) -> np.ndarray:
        """The largest number of examples of each client, int64 [N]."""
        return self.phases[0] if len(self.phases) == 1 else np.max(self.phases, axis=0)


@dataclass(frozen=True)
class ExampleLists:
    """A list of examples for each of N clients, concatenated."""

    indices: np.ndarray
    """Positions of the clients' examples in a half of the data set, int64 [sum of sizes]."""

    offsets: np.ndarray
    """Bounds of the lists, int64 [N + 1]; client i holds `indices[offsets[i]:offsets[i + 1]]`."""

    phases: tuple[tuple[int, ExampleLists], ...] = field(default=(), kw_only=True)
    """The lists of each phase with its first round, if they change over the rounds; the lists
    themselves then hold the examples of all phases."""

    @classmethod
    def of(cls, owner: np.ndarray, n_clients: int) -> ExampleLists:
        """Return the lists from the owner of each example.

        Args:
            owner: the client of each example, int [n]; -1 for no client.
            n_clients: number of clients, N.
        """
        order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
        sizes = np.bincount(owner[owner >= 0], minlength=n_clients)
        offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        return ExampleLists(order.astype(np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, int64 [N]."""
        return np.diff(self.offsets)

    def client(self, i: int) -> np.ndarray:
        """Return a view of the examples of client `i`, int64 [n_i].

        Args:
            i: number of the client.
        """
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def at(self, t: int) -> ExampleLists:
        """Return the lists in round `t`.

        Args:
            t: number of the round, from 0; for a client that trains, the version that it received.
        """
        if not self.phases:
            return self
        return self.phases[bisect_right(self.phases, t, key=lambda phase: phase[0]) - 1][1]

    @property
    def sizes_by_round(self) -> SizesByRound:
        """Number of examples of each client in each round."""
        if not self.phases:
            return SizesByRound.of(self.sizes)
        return SizesByRound(
            tuple(start for start, _ in self.phases), tuple(part.sizes for _, part in self.phases)
        )

    def after_rounds(self) -> ExampleLists:
        """Return the lists by the number of completed rounds.

        A model after t + 1 rounds is evaluated on the examples of round t.
        """
        later = tuple((start + bool(start), part) for start, part in self.phases)
        return replace(self, phases=later)

    def separated(self, chosen: np.ndarray) -> tuple[ExampleLists, ExampleLists]:
        """Return the lists without the chosen examples, and lists of these.

        Args:
            chosen: whether each of `indices` is chosen, bool [sum of sizes].
        """
        n_chosen_before = np.concatenate([[0], np.cumsum(chosen, dtype=np.int64)])[self.offsets]
        return (
            ExampleLists(self.indices[~chosen], self.offsets - n_chosen_before),
            ExampleLists(self.indices[chosen], n_chosen_before),
        )

    def with_lists(self, lists: ExampleLists, **changes: Any) -> Self:
        """Return these clients with the examples of other lists.

        Args:
            lists: the examples of each client.
            **changes: other fields that change with them.
        """
        return replace(self, indices=lists.indices, offsets=lists.offsets, **changes)

    @property
    def owners(self) -> np.ndarray:
        """The client of each of `indices`, int64 [sum of sizes]."""
        return np.repeat(np.arange(len(self)), self.sizes)


@dataclass(frozen=True)
class Clients(ExampleLists):
    """Partition of the training half: the examples with which each client trains, and others."""

    validation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions in the training half that are held out for validation, int64 [M]."""

    public: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions in the training half that are public data, int64 [M]."""

    test: ExampleLists | None = None
    """Test examples of each client; None if clients have none."""

    test_half: Literal["train", "test"] = "train"
    """The half of the data set in which `test` has its positions."""

    val: ExampleLists | None = None
    """Validation examples of each client, in the training half; None if clients have none."""

    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Numbers of the clients that never train, in ascending order, int64 [H]."""

    reserved: ExampleLists | None = None
    """Examples of the clients that never train; None if all clients do."""

    @property
    def kept_out(self) -> np.ndarray:
        """Positions in the training half with which no client may train, ascending, int64."""
        parts = [self.validation, self.public]
        for lists in (self.test if self.test_half == "train" else None, self.val, self.reserved):
            if lists is not None:
                parts.append(lists.indices)
        # Lists of clients may overlap.
        return np.setdiff1d(np.concatenate(parts), self.indices)

    @property
    def n_training(self) -> int:
        """Number of clients that may train."""
        return len(self) - len(self.held_out)

    @property
    def n_nonempty(self) -> int:
        """Number of clients with training examples."""
        return int(np.count_nonzero(self.sizes))

    def all_examples(self) -> ExampleLists:
        """Return the examples of each client, including those of clients that never train."""
        reserved = self.reserved
        if reserved is None:
            return self
        parts = tuple((start, _together(part, reserved.at(start))) for start, part in self.phases)
        return replace(_together(self, reserved), phases=parts)


def union(lists: Sequence[ExampleLists]) -> ExampleLists:
    """Return for each client the examples that it has in any of some lists, ascending.

    Args:
        lists: lists of the same clients, such as those of each phase.
    """
    n_clients = len(lists[0])
    pairs = np.concatenate([np.stack([part.owners, part.indices]) for part in lists], axis=1)
    owners, indices = np.unique(pairs, axis=1)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=n_clients))])
    return ExampleLists(indices, offsets.astype(np.int64))


def _together(first: ExampleLists, second: ExampleLists) -> ExampleLists:
    """Return lists with the examples of both for each client."""
    order = np.argsort(np.concatenate([first.owners, second.owners]), kind="stable")
    indices = np.concatenate([first.indices, second.indices])[order]
    return ExampleLists(indices, first.offsets + second.offsets)


@dataclass(frozen=True)
class VirtualClients:
    """Partition whose clients draw their examples when they are accessed.

    Nothing is stored. The examples of a client are distinct, but clients may overlap.
    """

    n_clients: int
    """Number of clients, N."""

    samples: int
    """Number of examples of each client."""

    n_examples: int
    """Number of examples in the training half."""

    seed: int
    """Seed of the run."""

    validation: ClassVar = np.empty(0, dtype=np.int64)
    """No validation examples, int64 [0]."""

    public: ClassVar = np.empty(0, dtype=np.int64)
    """No public data, int64 [0]."""

    phases: ClassVar[tuple[()]] = ()
    """The examples do not change over the rounds."""

    def __len__(self) -> int:
        return self.n_clients

    @property
    def n_training(self) -> int:
        """Number of clients that may train: all."""
        return self.n_clients

    @property
    def n_nonempty(self) -> int:
        """Number of clients with training examples: all."""
        return self.n_clients

    def at(self, t: int) -> VirtualClients:
        """Return the clients, which are the same in each round.

        Args:
            t: number of the round, from 0.
        """
        return self

    @property
    def sizes_by_round(self) -> SizesByRound:
        """Number of examples of each client in each round."""
        return SizesByRound.of(self.sizes)

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, int64 [N]: a read-only view of one number."""
        return np.broadcast_to(np.int64(self.samples), (self.n_clients,))

    def client(self, i: int) -> np.ndarray:
        """Return the examples of client `i`, int64 [samples].

        Args:
            i: number of the client.

        Raises:
            IndexError: there is no such client.
        """
        if not 0 <= i < self.n_clients:
            raise IndexError(f"client {i} of {self.n_clients}")
        return generator(self.seed, "virtual", i).choice(
            self.n_examples, self.samples, replace=False
        )


def partition_digest(clients: Clients | VirtualClients) -> str:
    """Return the SHA-256 of a partition in hexadecimal; equal partitions have equal digests.

    Args:
        clients: each client's examples. Virtual clients are digested by their parameters.
    """
    if isinstance(clients, VirtualClients):
        return hashlib.sha256(repr(clients).encode()).hexdigest()
    whole = hashlib.sha256(np.ascontiguousarray(clients.offsets).tobytes())
    whole.update(np.ascontiguousarray(clients.indices).tobytes())
    for name in ("validation", "public"):
        positions: np.ndarray = getattr(clients, name)
        if len(positions):
            whole.update(name.encode() + np.ascontiguousarray(positions).tobytes())
    for name in ("test", "reserved", "val"):
        lists: ExampleLists | None = getattr(clients, name)
        if lists is not None:
            whole.update(name.encode() + lists.offsets.tobytes() + lists.indices.tobytes())
    for start, lists in clients.phases:
        whole.update(f"from {start}".encode() + lists.offsets.tobytes() + lists.indices.tobytes())
    return whole.hexdigest()
