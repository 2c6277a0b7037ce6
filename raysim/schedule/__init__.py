"""Schedules: which clients take part in each round, and when, in virtual time.

A schedule does not depend on the results of training. The order of events is a pure function of the
configuration, so rounds can be scheduled ahead of the training, and scheduled again after a crash.
The exception is a server rule that selects the cohorts of synchronous rounds itself.

A task is the local training of one client, from the broadcast to the arrival of its update. Version
v is the global model after v rounds. A scheduled round is a round as the server sees it: the
updates that arrive in it, from which the server computes version t + 1. In a synchronous round all
tasks started from version t (`synchronous`). In an asynchronous round each started when its
client was free, and its staleness is t minus the version it started from (`asynchronous`).

Tasks that drop out, miss the deadline or are discarded as stale are never trained (`stragglers`).
The client state and the mini-batch streams of their clients stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from raysim.config.schema import Config
from raysim.config.sections.schedule import InFlight
from raysim.data.partition.clients import SizesByRound
from raysim.schedule.asynchronous import Asynchronous
from raysim.schedule.scheduled_round import (
    Arrival,
    ScheduledRound,
    ScheduleExhausted,
    Selection,
    synchronous_round,
)
from raysim.schedule.synchronous import Synchronous

RoundSchedule = Synchronous | Asynchronous

__all__ = [
    "Arrival",
    "Asynchronous",
    "RoundSchedule",
    "ScheduleExhausted",
    "ScheduledRound",
    "Selection",
    "Synchronous",
    "clock_before",
    "make_schedule",
    "preview",
    "synchronous_round",
]


def make_schedule(config: Config, sizes: np.ndarray | SizesByRound) -> RoundSchedule:
    """Return the configured schedule at virtual time 0.

    Args:
        config: the configuration of the run.
        sizes: number of examples of each client, [N], or these by round.

    Raises:
        ConfigError: a trace of client times is unreadable or incomplete.
    """
    if isinstance(config.schedule, InFlight):
        return Asynchronous(config, sizes)
    return Synchronous(config, sizes)


def clock_before(
    config: Config,
    sizes: np.ndarray | SizesByRound,
    known: Sequence[tuple[int, dict[str, Tensor]]],
    t: int,
) -> dict[str, Tensor]:
    """Return the packed schedule as it is before round `t` is scheduled.

    Args:
        config: the configuration of the run.
        sizes: number of examples of each client, [N], or these by round.
        known: packed schedules before some rounds, each with its round; ascending, at least one
            of them not later than `t`.
        t: number of the round, from 0.
    """
    start, packed = next((s, clock) for s, clock in reversed(known) if s <= t)
    if start == t:
        return packed
    schedule = make_schedule(config, sizes)
    schedule.unpack(packed)
    for passed in range(start, t):
        schedule.next_round(passed)
    return schedule.pack()


def preview(config: Config, sizes: np.ndarray | SizesByRound, rounds: int) -> list[ScheduledRound]:
    """Return the first rounds, fewer if the schedule is exhausted; [] if all rounds look alike.

    Args:
        config: the configuration of the run.
        sizes: number of examples of each client, [N], or these by round.
        rounds: the largest number of rounds to return.
    """
    schedule = make_schedule(config, sizes)
    if isinstance(schedule, Synchronous) and schedule.is_uneventful:
        return []
    scheduled: list[ScheduledRound] = []
    try:
        for t in range(rounds):
            scheduled.append(schedule.next_round(t))
    except ScheduleExhausted:
        pass
    return scheduled
