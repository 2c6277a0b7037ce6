"""Heartbeats: detect actors that hang, but not those that compute for a long time.

Ray notices when a process ends, but not when it is suspended or waits forever, for example for a
disk. Each process of a run therefore has a `Heartbeat`: a thread that increments a counter in the
key-value store of Ray's head node. The thread also runs during long computations, because torch
releases Python's lock. The driver has a `Monitor`, which reads all counters. A process has
failed if

    it is silent             its counter has not changed for `resources.timeout` seconds, or
    its call takes too long  it has worked on one call for `resources.call_timeout` seconds (null:
                             no limit).

The monitor also checks Ray. If the driver's node is dead or the head node does not answer, nothing
can be recovered and the run ends. One thread calls Ray for this; another one only looks at Ray's
port and processes, because a call may block until Ray ends the driver. Only time during which the
monitor runs counts, so that a driver that was suspended does not count the other processes as dead.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from raysim.distributed.cluster import connection
from raysim.errors import RaysimError
from raysim.system import processes
from raysim.system.processes import Process

KEY_NAMESPACE = b"raysim"
"""Namespace of the heartbeats in Ray's key-value store."""

BEATS_PER_TIMEOUT = 20
"""Number of heartbeats within `resources.timeout`."""

MAX_INTERVAL_S = 5.0
"""Longest time between two heartbeats, in seconds."""

MIN_INTERVAL_S = 0.05
"""Shortest time between two heartbeats, in seconds."""

MIN_START_TIMEOUT_S = 120.0
"""Smallest time limit for the first heartbeat, in seconds: imports can exceed a short timeout."""

HEAD_TIMEOUT_S = 120.0
"""Time limit for an answer of Ray's head node, in seconds."""

HEAD_GONE_SHARE = 0.5
"""Share of the time after which Ray ends this process because nothing listens at the head's port.

The monitor waits that long: it reports the loss before Ray does."""

RESUME_ADVICE = "`raysim resume` continues from the last checkpoint"
"""Advice at the end of the error message if Ray dies during a run."""

NOTICE_TIMEOUT_S = 15.0
"""Time that the main thread has to notice that Ray is broken, in seconds.

After this time the main thread hangs in a call of Ray, and the monitor ends the process."""


@dataclass(frozen=True)
class Address:
    """Destination of a process's heartbeats."""

    key: bytes
    """Key in Ray's key-value store."""

    interval_s: float
    """Time between two heartbeats, in seconds."""


