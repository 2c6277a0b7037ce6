"""Executor of a simulated cluster, beside `Inline` and the one over Ray. It trains nothing.

The engine runs unchanged: same schedule, blocks, block scheduling and order of events. The work of
an executor takes virtual time from a table of costs: blocks on actors, objects through the nodes'
stores, bytes over their links, and the driver's own work. This shows in advance where a cluster
waits.

Every event is a `Milestone` that stores the milestone it waited for last. Following these back from
the end of a round's training gives the critical path of the round.

The model has limits. Nothing fails. A link carries one object at a time, in the order of the
requests, and all copies of a version come from the server's node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, groupby
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.random import Generator

from raysim.distributed.block_scheduler import BlockScheduler, WorkerSpeeds, count_local_steps
from raysim.engine.executor import CompletedResult, PendingServerStep, RoundResults
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.planning.milestones import Milestone, after, path
from raysim.planning.simulated_costs import Costs
from raysim.randomness import generator
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import State
from raysim.rules.uploads import sums
from raysim.server.central_server import RoundCohort
from raysim.server.selection import Candidates
from raysim.training.messages import (
    Block,
    Broadcast,
    ClientResult,
    EvaluationParts,
    WorkerResult,
)

T = TypeVar("T", covariant=True)


@dataclass
class SimulatedVersion:
    """A version of the model: when the server has it, and when it has arrived on each node."""

    ready: Milestone
    there: dict[int, Milestone] = field(default_factory=dict)


@dataclass
class VirtualFuture(Generic[T]):
    """A result that is available at some virtual time, for which the driver waits."""

    cluster: SimulatedExecutor
    milestone: Milestone
    value: T

    def ready(self) -> bool:
        """Return whether the driver's clock has reached the result's milestone."""
        return self.milestone.time <= self.cluster.driver.time

    def get(self) -> T:
        """Move the driver's clock to the value's milestone and return the value."""
        self.cluster.driver = after("", 0.0, self.cluster.driver, self.milestone)
        return self.value


@dataclass
class SimulatedActor:
    """A ClientActor: its node, its relative speed, and the milestone from which on it is idle."""

    node: int
    speed: float
    free: Milestone = field(default_factory=Milestone)


@dataclass
class RoundSummary:
    """Figures of one simulated round."""

    seconds: float
    """Seconds between the ends of training of the last round and of this one."""
    clients: int
    """Number of clients."""
    busy: float
    """Share of these seconds in which actors trained."""
    bytes_up: int
    """Bytes that arrived at the server's node."""
    bytes_down: int
    """Bytes that left the server's node."""
    path: dict[str, float]
    """Seconds of each part of the critical path."""
    begin: float
    """Virtual time at which the round began."""
    trained: list[tuple[int, int, float, float]]
    """Work of each actor, as (node, actor, begin, end)."""


