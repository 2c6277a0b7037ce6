"""What must hold while actors are killed at random: nothing of it shows in the result, only in the
counters."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import basic, timeless

import raysim
from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.transport.shared_memory import SharedBuffer
from raysim.distributed.worker_pool import WorkerPool
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("recycled_actors")]

MOMENTS = ("out", "between", "any")
"""Right after blocks were sent off, between training and the server's update, or a little later
than either."""


class Chaos:
    """Kills actors in the order that its seed gives: in some rounds one, at one of three moments."""

    def __init__(self, seed: int, rounds: list[int]):
        self.random = random.Random(seed)
        self.moments = dict(zip(rounds, self._mixed(MOMENTS, len(rounds)), strict=True))
        self.kinds = dict(
            zip(
                rounds,
                self._mixed(("client", "client", "eval", "server"), len(rounds)),
                strict=True,
            )
        )
        self.struck: list[tuple[int, str, str]] = []
        self.threads: list[threading.Timer] = []
        self.lock = threading.Lock()

    def _mixed(self, values: tuple[str, ...], count: int) -> list[str]:
        mixed = [values[i % len(values)] for i in range(count)]
        self.random.shuffle(mixed)
        return mixed

    def at(self, executor: Chaotic, t: int, moment: str) -> None:
        """Round t has come to this moment; it may come to it again after a checkpoint was gone back
        to."""
        wanted = self.moments.get(t)
        if wanted == moment or (wanted == "any" and moment == "out"):
            del self.moments[t]
            if wanted == "any":
                self.threads.append(
                    threading.Timer(self.random.uniform(0, 0.4), self.strike, (executor, t, wanted))
                )
                self.threads[-1].start()
            else:
                self.strike(executor, t, wanted)

    def is_over(self) -> None:
        """Waits for all strikes that are still to come: the server's last update must meet them."""
        for thread in self.threads:
            thread.join(60)

    def strike(self, executor: Chaotic, t: int, moment: str) -> None:
        with self.lock:
            kind = self.kinds[t]
            if kind == "client":
                there = [worker.actor for worker in list(executor.pool.workers.values())]
            else:
                there = [getattr(executor.pool, kind)]
            self.random.shuffle(there)
            if any(executor.pool.kill(actor) for actor in there):
                self.struck.append((t, moment, kind))


class ChaoticPool(WorkerPool):
    """Actors, with somebody who kills."""

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log)
        self.pids: dict[Any, Any] = {}

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        actor = super()._start(kind, *arguments, **more)
        self.pids[actor] = actor.handle.__ray_call__.remote(lambda self: os.getpid())
        return actor

    def kill(self, actor: Any) -> bool:
        """Whether it was there to be killed."""
        import ray

        try:
            pid = ray.get(self.pids[actor], timeout=60)
            if b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return False
            os.kill(pid, signal.SIGKILL)
        except (ray.exceptions.RayError, OSError):
            return False
        return True


class Chaotic(RayExecutor):
    """The executor over Ray, whose actors are killed."""

    chaos: Chaos
    last: int

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log, ChaoticPool(log))

    def training(self, t: int) -> Any:
        training = super().training(t)
        add, get = training.add, training.get

        def watched_add(broadcasts: Any, blocks: Any) -> None:
            add(broadcasts, blocks)
            self.chaos.at(self, t, "out")

        def watched_get() -> Any:
            if t == self.last:
                self.chaos.is_over()
            trained = get()
            self.chaos.at(self, t, "between")
            return trained

        training.add, training.get = watched_add, watched_get
        return training


