"""Round of training over Ray: dispatch blocks to workers, collect sums, and retry what fails."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from ray.exceptions import RayError, RayTaskError

from raysim.distributed.block_scheduler import BlockScheduler, WorkerSpeeds, count_local_steps
from raysim.distributed.node_traffic import RoundTraffic
from raysim.distributed.transport import actor_calls
from raysim.distributed.transport.actor_calls import Actor, Reference, Reply
from raysim.distributed.transport.shared_memory import attach_states
from raysim.distributed.waiting import POLL_INTERVAL_S, first_line, translated
from raysim.distributed.worker_pool import WorkerPool
from raysim.engine.executor import RoundResults
from raysim.engine.failure_policy import ActorDied, Decision, Work
from raysim.errors import ClientError, ServerStateLost, counted, round_name
from raysim.training.messages import Block, ClientResult, WorkerResult

MODEL_VERSION = "a version of the model"
"""What a wait for a broadcast waits for, in errors."""


@dataclass
class NodeUpload:
    """Vectors of some clients, ready for the server update."""

    vectors: list[Reference]
    """References to the clients' sum and, if the rule asks for them, their uploads per client."""

    ids: list[int]
    """The clients."""

    bound: float
    """Upper bound of the absolute value of every entry of the sum."""


@dataclass
class BlockCall:
    """One call of a ClientActor, which trains one or more blocks."""

    work: ClassVar = Work.BLOCK

    vectors: list[Reference]
    """References to the vectors that the call returns."""

    worker: int
    """Number of the ClientActor."""

    actor: Actor
    """The ClientActor itself; another one may get its number after it has failed."""

    node: str
    """Id of the worker's node."""

    gpus: list[str]
    """Ids of the worker's GPUs."""

    blocks: list[Block]
    """Blocks to train."""

    outcome: WorkerResult = field(default_factory=WorkerResult)
    """Result of the call without its vectors; empty until the call returns."""

    @property
    def who(self) -> str:
        """Name of the actor, for messages."""
        return f"ClientActor {self.worker}"


@dataclass
class NodeSum:
    """One call of a NodeAggregator, which sums the vectors of its node's workers."""

    work: ClassVar = Work.NODE_SUM

    vector: Reference
    """Reference to the sum."""

    node: str
    """Id of the node."""

    name: str
    """Name of the node, for messages."""

    shares: list[BlockCall]
    """Calls whose vectors are summed."""

    @property
    def who(self) -> str:
        """Name of the actor, for messages."""
        return f"the NodeAggregator of node {self.name}"


class RoundPhase(Enum):
    """Phase of a round."""

    TRAINING = "blocks are in training or wait for a worker"
    AGGREGATING = "all blocks are trained; NodeAggregators sum the uploads of their nodes"
    UPLOADING = "all blocks are trained; some sums are not uploaded yet"
    DONE = "all sums are uploaded to the server"


