"""What must hold while actors hang: they are stopped by SIGSTOP, and nothing of it shows in the
result. Nor is one replaced that works for longer than `resources.timeout`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import basic, pid_of, timeless
from support.programs import program

import raysim
from raysim.distributed.actor_health import ActorSupervisor
from raysim.distributed.local_transport import LocalTransport
from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.worker_pool import WorkerPool
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("recycled_actors")]

TIMEOUT = 4
"""Seconds of silence."""

HUNG = rf"no sign of life for {TIMEOUT} s \(resources\.timeout\)"


class CheckedSupervisor(ActorSupervisor):
    def end(self, actor: Any) -> None:
        """Who was stopped may be continued at any time, so nothing of it may be left when another
        takes its place."""
        there = self.monitor.process(self._addresses[actor])
        super().end(actor)
        assert there is not None and not there[1].alive


class HangingPool(WorkerPool):
    """Actors, some of which are stopped."""

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log)
        self.supervisor = CheckedSupervisor(log)
        self.local = LocalTransport(self.supervisor, log)


class Hanging(RayExecutor):
    """The executor over Ray, some of whose actors are stopped."""

    victims: dict[int, str]
    """By the round in which they are stopped: the server before that round's blocks are sent off,
    the others after."""

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log, HangingPool(log))
        self.left = dict(self.victims)

    def training(self, t: int) -> Any:
        training = super().training(t)
        add = training.add

        def watched(broadcasts: Any, blocks: Any) -> None:
            if self.left.get(t) == "server":
                self.stop(self.left.pop(t))
            add(broadcasts, blocks)
            if t in self.left:
                self.stop(self.left.pop(t))

        training.add = watched
        return training

    def stop(self, kind: str) -> None:
        actor = (
            min(self.pool.workers.items())[1].actor
            if kind == "client"
            else getattr(self.pool, kind)
        )
        os.kill(pid_of(self.pool, actor), signal.SIGSTOP)


def test_actors_that_hang_are_replaced(uri, tmp_path, monkeypatch, caplog):
    """A ClientActor, the server and the evaluator, one after the other, which share memory. The
    same on several nodes and under another schedule: tests/distributed/test_adding.py.
    """
    config = basic(tmp_path, uri) | {"rounds": 12, "algorithm": {"name": "gradma", "memory": 9}}
    whole = raysim.run({**config, "run_dir": f"{config['run_dir']}-inline"})
    messages: list[str] = []
    monkeypatch.setattr(Hanging, "victims", {2: "client", 4: "server", 6: "eval"}, raising=False)
    monkeypatch.setattr(experiment, "choose", lambda plan, log: Hanging(log))
    resources = {"executor": "ray", "actors": 2, "cpus": 0.5, "timeout": TIMEOUT}
    done = experiment.execute(prepare({**config, "resources": resources}), log=messages.append)
    assert done.state_digest == whole.state_digest and timeless(done.history) == timeless(
        whole.history
    )
    last = done.history[-1]
    assert (last["system/actors_failed"], last["system/server_restarts"]) == (2, 1) and last[
        "system/blocks_retried"
    ] >= 1
    client, evaluator = messages
    assert re.match(rf"ClientActor 0 failed \(in round 3, with \d blocks?: {HUNG}\)", client)
    assert re.match(rf"the EvalActor failed \(.*{HUNG}\)", evaluator)
    (server,) = [
        record.getMessage() for record in caplog.records if "no sign of life" in record.getMessage()
    ]
    assert (
        re.search(rf"the ServerActor on node \S+ has failed: {HUNG}", server)
        and "ClientActor" not in server
    )


class ServerDies(Hanging):
    """The executor over Ray, whose server is killed."""

    def stop(self, kind: str) -> None:
        os.kill(pid_of(self.pool, self.pool.server), signal.SIGKILL)


def test_a_server_that_dies_is_no_death_of_the_workers(uri, tmp_path, monkeypatch):
    """Nothing but the training waits for the server in a round without an evaluation."""
    config = basic(tmp_path, uri) | {"rounds": 6, "evaluate": {"every": 0}, "algorithm": "fedavg"}
    whole = raysim.run({**config, "run_dir": f"{config['run_dir']}-inline"})
    monkeypatch.setattr(ServerDies, "victims", {3: "server"}, raising=False)
    monkeypatch.setattr(experiment, "choose", lambda plan, log: ServerDies(log))
    resources = {"executor": "ray", "actors": 2, "cpus": 0.5}
    messages: list[str] = []
    done = experiment.execute(prepare({**config, "resources": resources}), log=messages.append)
    assert done.state_digest == whole.state_digest and messages == []
    last = done.history[-1]
    assert (last["system/actors_failed"], last["system/server_restarts"]) == (0, 1)


SLOW = program("hangs_slow")


def test_a_block_that_takes_longer_than_the_timeout_is_not_lost(uri, tmp_path, source):
    """The first round's blocks take twice as long as a process may be silent."""
    rule = f"{source('slow', SLOW)}:Slow"
    config = basic(tmp_path, uri) | {
        "rounds": 1,
        "schedule": {"cohort": 2},
        "checkpoint": {"every": 0},
    }
    resources = {"executor": "ray", "actors": 2, "cpus": 0.5, "timeout": TIMEOUT}
    config |= {
        "algorithm": {"name": rule, "seconds": 2 * TIMEOUT, "driver": os.getpid()},
        "resources": resources,
    }
    (_, last) = raysim.run(config).history
    assert last["system/train_seconds"] > 2 * TIMEOUT and last["clients/used"] == 2
    assert (
        last["system/actors_failed"],
        last["system/blocks_retried"],
        last["system/server_restarts"],
    ) == (0, 0, 0)
