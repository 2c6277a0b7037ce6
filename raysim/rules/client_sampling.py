"""Clients from which a synchronous round is sampled or selected, and users' sampling rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class ClientPool:
    """The clients from which a cohort is sampled."""

    ids: np.ndarray
    """Numbers of the available clients, ascending, [n]."""
    samples: np.ndarray
    """Their numbers of training examples, [n]."""


@dataclass(frozen=True)
class SelectionPool(ClientPool):
    """The clients from which a server rule selects a round, and what the server knows of them.

    All of them have training examples. The arrays have one entry per client, in the order of `ids`;
    the rule may change them.
    """

    loss: np.ndarray
    """Mean training loss of each client over its last round, [n]; nan if it was never seen."""
    duration: np.ndarray
    """Virtual time that each client's last round took, [n]; nan if it was never seen."""
    last_round: np.ndarray
    """The last round in which each client's update was used, [n]; -1 if it was never seen."""
    current_loss: np.ndarray
    """Loss of the current model on the training examples of each candidate, [n]; nan if the client
    is not a candidate (`ServerRule.candidates`), or if its evaluation failed."""
    metrics: dict[str, np.ndarray]
    """Metrics "metric/NAME" that each client reported in its last round, [n] by NAME; see
    `metric`."""
    n_rounds: np.ndarray
    """Number of rounds in which each client's update was used, [n]."""
    size: int
    """`schedule.cohort`, the largest number of clients that may be selected."""
    round: int
    """Number of the round, from 0."""

    def metric(self, name: str) -> np.ndarray:
        """Return a metric that each client reported in its last round, [n]; nan if it has not.

        Before the run a name is refused that no client reports in its first two rounds.

        Args:
            name: NAME of "metric/NAME" in the client's report, or of `task.log`.
        """
        return self.metrics.get(name, np.full(len(self.ids), np.nan))


@dataclass(frozen=True)
class ClientSampling:
    """Base of sampling rules (`schedule.sampling: path.py:Class`).

    A subclass is a frozen dataclass; its fields are set from the section `schedule.sampling`. The
    cohorts of a run are drawn ahead of the training, so a rule must not depend on anything but its
    arguments and its fields.
    """

    @abstractmethod
    def sample(
        self, pool: ClientPool, size: int, t: int, rng: np.random.Generator
    ) -> Sequence[int]:
        """Return the clients of one round, in the order in which they are sampled.

        Args:
            pool: the available clients.
            size: `schedule.cohort`, the largest number of different clients.
            t: number of the round, from 0.
            rng: a generator that is keyed by the seed and the round.

        Returns:
            Numbers from `pool.ids`. A client that occurs k times counts k times in means of
            uniform weights.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no sample")


def client_numbers(returned: Any, pool: ClientPool) -> list[int]:
    """Return the numbers of clients that a rule returned.

    Args:
        returned: what the rule returned.
        pool: the clients from which it chose.

    Raises:
        ValueError: they are no whole numbers from the pool; the message begins with "returns".
    """
    if isinstance(returned, np.ndarray | Tensor):
        returned = returned.tolist()
    if not isinstance(returned, Iterable):
        kind = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise ValueError(f"returns {kind}; return a list of numbers from pool.ids")
    clients = [client.item() if isinstance(client, Tensor) else client for client in returned]
    for client in clients:
        # A mask of the pool would be clients 0 and 1.
        if isinstance(client, bool | np.bool_) or not isinstance(client, int | np.integer):
            raise ValueError(f"returns {client!r} as a client; return whole numbers from pool.ids")
    clients = [int(client) for client in clients]
    if unknown := sorted(set(clients) - set(pool.ids.tolist())):
        raise ValueError(
            f"returns client {unknown[0]}, which is not in pool.ids; return numbers from pool.ids, "
            "not positions in it"
        )
    return clients