class RayRound:
    """Round in progress: workers train its blocks, and NodeAggregators sum the uploads per node.

    The blocks of a failed worker go to other workers, one block per call, which shows during which
    block a worker died. If a NodeAggregator fails, the blocks of its node are trained again too.

    Args:
        pool: the actors.
        t: number of the round, from 0.
        sends_rows: whether the server receives uploads client by client.
    """

    def __init__(self, pool: WorkerPool, t: int, sends_rows: bool):
        self.pool = pool
        self.t = t
        self.sends_rows = sends_rows
        self.speeds = pool.speeds
        self.scheduler = BlockScheduler(self.speeds)
        self.traffic = RoundTraffic(pool.topology)
        self.broadcasts: dict[int, Any] = {}
        """References to the model versions that clients start from, by number."""
        self.waiting: dict[Any, BlockCall | NodeSum] = {}
        """Calls in flight by the reference to their result, in the order of dispatch."""
        self.retries: deque[Block] = deque()
        """Blocks to train again."""
        self.nodes_without_aggregator: set[str] = set()
        """Nodes whose NodeAggregator failed in this round; their sums are uploaded separately."""
        self.deaths: dict[tuple[int, ...], list[tuple[str, str]]] = {}
        """Node and reason of the worker deaths during a block, by the block's clients."""
        self.seconds: Counter[int] = Counter()
        """Training time of each worker in this round, in seconds."""
        self.trained: list[BlockCall] = []
        """Calls that have returned and whose vectors are not uploaded yet."""
        self.uploads: list[NodeUpload] = []
        """Uploads for the server update."""
        self.results: list[WorkerResult] = []
        """Results of all uploaded calls, and of clients that were dropped."""

    def add(self, broadcasts: Mapping[int, Reference], blocks: list[Block]) -> None:
        """Dispatch blocks to the available workers; may be called several times before `get`.

        Args:
            broadcasts: references to the model versions that the blocks' clients start from, by
                number.
            blocks: the clients, in the blocks that are trained together.

        Raises:
            RaysimError: no worker is left and none starts in time, or Ray itself has failed.
        """
        self.broadcasts |= broadcasts
        for worker, share in self.scheduler.assign(blocks, self.pool.available_workers()).items():
            self._send(worker, share)
        # Calls over sockets are sent when their version of the model has arrived.
        for broadcast in broadcasts.values():
            if isinstance(broadcast, Reply):
                self.pool.supervisor.await_result(broadcast, MODEL_VERSION, self.pool.server)

    def get(self) -> RoundResults:
        """Wait until all blocks are trained and their sums uploaded, and return the results.

        If a NodeAggregator fails, the round returns from the aggregating to the training phase.

        Raises:
            ClientError: workers died repeatedly during a block, and `faults.on_client_error` is
                "stop".
            ServerStateLost: the server has failed, or a vector that an actor needs is lost.
            RaysimError: Ray itself has failed, or an actor raised an error.
        """
        self.last_answer = self.last_check = time.monotonic()
        while (phase := self.phase) is not RoundPhase.DONE:
            match phase:
                case RoundPhase.TRAINING:
                    self._send_more()
                    self._receive()
                case RoundPhase.AGGREGATING:
                    self._receive()
                case RoundPhase.UPLOADING:
                    self._upload()
        metrics = {
            "system/train_seconds": float(max(self.seconds.values(), default=0.0)),
            **self.traffic.figures(len(self.pool.workers)),
        }
        return RoundResults(self.uploads, self.results, metrics)

    @property
    def phase(self) -> RoundPhase:
        """Current phase of the round."""
        if self._has_blocks_left or self._block_calls():
            return RoundPhase.TRAINING
        if self.waiting:
            return RoundPhase.AGGREGATING
        return RoundPhase.UPLOADING if self.trained else RoundPhase.DONE

    @property
    def _has_blocks_left(self) -> bool:
        """Whether there are blocks without a worker."""
        return bool(self.retries) or self.scheduler.has_held_back

    def _block_calls(self) -> list[BlockCall]:
        """Return the calls of workers that are in flight."""
        return [call for call in self.waiting.values() if isinstance(call, BlockCall)]

    def _receive(self) -> None:
        """Wait up to `POLL_INTERVAL_S` for results; check for failures at the same interval."""
        # While blocks wait for a worker, the first result already lets the next block start.
        n_results = 1 if self._has_blocks_left else len(self.waiting)
        ready, late = actor_calls.wait(
            list(self.waiting), num_returns=n_results, timeout=POLL_INTERVAL_S
        )
        for reference in ready:
            self._take_answer(reference)
        now = time.monotonic()
        if ready:
            self.last_answer = now
        if late and now - self.last_check >= POLL_INTERVAL_S:
            self.last_check = now
            self._find_failures(now - self.last_answer)

    def _send(self, worker: int, blocks: list[Block], again: bool = False) -> None:
        """Dispatch `blocks` to a worker; `again`: the worker may have sent a result already."""
        bases = {task.base: self.broadcasts[task.base] for block in blocks for task in block.tasks}
        recipient = self.pool.workers[worker]
        sent, states = blocks, None
        if not again:
            sent, states = self.pool.local.share_states(worker, recipient.actor, blocks)
        *vectors, result = recipient.actor.call(
            "train", sent, again, states, list(bases), *bases.values()
        )
        self.waiting[result] = BlockCall(
            vectors[: 1 + self.sends_rows],
            worker,
            recipient.actor,
            recipient.node,
            recipient.gpus,
            blocks,
        )
        self.traffic.sent(recipient.node, bases)

    def _send_more(self) -> None:
        """Dispatch blocks to retry, then held-back blocks, to idle workers."""
        if not self._has_blocks_left:
            return
        busy = {call.worker for call in self._block_calls()}
        for worker in sorted(set(self.pool.available_workers()) - busy):
            blocks = self._next_retry(worker) or self.scheduler.next_batch(len(self.pool.workers))
            if blocks:
                # The worker's shared buffer may hold its first result, which is not read yet.
                self._send(worker, blocks, again=True)

    def _next_retry(self, worker: int) -> list[Block]:
        """Return a block for a worker to train again; [] if there is none.

        A block is tried on each node before it is tried again on one where a worker died: one bad
        node must not pass for a client that kills its actors.
        """
        nodes = {worker.node for worker in self.pool.workers.values()}
        node = self.pool.workers[worker].node
        for block in self.retries:
            struck = {place for place, _ in self.deaths.get(_clients_of(block), [])}
            if node not in struck or nodes <= struck:
                self.retries.remove(block)
                return [block]
        return []

    def _take_answer(self, reference: Reference) -> None:
        """Take in the result of a call, or handle its failure."""
        call = self.waiting.get(reference)
        # The failure of the call's actor has removed the call already.
        if call is None:
            return
        try:
            result: Any = actor_calls.get(reference, self.pool.timeout)
        except RayError as error:
            self._handle_failure(reference, call, error)
            return
        del self.waiting[reference]
        if isinstance(call, NodeSum):
            vectors, size = [call.vector], result
            for share in call.shares:
                if share.outcome.ids:
                    vectors += share.vectors[1:]
                    size += share.outcome.bytes[1]
            self._send_up(vectors, call.shares, size)
            return
        result, states = result
        if states is not None:
            attach_states(result.clients, self.pool.local.buffers[states.writer].read(states))
        call.outcome = result
        self.seconds[call.worker] += result.seconds
        self.speeds.observe(call.worker, count_local_steps(call.blocks), result.seconds)
        self.trained.append(call)

    # Uploads.

    def _upload(self) -> None:
        """Upload the sums of all trained calls, or send them to their NodeAggregator.

        A sum is lost if its node has died since, so its blocks are trained again.
        """
        dead_nodes = self.pool.supervisor.monitor.dead_nodes()
        shares_by_node: dict[str, list[BlockCall]] = {}
        for share in self.trained:
            if share.node in dead_nodes and share.outcome.ids:
                self._end_worker(share, share.blocks, "its node died")
                self.retries.extend(share.blocks)
            else:
                shares_by_node.setdefault(share.node, []).append(share)
        self.trained = []
        for node, shares in sorted(shares_by_node.items()):
            # A call whose clients have all failed has no sum.
            sums = [share for share in shares if share.outcome.ids]
            aggregates = self.pool.aggregates_on_node(node, len(sums))
            if aggregates and node not in self.nodes_without_aggregator:
                self._aggregate(node, shares, sums)
            else:
                for share in shares:
                    self._send_up(share.vectors, [share], sum(share.outcome.bytes))

    def _aggregate(self, node: str, shares: list[BlockCall], sums: list[BlockCall]) -> None:
        """Let the NodeAggregator of a node add up the vectors of `sums`."""
        bound = sum(share.outcome.bound for share in sums)
        vectors = [share.vectors[0] for share in sums]
        vector, size = self.pool.aggregator(node).call("add", bound, *vectors)
        self.waiting[size] = NodeSum(vector, node, self.pool.topology.name(node), shares)

    def _send_up(self, vectors: list[Reference], shares: list[BlockCall], size: int) -> None:
        """Record the vectors of `shares` (`size` bytes) as an upload, and the calls' results."""
        ids = [client for share in shares for client in share.outcome.ids]
        if ids:
            self.uploads.append(
                NodeUpload(vectors, ids, sum(share.outcome.bound for share in shares))
            )
            self.traffic.up(shares[0].node, size)
        for share in shares:
            self.results.append(share.outcome)
            self.traffic.trained(share.node, share.gpus, share.outcome)

    # Failures.

    def _handle_failure(
        self, reference: Reference, call: BlockCall | NodeSum, error: RayError
    ) -> None:
        """Do the work of a failed call again, or raise its error, as the failure policy decides."""
        failure = translated(error, f"{round_name(self.t)}: {call.who}")
        if self.pool.failure_policy.decide(failure, call.work) is Decision.RAISE:
            raise failure from None
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(call, NodeSum):
            self._retry_sum(reference, first_line(cause))
        else:
            self._retry_blocks(call, str(cause))

    def _find_failures(self, waited: float) -> None:
        """Find actors that hang and nodes that died, because their calls never return.

        `waited` is the time since the last result, in seconds.
        """
        supervisor = self.pool.supervisor
        # Without the server the round is lost, so it is not trained to its end first.
        supervisor.check(self.pool.server, f"{round_name(self.t)}")
        dead_nodes = supervisor.monitor.dead_nodes()
        for reference, call in list(self.waiting.items()):
            # An earlier pass of this loop may have removed other calls of the same actor.
            if reference not in self.waiting:
                continue
            why = supervisor.failure(self._actor_of(call))
            if call.node in dead_nodes:
                why = "its node died"
            if why and isinstance(call, NodeSum):
                self._retry_sum(reference, why)
            elif why and isinstance(call, BlockCall):
                self._retry_blocks(call, why)
        self._check_progress(waited)

    def _check_progress(self, waited: float) -> None:
        """Raise ServerStateLost if no actor has worked for `resources.timeout`.

        No actor has failed, so Ray does not deliver an input that they need.
        """
        pool = self.pool
        busy = [self._actor_of(call) for call in self.waiting.values()]
        if not busy or min(pool.supervisor.idle_s([pool.server, *busy]), waited) < pool.timeout:
            return
        names = sorted({call.who for call in self.waiting.values()})
        # An actor runs its calls in order: the repeated rounds would wait for these calls.
        for worker in {call.worker for call in self._block_calls()}:
            pool.remove_worker(worker, f"in {round_name(self.t)}: its inputs do not arrive")
        raise ServerStateLost(
            f"{round_name(self.t)}: {', '.join(names)} and the ServerActor have been idle for "
            f"{pool.timeout:g} s; Ray does not deliver their inputs (limit: resources.timeout)"
        )

    def _actor_of(self, call: BlockCall | NodeSum) -> Actor | None:
        """Return the actor of a call; None for a NodeAggregator that the pool has removed."""
        if isinstance(call, NodeSum):
            return self.pool.aggregators.get(call.node)
        return call.actor

    def _retry_sum(self, reference: Reference, why: str) -> None:
        """Train the blocks of a node sum again because its NodeAggregator or its inputs failed."""
        node_sum = self.waiting.pop(reference)
        assert isinstance(node_sum, NodeSum)
        blocks = [block for share in node_sum.shares for block in share.blocks]
        self.pool.remove_aggregator(
            node_sum.node,
            f"in {round_name(self.t)}, with {counted(len(blocks), 'block')}: {why}",
        )
        self.pool.recoveries["system/blocks_retried"] += len(blocks)
        self.nodes_without_aggregator.add(node_sum.node)
        # Trained again, not only summed again: the inputs of the sum may be lost.
        self.retries.extend(blocks)

    def _retry_blocks(self, failed: BlockCall, why: str) -> None:
        """End a failed worker, and train its blocks again unless they fail again and again.

        The worker died during the first of its calls, because an actor runs its calls in order.
        """
        blocks: list[Block] = []
        for reference, call in list(self.waiting.items()):
            if isinstance(call, BlockCall) and call.actor is failed.actor:
                if not blocks:
                    for block in call.blocks:
                        self.deaths.setdefault(_clients_of(block), []).append((call.node, why))
                blocks += call.blocks
                del self.waiting[reference]
        self._end_worker(failed, blocks, first_line(why))
        for block in blocks:
            deaths = self.deaths.get(_clients_of(block), [])
            decision = self.pool.failure_policy.decide(ActorDied(why), Work.BLOCK, len(deaths))
            if decision is Decision.RETRY:
                self.retries.append(block)
            else:
                self._give_up(block, deaths, decision)

    def _end_worker(self, call: BlockCall, blocks: list[Block], why: str) -> None:
        """End the worker of a call, and count the blocks that are lost with it."""
        self.pool.remove_worker(
            call.worker,
            f"in {round_name(self.t)}, with {counted(len(blocks), 'block')}: {why}",
            call.actor,
        )
        self.pool.recoveries["system/blocks_retried"] += len(blocks)

    def _give_up(self, block: Block, deaths: list[tuple[str, str]], decision: Decision) -> None:
        """Stop the run, or drop the clients of a block during which too many workers died."""
        clients = _clients_of(block)
        names = ("client " if len(clients) == 1 else "clients ") + ", ".join(map(str, clients))
        message = (
            f"the actor that trained {names} died, {len(deaths)} times in turn; "
            f"the first time: {deaths[0][1].strip()}"
        )
        if decision is Decision.RAISE:
            raise ClientError(
                f"{round_name(self.t)}: {message}\n"
                "(to continue without such clients, set faults.on_client_error=drop)"
            )
        failed = [ClientResult(client, error=message) for client in clients]
        self.results.append(WorkerResult(failed))


def _clients_of(block: Block) -> tuple[int, ...]:
    """Return the numbers of a block's clients."""
    return tuple(task.client for task in block.tasks)


class ClientEvaluationRound(RayRound):
    """Evaluation of clients in progress, while clients train.

    All blocks are dispatched at once. Their times do not count for the speeds of workers, which are
    those of training. No result is left in a shared buffer, where it could replace an upload.

    Args:
        pool: the actors.
        version: number of the version of the model.
    """

    def __init__(self, pool: WorkerPool, version: int):
        super().__init__(pool, version, sends_rows=False)
        self.speeds = WorkerSpeeds()
        self.scheduler = BlockScheduler(self.speeds)

    def _send(self, worker: int, blocks: list[Block], again: bool = False) -> None:
        """Dispatch blocks to a worker, whose result does not go through shared memory."""
        super()._send(worker, blocks, again=True)

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        if self.retries:
            return False
        calls = list(self.waiting)
        _, late = actor_calls.wait(calls, num_returns=len(calls), timeout=0)
        return not late
