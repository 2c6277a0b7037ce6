"""The virtual clock against a simulator that is as slow and as plain as can be: a list of what will happen, searched for
what happens first; every version of the model kept for ever; a client trained, alone, when its task arrives. Who
trains when, and every bit of every x_t, must be the same. Then what must hold of schedules whatever the simulator
says, checkpoints in the middle of everything, and mistakes.
"""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysim
from raysim import schedule, tracking
from raysim.block import Block, Job, batches_per_pass, local_steps
from raysim.config import Config, validate
from raysim.engine import Engine
from raysim.errors import ConfigError, RaysimError
from raysim.executor import make_server, make_trainer
from raysim.experiment import resume
from raysim.plan import Plan, prepare
from raysim.randomness import generator
from raysim.server import Round

SIZES = [5, 9, 12, 3, 0, 7, 16, 4, 10, 6, 8, 11, 2, 1]
"""Ragged; client 4 has nothing."""
N = len(SIZES) - 1
"""Clients that have data."""
ROUNDS = 200


# -- the plain simulator -----------------------------------------------------------------------------------------------


@dataclass
class Task:
    client: int
    base: int
    k: int
    start: float


@dataclass
class Event:
    """A task ends, or (without one) a client asks for work."""

    time: float
    sequence: int
    client: int
    task: Task | None = None


@dataclass
class Facts:
    """What is to be said of a round. `under_way` are the tasks when it is over; `idle` the clients that rest."""

    t: int
    arrivals: list[tuple[int, int, float, float]] = field(default_factory=list)
    time: float = 0.0
    lost: list[Task] = field(default_factory=list)
    discarded: list[Task] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    under_way: list[Task] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        raise TypeError("compare what `told` gives")


class NothingMore(Exception):
    """Nothing can happen any more."""


def means(config: Config, sizes: Sequence[int]) -> list[float]:
    """The mean virtual time of each client's tasks."""
    s, n = config.schedule.speeds, len(sizes)
    if s.name == "lognormal":
        return [float(np.exp(s.sigma * z)) for z in generator(config.seed, "speeds").standard_normal(n)]
    if s.name == "two_speed":
        return [s.factor if i >= n - max(1, round(s.slow * n)) else 1.0 for i in range(n)]
    if s.name == "data":
        return [size / (sum(sizes) / n) for size in sizes]
    if s.name == "trace":
        rows = {int(row["client"]): row for row in csv.DictReader(Path(s.path).read_text().splitlines())}
        trained = [config.local.steps * min(config.local.batch, size) for size in sizes]
        return [
            float(r["down"]) + float(r["up"]) + float(r["seconds_per_sample"]) * trained[i] if (r := rows.get(i)) else 0.0
            for i in range(n)
        ]
    return [1.0] * n


class Chance:
    """The keyed draws, each made when it is asked for."""

    def __init__(self, config: Config, sizes: Sequence[int]):
        self.config, self.s, self.means = config, config.schedule, means(config, sizes)
        self.births = generator(config.seed, "windows").random(len(sizes))

    def takes(self, client: int, k: int) -> float:
        speeds = self.s.speeds
        rng = generator(self.config.seed, "speed", client, k)
        if speeds.name == "uniform_arrival":
            return self.means[client] * rng.exponential()
        jitter = getattr(speeds, "jitter", 0.0)
        if jitter == 0:
            return self.means[client]
        return self.means[client] * float(np.exp(jitter * rng.standard_normal() - jitter**2 / 2))

    def loses(self, client: int, k: int) -> bool:
        drops = self.s.dropouts
        return drops is not None and generator(self.config.seed, "dropouts", client, k).random() < drops.rate

    def rejoins(self) -> float:
        return np.inf if self.s.dropouts is None or self.s.dropouts.rejoin is None else self.s.dropouts.rejoin

    def opens(self, client: int, now: float) -> float:
        """`now` if the client's window is open, else when it opens next."""
        windows = self.s.availability
        if windows is None:
            return now
        birth, day = float(self.births[client]) * windows.period, int(now / windows.period)
        while (dawn := day * windows.period - birth) + windows.period <= now:
            day += 1
        return now if now < dawn + windows.open else dawn + windows.period


class Plain:
    """K-async and buffered, one event after the other."""

    def __init__(self, config: Config, sizes: Sequence[int]):
        self.config, self.s, self.chance = config, config.schedule, Chance(config, sizes)
        self.places = self.s.concurrency or sum(size > 0 for size in sizes)
        self.pending: list[Event] = []
        self.waiting: set[int] = set()
        self.arrived: list[Task] = []
        self.begun: Counter[int] = Counter()
        self.sequence = self.draws = self.version = 0
        self.now = 0.0
        self.most = 0
        self.wait([i for i, size in enumerate(sizes) if size])
        self.give_places()

    def put(self, time: float, client: int, task: Task | None = None) -> None:
        self.pending.append(Event(time, self.sequence, client, task))
        self.sequence += 1

    def under_way(self) -> list[Task]:
        return [event.task for event in self.pending if event.task is not None]

    def wait(self, clients: Sequence[int]) -> None:
        for client in clients:
            opening = self.chance.opens(client, self.now)
            if opening == self.now:
                self.waiting.add(client)
            else:
                self.put(opening, client)

    def give_places(self) -> None:
        while self.waiting:
            taken = len(self.under_way()) + (len(self.arrived) if self.s.name == "kasync" else 0)
            there, free = sorted(self.waiting), self.places - taken
            if not free:
                return
            if len(there) > free:
                rng = generator(self.config.seed, "start", self.draws)
                there = [there[i] for i in rng.choice(len(there), free, replace=False)]
                self.draws += 1
            for client in there:
                self.waiting.remove(client)
                if self.chance.opens(client, self.now) != self.now:  # it closed while this one waited: a place is left
                    self.wait([client])
                    continue
                task = Task(client, self.version, self.begun[client], self.now)
                self.begun[client] += 1
                self.put(self.now + self.chance.takes(client, task.k), client, task)

    def turn(self, t: int) -> Facts:
        assert t == self.version
        facts = Facts(t)
        while self.version == t:
            if not self.pending:
                raise NothingMore
            event = min(self.pending, key=lambda event: (event.time, event.sequence))
            self.pending.remove(event)
            self.now, task = event.time, event.task
            if task is None:
                self.wait([event.client])
            elif self.chance.loses(task.client, task.k):
                facts.lost.append(task)
                if self.chance.rejoins() < np.inf:
                    self.put(self.now + self.chance.rejoins(), task.client)
            elif self.s.max_staleness is not None and t - task.base > self.s.max_staleness:
                facts.discarded.append(task)
                self.wait([task.client])
            else:
                self.arrived.append(task)
                facts.arrivals.append((task.client, task.base, task.start, self.now))
                if len(self.arrived) == self.s.arrivals:
                    self.version += 1
                    rest, self.arrived = self.arrived, []
                    self.wait([task.client for task in rest])
            self.give_places()
            self.most = max(self.most, len(self.under_way()))
        facts.time, facts.under_way = self.now, self.under_way()
        return facts
