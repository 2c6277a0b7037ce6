"""Supervision of the actors of a run: whether one has failed, waits that notice it, and its end.

Ray does not restart the actors. One that hangs is killed and counts as failed; `heartbeats` says
when. Every wait has a limit, checks for failures every `POLL_INTERVAL_S`, and names in its error
what it waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from raysim.distributed.heartbeats import Address, Monitor
from raysim.distributed.transport import actor_calls
from raysim.distributed.transport.actor_calls import Actor, Reference
from raysim.distributed.waiting import POLL_INTERVAL_S, PROGRESS_INTERVAL_S, get
from raysim.engine.failure_policy import ActorDied
from raysim.errors import RaysimError, ServerStateLost
from raysim.system import processes, startup_stages


class ActorSupervisor:
    """Supervisor of the actors of a run, in the driver.

    Args:
        log: called with one line of text if a process does not end.
    """

    def __init__(self, log: Callable[[str], None]):
        self.log = log
        self._monitor: Monitor | None = None
        self._addresses: dict[Actor, Address] = {}
        self._names: dict[Actor, str] = {}

    def start(self, timeout_s: float, call_timeout_s: float | None) -> None:
        """Start to receive heartbeats, after this process has joined Ray.

        Args:
            timeout_s: time that an actor may be silent, and limit of the waits, in seconds.
            call_timeout_s: time that an actor may work on one call, in seconds; None means no
                limit.
        """
        self.timeout_s = timeout_s
        self.home = ray.get_runtime_context().get_node_id()
        self._monitor = Monitor(timeout_s, call_timeout_s)

    def stop(self) -> None:
        """Forget all actors, and receive no more heartbeats."""
        self._addresses = {}
        self._names = {}
        if self._monitor is not None:
            self._monitor.stop()

    # Which actors there are.

    def add(self, actor: Actor, address: Address, name: str) -> None:
        """Supervise an actor.

        Args:
            actor: the actor.
            address: address of its heartbeats, from `monitor.add`.
            name: its name in messages.
        """
        self._addresses[actor] = address
        self.rename(actor, name)

    def rename(self, actor: Actor, name: str) -> None:
        """Change the name of an actor in messages.

        Args:
            actor: the actor.
            name: its name from now on.
        """
        self._names[actor] = name

    def end(self, actor: Actor) -> None:
        """Kill an actor, even if its process is suspended.

        An actor on the driver's node has ended when this returns: otherwise it could write into
        its shared buffer after its successor has opened it.

        Args:
            actor: the actor.
        """
        address = self._addresses.pop(actor, None)
        actor.close()
        ray.kill(actor.handle)
        if address is not None:
            process = self.monitor.process(address)
            self.monitor.forget(address)
            if process is not None and process[0] == self.home and not processes.kill([process[1]]):
                self.log(f"process {process[1].pid} was killed but does not end")

    # How they are.

    @property
    def monitor(self) -> Monitor:
        """Receiver of the heartbeats; only after `start`."""
        assert self._monitor is not None
        return self._monitor

    @property
    def ray_is_broken(self) -> bool:
        """True if Ray has failed; its calls may never return."""
        return self._monitor is not None and bool(self._monitor.broken)

    def has_started(self, actor: Actor) -> bool:
        """Return whether an actor's process has started; it may be waiting for resources.

        Args:
            actor: the actor.
        """
        return self.monitor.started(self._addresses[actor])

    def failure(self, actor: Actor | None) -> str:
        """Return why an actor counts as failed; "" if it has not failed.

        Args:
            actor: the actor; None if it has been replaced.
        """
        address = None if actor is None else self._addresses.get(actor)
        return "another actor has replaced it" if address is None else self.monitor.failure(address)

    def idle_s(self, actors: Iterable[Actor | None]) -> float:
        """Return for how many seconds none of some actors has worked; 0 if none is known.

        Args:
            actors: the actors; None and actors that have ended do not count.
        """
        known = [self._addresses[actor] for actor in actors if actor and actor in self._addresses]
        return min(map(self.monitor.idle_s, known), default=0.0)

    def check(self, actor: Actor, awaited: str) -> None:
        """Check that Ray and an actor are alive.

        Args:
            actor: the actor.
            awaited: the caller's work, named in the error.

        Raises:
            ActorDied: the actor has failed.
            RaysimError: Ray itself has failed.
        """
        self.monitor.check()
        if why := self.failure(actor):
            raise ActorDied(f"{awaited}: {self._names[actor]} has failed: {why}")

    # Waits.

    def wait(self, reference: Reference, awaited: str, *actors: Actor) -> Any:
        """Wait for the value of `reference`.

        The wait ends with an error when none of `actors` has worked for `timeout_s`.

        Args:
            reference: reference to the value.
            awaited: the value's name in errors.
            *actors: the actor that computes the value, then the actors whose results it needs.

        Returns:
            The value.

        Raises:
            ActorDied: the first actor has failed.
            ServerStateLost: another actor has failed, or Ray does not deliver a needed result.
            RaysimError: Ray itself has failed, or an actor raised an error.
        """
        self.await_result(reference, awaited, *actors)
        return get(reference, awaited, self.timeout_s)

    def await_result(self, reference: Reference, awaited: str, *actors: Actor) -> None:
        """Wait until a result is there or its call has failed; see `wait`."""
        computing, *needed = actors
        began = time.monotonic()
        while not actor_calls.wait([reference], timeout=POLL_INTERVAL_S)[0]:
            self.check(computing, awaited)
            for actor in needed:
                if why := self.failure(actor):
                    raise ServerStateLost(f"{awaited}: {self._names[actor]} has failed: {why}")
            # Actors may have been idle before this wait began.
            if min(self.idle_s(actors), time.monotonic() - began) >= self.timeout_s:
                raise ServerStateLost(
                    f"waited {self.timeout_s:g} s for {awaited}, and no actor works on it "
                    "(limit: resources.timeout)"
                )

    def wait_for_start(self, places: dict[str, Reference]) -> list[Any]:
        """Wait for the first actors of a run.

        Args:
            places: reference to each actor's place, by its name in errors.

        Returns:
            The places.

        Raises:
            ActorDied: an actor has died.
            RaysimError: an actor does not start in time, or Ray itself has failed.
        """
        limit = self.monitor.start_s
        began = last_line = time.monotonic()
        awaited = f"the start of {', '.join(places)}"
        pending: list[Any] = list(places.values())
        while pending and (now := time.monotonic()) < began + limit:
            if now - last_line >= PROGRESS_INTERVAL_S:
                startup_stages.begin(
                    f"{len(places) - len(pending)} of {len(places)} actors, the server's included, "
                    f"have started; waiting, {now - began:.0f} of at most {limit:g} s"
                )
                last_line = now
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_INTERVAL_S)
            # Raises at once if an actor has failed to start, instead of at the limit.
            get(ready, awaited, limit)
            self.monitor.check()
        if pending:
            late = ", ".join(name for name, place in places.items() if place in pending)
            raise RaysimError(
                f"waited {limit:g} s for the start of {late}; the machine may be overloaded, or a "
                "node may have failed. Raise resources.timeout if the actors need longer"
            )
        return get(list(places.values()), awaited, limit)
