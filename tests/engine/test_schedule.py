"""The virtual clock against a simulator that is as slow and as plain as can be: a list of what will
happen, searched for what happens first; every version of the model kept for ever; each client
trained alone. Who trains when, and every bit of every x_t, must be the same. Then what must hold of
schedules whatever the simulator says, checkpoints in the middle of everything, and mistakes.
"""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from support.stopped_runs import same, stop_at
from support.watched import Watched

import raysim
from raysim import schedule
from raysim.config.explain import validate
from raysim.config.schema import Config
from raysim.config.sections.data import Data
from raysim.config.sections.schedule import InFlight
from raysim.data import load_dataset
from raysim.data.partition.clients import SizesByRound
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_server, make_trainer
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.runs.resume import resume
from raysim.schedule.client_times import ClientTimes
from raysim.server.round_cohort import RoundCohort
from raysim.tracking import spool_sender as tracking
from raysim.training.batches.batch_order import local_steps
from raysim.training.messages import Block, ClientTask

SIZES = [5, 9, 12, 3, 0, 7, 16, 4, 10, 6, 8, 11, 2, 1]
"""Ragged; client 4 has nothing."""
M = sum(size > 0 for size in SIZES)
"""Clients that have data."""
ROUNDS = 60


# -- the plain simulator ---------------------------------------------------------------------------


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
    """What is to be said of a round; of an arrival: client, version, beginning, end. `under_way`
    are the tasks when the round is over."""

    t: int
    arrivals: list[tuple[int, int, float, float]] = field(default_factory=list)
    time: float = 0.0
    lost: list[Task] = field(default_factory=list)
    discarded: list[Task] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    under_way: list[Task] = field(default_factory=list)

    @property
    def told(self) -> tuple:
        """The same as `told_by` finds in a Turn."""
        return self.t, self.arrivals, self.time, len(self.lost), len(self.discarded), len(self.late)


def told_by(turn: schedule.ScheduledRound) -> tuple:
    arrivals = [(one.client, one.base, one.start, one.finish) for one in turn.arrivals]
    return turn.t, arrivals, turn.time, turn.dropped_out, turn.discarded_stale, turn.missed_deadline


class NothingMore(Exception):
    """Nothing can happen any more."""


def means(config: Config, sizes: Sequence[int]) -> list[float]:
    """The mean virtual time of each client's tasks."""
    s, n = config.schedule.client_speeds, len(sizes)
    if s.name == "lognormal":
        return [
            float(np.exp(s.sigma * z)) for z in generator(config.seed, "speeds").standard_normal(n)
        ]
    if s.name == "two_speed":
        return [s.factor if i >= n - max(1, round(s.slow * n)) else 1.0 for i in range(n)]
    if s.name == "data":
        return [size / (sum(sizes) / sum(size > 0 for size in sizes)) for size in sizes]
    if s.name == "trace":
        rows = {
            int(row["client"]): row for row in csv.DictReader(Path(s.path).read_text().splitlines())
        }
        trained = [config.local.steps * min(config.local.batch_size, size) for size in sizes]
        return [
            float(r["down"]) + float(r["up"]) + float(r["seconds_per_sample"]) * trained[i]
            if (r := rows.get(i))
            else 0.0
            for i in range(n)
        ]
    return [1.0] * n