def chaotic(config: dict[str, Any], chaos: Chaos, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run on three actors that are killed; it must tell each round once and be the inline run."""
    rounds = config["rounds"]
    whole = raysim.run({**config, "run_dir": f"{config['run_dir']}-inline"})
    resources = {"executor": "ray", "actors": 3, "cpus": 0.5, "timeout": 120}
    Chaotic.chaos, Chaotic.last = chaos, rounds - 1
    monkeypatch.setattr(experiment, "choose", lambda plan, log: Chaotic(log))
    told: list[float] = []
    done = experiment.execute(
        prepare({**config, "resources": resources}),
        progress=lambda record: told.append(record["round"]),
        log=lambda text: None,
    )
    assert told == list(range(rounds + 1))
    assert done.state_digest == whole.state_digest
    assert timeless(done.history) == timeless(whole.history)
    kinds = Counter(kind for _, _, kind in chaos.struck)
    last = done.history[-1]
    unseen = [
        kinds["server"] - last["system/server_restarts"],
        kinds["client"] + kinds["eval"] - last["system/actors_failed"],
    ]
    assert unseen in ([0, 0], [0, 1]), (
        "only who is killed when the last work is done need not be missed"
    )
    return done, kinds


ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradma": {"algorithm": {"name": "gradma", "memory": 9}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "client_state": {"memory": "20kB"}},
    "fedhist": {
        "algorithm": {"name": "fedhist", "length": 4},
        "schedule": {
            "name": "kasync",
            "k": 5,
            "concurrency": 12,
            "client_speeds": {"name": "lognormal"},
        },
    },
}
"""In step; with rows of which most are on disk; with versions that live for several rounds."""


@pytest.fixture
def without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> SharedBuffer:
        raise OSError("no space left on device")

    monkeypatch.setattr(SharedBuffer, "new", full)


THIRTY = [*range(1, 57, 2), 4, 8, 12, 20, 28, 32, 36, 44, 52]
"""Rounds in which somebody is killed; a kill may miss, where its victim is dead already."""


def many(config: dict[str, Any], seed: int, rounds: list[int], monkeypatch: Any) -> None:
    """Of the kills four in five must hit; every kind and every moment is among them."""
    done, kinds = chaotic(config, Chaos(seed, rounds), monkeypatch)
    moments = Counter(moment for _, moment, _ in Chaotic.chaos.struck)
    least = len(rounds) // 6
    assert sum(kinds.values()) >= len(rounds) * 4 // 5
    assert min(kinds[kind] for kind in ("client", "eval", "server")) >= least
    assert min(moments[moment] for moment in MOMENTS) >= least
    assert done.history[-1]["system/blocks_retried"] >= 1


def test_six_kills_in_14_rounds_do_not_show(uri, tmp_path, monkeypatch):
    """At every moment, of every kind."""
    config = basic(tmp_path, uri) | ALGORITHMS["gradma"] | {"rounds": 14}
    many(config, 0, list(range(1, 13, 2)), monkeypatch)


def test_kills_do_not_show_in_clients_states_and_old_versions_without_shared_memory(
    uri, tmp_path, monkeypatch, without_shared_memory
):
    config = basic(tmp_path, uri) | ALGORITHMS["scaffold"]
    config["schedule"] = ALGORITHMS["fedhist"]["schedule"]
    _, kinds = chaotic(config | {"rounds": 16}, Chaos(1, list(range(2, 14, 2))), monkeypatch)
    assert sum(kinds.values()) >= 4 and kinds["server"] >= 1 and kinds["client"] >= 2


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_thirty_kills_in_sixty_rounds_do_not_show(uri, tmp_path, monkeypatch, name):
    many(basic(tmp_path, uri) | ALGORITHMS[name], 3, THIRTY, monkeypatch)


@pytest.mark.long
def test_thirty_kills_do_not_show_without_shared_memory(
    uri, tmp_path, monkeypatch, without_shared_memory
):
    many(basic(tmp_path, uri) | ALGORITHMS["gradma"], 4, THIRTY, monkeypatch)


# -- killed while another one is being replaced ----------------------------------------------------


class StalkedPool(ChaoticPool):
    """Actors, one of whose successors is killed too, at its start or when it has said that it is
    there."""

    kind: str
    late: bool

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log)
        self.begun = self.done = False
        self.open_local = self.local.open
        self.local.open = self.stalked_open

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        actor = super()._start(kind, *arguments, **more)
        if self.begun and not self.done and kind.__name__ == self.kind:
            self.done = True
            if not self.late:
                assert self.kill(actor)
        return actor

    def stalked_open(self, actor: Any, first: bool = False) -> None:
        if self.begun and self.late and self.done and self.kill(actor):
            self.late = False
        self.open_local(actor, first)


class Stalked(RayExecutor):
    """The executor over Ray, an actor of which is killed in round 3, and then who takes its place."""

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log, StalkedPool(log))

    def training(self, t: int) -> Any:
        import ray

        training, pool = super().training(t), self.pool
        add = training.add

        def watched_add(broadcasts: Any, blocks: Any) -> None:
            add(broadcasts, blocks)
            if t == 3 and not pool.begun:
                pool.begun = True
                assert pool.kill(
                    pool.server if pool.kind == "ServerActor" else pool.workers[0].actor
                )
            if t >= 5 and pool.joining:  # the run is not over before they are there
                ray.wait(
                    [word for _, word in pool.joining.values()],
                    num_returns=len(pool.joining),
                    timeout=60,
                )

        training.add = watched_add
        return training


AT_ITS_START, WHEN_IT_IS_THERE = False, True


@pytest.mark.parametrize(
    ("kind", "late"),
    [
        ("ServerActor", AT_ITS_START),
        ("ClientActor", WHEN_IT_IS_THERE),
        pytest.param("ServerActor", WHEN_IT_IS_THERE, marks=pytest.mark.long),
        pytest.param("ClientActor", AT_ITS_START, marks=pytest.mark.long),
    ],
)
def test_an_actor_killed_while_it_takes_another_ones_place_does_not_show(
    uri, tmp_path, monkeypatch, kind, late
):
    config = basic(tmp_path, uri) | {"rounds": 12}
    whole = raysim.run({**config, "run_dir": f"{config['run_dir']}-inline"})
    monkeypatch.setattr(StalkedPool, "kind", kind, raising=False)
    monkeypatch.setattr(StalkedPool, "late", late, raising=False)
    monkeypatch.setattr(experiment, "choose", lambda plan, log: Stalked(log))
    resources = {"executor": "ray", "actors": 2, "cpus": 0.5, "timeout": 120}
    done = experiment.execute(prepare({**config, "resources": resources}), log=lambda text: None)
    assert done.state_digest == whole.state_digest and timeless(done.history) == timeless(
        whole.history
    )
    last = done.history[-1]
    assert (last["system/server_restarts"], last["system/actors_failed"]) == (
        (2, 0) if kind == "ServerActor" else (0, 2)
    )
