"""Who trains when, on a virtual clock. Nothing here depends on what training gives, so the whole order of events is a
pure function of the configuration: turns can be drawn ahead of the work, and drawn again.

A task is one client's local training, from the version of the model it was sent to its arrival. Version v is the model
after v rounds. A `Turn` is a round as the server sees it: the tasks that arrive in it and are put together to make
version t + 1. Under `Synchronous` they all began with version t; under `Asynchronous` they began when their client was
free, and their staleness is t minus the version they began with.

Chance is keyed, and drawn 16 numbers at a time: the time of client i's k-th task comes from number k mod 16 of
`generator(seed, "speed", i, k // 16)`, and whether it is lost from that, uniform, of (seed, "dropouts", i, k // 16).
Synchronous rounds count a client's tasks by rounds, k = t.

The asynchronous clock keeps a heap of (time, sequence number), so that ties go to what was put there first:

- Idle clients wait, in the order of their numbers. Free places, `concurrency` in all, are given to them one after the
  other, with the newest version: to all in their order if there is room for all, else to the one at
  floor(u len(waiting)), where u is the next uniform number of (seed, "start", n // 16), n counting them.
- When a task ends, it may be lost: its client waits again after `rejoin`. It may be too stale: it is discarded, and its
  client waits. Else it arrives.
- Under `kasync` who has arrived keeps its place until the round ends, under `buffered` not. With the K-th arrival the
  round ends: the version is the next, and the K clients wait.
- A client whose window is closed does not wait; it does from the window's next opening on. One whose window closed
  while it waited is found out when its turn comes (the number that drew it is used up) and comes back then.
- After every event but a round's last arrival the free places are given away, and after the round's end.

Tasks that are lost, late or discarded are never trained: their clients' rows and streams of mini-batches stay as they
are. Whether a number is exponential or normal depends on the speeds; lognormal means are exp(sigma z), z from
`generator(seed, "speeds").standard_normal(N)`. Client i's day begins at -o_i and every `period` from there, where o is
`generator(seed, "windows").random(N) * period`.
"""

from __future__ import annotations

import csv
import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.config.schema import (
    ByData,
    Config,
    Constant,
    InFlight,
    Lognormal,
    Sync,
    Trace,
    TwoSpeed,
    UniformArrival,
    slow_clients,
)
from raysim.errors import ConfigError, RaysimError
from raysim.randomness import generator


class StandStill(RaysimError):
    """Nothing can happen any more on the virtual clock."""


@dataclass(frozen=True)
class Arrival:
    """A task that came in: whose, the version it began with, and when it began and ended."""

    client: int
    base: int
    start: float
    finish: float


@dataclass(frozen=True)
class Turn:
    """Round `t`: its arrivals in the order of virtual time (sampling order where that is the same), and the time at
    which it ends. `lost` tasks dropped out in it, `discarded` ones were too stale, `late` ones missed the deadline.
    `stands_still` says why there can be no such round, if there cannot."""

    t: int
    arrivals: list[Arrival]
    time: float
    lost: int = 0
    discarded: int = 0
    late: int = 0
    stands_still: str = ""

    @property
    def ids(self) -> list[int]:
        return [one.client for one in self.arrivals]

    @property
    def staleness(self) -> list[int]:
        return [self.t - one.base for one in self.arrivals]


def in_step(t: int, ids: list[int], time: float = 0.0) -> Turn:
    """A round in which these clients begin together and arrive one unit of time later."""
    return Turn(t, [Arrival(client, t, time, time + 1) for client in ids], time + 1)


def make(config: Config, sizes: np.ndarray) -> Synchronous | Asynchronous:
    """The configured schedule, at virtual time 0."""
    return (Asynchronous if isinstance(config.schedule, InFlight) else Synchronous)(config, sizes)


def preview(config: Config, sizes: np.ndarray, rounds: int) -> list[Turn]:
    """The first rounds, as many as there can be; [] where all rounds are alike."""
    clock, turns = make(config, sizes), []
    if isinstance(clock, Synchronous) and clock.tempo.constant and not clock.tempo.comes_and_goes:
        return []
    try:
        for t in range(rounds):
            turns.append(clock.turn(t))
    except StandStill:
        pass
    return turns


