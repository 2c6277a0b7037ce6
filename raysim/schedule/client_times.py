"""How long the tasks of each client take in virtual time, and when clients are available.

The duration of the k-th task of client i is its mean times a random factor, number k of the stream
"speed" of that client. It does not depend on the schedule or on the algorithm. Lognormal means are
exp(sigma z) with z from `generator(seed, "speeds").standard_normal(N)`. The availability windows of
client i begin at -o_i and every `period` from there, with o from `generator(seed, "windows")`,
uniform over a period.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
from numpy.random import Generator

from raysim.config.schema import Config
from raysim.config.sections.data import slow_clients
from raysim.config.sections.schedule import (
    ByData,
    Constant,
    Lognormal,
    Trace,
    TwoSpeed,
    UniformArrival,
)
from raysim.data.partition.clients import SizesByRound
from raysim.data.partition.groups import batch_sizes_of, by_group, group_members, local_of_groups
from raysim.errors import ConfigError
from raysim.randomness import KeyedStream, generator

TRACE_COLUMNS = ("client", "seconds_per_sample", "down", "up")

MAX_TRACE_SECONDS = 1e100
"""Longest duration of a task that a trace may have, in seconds."""


class ClientTimes:
    """Durations of tasks and availability windows.

    Args:
        config: the run's configuration.
        sizes: number of examples of each client, [N], or these by round.

    Attributes:
        are_constant: whether every task takes one unit of virtual time.

    Raises:
        ConfigError: a trace is unreadable or incomplete; the message names the line.
    """

    def __init__(self, config: Config, sizes: np.ndarray | SizesByRound):
        speeds = config.schedule.client_speeds
        self._sizes = SizesByRound.of(sizes)
        self._means = [_mean_durations(config, of_phase) for of_phase in self._sizes.phases]
        self.are_constant = isinstance(speeds, Constant)
        self._is_exponential = isinstance(speeds, UniformArrival)
        self._jitter = float(getattr(speeds, "jitter", 0.0))
        draw = Generator.standard_normal
        if self._is_exponential:
            draw = Generator.standard_exponential
        self._factors = KeyedStream(config.seed, "speed", draw)
        self._windows = config.schedule.availability
        if self._windows is not None:
            uniforms = generator(config.seed, "windows").random(len(self._means[0]))
            self._offset = uniforms * self._windows.period

    @property
    def have_windows(self) -> bool:
        """Whether clients are available only in windows."""
        return self._windows is not None

    def duration(self, client: int, k: int, t: int = 0) -> float:
        """Return the virtual duration of the `k`-th task of `client`.

        Args:
            client: number of the client.
            k: number of the task among those of the client, from 0; in a synchronous run that of
                the round.
            t: the round, or the version that the client received.
        """
        mean = float(self._means[self._sizes.phase(t)][client])
        if self._is_exponential:
            return mean * self._factors.number(k, client)
        if self._jitter:
            z = self._factors.number(k, client)
            return mean * math.exp(self._jitter * z - self._jitter**2 / 2)
        return mean

    def available_from(self, client: int, now: float) -> float:
        """Return the first time, `now` or later, at which `client` is available.

        Args:
            client: number of the client.
            now: the virtual time.
        """
        if self._windows is None or now == np.inf:
            return now
        period = self._windows.period
        offset = float(self._offset[client])
        begin = math.floor((now + offset) / period) * period - offset
        if now >= begin + period:  # by rounding
            begin += period
        return now if now < begin + self._windows.open else begin + period


def _mean_durations(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Return the mean virtual duration of each client's tasks, float64 [N]."""
    speeds = config.schedule.client_speeds
    n_clients = len(sizes)
    match speeds:
        case Lognormal():
            z = generator(config.seed, "speeds").standard_normal(n_clients)
            return np.exp(speeds.sigma * z)
        case TwoSpeed():
            first_slow = n_clients - slow_clients(n_clients, speeds.slow)
            return np.where(np.arange(n_clients) >= first_slow, speeds.factor, 1.0)
        case ByData():
            # Clients that are held out or empty have no examples here, and never train.
            return sizes / sizes[sizes > 0].mean()
        case Trace():
            path = Path(speeds.path).expanduser()
            return _read_trace(path, sizes, _examples_per_task(config, sizes))
        case _:
            return np.broadcast_to(1.0, (n_clients,))


def _examples_per_task(config: Config, sizes: np.ndarray) -> np.ndarray:
    """Return the examples that each client trains on in one task, [N].

    Local steps count the batch size (at most the client's examples), epochs the client's examples,
    with `drop_last` those of full batches.
    """
    batch_sizes = batch_sizes_of(config, sizes)
    of_group = []
    for local in local_of_groups(config):
        left = sizes % np.maximum(batch_sizes, 1) if local.drop_last else 0
        of_epochs = (sizes - left) * (local.epochs or 0)
        of_group.append(of_epochs if local.steps is None else local.steps * batch_sizes)
    return by_group(of_group, group_members(config, len(sizes)))


def _read_trace(path: Path, sizes: np.ndarray, examples_per_task: np.ndarray) -> np.ndarray:
    """Return the seconds of each client's task by a trace, [N].

    Raises:
        ConfigError: the trace is unreadable or incomplete; the message names the line.
    """
    key = "schedule.client_speeds.path"
    n_clients = len(sizes)
    seconds = np.full(n_clients, np.nan)
    for line, row in _read_rows(path, key):
        where = f"{key}: {path}, line {line}"
        client, per_example, down, up = _parse_row(row, where)
        if not 0 <= client < n_clients:
            raise ConfigError(
                f"{where}: unknown client {client}; the partition has clients 0 to {n_clients - 1}"
            )
        if not (min(per_example, down, up) >= 0 and np.isfinite([per_example, down, up]).all()):
            raise ConfigError(
                f"{where}: client {client} has a negative, infinite or undefined time; give 0 or "
                "more"
            )
        if not np.isnan(seconds[client]):
            raise ConfigError(f"{where}: client {client} occurs twice; give it one line")
        seconds[client] = down + up + per_example * float(examples_per_task[client])
        if seconds[client] > MAX_TRACE_SECONDS:
            raise ConfigError(
                f"{where}: client {client} takes {seconds[client]:g} seconds; give shorter times"
            )
    missing = np.flatnonzero(np.isnan(seconds) & (sizes > 0))
    if missing.size:
        raise ConfigError(
            f"{key}: {path} has no line for client {missing[0]} ({missing.size} are missing); add "
            "them"
        )
    return seconds


def _read_rows(path: Path, key: str) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a trace with their line numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key}: {path} cannot be read: {reason}") from None
    missing = [name for name in TRACE_COLUMNS if name not in header]
    if missing:
        raise ConfigError(
            f"{key}: {path} has no column '{missing[0]}', but {header}; "
            f"its first line must name {', '.join(TRACE_COLUMNS)}"
        )
    return rows


def _parse_row(row: dict[str, str], where: str) -> tuple[int, float, float, float]:
    """Return client, seconds per example, seconds down and seconds up of one row."""
    try:
        client = int(row["client"])
        per_example, down, up = (float(row[name]) for name in TRACE_COLUMNS[1:])
        if None in row:
            raise ValueError("more values than columns")
    except (TypeError, ValueError):
        values = ", ".join(repr(row[name]) for name in TRACE_COLUMNS)
        raise ConfigError(
            f"{where}: expected a whole number and three numbers; found {values}"
        ) from None
    return client, per_example, down, up