class Chance:
    """The keyed draws, each made when it is asked for."""

    def __init__(self, config: Config, sizes: Sequence[int]):
        self.config, self.s, self.means = config, config.schedule, means(config, sizes)
        self.births = generator(config.seed, "windows").random(len(sizes))

    def number(self, law: str, k: int, *place: Any) -> float:
        """The k-th number of a place."""
        return float(getattr(generator(self.config.seed, *place, k // 16), law)(size=16)[k % 16])

    def takes(self, client: int, k: int) -> float:
        speeds = self.s.client_speeds
        if speeds.name == "uniform_arrival":
            return self.means[client] * self.number("exponential", k, "speed", client)
        jitter = getattr(speeds, "jitter", 0.0)
        if jitter == 0:
            return self.means[client]
        return self.means[client] * math.exp(
            jitter * self.number("normal", k, "speed", client) - jitter**2 / 2
        )

    def loses(self, client: int, k: int) -> bool:
        drops = self.s.client_dropout
        return drops is not None and self.number("uniform", k, "dropouts", client) < drops.rate

    def starts(self, n: int) -> float:
        return self.number("uniform", n, "start")

    def rejoins(self) -> float:
        return (
            np.inf
            if self.s.client_dropout is None or self.s.client_dropout.rejoin_after is None
            else self.s.client_dropout.rejoin_after
        )

    def opens(self, client: int, now: float) -> float:
        """`now` if the client's window is open, else when it opens next."""
        windows = self.s.availability
        if windows is None or now == np.inf:
            return now
        birth, day = float(self.births[client]) * windows.period, int(now / windows.period)
        while (dawn := day * windows.period - birth) + windows.period <= now:
            day += 1
        return now if now < dawn + windows.open else dawn + windows.period


def in_flight(s: InFlight, sizes: Sequence[int]) -> int:
    """M: everybody with data, under `buffered` all but K (but K at least), unless it is given."""
    everybody = sum(n > 0 for n in sizes)
    return s.concurrency or (everybody if s.name == "kasync" else max(s.size, everybody - s.size))


class Plain:
    """K-async and buffered, one event after the other."""

    def __init__(self, config: Config, sizes: Sequence[int]):
        self.config, self.s, self.chance = config, config.schedule, Chance(config, sizes)
        self.places = in_flight(self.s, sizes)
        self.pending: list[Event] = []
        self.waiting: set[int] = set()
        self.arrived: list[Task] = []
        self.begun: Counter[int] = Counter()
        self.sequence = self.draws = self.version = 0
        self.now = 0.0
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
                there = [there[math.floor(self.chance.starts(self.draws) * len(there))]]
                self.draws += 1
            for client in there:
                self.waiting.remove(client)
                if (
                    self.chance.opens(client, self.now) != self.now
                ):  # it closed while this one waited: a place is left
                    self.wait([client])
                    continue
                task = Task(client, self.version, self.begun[client], self.now)
                self.begun[client] += 1
                self.put(self.now + self.chance.takes(client, task.k), client, task)

    def next_round(self, t: int) -> Facts:
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
                if len(self.arrived) == self.s.size:
                    self.version += 1
                    rest, self.arrived = self.arrived, []
                    self.wait([task.client for task in rest])
            self.give_places()
        facts.time, facts.under_way = self.now, self.under_way()
        return facts


class PlainSync:
    """Rounds in step. The server waits until the deadline for who is lost; without one, until that
    task's end."""

    def __init__(self, config: Config, sizes: Sequence[int]):
        self.config, self.s, self.sizes, self.chance = (
            config,
            config.schedule,
            sizes,
            Chance(config, sizes),
        )
        self.now, self.back = 0.0, [0.0] * len(sizes)

    def there_from(self, client: int) -> float:
        """When a client can be sampled next: it is back, and its window is open."""
        return self.chance.opens(client, max(self.now, self.back[client]))

    def next_round(self, t: int) -> Facts:
        n, facts = len(self.sizes), Facts(t)
        self.now = max(self.now, min(self.there_from(i) for i in range(n) if self.sizes[i]))
        if self.now == np.inf:
            raise NothingMore
        available = [i for i in range(n) if self.there_from(i) == self.now]
        with_data = [i for i in available if self.sizes[i]]
        for there in (available, with_data):  # again if the first draw has nobody with data
            drawn = generator(self.config.seed, "cohort", t).choice(
                len(there), min(self.s.cohort, len(there)), replace=False
            )
            if any(self.sizes[there[i]] for i in drawn):
                break
        ends = []
        for client in (there[i] for i in drawn if self.sizes[there[i]]):
            took = self.chance.takes(client, t)
            if self.s.deadline is not None and took > self.s.deadline:
                facts.late.append(client)
            elif self.chance.loses(client, t):
                facts.lost.append(Task(client, t, t, self.now))
                self.back[client] = self.now + took + self.chance.rejoins()
                ends.append(self.now + took)
            else:
                facts.arrivals.append((client, t, self.now, self.now + took))
                ends.append(self.now + took)
        if self.s.deadline is not None and (facts.late or facts.lost):
            ends = [self.now + self.s.deadline]
        facts.arrivals.sort(key=lambda arrival: arrival[3])
        self.now = facts.time = max([self.now, *ends])
        return facts


def plain(config: Config, sizes: Sequence[int]) -> Plain | PlainSync:
    return (PlainSync if config.schedule.name == "sync" else Plain)(config, sizes)


def train(plan: Plan) -> tuple[list[np.ndarray], list[Facts]]:
    """x_0 .. x_T and the rounds, by the plain simulator. Each client trains by itself. A version is
    what the server has after a round, before it can know who will arrive in the next one."""
    config, sizes = plan.config, [int(n) for n in plan.clients.sizes]
    n, local = len(sizes), config.local
    clock, trainer, server = (
        plain(config, sizes),
        make_trainer(plan, "cpu"),
        make_server(plan, "cpu"),
    )
    nobody: list[Any] = [[], [], [], [], []]
    versions = {0: server.broadcast(RoundCohort(0, *nobody))}
    cursors, rows, rounds = [0] * n, {}, []
    for t in range(config.rounds):
        facts = clock.next_round(t)
        rounds.append(facts)
        ids, bases = [one[0] for one in facts.arrivals], [one[1] for one in facts.arrivals]
        steps = [local_steps(sizes[i], local.batch_size, local.steps, local.epochs) for i in ids]
        round = RoundCohort(t, ids, bases, [], [sizes[i] for i in ids], steps)
        if ids:
            round.weights = plan.server.at(t).weigh(round.cohort(plan.problem))
        outcomes = []
        for i, base, weight, k in zip(ids, bases, round.weights, steps, strict=True):
            share = sizes[i] * n / sum(sizes) if plan.server.weights == "samples" else 1.0
            task = ClientTask(i, base, cursors[i], weight, k, share, i in rows, rows.get(i))
            outcomes.append(trainer.train({base: versions[base]}, [Block(0, [task])]))
            (done,) = outcomes[-1].clients
            assert done.error is None
            cursors[i] += k
            rows[i] = done.client_state
        server.broadcast(round)  # the server now knows who has arrived
        server.update(round, outcomes, versions)
        versions[t + 1] = server.broadcast(RoundCohort(t + 1, *nobody))
    return [versions[t].shared["x"].numpy() for t in range(config.rounds + 1)], rounds


# -- whole runs ------------------------------------------------------------------------------------


def partition(folder: Path, sizes: Sequence[int]) -> dict[str, str]:
    """Clients of these sizes, each with the digits of its place in an order by label, so that
    clients disagree."""
    order = np.argsort(load_dataset(Data(name="digits")).y, kind="stable")
    starts = np.linspace(0, len(order) - max(sizes), len(sizes)).astype(int)
    path = folder / "partition.json"
    path.write_text(
        json.dumps([order[a : a + n].tolist() for a, n in zip(starts, sizes, strict=True)])
    )
    return {"name": "file", "path": str(path)}


def trace(folder: Path) -> dict[str, str]:
    """Times for the clients that have data; the others need no line."""
    path = folder / "trace.csv"
    lines = [
        f"{i},{0.02 + 0.01 * (i % 3)},{0.1 * (i % 4)},{0.2}" for i, size in enumerate(SIZES) if size
    ]
    path.write_text("\n".join(["client,seconds_per_sample,down,up", *reversed(lines)]))
    return {"name": "trace", "path": str(path)}


LOGNORMAL = {"name": "lognormal", "sigma": 0.8, "jitter": 0.3}
COMING_BACK = {"rate": 0.2, "rejoin_after": 0.7}
WINDOWS = {"period": 5.0, "open": 3.0}
MOON = {
    "client": {"name": "moon"},
    "server": {"name": "fedavg"},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"steps": 1, "batch_size": 3, "lr": 0.1},
}
KASYNC = {"name": "kasync", "k": 3}
BUFFERED = {"name": "buffered", "buffer_size": 3, "concurrency": 8}
SIZE_KEY = {"kasync": "k", "buffered": "buffer_size"}

CASES: dict[str, dict[str, Any]] = {
    "kasync-fedavg": {"schedule": KASYNC},
    "kasync-ties-fedhist": {
        "schedule": {**KASYNC, "client_speeds": "constant", "client_dropout": COMING_BACK},
        "algorithm": {"name": "fedhist", "length": 4},
        "rounds": 100,  # staleness above 3 comes late
    },
    "kasync-lognormal-dynsgd": {
        "schedule": {**KASYNC, "concurrency": 9, "max_staleness": 3, "client_speeds": LOGNORMAL},
        "algorithm": {"name": "dynsgd", "weights": "samples"},
    },
    "kasync-fedasync": {
        "schedule": {
            **KASYNC,
            "k": 1,
            "concurrency": 6,
            "client_speeds": LOGNORMAL,
            "availability": WINDOWS,
        },
        "algorithm": "fedasync",
    },
    "kasync-trace-moon": {
        "schedule": {**KASYNC, "k": 2, "client_speeds": "trace", "availability": WINDOWS},
        **MOON,
    },
    "kasync-never-stale": {
        "schedule": {
            **KASYNC,
            "max_staleness": 0,
            "client_speeds": {"name": "data", "jitter": 0.5},
            "client_dropout": COMING_BACK,
        },
        "algorithm": "scaffold",
    },
    "kasync-batchnorm-fedasync": {
        "schedule": {**KASYNC, "k": 2},
        "algorithm": "fedasync",
        "model": "tinynn",
        "rounds": 25,
    },
    "buffered-everybody-data-mifa": {
        "schedule": {**BUFFERED, "concurrency": 13, "client_speeds": "data"},
        "algorithm": "mifa",
    },
    "buffered-lognormal-gradma": {
        "schedule": {
            **BUFFERED,
            "buffer_size": 2,
            "client_speeds": LOGNORMAL,
            "client_dropout": COMING_BACK,
            "availability": WINDOWS,
        },
        "algorithm": {"name": "gradma", "memory": 5},
    },
    "buffered-trace-fedavg": {
        "schedule": {
            **BUFFERED,
            "client_speeds": "trace",
            "max_staleness": 3,
            "client_dropout": COMING_BACK,
        }
    },
    "sync-fedavg": {
        "schedule": {
            "cohort": 5,
            "deadline": 1.5,
            "client_speeds": LOGNORMAL,
            "client_dropout": COMING_BACK,
            "availability": WINDOWS,
        },
    },
}


@dataclass
class Both:
    """A run of the engine and one of the plain simulator."""

    engine: Engine
    records: list[dict[str, float]]
    xs: list[np.ndarray]
    rounds: list[Facts]

    @property
    def rows(self) -> list[tuple[dict[str, float], Facts]]:
        return list(zip(self.records[1:], self.rounds, strict=True))


def configured(folder: Path, case: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    config = {
        "rounds": ROUNDS,
        "data": "digits",
        "partition": partition(folder, SIZES),
        "model": "logistic",
        "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
        "batching": {"mode": "loop", "size": 1},
        "resources": {"executor": "inline", "threads": 1},
        "evaluate": {"every": 0},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        **case,
        **more,
    }
    if not {"algorithm", "client"} & config.keys():
        config["algorithm"] = "fedavg"
    if config["schedule"].get("client_speeds") == "trace":
        config["schedule"] = {**config["schedule"], "client_speeds": trace(folder)}
    return config


@pytest.fixture(scope="module", params=CASES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    plan, executor = (
        prepare(configured(tmp_path_factory.mktemp("both"), CASES[request.param])),
        Watched(),
    )
    executor.open(plan)
    engine = Engine(plan, executor)
    records = list(engine.rounds())
    yield Both(engine, records, *train(plan))
    executor.close()


def test_every_x_is_the_plain_simulators(both):
    """Bit for bit, from x_0 to x_T; and the clients do move it."""
    assert len(both.xs) == both.engine.config.rounds + 1
    same = [np.array_equal(x, y) for x, y in zip(both.engine.executor.xs, both.xs, strict=True)]
    assert all(same), f"x_{same.index(False)} differs"
    assert np.linalg.norm(both.xs[-1] - both.xs[0]) > 0.1


def test_what_is_said_of_a_round(both):
    """Virtual time, who arrived and who did not, and how stale they were."""
    before = 0.0
    for record, facts in both.rows:
        assert record.get("virtual_time", record["round"]) == facts.time >= before
        before = facts.time
        assert record["clients/used"] == len(facts.arrivals) and "clients/failed" not in record
        counts = {
            "dropped_out": facts.lost,
            "missed_deadline": facts.late,
            "discarded_stale": facts.discarded,
        }
        for name, clients in counts.items():
            assert record.get(f"clients/{name}", 0) == len(clients), name
        s = [facts.t - base for _, base, _, _ in facts.arrivals]
        histogram = {
            int(k.rpartition("_")[2]): v
            for k, v in record.items()
            if k.startswith("staleness/from_")
        }
        if not s or both.engine.config.schedule.name == "sync":
            assert not any(s) and not any(key.startswith("staleness") for key in record)
            continue
        assert record["staleness/mean"] == pytest.approx(sum(s) / len(s)) and record[
            "staleness/max"
        ] == max(s)
        assert (
            sum(histogram.values()) == len(s)
            and list(histogram) == [0, 1, 2, 4, 8, 16, 32, 64, 128][: len(histogram)]
        )
        assert Counter({low: n for low, n in histogram.items() if n}) == Counter(
            0 if one == 0 else 2 ** (one.bit_length() - 1) for one in s
        )
    assert both.rounds[-1].time > both.rounds[0].time


def test_versions_are_kept_as_long_as_somebody_needs_them(both):
    """The newest, and those that tasks under way began with; not of tasks that are lost in the next
    round or discarded, which nobody trains. Traffic counts who was sent a version, whatever became
    of it."""
    following = [
        {(one.client, one.k) for one in facts.lost + facts.discarded} for facts in both.rounds[1:]
    ] + [set()]
    sent = 0
    for (record, facts), gone in zip(both.rows, following, strict=True):
        needed = {one.base for one in facts.under_way if (one.client, one.k) not in gone} | {
            facts.t + 1
        }
        alive = record.get("system/versions_in_memory", 1)
        assert alive == len(needed) <= min(M, facts.t + 1) + 1
        size = both.engine.plan.bytes_down
        assert record.get("system/versions_bytes", size) == len(needed) * size
        sent += len(facts.arrivals) + len(facts.lost) + len(facts.discarded) + len(facts.late)
        assert record["bytes_down"] == sent * both.engine.plan.bytes_down
    asynchronous = both.engine.config.schedule.name != "sync"
    assert all(("system/versions_bytes" in r) == asynchronous for r in both.records[1:])


def test_the_cases_are_what_they_should_be(both):
    """Stale ones and fresh ones, losses and discards, ties: where a case is to show that, it
    occurs."""
    s = both.engine.config.schedule
    late = [facts.t - base for facts in both.rounds for _, base, _, _ in facts.arrivals]
    if s.name != "sync":
        assert (max(late) == s.max_staleness) if s.max_staleness is not None else max(late) > 3
        assert any(facts.discarded for facts in both.rounds) == (s.max_staleness is not None)
    assert any(facts.lost for facts in both.rounds) == (s.client_dropout is not None)
    if s.client_speeds.name == "constant":
        ends = [end for facts in both.rounds for *_, end in facts.arrivals]
        assert len(set(ends)) < 0.7 * len(ends)
    seen = {i for facts in both.rounds for i, *_ in facts.arrivals}
    assert len(seen) >= 10 and all(SIZES[i] for i in seen)


# -- the order of events alone ---------------------------------------------------------------------


def alone(given: Mapping[str, Any], **more: Any) -> Config:
    """The configuration of a schedule; the rest matters to nobody."""
    return validate(
        {"rounds": 1, "data": "digits", "algorithm": "fedavg", "schedule": given, **more}
    )


def turns(config: Config, sizes: Sequence[int], number: int) -> list[schedule.ScheduledRound]:
    clock = schedule.make_schedule(config, np.array(sizes))
    return [clock.next_round(t) for t in range(number)]


def drawn(seed: int, names: Sequence[str]) -> tuple[Config, list[int]]:
    """A schedule of one of these names, and clients' sizes, drawn from all that there can be."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, rng.integers(4, 16))
    sizes[0] = 1
    speeds = [
        {"name": "constant"},
        {"name": "uniform_arrival"},
        {"name": "lognormal", "jitter": rng.choice([0, 0.3])},
        {"name": "two_speed", "slow": rng.choice([0.1, 0.5]), "jitter": rng.choice([0, 0.1])},
        {"name": "data", "jitter": rng.choice([0, 0.1])},
    ]
    given: dict[str, Any] = {
        "name": str(rng.choice(names)),
        "client_speeds": speeds[rng.integers(len(speeds))],
    }
    if given["name"] == "sync":
        given["cohort"] = int(rng.integers(1, len(sizes) + 1))
        if rng.random() < 0.5:
            given["deadline"] = rng.choice([0.6, 1.5])
    else:
        places = int(rng.integers(1, (sizes > 0).sum() + 1))
        given[SIZE_KEY[given["name"]]] = int(rng.integers(1, places + 1))
        given["concurrency"] = places if rng.random() < 0.7 else None
        if rng.random() < 0.5:
            given["max_staleness"] = int(rng.integers(0, 4))
    if rng.random() < 0.5:
        given["client_dropout"] = {
            "rate": rng.choice([0.05, 0.3, 0.9]),
            "rejoin_after": rng.choice([None, 0.1, 1.0, 2.5]),
        }
    if rng.random() < 0.5:
        period = rng.choice([0.5, 3.0, 10.0])
        given["availability"] = {"period": period, "open": period * rng.choice([0.1, 0.5, 0.9])}
    return alone(given, seed=seed), sizes.tolist()


def until_the_end(clock: Any, rounds: Sequence[int], ends: type[Exception]) -> list[tuple]:
    """What a simulator tells, up to a point where nothing happens any more."""
    told = []
    for t in rounds:
        try:
            turn = clock.next_round(t)
        except ends:
            return [*told, "the end"]
        told.append(told_by(turn) if isinstance(turn, schedule.ScheduledRound) else turn.told)
    return told


@pytest.mark.parametrize("names", [["kasync", "buffered"], ["sync"]], ids=["asynchronous", "sync"])
def test_drawn_schedules_are_the_plain_simulators(names):
    """With all that can be configured, in any combination, and to the end where there is one."""
    ended = 0
    for seed in range(120):
        config, sizes = drawn(seed, names)
        wanted = until_the_end(plain(config, sizes), range(40), NothingMore)
        found = until_the_end(
            schedule.make_schedule(config, np.array(sizes)), range(40), schedule.ScheduleExhausted
        )
        assert found == wanted, (seed, config.schedule, sizes)
        ended += wanted[-1] == "the end"
    assert ended >= 3


def test_ties_go_to_who_was_put_there_first():
    """Client 2 takes twice as long. At time 2 three tasks end: its first one, which began before
    the second ones of clients 0 and 1; worked out by hand."""
    given = {
        "name": "kasync",
        "k": 1,
        "client_speeds": {"name": "two_speed", "slow": 0.3, "factor": 2.0, "jitter": 0},
    }
    found = [
        (one.client, one.base, one.finish)
        for turn in turns(alone(given), [4, 4, 4], 8)
        for one in turn.arrivals
    ]
    assert found[:2] == [(0, 0, 1), (1, 0, 1)]
    assert found[2:5] == [(2, 0, 2), (0, 1, 2), (1, 2, 2)]
    assert found[5:] == [(0, 4, 3), (1, 5, 3), (2, 3, 4)]


def test_a_place_that_is_left_goes_to_who_waits():
    """Three clients, two places, two arrivals a round, all tasks equally long: under `kasync` who
    has arrived keeps its place, so the third has to wait for the round's end; under `buffered` it
    begins as soon as one has ended."""
    for name, fresh in (("kasync", []), ("buffered", [0])):
        given = {"name": name, SIZE_KEY[name]: 2, "concurrency": 2, "client_speeds": "constant"}
        clock = schedule.make_schedule(alone(given), np.array([4, 4, 4]))
        first = clock.next_round(0)
        (third,) = {0, 1, 2} - set(first.ids)
        assert [one.finish for one in first.arrivals] == [1, 1] and first.time == 1
        assert sum(clock.versions_in_flight().values()) == 2 and clock.versions_in_flight()[
            0
        ] == len(fresh)
        following = {one.client: one.base for one in clock.next_round(1).arrivals}
        assert name == "kasync" or following[third] == 0
        assert name == "buffered" or set(following.values()) == {1}


# -- in step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("speeds", ["constant", "uniform_arrival"])
def test_to_wait_for_everybody_is_to_be_in_step(engine, tmp_path, mode, speeds):
    """K-async with K = N is FedAvg in step, bit for bit, whatever the order of arrival."""
    more = {"rounds": 12, "batching": {"mode": mode, "size": 5}}
    xs = []
    for given in (
        {"name": "kasync", "k": M},
        {"name": "buffered", "buffer_size": M},
        {"cohort": len(SIZES)},
    ):
        run, records = engine(
            configured(tmp_path, {"schedule": {**given, "client_speeds": speeds}}, **more)
        )
        assert all(
            record["clients/used"] == M and record.get("staleness/max", 0) == 0
            for record in records[1:]
        )
        assert {record.get("system/versions_in_memory", 1) for record in records[1:]} == {1}
        xs.append(np.array(run.executor.xs))
    assert np.array_equal(xs[0], xs[2]) and np.array_equal(xs[1], xs[2])
    assert np.linalg.norm(xs[0][-1] - xs[0][0]) > 0.1


def test_who_takes_just_as_long_as_the_deadline_is_in_time():
    """Whatever the time on the clock. The windows bring the clock to odd times."""
    speeds = {"name": "two_speed", "slow": 0.9, "factor": 0.1, "jitter": 0}
    given = {
        "cohort": 1,
        "deadline": 0.1,
        "client_speeds": speeds,
        "availability": {"period": 1.7, "open": 0.2},
    }
    assert [turn.missed_deadline for turn in turns(alone(given), [3, 3], 50)] == [0] * 50


def test_the_average_client_that_trains_takes_one_unit_of_time():
    """Neither clients that are held out nor empty ones make the others slower."""
    speeds = {"name": "data", "jitter": 0}
    for sizes in ([2, 4, 6], [0, 2, 0, 4, 6]):
        rounds = turns(alone({"cohort": len(sizes), "client_speeds": speeds}), sizes, 1)
        durations = [arrival.duration for arrival in rounds[0].arrivals]
        assert durations == [0.5, 1.0, 1.5]


def test_clients_that_wait_are_looked_at_once_for_all_free_places(monkeypatch):
    """In runs whose clients change their examples."""
    looked_up = []
    of_round = SizesByRound.at
    monkeypatch.setattr(
        SizesByRound, "at", lambda sizes, t: looked_up.append(t) or of_round(sizes, t)
    )
    sizes = SizesByRound((0, 10), (np.full(40, 3), np.full(40, 4)))
    schedule.make_schedule(alone({"name": "kasync", "k": 2, "concurrency": 20}), sizes)
    assert looked_up == [0]


# -- stopped in the middle -------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["kasync", "buffered"], ["sync"]], ids=["asynchronous", "sync"])
def test_a_packed_clock_goes_on_as_if_nothing_had_been(names):
    """Packed between two turns, written, read and unpacked in a fresh schedule."""
    compared = 0
    for seed in range(200, 260):
        config, sizes = drawn(seed, names)
        first, second = (schedule.make_schedule(config, np.array(sizes)) for _ in range(2))
        if until_the_end(first, range(13), schedule.ScheduleExhausted)[-1] == "the end":
            continue
        second.unpack(load_tensors(save_tensors(first.pack())))
        assert second.versions_in_flight() == first.versions_in_flight() and second.now == first.now
        wanted, found = (
            until_the_end(clock, range(13, 40), schedule.ScheduleExhausted)
            for clock in (first, second)
        )
        assert found == wanted, (seed, config.schedule, sizes)
        compared += 1
    assert compared > 40


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.getbasetemp()}/shared-mlflow.db"


@pytest.fixture
def tracked(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """tracked(case): the configuration of a run with a folder and an experiment of its own."""
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    own = {"run_dir": str(tmp_path / "run"), "tracking": {"uri": uri, "experiment": tmp_path.name}}
    return lambda case, **more: configured(tmp_path, case, **{**own, **more})


ALIVE = {
    "k": 3,
    "concurrency": 9,
    "client_speeds": LOGNORMAL,
    "client_dropout": COMING_BACK,
    "availability": WINDOWS,
}


@pytest.mark.ray
@pytest.mark.parametrize("algorithm", ["fedhist", "fedasync"])
def test_resumed_is_uninterrupted(tracked, tmp_path, recycled_actors, algorithm):
    """Stopped in round 14, after the checkpoint of round 10, with tasks under way on several
    versions: resumed in this process and on two actors, the parameters and the history are those of
    never stopping."""
    case = {
        "schedule": {"name": "kasync", **ALIVE, "max_staleness": 4},
        "algorithm": {"name": algorithm},
    }
    if algorithm == "fedhist":
        case["algorithm"]["length"] = 3
    # blocks of several, whose sums show in float64 if a resumed round were cut otherwise
    case |= {
        "dtype": "float64",
        "batching": {"mode": "loop" if algorithm == "fedhist" else "lanes", "size": 3},
    }
    config = tracked(case, rounds=18, checkpoint={"every": 5})
    whole = raysim.run(config, run_dir=str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        raysim.run(config, progress=stop_at(14))
    assert [path.name for path in checkpoint.available_checkpoints(tmp_path / "run")][
        -1
    ] == "round-000010"
    saved = checkpoint.read_latest(tmp_path / "run")
    assert len(saved.versions) >= 2 and len(saved.clock["events/times"]) >= 9
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    on_actors = {"executor": "ray", "actors": 2, "cpus": 1, "timeout": 300}
    for folder, overrides in (("run", {}), ("copy", {"resources": on_actors})):
        done = resume(tmp_path / folder, overrides)
        assert done.state_digest == whole.state_digest and torch.equal(
            done.parameters, whole.parameters
        )
        shared = [
            {k: record[k] for k in before}
            for before, record in zip(whole.history, done.history, strict=True)
        ]
        assert same(shared, whole.history)


# -- mistakes, and the end of everything -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "kasync", "k": 5, "concurrency": 4}, r"schedule: 'k' \(5\).* 'concurrency' \(4\)"),
        (
            {"name": "buffered", "buffer_size": 5, "concurrency": 4},
            r"schedule: 'buffer_size' \(5\).* 'concurrency' \(4\)",
        ),
        ({"name": "kasync", "k": 5, "concurrency": 15}, r"schedule\.concurrency: .*15 .* 14"),
        ({"name": "kasync", "k": 5, "concurrency": 14}, r"schedule\.concurrency: .*14 .* data .* 13"),
        ({"name": "buffered", "buffer_size": 15}, r"schedule\.buffer_size: .*15 .* 14"),
        ({"name": "kasync", "k": 14}, r"schedule\.k: .*14 .* data .* 13"),
        ({"cohort": 15}, r"schedule\.cohort: .*15 .* 14"),
        ({"name": "kasync", "k": 3, "availability": {"period": 2, "open": 2}}, r"schedule\.availability: 'open'"),
        ({"cohort": 3, "availability": {"period": 2, "open": 3}}, r"schedule\.availability: 'open'.*'period' \(2\)"),
        ({"cohort": 3, "availability": {"period": 2, "open": 0}}, r"schedule\.availability\.open: .*greater than"),
        ({"cohort": 3, "client_dropout": {"rate": 1.5}}, r"schedule\.client_dropout\.rate: .*1\.5"),
        (
            {"cohort": 3, "client_dropout": {"rate": 0.5, "rejoin_after": 0}},
            r"schedule\.client_dropout\.rejoin_after: .*greater than 0",
        ),
        ({"cohort": 3, "deadline": 0}, r"schedule\.deadline: .*greater than 0"),
        ({"name": "kasync", "k": 3, "max_staleness": -1}, r"schedule\.max_staleness: .*-1"),
        ({"name": "kasync", "k": 3, "cohort": 3}, r"schedule\.cohort: unknown key"),
        ({"cohort": 3, "client_speeds": "uniform"}, r"schedule\.client_speeds\.name: .*'uniform_arrival'"),
        (
            {"cohort": 3, "client_speeds": {"name": "lognormal", "sigm": 1}},
            r"schedule\.client_speeds\.sigm: unknown key.*'sigma'",
        ),
        ({"cohort": 3, "client_speeds": {"name": "trace"}}, r"schedule\.client_speeds\.path: missing"),
        ({"cohort": 3, "client_dropout": {"rate": True}}, r"schedule\.client_dropout\.rate: true"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        prepare(configured(tmp_path, {"schedule": given}))


TRACE = ["client,seconds_per_sample,down,up", *(f"{i},0.1,0.2,0.3" for i in range(14))]


def test_a_trace_belongs_to_its_run(tmp_path):
    """Its content is part of the fingerprint, its place is not; a run whose trace has changed does
    not go on."""
    prints = []
    for folder, pace in (("a", "0.1"), ("b", "0.1"), ("c", "0.2")):
        path = tmp_path / folder / "times.csv"
        path.parent.mkdir()
        path.write_text("\n".join([TRACE[0], *(f"{i},{pace},0.1,0.1" for i in range(len(SIZES)))]))
        given = {"name": "kasync", "k": 3, "client_speeds": {"name": "trace", "path": str(path)}}
        prints.append(prepare(configured(tmp_path, {"schedule": given})).config.fingerprint)
    assert prints[0] == prints[1] != prints[2]
    saved = prepare(configured(tmp_path, {"schedule": given})).config.model_dump(mode="json")
    assert prepare(saved).config.fingerprint == prints[2]
    path.write_text(path.read_text().replace("0.2", "0.3"))
    with pytest.raises(
        ConfigError,
        match=r"schedule\.client_speeds\.path: \S*times\.csv has changed since this run began",
    ):
        prepare(saved)


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (1, "client,down,up", "no column 'seconds_per_sample'"),
        (1, "", "no column|line 1"),
        (5, "14,0.1,0.2,0.3", "line 5: unknown client 14; .* 0 to 13"),
        (5, "-1,0.1,0.2,0.3", "line 5: unknown client -1"),
        (6, "4,-0.1,0.2,0.3", "line 6: client 4 has a negative"),
        (6, "4,0.1,0.2,-0.3", "line 6: client 4 has a negative"),
        (6, "4,0.1,inf,0.3", "line 6: client 4 .*infinite"),
        (7, "5,0.1,nan,0.3", "line 7: client 5"),
        (7, "5,0.1,soon,0.3", "line 7: .*number.*'soon'"),
        (7, "5,0.1,0.2", "line 7: .*number"),
        (7, "five,0.1,0.2,0.3", "line 7: .*number.*'five'"),
        (15, "12,0.1,0.2,0.3", "line 15: client 12 occurs twice"),
        (4, "", "no line for client 2 "),
        (3, "\n1,0.1,0.2,-0.3", "line 4: client 1 has a negative"),
    ],
)
def test_a_trace_with_a_mistake_is_refused(tmp_path, line, text, said):
    """By its line in the file, empty ones counted."""
    path = tmp_path / "times.csv"
    given = {"name": "kasync", "client_speeds": {"name": "trace", "path": str(path)}}
    path.write_text("\n".join([*TRACE[: line - 1], text, *TRACE[line:]]))
    with pytest.raises(
        ConfigError, match=rf"schedule\.client_speeds\.path: \S*times\.csv.*({said})"
    ):
        prepare(configured(tmp_path, {"schedule": given}))


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    given = {"cohort": 3, "client_speeds": {"name": "trace", "path": "none.csv"}}
    with pytest.raises(ConfigError, match=r"schedule\.client_speeds\.path: \S*none\.csv cannot be"):
        prepare(configured(tmp_path, {"schedule": given}))


def test_a_trace_is_what_its_columns_say(tmp_path):
    """down + up + seconds_per_sample times the samples of two steps of 4, or of the epochs; a
    client without data needs no line."""
    path, own = (
        tmp_path / "times.csv",
        {"cohort": 5, "client_speeds": {"name": "trace", "path": str(tmp_path / "times.csv")}},
    )
    path.write_text(
        "up,client,down,seconds_per_sample,note\n0.5,2,0.25,0.125,\n1,0,2,3,far\n0,1,0,1,\n"
    )
    for local, wanted in (
        ({"steps": 2, "batch_size": 4}, [3 + 24, 6, 0.75 + 1]),
        ({"steps": 2, "batch_size": "full"}, [3 + 54, 6, 0.75 + 2]),
        ({"epochs": 3, "batch_size": 4}, [3 + 81, 9, 0.75 + 3]),
    ):
        tempo = ClientTimes(alone(own, local=local), np.array([9, 3, 8, 0]))
        assert [tempo.duration(i, 7) for i in range(3)] == wanted


@pytest.mark.parametrize(
    ("name", "rate"), [("kasync", 0.2), ("buffered", 0.2), ("sync", 0.2), ("kasync", 1.0)]
)
def test_when_everybody_is_gone_for_good_the_run_ends(tracked, tmp_path, name, rate):
    """With an error that says when, and with the rounds that were done."""
    size = {"cohort": 4} if name == "sync" else {SIZE_KEY[name]: 3}
    case = {
        "schedule": {
            "name": name,
            **size,
            "client_speeds": LOGNORMAL,
            "client_dropout": {"rate": rate, "rejoin_after": None},
        }
    }
    config, seen = tracked(case), []
    plan = prepare(config)
    told = until_the_end(plain(plan.config, SIZES), range(ROUNDS), NothingMore)
    assert told.pop() == "the end" and (len(told) > 4 if rate < 1 else not told or name == "sync")
    with pytest.raises(RaysimError, match=r"virtual time \d+(\.\d+)?\b") as caught:
        raysim.run(config, progress=lambda record: seen.append(record))
    assert not isinstance(caught.value, ConfigError)
    if name == "sync":
        assert f"virtual time {told[-1][2]:g}" in str(caught.value)
    assert len(seen) == len(told) + 1 and [record["virtual_time"] for record in seen[1:]] == [
        one[2] for one in told
    ]
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines()))
    assert [float(row["round"]) for row in rows] == [float(t) for t in range(len(told) + 1)]
    assert [float(row["virtual_time"]) for row in rows[1:]] == [one[2] for one in told]


# -- what is measured beside -----------------------------------------------------------------------


def test_accuracy_is_the_mean_of_the_classes(engine, tmp_path):
    """Weighed by how many examples of each there are."""
    case = {"schedule": KASYNC, "evaluate": {"every": 4, "per_class": True, "batch_size": 100}}
    run, records = engine(configured(tmp_path, case, rounds=12))
    counts = np.bincount(run.plan.dataset.y_test, minlength=10)
    measured = [record for record in records if "accuracy" in record]
    assert [record["round"] for record in measured] == [0, 4, 8, 12]
    for record in measured:
        of_class = np.array([record[f"accuracy/class_{c}"] for c in range(10)])
        assert (of_class * counts).sum() / counts.sum() == pytest.approx(record["accuracy"])
        assert of_class.min() >= 0 and of_class.max() <= 1 and of_class.std() > 0.05
    assert not any(
        key.startswith("accuracy/")
        for record in records
        if record not in measured
        for key in record
    )
    _, plainly = engine(configured(tmp_path, {**case, "evaluate": {"every": 4}}, rounds=12))
    assert [r.get("accuracy") for r in plainly] == [r.get("accuracy") for r in records]
    assert not any(key.startswith("accuracy/") for record in plainly for key in record)
