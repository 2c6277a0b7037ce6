"""Asynchronous rounds: an event queue in virtual time, for K-async and buffered schedules.

The queue is a heap of (time, sequence number), so ties go to the event that was added first:

- Idle clients wait, ordered by their numbers. Free places, `concurrency` in all, are given to them
  one after the other, together with the newest version: to all of them in order if there is room
  for all, otherwise to the one at floor(u len(waiting)), where u is the next number of the stream
  "start".
- When a task ends, it may have dropped out: its client waits again after `rejoin_after`. It may be
  too stale: it is discarded, and its client waits. Otherwise its update arrives.
- Under `kasync` a client whose update has arrived keeps its place until the round ends; under
  `buffered` it does not. The K-th arrival ends the round: the server publishes the next version,
  and the K clients wait.
- A client whose window is closed does not wait; it does from the next opening on. If the window
  closed while the client waited, this is noticed when its turn comes (the number that drew it is
  used up), and it returns at the next opening.
- Free places are given away after every event except the last arrival of a round, and after the
  end of the round.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.schedule import InFlight
from raysim.data.partition.clients import SizesByRound
from raysim.errors import round_name
from raysim.randomness import KeyedStream
from raysim.schedule.client_times import ClientTimes
from raysim.schedule.scheduled_round import Arrival, ScheduledRound, ScheduleExhausted
from raysim.schedule.stragglers import Fate, Stragglers

MAX_EVENTS_WITHOUT_ARRIVAL = 1_000_000
"""Number of events without an arrival after which the schedule counts as exhausted."""


class EventKind(IntEnum):
    """Kinds of events."""

    TASK_ENDS = 0
    CLIENT_RETURNS = 1


class Event(NamedTuple):
    """An event on the virtual clock. Events are ordered by time, then by sequence number."""

    time: float
    sequence: int
    kind: EventKind
    client: int
    base: int = -1
    """Version that the task started from; -1 if a client returns."""
    start: float = 0.0
    """Time at which the task started."""


class Asynchronous:
    """The K-async and the buffered schedule.

    Args:
        config: the configuration of the run.
        sizes: [N], number of examples of each client, or these by round; clients without examples
            do not start.

    Attributes:
        now: the virtual time.
    """

    def __init__(self, config: Config, sizes: np.ndarray | SizesByRound):
        schedule = config.schedule
        assert isinstance(schedule, InFlight)
        self._sizes = SizesByRound.of(sizes)
        largest = self._sizes.largest
        with_data = [int(client) for client in np.flatnonzero(largest > 0)]
        self.now = 0.0
        self._version = 0
        self._arrivals_per_round = schedule.size
        self._places = schedule.places(len(with_data))
        self._arrived_keep_places = schedule.name == "kasync"
        self._times = ClientTimes(config, sizes)
        self._stragglers = Stragglers(config)
        self._uniforms = KeyedStream(config.seed, "start", Generator.random)
        self._uniforms_used = 0
        self._events: list[Event] = []
        self._events_added = 0
        self._tasks_started = np.zeros(len(largest), dtype=np.int64)
        self._in_flight = 0
        self._bases_in_flight: Counter[int] = Counter()
        self._arrived: list[Arrival] = []
        self._waiting: list[int] = []
        for client in with_data:
            self._wait(client)
        self._start_waiting_clients()

    def next_round(self, t: int) -> ScheduledRound:
        """Return round `t`. Rounds are scheduled in order.

        Args:
            t: number of the round, from 0.

        Raises:
            ScheduleExhausted: no client will ever arrive again.
        """
        assert t == self._version
        fates: Counter[Fate] = Counter()
        events_without_arrival = 0
        while len(self._arrived) < self._arrivals_per_round:
            events_without_arrival += 1
            if not self._events or events_without_arrival > MAX_EVENTS_WITHOUT_ARRIVAL:
                raise self._exhausted(t)
            event = heapq.heappop(self._events)
            self.now = event.time
            if event.kind is EventKind.CLIENT_RETURNS:
                self._wait(event.client)
            else:
                fate = self._end_task(event, t)
                fates[fate] += 1
                if fate is Fate.ARRIVES:
                    events_without_arrival = 0
            if len(self._arrived) < self._arrivals_per_round:
                self._start_waiting_clients()
        return self._end_round(t, fates)

    def _end_task(self, event: Event, t: int) -> Fate:
        """Decide what becomes of a task that ends, and of its client."""
        client = event.client
        self._in_flight -= 1
        self._bases_in_flight[event.base] -= 1
        if not self._bases_in_flight[event.base]:
            del self._bases_in_flight[event.base]
        k = int(self._tasks_started[client]) - 1
        fate = self._stragglers.fate(client, k, staleness=t - event.base)
        if fate is Fate.ARRIVES:
            self._arrived.append(Arrival(client, event.base, event.start, self.now))
        elif fate is Fate.DROPPED_OUT:
            self._return_at(client, self.now + self._stragglers.rejoin_after)
        else:
            self._wait(client)
        return fate

    def _end_round(self, t: int, fates: Counter[Fate]) -> ScheduledRound:
        scheduled = ScheduledRound(
            t,
            self._arrived,
            self.now,
            dropped_out=fates[Fate.DROPPED_OUT],
            discarded_stale=fates[Fate.DISCARDED_STALE],
        )
        self._version = t + 1
        self._arrived = []
        for client in scheduled.ids:
            self._wait(client)
        self._start_waiting_clients()
        return scheduled

    def _exhausted(self, t: int) -> ScheduleExhausted:
        reason = "no client is training and none will return"
        if self._events:
            reason = f"{MAX_EVENTS_WITHOUT_ARRIVAL} events without an arrival"
        return ScheduleExhausted(
            f"virtual time {self.now:g}: {reason}; {round_name(t)} has {len(self._arrived)} of "
            f"{self._arrivals_per_round} arrivals (schedule.client_dropout.rejoin_after makes "
            "clients return, "
            "schedule.availability says when they are available)"
        )

    def versions_in_flight(self) -> Counter[int]:
        """Return the number of unfinished tasks for each base version that has any."""
        return self._bases_in_flight

    def _add_event(
        self, time: float, kind: EventKind, client: int, base: int = -1, start: float = 0.0
    ) -> None:
        heapq.heappush(self._events, Event(time, self._events_added, kind, client, base, start))
        self._events_added += 1

    def _wait(self, client: int) -> None:
        """Let a client wait for a place, from its next window on."""
        available_from = self._times.available_from(client, self.now)
        if available_from <= self.now:
            insort(self._waiting, client)
        else:
            self._return_at(client, available_from)

    def _return_at(self, client: int, time: float) -> None:
        if time < np.inf:
            self._add_event(time, EventKind.CLIENT_RETURNS, client)

    def _start_waiting_clients(self) -> None:
        """Give free places to waiting clients."""
        ready = self._with_data()
        while ready:
            free = self._places - self._in_flight
            if self._arrived_keep_places:
                free -= len(self._arrived)
            if free <= 0:
                return
            if len(ready) <= free:
                starting = set(ready)
                self._waiting = [client for client in self._waiting if client not in starting]
                for client in ready:
                    self._start_task(client)
                return
            u = self._uniforms.number(self._uniforms_used)
            self._uniforms_used += 1
            client = ready.pop(int(u * len(ready)))
            if ready is not self._waiting:
                self._waiting.remove(client)
            self._start_task(client)

    def _with_data(self) -> list[int]:
        """Return the waiting clients that have examples in the round of the newest version.

        They are the list of those that wait itself if the data never change.
        """
        if len(self._sizes.phases) == 1:
            return self._waiting
        sizes = self._sizes.at(self._version)
        return [client for client in self._waiting if sizes[client] > 0]

    def _start_task(self, client: int) -> None:
        """Send the newest version to a client, unless its window closed while it waited."""
        available_from = self._times.available_from(client, self.now)
        if available_from > self.now:
            self._return_at(client, available_from)
            return
        finish = self.now + self._times.duration(
            client, int(self._tasks_started[client]), self._version
        )
        self._tasks_started[client] += 1
        self._in_flight += 1
        self._bases_in_flight[self._version] += 1
        self._add_event(finish, EventKind.TASK_ENDS, client, self._version, self.now)

    def pack(self) -> dict[str, Tensor]:
        """Return the state of the clock between two rounds, for a checkpoint."""
        times = [[event.time, event.start] for event in self._events]
        numbers = [event[1:5] for event in self._events]
        return {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "counts": torch.tensor([self._version, self._events_added, self._uniforms_used]),
            "tasks": torch.from_numpy(self._tasks_started.copy()),
            "waiting": torch.tensor(self._waiting, dtype=torch.int64),
            "events/times": torch.tensor(times, dtype=torch.float64).reshape(-1, 2),
            "events/numbers": torch.tensor(numbers, dtype=torch.int64).reshape(-1, 4),
        }

    def unpack(self, packed: dict[str, Tensor]) -> None:
        """Restore the state that `pack` returned.

        Args:
            packed: the virtual time, counters, the clients that wait and all pending events.
        """
        self.now = float(packed["now"])
        self._version, self._events_added, self._uniforms_used = packed["counts"].tolist()
        self._tasks_started = packed["tasks"].numpy().copy()
        self._waiting = packed["waiting"].tolist()
        self._arrived = []
        self._events = [
            Event(time, sequence, EventKind(kind), client, base, start)
            for (time, start), (sequence, kind, client, base) in zip(
                packed["events/times"].tolist(), packed["events/numbers"].tolist(), strict=True
            )
        ]
        self._bases_in_flight = Counter(event.base for event in self._events if event.base >= 0)
        self._in_flight = self._bases_in_flight.total()