class SimulatedExecutor:
    """Executor on simulated nodes with ClientActors; driver and server are on the first node.

    Args:
        costs: the table of costs.
        nodes: number of nodes.
        actors: ClientActors of each node.
        aggregators: whether nodes aggregate the sums of their actors.
    """

    def __init__(self, costs: Costs, nodes: int, actors: int, aggregators: bool = True):
        self.costs, self.recoveries, self.aggregators = costs, Counter[str](), aggregators
        self.shape = nodes, actors
        self.rounds: list[RoundSummary] = []

    def open(self, plan: Plan) -> None:
        """Place actors and server on the simulated nodes. See `Executor.open`."""
        seed, self.cohort, (nodes, actors_per_node) = (
            plan.config.seed,
            plan.config.schedule.size,
            self.shape,
        )
        noise = generator(seed, "simulated nodes").standard_normal(nodes)
        speeds = np.exp(self.costs.training.nodes * noise)
        self.seed, self.bytes_down, (x0, buffers) = seed, plan.bytes_down, plan.initial
        self.bytes_sums = 8 * (len(sums(plan.server.uploads)) * x0.numel() + buffers.numel())
        self.bytes_row = x0.nbytes * len(plan.sent_per_client)
        self.actors = {
            i: SimulatedActor(i % nodes, float(speeds[i % nodes]))
            for i in range(nodes * actors_per_node)
        }
        self.speeds, self.driver, self.server, self.eval = (
            WorkerSpeeds(),
            Milestone(),
            Milestone(),
            Milestone(),
        )
        self.up, self.down = [Milestone()] * nodes, [Milestone()] * nodes
        self.end = 0.0
        self._new_round()

    def _new_round(self) -> None:
        self.bytes_up = self.sent_down = 0
        self.trained: list[tuple[int, int, float, float]] = []

    # -- what things cost --------------------------------------------------------------------------

    def works(self, seconds: float, *milestones: Milestone) -> None:
        """Simulate work of the driver.

        Args:
            seconds: its duration in simulated seconds.
            *milestones: the milestones before it, besides the driver's earlier work.
        """
        self.driver = after("driver", seconds, self.driver, *milestones)

    def call(self, node: int) -> Milestone:
        """Return the milestone at which a call of the driver reaches a node.

        Args:
            node: number of the node; the driver is on node 0.
        """
        self.works(self.costs.driver.call)
        return after("messages", self.costs.network.latency if node else 0.0, self.driver)

    def put(self, size: int, *milestones: Milestone) -> Milestone:
        """Simulate a copy of an object into its node's store.

        Args:
            size: size of the object in bytes.
            *milestones: the milestones before it.

        Returns:
            The milestone at which the store has the object.
        """
        return after(
            "object store",
            self.costs.store.latency + size / self.costs.store.bandwidth,
            *milestones,
        )

    def got(self, *milestones: Milestone) -> Milestone:
        """Return the milestone at which an actor has objects of its node's store, without a copy.

        Args:
            *milestones: the milestones before it, such as the arrival of each object on the node.
        """
        return after("object store", self.costs.store.latency, *milestones)

    def moved(self, size: int, source: int, target: int, *milestones: Milestone) -> Milestone:
        """Simulate the transfer of an object from one node to another.

        Args:
            size: size of the object in bytes.
            source: number of the node that sends it, from 0.
            target: number of the node that receives it; the driver is on node 0.
            *milestones: the milestones before it.

        Returns:
            The milestone at which the object has arrived; on one node it takes no time.
        """
        if source == target:
            return after("", 0.0, *milestones)
        link = self.costs.network
        out = after(
            "network", size / link.bandwidth, *milestones, self.up[source], self.down[target]
        )
        self.up[source] = self.down[target] = out
        if target == 0:
            self.bytes_up += size
        else:
            self.sent_down += size
        return after("network", link.latency, out)

    def block_seconds(self, t: int, block: Block, actor: SimulatedActor) -> float:
        """Return the seconds of a block on an actor: a lognormal time by the actor's speed.

        Args:
            t: number of the round, which with the first client keys the random factor.
            block: the clients of the block.
            actor: the actor; a faster one needs fewer seconds.
        """
        cost = self.costs.training
        z = (
            generator(self.seed, "simulated blocks", t, block.tasks[0].client).standard_normal()
            if cost.spread
            else 0.0
        )
        sigma = np.sqrt(np.log1p(cost.spread**2))
        return (
            (cost.block + cost.step * count_local_steps([block]))
            * float(np.exp(sigma * z - sigma**2 / 2))
            / actor.speed
        )

    # -- the engine's methods ----------------------------------------------------------------------

    def broadcast(self, following: RoundCohort) -> SimulatedVersion:
        """Return the model as the server has it. See `Executor.broadcast`."""
        self.server = self.put(self.bytes_down, self.call(0), self.server)
        return SimulatedVersion(self.server)

    def training(self, t: int) -> SimulatedRound:
        """Return the simulated training of round t.

        Args:
            t: number of the round, from 0.
        """
        self.works(self.costs.driver.draw * self.cohort)
        return SimulatedRound(self, t)

    def ends_round(self, busy: float, clients: int) -> None:
        """End a round: the driver has received all of its results.

        Args:
            busy: seconds that actors have worked in the round, summed over actors.
            clients: number of clients that trained.
        """
        took = self.driver.time - self.end
        share = busy / max(took * len(self.actors), 1e-12)
        moved = self.bytes_up, self.sent_down
        self.rounds.append(
            RoundSummary(
                took, clients, share, *moved, path(self.driver, self.end), self.end, self.trained
            )
        )
        self.end = self.driver.time
        self._new_round()

    def advance(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, SimulatedVersion],
        following: RoundCohort,
    ) -> PendingServerStep:
        """Simulate the server's update of a round, and the publication of the next version.

        See `Executor.advance`.
        """
        metrics = self.update(round, trained, bases)
        self.server = self.put(self.bytes_down, self.server)
        return PendingServerStep(
            VirtualFuture(self, self.server, metrics.value), SimulatedVersion(self.server)
        )

    def update(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, SimulatedVersion],
    ) -> VirtualFuture[dict[str, float]]:
        """Simulate the server's update of a round. See `Executor.update`."""
        self.works(self.costs.driver.accept * len(round.ids))
        called, size = self.call(0), sum(sums for _, sums, _, _ in trained.uploads)
        there = [
            self.moved(sums + rows, node, 0, called, ready)
            for node, sums, rows, ready in trained.uploads
        ]
        took = size / self.costs.server.adds + self.costs.server.update
        self.server = after("server", took, self.server, self.got(called, *there))
        return VirtualFuture(self, self.server, {})

    def candidates(self, pool: SelectionPool, rng: Generator) -> CompletedResult[Candidates]:
        """Name no candidates; a forecast does not count the time of their evaluation.

        See `Executor.candidates`.
        """
        return CompletedResult(Candidates([], False))

    def select(self, pool: SelectionPool, rng: Generator) -> VirtualFuture[list[int]]:
        """Simulate a selection: uniform, because simulated clients have no losses.

        See `Executor.select`.
        """
        self.server = after("server", 0.0, self.server, self.call(0))
        selected = rng.choice(pool.ids, min(pool.size, len(pool.ids)), replace=False)
        return VirtualFuture(self, self.server, selected.tolist())

    def evaluate(
        self, broadcast: SimulatedVersion, parts: EvaluationParts
    ) -> VirtualFuture[dict[str, float]]:
        """Simulate an evaluation while the next round trains. See `Executor.evaluate`."""
        self.eval = after(
            "evaluation", self.costs.server.evaluate, self.call(0), broadcast.ready, self.eval
        )
        return VirtualFuture(self, self.eval, {})

    def evaluate_clients(
        self, version: int, broadcast: SimulatedVersion, blocks: list[Block]
    ) -> CompletedResult[RoundResults]:
        """Leave the evaluation of clients out; a forecast does not count its time.

        See `Executor.evaluate_clients`.
        """
        return CompletedResult(RoundResults([], [], {}))

    def snapshot(self) -> CompletedResult[State]:
        """Return an empty state; a simulated run writes no checkpoints."""
        return CompletedResult({})

    def restore(self, snapshot: State) -> None:
        """Do nothing: a simulated run has no state to restore. See `Executor.restore`."""

    def download_version(self, broadcast: SimulatedVersion) -> Broadcast:
        """Refuse: a simulated version has no tensors. See `Executor.download_version`."""
        raise NotImplementedError("a simulated cluster has no model")

    def upload_version(self, version: Broadcast) -> Any:
        """Refuse: a simulated version has no tensors. See `Executor.upload_version`."""
        raise NotImplementedError("a simulated cluster has no model")

    def recover(self) -> None:
        """Do nothing: a simulated server cannot fail."""

    def close(self) -> None:
        """Do nothing: no process was started."""


