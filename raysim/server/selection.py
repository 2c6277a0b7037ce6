"""Selection of the clients of synchronous rounds by a server rule (`ServerRule.select`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.rules.client_sampling import ClientPool, SelectionPool, client_numbers
from raysim.rules.contract import ServerRule, State
from raysim.rules.errors.user_code import breach
from raysim.schedule import ScheduledRound
from raysim.training.messages import ClientResult

METRIC = "history/metric/"
"""First part of the keys under which a checkpoint has the metrics that clients reported."""


class ClientHistory:
    """Facts that the server knows of the last round of each client.

    Args:
        n_clients: number of clients, N.
    """

    def __init__(self, n_clients: int):
        self._loss = np.full(n_clients, np.nan)
        self._duration = np.full(n_clients, np.nan)
        self._last_round = np.full(n_clients, -1, np.int64)
        self._n_rounds = np.zeros(n_clients, np.int64)
        self._metrics: dict[str, np.ndarray] = {}

    def pool(self, available: ClientPool, size: int, t: int) -> SelectionPool:
        """Return the available clients with data, and the facts about their last rounds.

        Args:
            available: the available clients, with their numbers of examples.
            size: largest number of clients to select, `schedule.cohort`.
            t: number of the round, from 0.
        """
        has_data = available.samples > 0
        ids = available.ids[has_data]
        return SelectionPool(
            ids,
            available.samples[has_data],
            self._loss[ids],
            self._duration[ids],
            self._last_round[ids],
            np.full(len(ids), np.nan),
            {name: values[ids] for name, values in self._metrics.items()},
            self._n_rounds[ids],
            size,
            t,
        )

    def record(self, scheduled: ScheduledRound, used: Iterable[ClientResult]) -> None:
        """Record loss, duration and metrics of a round's clients.

        Args:
            scheduled: the round, with the duration of each arrival.
            used: the results of the clients whose updates are used.
        """
        duration = {arrival.client: arrival.duration for arrival in scheduled.arrivals}
        for result in used:
            self._loss[result.client] = result.loss
            self._duration[result.client] = duration[result.client]
            self._last_round[result.client] = scheduled.t
            self._n_rounds[result.client] += 1
            for name, value in result.metrics.items():
                # Clients of other groups, or earlier rounds, may not have reported this metric.
                unknown = np.full(len(self._loss), np.nan)
                self._metrics.setdefault(name, unknown)[result.client] = value

    def pack(self) -> dict[str, Tensor]:
        """Return everything that is known, for a checkpoint."""
        return {
            "history/loss": torch.from_numpy(self._loss),
            "history/duration": torch.from_numpy(self._duration),
            "history/last_round": torch.from_numpy(self._last_round),
            "history/n_rounds": torch.from_numpy(self._n_rounds),
            **{METRIC + name: torch.from_numpy(v) for name, v in self._metrics.items()},
        }

    def unpack(self, packed: Mapping[str, Tensor]) -> None:
        """Restore what `pack` returned; without it nothing is known.

        Args:
            packed: tensors [N] by key: each client's last loss, duration, round and metrics, and
                its number of rounds. A fork of a run whose server rule does not select has none.
        """
        if "history/loss" in packed:
            self._loss = packed["history/loss"].numpy().copy()
            self._duration = packed["history/duration"].numpy().copy()
            self._last_round = packed["history/last_round"].numpy().copy()
            self._n_rounds = packed["history/n_rounds"].numpy().copy()
            self._metrics = {
                key.removeprefix(METRIC): values.numpy().copy()
                for key, values in packed.items()
                if key.startswith(METRIC)
            }


def named_candidates(
    rule: ServerRule, state: State, pool: SelectionPool, rng: Generator
) -> list[int]:
    """Return the clients whose loss a rule asks for, after a check.

    Args:
        rule: the server rule.
        state: the state of the server rule.
        pool: the clients to select from; the rule gets copies of its arrays.
        rng: generator that is keyed by seed and round.

    Raises:
        ContractError: the rule names something else than clients of the pool, or a client twice.
    """
    named = rule.candidates(state, _copied(pool), rng)
    clients = [] if named is None else _checked(rule, "candidates", named, pool)
    if (twice := _first_repeated(clients)) is not None:
        raise breach(
            rule, "candidates", f"returns client {twice} more than once; return each client once"
        )
    return clients


def selected_clients(
    rule: ServerRule, state: State, pool: SelectionPool, rng: Generator
) -> list[int]:
    """Return the clients that a rule selects, after a check.

    Args:
        rule: the server rule.
        state: the state of the server rule.
        pool: the clients to select from; the rule gets copies of its arrays.
        rng: generator that is keyed by seed and round.

    Raises:
        ContractError: the rule selected something else than clients of the pool, a client twice
            without declaring it, or more than `pool.size`.
    """
    clients = _checked(rule, "select", rule.select(state, _copied(pool), rng), pool)
    twice = _first_repeated(clients)
    if twice is not None and not rule.selects_with_replacement:
        raise breach(
            rule,
            "select",
            f"returns client {twice} more than once; return each client once, or set "
            "selects_with_replacement = True in the class",
        )
    # A client that was drawn twice trains once.
    if len(set(clients)) > pool.size:
        raise breach(
            rule,
            "select",
            f"returns {len(set(clients))} clients; return at most pool.size ({pool.size}), or "
            "raise schedule.cohort",
        )
    return clients


def _copied(pool: SelectionPool) -> SelectionPool:
    """Return a pool with copies of its arrays."""
    # A rule may change the arrays, and `select` gets those that `candidates` got.
    copies = {key: v.copy() for key, v in vars(pool).items() if isinstance(v, np.ndarray)}
    metrics = {name: values.copy() for name, values in pool.metrics.items()}
    return replace(pool, **copies, metrics=metrics)


def _checked(rule: ServerRule, method: str, returned: Any, pool: SelectionPool) -> list[int]:
    """Return the numbers of clients that a rule's method returned.

    Raises:
        ContractError: they are no list of numbers from the pool.
    """
    try:
        return client_numbers(returned, pool)
    except ValueError as error:
        raise breach(rule, method, str(error)) from None


def _first_repeated(clients: list[int]) -> int | None:
    """Return the first client that occurs more than once; None if there is none."""
    counts = Counter(clients)
    return next((client for client in clients if counts[client] > 1), None)
