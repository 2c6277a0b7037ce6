"""Which worker retries the blocks of a failed worker, and a slow start. Ray is a fake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.distributed import actor_health
from raysim.distributed.block_scheduler import WorkerSpeeds
from raysim.distributed.node_traffic import ClusterTopology
from raysim.distributed.round import BlockCall, RayRound, RoundPhase
from raysim.distributed.worker_pool import Worker
from raysim.engine.failure_policy import FailurePolicy
from raysim.errors import ClientError
from raysim.system import startup_stages
from raysim.training.messages import Block, ClientTask, WorkerResult


def test_a_slow_start_of_actors_is_shown(monkeypatch):
    """A fake of Ray, in which one of two actors starts per wait."""
    monkeypatch.setattr(actor_health, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(actor_health, "get", lambda reference, *limits: reference)
    monkeypatch.setattr(
        actor_health.ray, "wait", lambda pending, **limits: (pending[:1], pending[1:])
    )
    supervisor = actor_health.ActorSupervisor(print)
    monitor: Any = SimpleNamespace(start_s=120.0, check=lambda: None)
    supervisor._monitor = monitor
    lines: list[str] = []
    places: Any = {"the ServerActor": "a", "ClientActor 0": "b"}
    with startup_stages.shown_by(lines.append):
        assert supervisor.wait_for_start(places) == ["a", "b"]
    assert [line[:30] for line in lines] == [
        "0 of 2 actors, the server's in",
        "1 of 2 actors, the server's in",
    ]
    assert lines[1].endswith("have started; waiting, 0 of at most 120 s")


class PlainPool:
    """Workers by number, each on a node; a failed one comes back on the same node."""

    def __init__(self, nodes: dict[int, str]):
        self.nodes = nodes
        self.dead: set[str] = set()
        self.workers = {number: self.started(number) for number in nodes}
        self.failure_policy = FailurePolicy("stop")
        self.recoveries: Counter[str] = Counter()
        self.speeds = WorkerSpeeds()
        self.topology = ClusterTopology({node: node for node in nodes.values()})
        self.supervisor = SimpleNamespace(monitor=SimpleNamespace(dead_nodes=lambda: self.dead))

    def started(self, number: int) -> Worker:
        actor: Any = SimpleNamespace(number=number)
        return Worker(actor, self.nodes[number], [])

    def available_workers(self) -> dict[int, Worker]:
        for number, node in self.nodes.items():
            if number not in self.workers and node not in self.dead:
                self.workers[number] = self.started(number)
        return self.workers

    def remove_worker(self, number: int, why: str, actor: Any = None) -> None:
        assert self.workers[number].actor is actor
        del self.workers[number]

    def aggregates_on_node(self, node: str, uploads: int) -> bool:
        return False


class PlainRound(RayRound):
    """A round whose calls are only recorded."""

    def __init__(self, nodes: dict[int, str]):
        self.plain = PlainPool(nodes)
        super().__init__(self.plain, 7, sends_rows=False)  # type: ignore[arg-type]
        self.sent: list[tuple[int, list[int]]] = []

    def _send(self, worker: int, blocks: list[Block], again: bool = False) -> None:
        at = self.plain.workers[worker]
        vector: Any = object()
        self.waiting[len(self.sent)] = BlockCall([vector], worker, at.actor, at.node, [], blocks)
        self.sent.append((worker, [block.index for block in blocks]))

    def dies(self, call: int) -> None:
        """The actor of a call dies."""
        failed = self.waiting[call]
        assert isinstance(failed, BlockCall)
        self._retry_blocks(failed, "out of memory")
        self._send_more()

    def answers(self, call: int) -> None:
        """A call returns a result for all its clients."""
        answered = self.waiting.pop(call)
        assert isinstance(answered, BlockCall)
        clients = [task.client for block in answered.blocks for task in block.tasks]
        answered.outcome = WorkerResult([], clients)
        self.trained.append(answered)


def block(client: int) -> Block:
    return Block(client, [ClientTask(client, 0, 0, 1.0, 1)])


def test_a_bad_node_is_no_bad_client():
    """Worker 0 dies and returns, idle and first in order: its block goes to the other node."""
    round = PlainRound({0: "bad", 1: "bad", 2: "good"})
    for worker in (0, 1, 2):
        round._send(worker, [block(worker)])
    round.dies(0)
    assert len(round.sent) == 3, "worker 0 is idle, but on the node where one died"
    assert round.phase is RoundPhase.TRAINING
    round.dies(1)
    round.answers(2)
    round._send_more()
    assert round.sent[3:] == [(2, [0])]
    round.answers(3)
    round._send_more()
    assert round.sent[4:] == [(2, [1])]


def test_a_block_that_kills_on_all_nodes_ends_the_run():
    round = PlainRound({0: "first", 1: "second"})
    round._send(0, [block(5)])
    round.dies(0)
    assert round.sent[1:] == [(1, [5])]
    round.dies(1)
    assert round.sent[2:] == [(0, [5])]
    with pytest.raises(ClientError, match=r"client 5 died, 3 times in turn.*out of memory"):
        round.dies(2)


def test_others_work_goes_on_where_a_block_must_not():
    round = PlainRound({0: "bad", 1: "good"})
    round._send(0, [block(0)])
    round._send(1, [block(1)])
    round.retries.append(block(2))
    round.dies(0)
    assert round.sent[2:] == [(0, [2])]


def test_a_sum_that_is_lost_with_its_node_is_trained_again():
    """Node "lost" dies after its worker has answered, while the other one still trains."""
    round = PlainRound({0: "lost", 1: "kept"})
    round._send(0, [block(0)])
    round._send(1, [block(1)])
    round.answers(0)
    round.plain.dead.add("lost")
    round.answers(1)
    assert round.phase is RoundPhase.UPLOADING
    round._upload()
    assert [upload.ids for upload in round.uploads] == [[1]]
    assert round.phase is RoundPhase.TRAINING
    assert round.plain.recoveries == {"system/blocks_retried": 1}
    round._send_more()
    assert round.sent[2:] == [(1, [0])]
    round.answers(2)
    round._upload()
    assert sorted(client for upload in round.uploads for client in upload.ids) == [0, 1]
    assert round.phase is RoundPhase.DONE