class Synchronous:
    """`cohort` clients a round, uniformly without replacement, in sampling order; every algorithm of a seed sees the
    same cohorts. Sampled clients without data are left out, so a round may have fewer, or none.

    Sampled are those who are there: all, or those who are not away after a drop-out and whose window is open. A round
    begins when there is somebody with data, and ends with the last task's end, a lost one's too, or at the deadline if
    one missed it. Who is late is not lost as well, and may be sampled again at once.
    """

    def __init__(self, config: Config, sizes: np.ndarray):
        assert isinstance(config.schedule, Sync)
        self.seed, self.size, self.sizes, self.now = config.seed, config.schedule.cohort, sizes, 0.0
        self.deadline = config.schedule.deadline
        self.tempo = Tempo(config, sizes)
        self.away: dict[int, float] = {}

    def turn(self, t: int) -> Turn:
        """Round `t`. Turns are drawn in order."""
        ids = self.cohort(t)  # may have to wait for somebody
        began = last = self.now
        late = lost = 0
        arrivals = []
        for client in ids:
            duration = self.tempo.duration(client, t)
            finish = began + duration
            late += (is_late := self.deadline is not None and duration > self.deadline)
            lost += (is_lost := not is_late and self.tempo.is_lost(client, t))
            if is_lost:
                self.away[client] = finish + self.tempo.rejoin
            if is_late or is_lost:
                last = max(last, finish if self.deadline is None else began + self.deadline)
            else:
                arrivals.append(Arrival(client, t, began, finish))
        if not self.tempo.constant:
            arrivals.sort(key=lambda one: one.finish)
        self.now = max([last, *(one.finish for one in arrivals)])
        return Turn(t, arrivals, self.now, lost=lost, late=late)

    def cohort(self, t: int) -> list[int]:
        """Client ids of round `t`, at the present time."""
        rng, N = generator(self.seed, "cohort", t), len(self.sizes)
        if not self.tempo.comes_and_goes:
            drawn = rng.choice(N, self.size, replace=False)
        else:
            there = np.array(self._there())
            drawn = there[rng.choice(len(there), min(self.size, len(there)), replace=False)]
        return [int(client) for client in drawn if self.sizes[client] > 0]

    def _there(self) -> list[int]:
        """Clients that could be sampled now; if none of them has data, the clock goes on to when one has."""
        self.away = {client: back for client, back in self.away.items() if back > self.now}
        opens = [self.tempo.opening(i, max(self.now, self.away.get(i, 0.0))) for i in range(len(self.sizes))]
        first = min(opening for opening, n in zip(opens, self.sizes, strict=True) if n > 0)
        if first == np.inf:
            raise StandStill(
                f"virtual time {self.now:g}: every client has dropped out and none comes back "
                "(schedule.dropouts.rejoin brings them back)"
            )
        self.now = max(self.now, first)
        return [i for i, opening in enumerate(opens) if opening <= self.now]

    def held(self) -> Counter[int]:
        """Versions that tasks still under way began with: none between rounds."""
        return Counter()

    def pack(self) -> dict[str, Tensor]:
        """The clock, for a checkpoint."""
        away = torch.tensor([[client, back] for client, back in self.away.items()], dtype=torch.float64)
        return {"now": torch.tensor(self.now, dtype=torch.float64), "away": away.reshape(-1, 2)}

    def unpack(self, packed: dict[str, Tensor]) -> None:
        """Goes back to what `pack` gave."""
        self.now = float(packed["now"])
        self.away = {int(client): back for client, back in packed["away"].tolist()}


PATIENCE = 1_000_000
"""Events without an arrival after which the clock counts as standing still."""
ENDS, RETURNS = 0, 1
"""What an event is: a task ends, or a client may take work again."""


