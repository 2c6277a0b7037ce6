"""Actors that outlive a run: a new process for every actor of every run would take minutes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import ray

from raysim.distributed.worker_pool import WorkerPool


class Recycling:
    """Keeps the actors of a closed pool for the next pool.

    Their `__init__` runs again in the same process. A failed actor is always replaced by a new one.

    Args:
        reserve: whether actors reserve their CPUs, also between two runs.
    """

    def __init__(self, reserve: bool = False) -> None:
        self.remote, self.kill = ray.remote, ray.kill
        self.reserve = reserve
        self.starting = self.closing = False
        self.idle: dict[Any, list[Any]] = {}
        self.kinds: dict[Any, Any] = {}
        """The class and the node of each actor."""

    def begin(self, patch: Callable[[Any, str, Any], None]) -> None:
        """Replace `ray.remote` and `ray.kill` while a pool starts and closes."""
        patch(ray, "remote", self._of)
        patch(ray, "kill", self._end)
        patch(WorkerPool, "start", self._within("starting", WorkerPool.start))
        patch(WorkerPool, "close", self._within("closing", WorkerPool.close))

    def shut_down(self) -> None:
        for actor in self.kinds:
            self.kill(actor)

    def _within(self, flag: str, method: Any) -> Any:
        @wraps(method)
        def watched(*arguments: Any) -> Any:
            setattr(self, flag, True)
            try:
                return method(*arguments)
            finally:
                setattr(self, flag, False)

        return watched

    def _of(self, *kinds: type, **options: Any) -> Any:
        if not self.starting:
            return self.remote(*kinds, **options)
        (kind,) = kinds
        return SimpleNamespace(
            options=lambda **how: SimpleNamespace(remote=lambda *what: self._start(kind, how, what))
        )

    def _start(self, kind: type, how: dict[str, Any], what: tuple) -> Any:
        place = kind, getattr(how.get("scheduling_strategy"), "node_id", None)
        while self.idle.get(place):
            actor = self.idle[place].pop(0)
            again = actor.__ray_call__.remote(lambda this, *what: this.__init__(*what), *what)
            try:
                ray.get(again, timeout=60)
                return actor
            except ray.exceptions.RayActorError:  # its process has died
                del self.kinds[actor]
        if not self.reserve:
            how = {**how, "num_cpus": 0}
        actor = self.remote(kind).options(**how).remote(*what)
        self.kinds[actor] = place
        return actor

    def _end(self, actor: Any) -> None:
        if self.closing and actor in self.kinds:
            self.idle.setdefault(self.kinds[actor], []).append(actor)
        else:
            self.kinds.pop(actor, None)
            self.kill(actor)
