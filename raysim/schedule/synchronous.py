"""Synchronous rounds: sample a cohort, let all of it start together, and drop stragglers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.schedule import Sync, UniformSampling
from raysim.data.partition.clients import SizesByRound
from raysim.data.partition.kept_out import held_out_clients
from raysim.randomness import generator
from raysim.rules.client_sampling import ClientPool
from raysim.schedule.client_times import ClientTimes
from raysim.schedule.cohort_sampling import make_sampler
from raysim.schedule.scheduled_round import Arrival, ScheduledRound, ScheduleExhausted, Selection
from raysim.schedule.stragglers import Fate, Stragglers


class Synchronous:
    """The synchronous schedule: a cohort is sampled for each round and starts together.

    All algorithms see the same cohorts for the same seed. Clients are sampled from those that are
    available: not held out, not away after a drop-out, and with an open window. How they are
    sampled is `schedule.sampling`, or a server rule's `select`.

    Sampled clients without data are left out, so a round may have fewer clients. If uniform
    sampling finds only such clients, it samples again among those with data; not so under
    client-level privacy, where who has data must not show in how often the others are sampled.

    A round starts when at least one client with data is available. It ends when its last task
    ends, or at the deadline if a client missed it or dropped out. A client that missed the deadline
    may be sampled again at once.

    Args:
        config: the run's configuration.
        sizes: number of examples of each client, [N], or these by round.

    Attributes:
        now: the virtual time.
    """

    def __init__(self, config: Config, sizes: np.ndarray | SizesByRound):
        assert isinstance(config.schedule, Sync)
        self.now = 0.0
        self._seed = config.seed
        self._sizes = SizesByRound.of(sizes)
        n_clients = len(self._sizes.at(0))
        held_out = held_out_clients(n_clients, config.held_out, config.seed)
        self._pool = np.delete(np.arange(n_clients), held_out)
        self._sampler = make_sampler(config.schedule, len(self._pool), config.rounds)
        is_uniform = isinstance(config.schedule.sampling, UniformSampling)
        self._samples_again = is_uniform and config.client_privacy is None
        self._everybody = [ClientPool(self._pool, of[self._pool]) for of in self._sizes.phases]
        self._times = ClientTimes(config, sizes)
        self._stragglers = Stragglers(config)
        self._away_until: dict[int, float] = {}

    @property
    def is_uneventful(self) -> bool:
        """Whether every client takes the same time and is always available."""
        return self._times.are_constant and not self._some_may_be_away

    @property
    def _some_may_be_away(self) -> bool:
        return self._stragglers.can_drop_out or self._times.have_windows

    def next_round(self, t: int, selection: Selection | None = None) -> ScheduledRound:
        """Return round `t`. Rounds are scheduled in order.

        Args:
            t: number of the round, from 0.
            selection: the clients that the server rule selected among the `available` ones; None:
                they are sampled.

        Raises:
            ScheduleExhausted: all clients have dropped out for good.
        """
        if selection is None:
            selection = self.select(t)  # moves the clock if no client is available yet
        start = self.now
        end = start
        arrivals = []
        fates: Counter[Fate] = Counter()
        for client, draws in Counter(selection.clients).items():
            duration = self._times.duration(client, t, t)
            finish = start + duration
            fate = self._stragglers.fate(client, t, duration=duration)
            fates[fate] += 1
            if fate is Fate.ARRIVES:
                arrivals.append(Arrival(client, t, start, finish, draws))
                end = max(end, finish)
                continue
            if fate is Fate.DROPPED_OUT:
                self._away_until[client] = finish + self._stragglers.rejoin_after
            deadline = self._stragglers.deadline
            end = max(end, finish if deadline is None else start + deadline)
        if not self._times.are_constant:
            arrivals.sort(key=lambda arrival: arrival.finish)
        self.now = end
        return ScheduledRound(
            t,
            arrivals,
            end,
            dropped_out=fates[Fate.DROPPED_OUT],
            missed_deadline=fates[Fate.MISSED_DEADLINE],
            selection=selection,
        )

    def select(self, t: int) -> Selection:
        """Return clients with data that are sampled for round `t`.

        Args:
            t: number of the round, from 0.

        Raises:
            ScheduleExhausted: all clients have dropped out for good.
        """
        pool, sizes = self.available(t), self._sizes.at(t)
        sampled = self._sampler(pool, t, generator(self._seed, "cohort", t))
        if self._samples_again and not sizes[sampled].any():
            ids = pool.ids[pool.samples > 0]
            with_data = ClientPool(ids, sizes[ids])
            sampled = self._sampler(with_data, t, generator(self._seed, "cohort", t))
        return Selection([client for client in sampled if sizes[client] > 0])

    def available(self, t: int) -> ClientPool:
        """Return the clients from which round `t` is sampled or selected.

        The clock moves until one of them has data.

        Args:
            t: number of the round, from 0.

        Raises:
            ScheduleExhausted: all clients have dropped out for good.
        """
        if not self._some_may_be_away:
            return self._everybody[self._sizes.phase(t)]
        sizes = self._sizes.at(t)
        ids = np.array(self._wait_for_available_clients(sizes))
        return ClientPool(ids, sizes[ids])

    def _wait_for_available_clients(self, sizes: np.ndarray) -> list[int]:
        """Return the clients that are available; move the clock until one of them has data."""
        self._away_until = {
            client: until for client, until in self._away_until.items() if until > self.now
        }
        available_from = [
            self._times.available_from(client, max(self.now, self._away_until.get(client, 0.0)))
            for client in range(len(sizes))
        ]
        with_data = [time for time, size in zip(available_from, sizes, strict=True) if size > 0]
        earliest = min(with_data)
        if earliest == np.inf:
            raise ScheduleExhausted(
                f"virtual time {self.now:g}: all clients have dropped out and none returns "
                "(schedule.client_dropout.rejoin_after makes them return)"
            )
        self.now = max(self.now, earliest)
        return [client for client in self._pool.tolist() if available_from[client] <= self.now]

    def versions_in_flight(self) -> Counter[int]:
        """Return the base versions of unfinished tasks; there are none between rounds."""
        return Counter()

    def pack(self) -> dict[str, Tensor]:
        """Return the state of the clock for a checkpoint."""
        away = [[client, until] for client, until in self._away_until.items()]
        return {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "away": torch.tensor(away, dtype=torch.float64).reshape(-1, 2),
        }

    def unpack(self, packed: dict[str, Tensor]) -> None:
        """Restore the state that `pack` returned.

        Args:
            packed: the virtual time, and the clients that are away with the time until which they
                are.
        """
        self.now = float(packed["now"])
        self._away_until = {int(client): until for client, until in packed["away"].tolist()}