class Asynchronous:
    """The K-async and the buffered schedule; see above."""

    def __init__(self, config: Config, sizes: np.ndarray):
        assert isinstance(config.schedule, InFlight)
        s = config.schedule
        self.seed, self.arrivals, self.max_staleness = config.seed, s.arrivals, s.max_staleness
        self.holds_places = s.name == "kasync"
        self.tempo = Tempo(config, sizes)
        with_data = [int(i) for i in np.flatnonzero(sizes > 0)]
        self.places = s.places(len(with_data))
        self.now, self.version, self.sequence, self.draws = 0.0, 0, 0, 0
        self.starts = Numbers(config.seed, "start", Generator.random)
        self.heap: list[tuple[float, int, int, int, int, float]] = []
        """(time, sequence, kind, client, base, start); the last two are of tasks."""
        self.tasks = np.zeros(len(sizes), dtype=np.int64)
        """How many each client has begun."""
        self.under_way: Counter[int] = Counter()
        self.in_flight = 0
        self.buffer: list[Arrival] = []
        self.waiting: list[int] = []
        for client in with_data:
            self._wait(client)
        self._fill()

    def turn(self, t: int) -> Turn:
        """Round `t`. Turns are drawn in order.

        Raises StandStill when nobody is left to arrive.
        """
        assert t == self.version
        lost = discarded = idle = 0
        while len(self.buffer) < self.arrivals:
            if not self.heap or (idle := idle + 1) > PATIENCE:
                why = "nobody is training and nobody will come back"
                raise StandStill(
                    f"virtual time {self.now:g}: {why if not self.heap else f'{PATIENCE} events without an arrival'}; "
                    f"round {t} has {len(self.buffer)} of {self.arrivals} arrivals (schedule.dropouts.rejoin brings "
                    "clients back, schedule.availability says when they take work)"
                )
            self.now, _, kind, client, base, start = heapq.heappop(self.heap)
            if kind == RETURNS:
                self._wait(client)
            else:
                self._release(base)
                if self.tempo.is_lost(client, int(self.tasks[client]) - 1):
                    lost += 1
                    self._return(client, self.now + self.tempo.rejoin)
                elif self.max_staleness is not None and t - base > self.max_staleness:
                    discarded += 1
                    self._wait(client)
                else:
                    self.buffer.append(Arrival(client, base, start, self.now))
                    idle = 0
            if len(self.buffer) < self.arrivals:
                self._fill()
        turn = Turn(t, self.buffer, self.now, lost=lost, discarded=discarded)
        self.version, self.buffer = t + 1, []
        for one in turn.arrivals:
            self._wait(one.client)
        self._fill()
        return turn

    def held(self) -> Counter[int]:
        """Versions that tasks still under way began with, and how many tasks."""
        return self.under_way

    def _push(self, time: float, kind: int, client: int, base: int = -1, start: float = 0.0) -> None:
        heapq.heappush(self.heap, (time, self.sequence, kind, client, base, start))
        self.sequence += 1

    def _wait(self, client: int) -> None:
        opening = self.tempo.opening(client, self.now)
        if opening <= self.now:
            insort(self.waiting, client)
        else:
            self._return(client, opening)

    def _return(self, client: int, time: float) -> None:
        if time < np.inf:
            self._push(time, RETURNS, client)

    def _release(self, base: int) -> None:
        self.in_flight -= 1
        self.under_way[base] -= 1
        if not self.under_way[base]:
            del self.under_way[base]

    def _fill(self) -> None:
        """Gives free places to those who wait."""
        while self.waiting:
            free = self.places - self.in_flight - (len(self.buffer) if self.holds_places else 0)
            if free <= 0:
                return
            if len(self.waiting) <= free:
                everybody, self.waiting = self.waiting, []
                for client in everybody:
                    self._begin(client)
            else:
                u = self.starts.number(self.draws)
                self.draws += 1
                self._begin(self.waiting.pop(int(u * len(self.waiting))))

    def _begin(self, client: int) -> None:
        """Sends the newest version to a client; if its window has closed while it waited, it comes back later."""
        opening = self.tempo.opening(client, self.now)
        if opening > self.now:
            self._return(client, opening)
            return
        finish = self.now + self.tempo.duration(client, int(self.tasks[client]))
        self.tasks[client] += 1
        self.in_flight += 1
        self.under_way[self.version] += 1
        self._push(finish, ENDS, client, self.version, self.now)

    def pack(self) -> dict[str, Tensor]:
        """The clock between two turns, for a checkpoint."""
        events = torch.tensor([[time, start] for time, *_, start in self.heap], dtype=torch.float64).reshape(-1, 2)
        whole = torch.tensor([event[1:5] for event in self.heap], dtype=torch.int64).reshape(-1, 4)
        return {
            "now": torch.tensor(self.now, dtype=torch.float64),
            "counts": torch.tensor([self.version, self.sequence, self.draws]),
            "tasks": torch.from_numpy(self.tasks.copy()),
            "waiting": torch.tensor(self.waiting, dtype=torch.int64),
            "events/times": events,
            "events/what": whole,
        }

    def unpack(self, packed: dict[str, Tensor]) -> None:
        """Goes back to what `pack` gave."""
        self.now = float(packed["now"])
        self.version, self.sequence, self.draws = packed["counts"].tolist()
        self.tasks, self.waiting = packed["tasks"].numpy().copy(), packed["waiting"].tolist()
        events = zip(packed["events/times"].tolist(), packed["events/what"].tolist(), strict=True)
        self.heap = [(time, *what, start) for (time, start), what in events]
        self.buffer = []
        self.under_way = Counter(base for *_, base, _ in self.heap if base >= 0)
        self.in_flight = self.under_way.total()


EMPTY = np.empty(0)


class Numbers:
    """A keyed sequence of random numbers for each place, drawn 16 at a time because making a generator costs more than
    its numbers; those in use are kept."""

    def __init__(self, seed: int, stream: str, draw: Callable[[Generator, int], np.ndarray]):
        self.seed, self.stream, self.draw = seed, stream, draw
        self.kept: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}

    def number(self, k: int, *place: int) -> float:
        """The k-th number of this place."""
        chunk, at = divmod(k, 16)
        number, values = self.kept.get(place, (-1, EMPTY))
        if number != chunk:
            values = self.draw(generator(self.seed, self.stream, *place, chunk), 16)
            self.kept[place] = chunk, values
        return float(values[at])