@dataclass
class SimulatedCall:
    """Call of an actor: its blocks, when its message and its sums are ready, its training time."""

    actor: int
    blocks: list[Block]
    word: Milestone
    there: Milestone
    seconds: float


class SimulatedRound:
    """Training of a round as by `RayRound`, without failures."""

    def __init__(self, cluster: SimulatedExecutor, t: int):
        self.cluster, self.t = cluster, t
        self.scheduler = BlockScheduler(cluster.speeds)
        self.broadcasts: dict[int, SimulatedVersion] = {}
        self.words: list[tuple[float, int, SimulatedCall]] = []
        """Heap of calls in flight, by the time at which the driver hears of them."""
        self.calls = count()
        self.shares: list[SimulatedCall] = []

    def add(self, broadcasts: Mapping[int, SimulatedVersion], blocks: list[Block]) -> None:
        """Add blocks; nothing is simulated yet. See `RoundHandle.add`."""
        c, self.broadcasts = self.cluster, {**self.broadcasts, **broadcasts}
        c.works(c.costs.driver.dispatch * sum(len(block.tasks) for block in blocks))
        for number, share in self.scheduler.assign(blocks, c.actors).items():
            self._send(number, share)

    def _send(self, number: int, blocks: list[Block]) -> None:
        c, actor = self.cluster, self.cluster.actors[number]
        called = c.call(actor.node)
        bases = sorted({task.base for block in blocks for task in block.tasks})
        ready = c.got(
            called,
            actor.free,
            *(self._arrives(self.broadcasts[base], actor.node, called) for base in bases),
        )
        seconds = sum(c.block_seconds(self.t, block, actor) for block in blocks)
        trained = after("training", seconds, ready)
        rows = c.bytes_row * sum(len(block.tasks) for block in blocks)
        actor.free = c.put(c.bytes_sums + rows, trained)
        word = after("messages", c.costs.network.latency if actor.node else 0.0, actor.free)
        heappush(
            self.words,
            (word.time, next(self.calls), SimulatedCall(number, blocks, word, actor.free, seconds)),
        )
        c.trained.append((actor.node, number, ready.time, trained.time))

    def _arrives(self, version: SimulatedVersion, node: int, called: Milestone) -> Milestone:
        """Return when a version is on a node, which downloads each version once."""
        c = self.cluster
        if node not in version.there:
            version.there[node] = c.moved(c.bytes_down, 0, node, called, version.ready)
        return version.there[node]

    def get(self) -> RoundResults:
        """Simulate all blocks, and return when the last actor has finished."""
        c, cost = self.cluster, self.cluster.costs.driver
        done: list[WorkerResult] = []
        while self.words:
            *_, share = heappop(self.words)
            self.shares.append(share)
            ids = [task.client for block in share.blocks for task in block.tasks]
            c.works(cost.receive * len(ids), share.word)
            c.speeds.observe(share.actor, count_local_steps(share.blocks), share.seconds)
            done.append(
                WorkerResult(
                    [ClientResult(client, 0.0, bytes=c.bytes_sums // 2) for client in ids], ids
                )
            )
            if more := self.scheduler.next_batch(len(c.actors)):
                self._send(share.actor, more)
        uploads = self._uploads()
        c.ends_round(
            sum(share.seconds for share in self.shares), sum(len(result.ids) for result in done)
        )
        return RoundResults(uploads, done, {})

    def _uploads(self) -> list[tuple[int, int, int, Milestone]]:
        """Return the transfers to the server: (node, bytes of sums, bytes of rows, time).

        A NodeAggregator adds the sums of a node that has several and is not the server's.
        """
        c, uploads, words = self.cluster, [], []
        by_node = sorted(self.shares, key=lambda share: c.actors[share.actor].node)
        for node, group in groupby(by_node, key=lambda share: c.actors[share.actor].node):
            shares = list(group)
            rows = [
                c.bytes_row * sum(len(block.tasks) for block in share.blocks) for share in shares
            ]
            if node and c.aggregators and c.bytes_sums and len(shares) > 1:
                size = c.bytes_sums * len(shares)
                added = after("adding up on nodes", size / c.costs.server.adds, c.got(c.call(node)))
                there = c.put(c.bytes_sums, added)
                words.append(after("messages", c.costs.network.latency, there))
                uploads.append((node, c.bytes_sums, sum(rows), there))
            else:
                uploads += [
                    (node, c.bytes_sums, row_bytes, s.there)
                    for row_bytes, s in zip(rows, shares, strict=True)
                ]
        c.works(0.0, *words)
        return uploads


def simulate_rounds(
    plan: Plan, costs: Costs, nodes: int, actors: int, aggregators: bool = True
) -> list[RoundSummary]:
    """Simulate the rounds of a plan on a cluster.

    Args:
        plan: the plan of the run.
        costs: the table of costs.
        nodes: number of nodes.
        actors: ClientActors of each node.
        aggregators: whether nodes aggregate the sums of their actors.

    Returns:
        The figures of each round.

    Raises:
        RaysimError: the server rule's weights are invalid, or the schedule is exhausted.
    """
    cluster = SimulatedExecutor(costs, nodes, actors, aggregators)
    cluster.open(plan)
    for _ in Engine(plan, cluster).rounds():
        pass
    return cluster.rounds
