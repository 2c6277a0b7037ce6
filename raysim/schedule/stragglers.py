"""Drop stragglers: decide which scheduled updates the server never uses.

Whether the k-th task of client i drops out is decided by number k of the stream "dropouts" of that
client, so it does not depend on the schedule or on the algorithm.
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
from numpy.random import Generator

from raysim.config.schema import Config
from raysim.randomness import KeyedStream


class Fate(Enum):
    """Fates of the update of a scheduled client."""

    ARRIVES = auto()
    DROPPED_OUT = auto()
    MISSED_DEADLINE = auto()
    DISCARDED_STALE = auto()


class Stragglers:
    """Decides the fate of each task.

    Args:
        config: the configuration of the run.

    Attributes:
        rejoin_after: virtual time for which a client that dropped out stays away; infinity if it
            never returns.
        deadline: largest virtual duration of a task in a synchronous round, or None.
        max_staleness: largest staleness of an update in an asynchronous round, or None.
        can_drop_out: whether any task may drop out.
    """

    def __init__(self, config: Config):
        dropout = config.schedule.client_dropout
        self.can_drop_out = dropout is not None
        self.deadline: float | None = getattr(config.schedule, "deadline", None)
        self.max_staleness: int | None = getattr(config.schedule, "max_staleness", None)
        self.rejoin_after = np.inf
        if dropout is not None and dropout.rejoin_after is not None:
            self.rejoin_after = dropout.rejoin_after
        self._dropout_rate = dropout.rate if dropout is not None else 0.0
        self._uniforms = KeyedStream(config.seed, "dropouts", Generator.random)

    def fate(self, client: int, k: int, duration: float = 0.0, staleness: int = 0) -> Fate:
        """Return what becomes of the `k`-th task of `client`.

        Args:
            client: number of the client.
            k: number of the task among those of the client, from 0; in a synchronous run that of
                the round.
            duration: virtual time that the task takes.
            staleness: its staleness when it ends.
        """
        if self.deadline is not None and duration > self.deadline:
            return Fate.MISSED_DEADLINE
        if self.drops_out(client, k):
            return Fate.DROPPED_OUT
        if self.max_staleness is not None and staleness > self.max_staleness:
            return Fate.DISCARDED_STALE
        return Fate.ARRIVES

    def drops_out(self, client: int, k: int) -> bool:
        """Return whether the `k`-th task of `client` drops out.

        Args:
            client: number of the client.
            k: number of the task, as for `fate`.
        """
        return self.can_drop_out and self._uniforms.number(k, client) < self._dropout_rate