class Tempo:
    """How long tasks take, which are lost, and when clients take work.

    Attributes:
        mean: virtual time of each client's tasks, float64 [N].
        rejoin: how long a client that dropped out stays away.
    """

    def __init__(self, config: Config, sizes: np.ndarray):
        s = config.schedule
        self.seed, self.speeds, self.dropouts, self.windows = config.seed, s.speeds, s.dropouts, s.availability
        self.constant = isinstance(s.speeds, Constant)
        self.jitter = float(getattr(s.speeds, "jitter", 0.0))
        self.mean = _means(config, sizes)
        self.rejoin = np.inf if s.dropouts is None or s.dropouts.rejoin is None else s.dropouts.rejoin
        draw = Generator.standard_exponential if isinstance(s.speeds, UniformArrival) else Generator.standard_normal
        self.pace, self.fate = Numbers(self.seed, "speed", draw), Numbers(self.seed, "dropouts", Generator.random)
        if s.availability is not None:
            self.offset = generator(self.seed, "windows").random(len(sizes)) * s.availability.period

    @property
    def comes_and_goes(self) -> bool:
        """Whether there may be times at which a client takes no work."""
        return self.dropouts is not None or self.windows is not None

    def duration(self, client: int, k: int) -> float:
        """The virtual time that the client's k-th task takes."""
        mean = float(self.mean[client])
        if isinstance(self.speeds, UniformArrival):
            return mean * self.pace.number(k, client)
        if self.jitter:
            return mean * math.exp(self.jitter * self.pace.number(k, client) - self.jitter**2 / 2)
        return mean

    def is_lost(self, client: int, k: int) -> bool:
        """Whether the client's k-th task never arrives."""
        return self.dropouts is not None and self.fate.number(k, client) < self.dropouts.rate

    def opening(self, client: int, now: float) -> float:
        """When the client takes work next: `now`, or later."""
        if self.windows is None or now == np.inf:
            return now
        period, offset = self.windows.period, float(self.offset[client])
        begin = math.floor((now + offset) / period) * period - offset
        if now >= begin + period:  # by rounding
            begin += period
        return now if now < begin + self.windows.open else begin + period


def _means(config: Config, sizes: np.ndarray) -> np.ndarray:
    """The mean time of each client's tasks, float64 [N]."""
    speeds, N = config.schedule.speeds, len(sizes)
    match speeds:
        case Lognormal():
            return np.exp(speeds.sigma * generator(config.seed, "speeds").standard_normal(N))
        case TwoSpeed():
            return np.where(np.arange(N) >= N - slow_clients(N, speeds.slow), speeds.factor, 1.0)
        case ByData():
            return sizes / sizes.mean()
        case Trace():
            local = config.local
            batch = sizes if local.batch == "full" else np.minimum(sizes, local.batch)
            samples = sizes * local.epochs if local.epochs is not None else (local.steps or 0) * batch
            return _measured(Path(speeds.path).expanduser(), sizes, samples)
        case _:
            return np.broadcast_to(1.0, (N,))


def _measured(path: Path, sizes: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Seconds that each client takes for so many samples, from a trace. Raises ConfigError with the line at fault.

    A task's samples are counted as steps times the batch size (at most the client's own), or epochs times its own.
    """
    key, N, columns = "schedule.speeds.path", len(sizes), ("client", "seconds_per_sample", "down", "up")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {path} cannot be read: {reason}") from None
    if missing := [name for name in columns if name not in header]:
        raise ConfigError(
            f"{key}: {path} has no column '{missing[0]}', but {header}; its first line must name {', '.join(columns)}"
        )
    times = np.full(N, np.nan)
    for line, row in rows:
        where = f"{key}: {path}, line {line}"
        try:
            client = int(row["client"])
            pace, down, up = (float(row[name]) for name in columns[1:])
            if None in row:
                raise ValueError("more values than columns")
        except (TypeError, ValueError):
            found = ", ".join(repr(row[name]) for name in columns)
            raise ConfigError(f"{where}: expected a whole number and three numbers; found {found}") from None
        if not 0 <= client < N:
            raise ConfigError(f"{where}: unknown client {client}; the partition has clients 0 to {N - 1}")
        if not (min(pace, down, up) >= 0 and np.isfinite([pace, down, up]).all()):
            raise ConfigError(f"{where}: client {client} has a negative, infinite or undefined time; give 0 or more")
        if not np.isnan(times[client]):
            raise ConfigError(f"{where}: client {client} occurs twice; give it one line")
        times[client] = down + up + pace * float(samples[client])
        if times[client] > 1e100:
            raise ConfigError(f"{where}: client {client} takes {times[client]:g} seconds; give shorter times")
    if (without := np.flatnonzero(np.isnan(times) & (sizes > 0))).size:
        raise ConfigError(f"{key}: {path} has no line for client {without[0]} ({without.size} are missing); add them")
    return times
