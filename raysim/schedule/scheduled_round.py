"""A round as the server sees it: which updates arrive, in which order, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raysim.errors import RaysimError


class ScheduleExhausted(RaysimError):
    """No further event can happen on the virtual clock."""


@dataclass(frozen=True)
class Arrival:
    """The arrival of one client's update at the server."""

    client: int
    base: int
    """Version of the global model that the client started from."""
    start: float
    """Virtual time at which the client started."""
    finish: float
    """Virtual time at which its update arrived."""
    draws: int = 1
    """How often the client was drawn; more than 1 only if sampling is with replacement."""

    @property
    def duration(self) -> float:
        """Virtual time from the start to the arrival."""
        return self.finish - self.start


@dataclass(frozen=True)
class Selection:
    """The clients that are selected for a round, and what selecting them measured."""

    clients: list[int]
    """In the order of selection; a client that is drawn twice is there twice."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the round."""
    n_only_evaluated: int = 0
    """Candidates whose loss was measured and that were not selected."""


@dataclass(frozen=True)
class ScheduledRound:
    """Round `t`: its arrivals and what became of the other clients."""

    t: int
    arrivals: list[Arrival]
    """In the order of virtual time; in sampling order where all take the same time."""
    time: float
    """Virtual time at which the round ends."""
    dropped_out: int = 0
    """Number of clients that dropped out during it."""
    discarded_stale: int = 0
    """Number of updates that were too stale."""
    missed_deadline: int = 0
    """Number of clients that missed the deadline."""
    selection: Selection = field(default_factory=lambda: Selection([]))
    """The selection of its clients; of an asynchronous round an empty one."""
    exhausted: str = ""
    """Reason for which the round cannot take place; empty if it can."""

    @property
    def ids(self) -> list[int]:
        """The clients whose updates arrive."""
        return [arrival.client for arrival in self.arrivals]

    @property
    def staleness(self) -> list[int]:
        """For each arrival, the number of rounds between its base version and this round."""
        return [self.t - arrival.base for arrival in self.arrivals]


def synchronous_round(t: int, ids: list[int]) -> ScheduledRound:
    """Return round `t` in which the clients `ids` start at virtual time 0 and all arrive at 1.

    Args:
        t: number of the round, from 0.
        ids: numbers of the clients.
    """
    return ScheduledRound(t, [Arrival(client, t, 0.0, 1.0) for client in ids], 1.0)