class Heartbeat:
    """Sender of heartbeats, in an actor. Its thread ends when the object is deleted.

    Args:
        address: destination, from `Monitor.add`.
    """

    def __init__(self, address: Address):
        self._state = {"call": 0, "busy": False, "node": ray.get_runtime_context().get_node_id()}
        self._state |= Process.this().facts()
        ended = threading.Event()
        weakref.finalize(self, ended.set)
        # The thread waits an interval first; without a beat the process counts as not started.
        _send(address, self._state, 0)
        threading.Thread(
            target=_write_beat,
            args=(address, self._state, ended),
            name="raysim-heartbeat",
            daemon=True,
        ).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Return a context in which the heartbeats report that the process works on a call."""
        self._state["call"] += 1
        self._state["busy"] = True
        try:
            yield
        finally:
            self._state["busy"] = False


def _write_beat(address: Address, state: dict, ended: threading.Event) -> None:
    """Send heartbeats until `ended` is set."""
    count = 0
    while not ended.wait(address.interval_s):
        count += 1
        # The monitor notices heartbeats that do not arrive.
        with suppress(RayError, OSError):
            _send(address, state, count)


def _send(address: Address, state: dict, count: int) -> None:
    """Write one heartbeat."""
    internal_kv._internal_kv_put(
        address.key, json.dumps({"count": count, **state}), namespace=KEY_NAMESPACE
    )


@dataclass
class _Heard:
    """Last heartbeat of a process, and the times since its last changes."""

    last: dict = field(default_factory=dict)
    """Last heartbeat; empty before the first."""

    silent_s: float = 0.0
    """Time without a new heartbeat, in seconds."""

    idle_s: float = 0.0
    """Time for which the heartbeats have reported no work, in seconds."""

    call_s: float = 0.0
    """Time for which the heartbeats have reported work on the current call, in seconds."""

    def update(self, beat: dict, elapsed: float) -> None:
        """Take in the heartbeat read `elapsed` seconds after the previous read."""
        if beat == self.last or not beat:
            self.silent_s += elapsed
            return
        # Heartbeats are read more often than they are sent.
        passed = self.silent_s + elapsed
        same = beat["call"] == self.last.get("call")
        self.call_s = self.call_s + passed if same and beat["busy"] and self.last["busy"] else 0.0
        self.idle_s = self.idle_s + passed if same and not beat["busy"] else 0.0
        self.silent_s = 0.0
        self.last = beat


class Monitor:
    """Receiver of all heartbeats, in the driver.

    Args:
        timeout_s: time that a process may be silent, in seconds.
        call_timeout_s: time that it may work on one call, in seconds; None means no limit.
        advice: what a user can do after Ray is lost, for the message.
    """

    def __init__(
        self, timeout_s: float, call_timeout_s: float | None = None, advice: str = RESUME_ADVICE
    ):
        self.timeout_s = timeout_s
        self.call_timeout_s = call_timeout_s
        self.advice = advice
        self.interval_s = min(max(timeout_s / BEATS_PER_TIMEOUT, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self.broken = ""
        """Reason why Ray cannot be used any more; "" while it can."""
        self._prefix = f"heartbeats/{uuid.uuid4().hex}/"
        self._number = 0
        self._heard: dict[Address, _Heard] = {}
        self._seen: set[str] = set()
        self._alive: set[str] = set()
        self._ended = threading.Event()
        self._polls = self._checked_poll = 0
        self._checked_at = time.monotonic()
        self._unanswered_s = 0.0
        self._gone_s = 0.0
        self._head = ray.get_runtime_context().gcs_address
        self._home = ray.get_runtime_context().get_node_id()
        self._store: Any = internal_kv.internal_kv_get_gcs_client()
        self._look_at_nodes()
        self._vital = connection.vital_processes()
        self._threads = [
            threading.Thread(target=self._read, name="raysim-monitor", daemon=True),
            threading.Thread(target=self._watch, name="raysim-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def start_s(self) -> float:
        """Time limit for the start of a process, in seconds."""
        return max(self.timeout_s, MIN_START_TIMEOUT_S)

    def add(self) -> Address:
        """Monitor one more process, which is about to start; return its heartbeats' address."""
        self._number += 1
        address = Address(f"{self._prefix}{self._number}".encode(), self.interval_s)
        # The thread may be reading the old dictionary, so this builds a new one.
        self._heard = {**self._heard, address: _Heard()}
        return address

    def forget(self, address: Address) -> None:
        """Stop monitoring a process.

        Args:
            address: address of its heartbeats, as `add` returned it.
        """
        self._heard = {known: heard for known, heard in self._heard.items() if known != address}

    def failure(self, address: Address) -> str:
        """Return why a process counts as failed; "" if it has not failed.

        Args:
            address: address of its heartbeats, as `add` returned it.
        """
        heard = self._heard[address]
        if not heard.last:
            if heard.silent_s < self.start_s:
                return ""
            return f"it has not started within {self.start_s:g} s"
        if heard.silent_s >= self.timeout_s:
            return f"no sign of life for {self.timeout_s:g} s (resources.timeout)"
        if self.call_timeout_s is not None and heard.call_s >= self.call_timeout_s:
            return (
                f"it has worked on one call for {self.call_timeout_s:g} s (resources.call_timeout)"
            )
        return ""

    def started(self, address: Address) -> bool:
        """Return whether a process has sent a heartbeat.

        Args:
            address: address of its heartbeats, as `add` returned it.
        """
        return bool(self._heard[address].last)

    def idle_s(self, address: Address) -> float:
        """Return how long a process has reported no work, in seconds, up to its last heartbeat.

        It is 0 for a process that is silent: what that one does is not known, until it has failed.

        Args:
            address: address of its heartbeats, as `add` returned it.
        """
        heard = self._heard[address]
        return heard.idle_s if heard.silent_s < 3 * self.interval_s else 0.0

    def process(self, address: Address) -> tuple[str, Process] | None:
        """Return a process and the id of its node; None before its first heartbeat.

        Args:
            address: address of its heartbeats, as `add` returned it.
        """
        last = self._heard[address].last
        return (last["node"], Process.of(last)) if last else None

    def dead_nodes(self) -> set[str]:
        """Return the ids of nodes that have died since the start."""
        return self._seen - self._alive

    def check(self) -> None:
        """Check that Ray can still be used.

        Raises:
            RaysimError: the head does not answer, or this driver is cut off from it.
        """
        now = time.monotonic()
        polls = self._polls
        # As in `_read`: time in which this process was suspended does not count.
        self._unanswered_s += min(now - self._checked_at, 2 * MAX_INTERVAL_S)
        if polls != self._checked_poll:
            self._unanswered_s = 0.0
        self._checked_at = now
        self._checked_poll = polls
        if self._unanswered_s >= HEAD_TIMEOUT_S:
            self.broken = self.broken or (
                f"the head node of Ray has not answered for {HEAD_TIMEOUT_S:g} s: its GCS hangs, "
                f"or the network fails; {self.advice}"
            )
        if self.broken:
            raise RaysimError(self.broken)

    def stop(self) -> None:
        """Stop monitoring.

        Call this before Ray shuts down: a later request would start another Ray.
        """
        self._ended.set()
        for thread in self._threads:
            # Not without a limit, because a thread may hang in a call of Ray.
            thread.join(1)
        if not self.broken and not any(thread.is_alive() for thread in self._threads):
            with suppress(RayError, OSError):
                self._store.internal_kv_del(self._prefix.encode(), True, KEY_NAMESPACE, 5.0)

    def _watch(self) -> None:
        """Look for signs that Ray has ended, without calling it, until `stop`."""
        looked = time.monotonic()
        broken_s = 0.0
        while not self._ended.wait(min(self.interval_s, 1.0)):
            now = time.monotonic()
            elapsed = min(now - looked, 2 * self.interval_s)
            looked = now
            if self.broken:
                broken_s += elapsed
                if broken_s >= NOTICE_TIMEOUT_S:
                    processes.end_process(self.broken, connection.started_here())
            elif self._has_vital_processes():
                self._head_listens(elapsed)

    def _read(self) -> None:
        """Read all heartbeats and the state of the nodes until `stop`."""
        polled = time.monotonic()
        while not self._ended.wait(min(self.interval_s, 1.0)):
            now = time.monotonic()
            # If this process was suspended, the others have not been silent for that time.
            elapsed = min(now - polled, 2 * self.interval_s)
            polled = now
            # While nothing listens at the head's port, a call of Ray would block.
            if self.broken or self._gone_s:
                continue
            heard = self._heard
            beats = {}
            try:
                beats = self._store.internal_kv_multi_get(
                    [address.key for address in heard], KEY_NAMESPACE, 10.0
                )
                self._look_at_nodes()
            except (RayError, OSError):
                # `check` limits how long Ray may fail to answer.
                continue
            for address, process in heard.items():
                process.update(json.loads(beats.get(address.key, b"{}")), elapsed)
            self._polls += 1

    def _has_vital_processes(self) -> bool:
        """Return whether the Ray that this process started is alive; mark it as broken if not."""
        ended = [name for name, process in self._vital.items() if not process.alive]
        if ended:
            self.broken = (
                f"Ray on this machine has ended: its {' and its '.join(ended)} died; {self.advice}"
            )
        return not ended

    def _head_listens(self, elapsed: float) -> bool:
        """Return whether something listens at the head's port, and mark Ray as broken if not.

        Ray's own calls block while nothing does. One that restarts is waited for.
        """
        try:
            connection.knock(self._head, MAX_INTERVAL_S)
        except OSError:
            self._gone_s += elapsed
            limit_s = HEAD_GONE_SHARE * float(os.environ.get(connection.RECONNECT_VARIABLE, 60))
            if self._gone_s >= limit_s:
                self.broken = (
                    f"the head node of Ray is gone: nothing has listened at {self._head} for "
                    f"{limit_s:g} s; {self.advice}"
                )
            return False
        self._gone_s = 0.0
        return True

    def _look_at_nodes(self) -> None:
        """Update the living nodes, and mark Ray as broken if the driver's node is dead."""
        # The driver may be about to shut Ray down, and a request after that starts another Ray.
        if self._ended.is_set():
            return
        self._alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        self._seen |= self._alive
        if self._home in self._seen and self._home not in self._alive:
            self.broken = (
                f"Ray on this machine (node {self._home[:6]}) does not answer any more: its raylet "
                f"has died or hangs; {self.advice}"
            )
