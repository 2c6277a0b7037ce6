"""Ray actors of a run: ClientActors, one ServerActor, NodeAggregators, and perhaps one EvalActor.

This module defines their work; `worker_pool` starts and replaces them, and `round` dispatches
blocks to them. The actors of a node share the run's plan (data, partition, model) in the object
store without copies. Vectors travel from actor to actor, past the driver: in shared memory if all
actors run on one node, else through the object store. `actor_calls` has the two ways to call them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Any

# Before Ray is imported: workers use this Python, also under `uv run`, and an actor without a
# share of a GPU still sees the GPUs, as `_Actor` expects.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from raysim.imports import uncollected

with uncollected():  # the process of an actor imports torch here
    import numpy as np
    import ray
    from numpy.random import Generator
    from torch import Tensor

    from raysim.data.examples import shared_tensor
    from raysim.distributed.cluster.versions import SourceCode, source_code
    from raysim.distributed.heartbeats import Address, Heartbeat
    from raysim.distributed.transport import actor_calls
    from raysim.distributed.transport.shared_memory import (
        SharedBuffer,
        SharedBufferRef,
        attach_states,
        move_states,
        states_of,
    )
    from raysim.engine.evaluation.evaluator import Evaluator
    from raysim.engine.plan import Plan
    from raysim.engine.process_setup import configure_process, make_server, make_trainer
    from raysim.numerics.fixed_point import FixedTotal, combine
    from raysim.rules.client_sampling import SelectionPool
    from raysim.server.round_cohort import RoundCohort
    from raysim.training.messages import Block, Broadcast, EvaluationParts, WorkerResult
    from raysim.training.uploads.upload_sum import names_upload

Tree = dict[str, Any]
"""Nested dictionary of tensors or arrays."""

ModelVersion = Tree | SharedBufferRef
"""Broadcast of a version of the model as it travels between actors: itself, or its place."""


def packed(value: Any) -> Any:
    """Return `value` with tensors as numpy arrays, which the object store shares without copies.

    Args:
        value: a tensor, a nested dictionary of tensors, or any other value, returned unchanged.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {k: packed(v) for k, v in value.items()}
    return value


def unpacked(value: Any, device: str) -> Any:
    """Return `value` with its numpy arrays as tensors on `device`: the inverse of `packed`.

    On the CPU the tensors share the arrays' memory, which may be read-only.

    Args:
        value: an array, or nested dicts of arrays; anything else is returned as it is.
        device: a device of torch, such as "cpu" or "cuda:0".
    """
    if isinstance(value, np.ndarray):
        return shared_tensor(value).to(device)
    if isinstance(value, dict):
        return {k: unpacked(v, device) for k, v in value.items()}
    return value


def working(method: Any) -> Any:
    """Decorate a method of an actor, so that the actor's heartbeats report its calls as work.

    Args:
        method: a method of an `_Actor`.

    Returns:
        The method; while it runs, the heartbeats report work.
    """

    @wraps(method)
    def reported(self: _Actor, *arguments: Any) -> Any:
        with self.heartbeat.working():
            return method(self, *arguments)

    return reported


@dataclass(frozen=True)
class Place:
    """Node, GPUs and source code of an actor."""

    node: str
    """Id of the node."""

    gpus: list[str]
    """Ids of the GPUs that the actor has a share of."""

    code: SourceCode
    """The source code of raysim in its process."""


class _Actor:
    """Base class of the actors: heartbeats, a device, and the shared buffers of this node.

    Args:
        heartbeat: where to send heartbeats.
        plan: the run.
        on_gpu: whether its device is the first GPU that Ray makes visible; else it is the CPU,
            although an actor without a share of a GPU sees all of them.
    """

    def __init__(self, heartbeat: Address, plan: Plan, on_gpu: bool):
        self.heartbeat = Heartbeat(heartbeat)
        configure_process(plan.config.resources, on_gpu)
        # The driver handles interrupts. A KeyboardInterrupt in an actor can only come from a rule.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.device = "cuda:0" if on_gpu else "cpu"
        self.shared_buffers: dict[str, SharedBuffer] = {}

    def where(self) -> Place:
        """Return node, GPUs and source code of this actor."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), gpus, source_code())

    def open_shared_buffers(self, paths: dict[str, str]) -> None:
        """Open shared buffers, in addition to those that are open.

        Args:
            paths: file of each buffer, by its name.
        """
        self.shared_buffers |= {name: SharedBuffer(path) for name, path in paths.items()}

    def serve(self, address: str) -> None:
        """Answer calls over a socket, until the driver closes it.

        Args:
            address: the driver's end.
        """
        actor_calls.serve(self, address)

    def _share(self, writer: str, groups: dict[str, dict[str, Tensor]]) -> Tree | SharedBufferRef:
        """Write groups of tensors into the writer's shared buffer and return a reference to them.

        Without such a buffer, or if they do not fit, return them as arrays.
        """
        arrays = packed(groups)
        if writer in self.shared_buffers:
            return self.shared_buffers[writer].write(writer, arrays) or arrays
        return arrays

    def _fetch(self, shared: Tree | SharedBufferRef) -> Tree:
        """Return the groups of tensors that an actor sent with `_share`, on this actor's device."""
        if isinstance(shared, SharedBufferRef):
            shared = self.shared_buffers[shared.writer].read(shared)
        return unpacked(shared, self.device)


class ClientActor(_Actor):
    """Actor that trains blocks of clients.

    Args:
        heartbeat: where to send heartbeats.
        plan: the run.
        name: name of the shared buffer that this actor writes.
    """

    def __init__(self, heartbeat: Address, plan: Plan, name: str):
        super().__init__(heartbeat, plan, plan.config.resources.gpus > 0)
        # The start is work: a wait for an actor ends when the actor is idle for too long.
        with self.heartbeat.working():
            self.name = name
            self.trainer = make_trainer(plan, self.device)

    @working
    @ray.method(num_returns=3)
    def train(
        self,
        blocks: list[Block],
        again: bool,
        states: SharedBufferRef | None,
        bases: list[int],
        *broadcasts: Tree | SharedBufferRef,
    ) -> tuple[Tree | SharedBufferRef, Tree, tuple[WorkerResult, SharedBufferRef | None]]:
        """Train the clients in `blocks`.

        Args:
            blocks: the blocks to train.
            again: whether this actor has already sent a result in this round. Its shared buffer
                still holds that result, so this result is sent as it is.
            states: place of the clients' states; None if the tasks hold them.
            bases: numbers of the model versions that the clients start from.
            broadcasts: these versions, in the order of `bases`.

        Returns:
            The fixed-point sums, the uploads per client, and the result without vectors. In shared
            memory the first item holds sums and uploads per client, and the second is empty. With
            the result comes the place of the clients' new states; None if the result holds them.
        """
        if states is not None:
            tasks = [task for block in blocks for task in block.tasks]
            attach_states(tasks, self.shared_buffers[states.writer].read(states))
        versions = map(read_broadcast, map(self._fetch, broadcasts))
        outcome = self.trainer.train(dict(zip(bases, versions, strict=True)), blocks)
        rows = {}
        for key, client_rows in outcome.rows.items():
            for i, row in enumerate(client_rows):
                rows[f"{key}/{i}"] = row
        limbs = as_limbs(outcome.sums)
        result = replace(outcome, sums={}, rows={}, bytes=(_nbytes(limbs), _nbytes(rows)))
        kept = None
        if not again and (name := states_of(self.name)) in self.shared_buffers:
            result.clients, kept = move_states(result.clients, name, self.shared_buffers[name])
        shared = self._share("" if again else self.name, {"sums": limbs, "rows": rows})
        if isinstance(shared, SharedBufferRef):
            return shared, {}, (result, kept)
        return {"sums": shared["sums"]}, {"rows": shared["rows"]}, (result, kept)


class NodeAggregator(_Actor):
    """Actor that sums the uploads of its node's ClientActors, so that the node sends one sum.

    Args:
        heartbeat: where to send heartbeats.
        plan: the run.
    """

    def __init__(self, heartbeat: Address, plan: Plan):
        super().__init__(heartbeat, plan, False)

    @working
    @ray.method(num_returns=2)
    def add(self, bound: float, *uploads: Tree) -> tuple[Tree, int]:
        """Return the sum of the fixed-point sums in `uploads`, and its size in bytes.

        Args:
            bound: upper bound of the absolute value of every entry of the result.
            *uploads: the first item that each call of `ClientActor.train` on this node returned.
        """
        sums = [read_limbs(self._fetch(upload)["sums"]) for upload in uploads]
        total = {}
        for name in sums[0]:
            with names_upload(name):
                total[name] = combine([vectors[name] for vectors in sums], bound)
        limbs = as_limbs(total)
        return packed({"sums": limbs}), _nbytes(limbs)


class ServerActor(_Actor):
    """Actor that holds the server's state and runs its updates.

    Args:
        heartbeat: where to send heartbeats.
        plan: the run.
    """

    def __init__(self, heartbeat: Address, plan: Plan):
        super().__init__(heartbeat, plan, plan.config.resources.server_on_gpu)
        with self.heartbeat.working():
            self.server = make_server(plan, self.device)

    @working
    def broadcast(self, following: RoundCohort) -> ModelVersion:
        """Return the version of the model for a round, without an update before.

        Args:
            following: the cohort of the next round.

        Raises:
            RaysimError: the server rule fails, or breaks its contract.
        """
        self.last_broadcast = self.server.broadcast(following)
        return self._share("server", as_groups(self.last_broadcast))

    @working
    @ray.method(num_returns=2)
    def advance(
        self,
        round: RoundCohort,
        following: RoundCohort,
        uploads: list[tuple[list[int], float, int]],
        bases: list[int],
        *vectors: Tree | SharedBufferRef,
    ) -> tuple:
        """Aggregate the uploads of a round and make the next model version.

        Args:
            round: the cohort that trained.
            following: the cohort of the next round.
            uploads: for each upload its clients, the bound of its sum, and its number of vectors.
            bases: numbers of the model versions that the server update needs.
            *vectors: the vectors of all uploads in order, then the versions of `bases`.

        Returns:
            The metrics of the update, and the next model version.

        Raises:
            RaysimError: the server rule fails, or breaks its contract.
        """
        step = self.server.advance(round, *self._read(uploads, bases, vectors), following)
        self.last_broadcast = step.broadcast
        # Two objects, because the driver reads the metrics and must not receive the version.
        return step.metrics, self._share("server", as_groups(self.last_broadcast))

    @working
    def update(
        self,
        round: RoundCohort,
        uploads: list[tuple[list[int], float, int]],
        bases: list[int],
        *vectors: Tree | SharedBufferRef,
    ) -> dict[str, float]:
        """Aggregate the uploads of a round, without making the next model version.

        Args:
            round: the cohort that trained.
            uploads: as in `advance`.
            bases: as in `advance`.
            *vectors: as in `advance`.

        Returns:
            The metrics of the update.

        Raises:
            RaysimError: the server rule fails, or breaks its contract.
        """
        return self.server.update(round, *self._read(uploads, bases, vectors))

    @working
    def candidates(self, pool: SelectionPool, rng: Generator) -> list[int]:
        """Return the clients of `pool` whose loss the server rule asks for.

        Args:
            pool: the number of the round, the available clients, and the facts about them.
            rng: generator that is keyed by seed and round.
        """
        return self.server.candidates(pool, rng)

    @working
    def select(self, pool: SelectionPool, rng: Generator) -> list[int]:
        """Return the clients that the server rule selects from `pool`.

        Args:
            pool: the number of the round, the available clients, and the facts about them.
            rng: generator that is keyed by seed and round.
        """
        return self.server.select(pool, rng)

    def _read(
        self,
        uploads: list[tuple[list[int], float, int]],
        bases: list[int],
        vectors: Iterable[Tree | SharedBufferRef],
    ) -> tuple[list[WorkerResult], dict[int, Broadcast]]:
        """Return the results of the workers and the model versions that an update receives."""
        outcomes = []
        trees = map(self._fetch, vectors)
        for clients, bound, count in uploads:
            outcomes.append(WorkerResult([], clients, bound=bound))
            for tree in islice(trees, count):
                outcomes[-1].sums |= read_limbs(tree.get("sums", {}))
                for name, row in tree.get("rows", {}).items():
                    outcomes[-1].rows.setdefault(name.rpartition("/")[0], []).append(row)
        return outcomes, dict(zip(bases, map(read_broadcast, trees), strict=True))

    @working
    def publish(self, for_evaluation: bool) -> Tree:
        """Return the last broadcast as arrays.

        Unlike what the shared buffer holds, they stay as they are at the next broadcast.

        Args:
            for_evaluation: whether to return what is evaluated in its place.
        """
        last = self.last_broadcast
        return packed(as_groups(last.for_evaluation() if for_evaluation else last))

    @working
    def snapshot(self) -> Tree:
        """Return the server's state as numpy arrays."""
        return packed(self.server.snapshot())

    @working
    def restore(self, snapshot: Tree) -> None:
        """Set the server's state to one that `snapshot` returned.

        Args:
            snapshot: the state as numpy arrays.

        Raises:
            RaysimError: the snapshot comes from another rule or another model.
        """
        # Clones: the object store's arrays are read-only, and a rule may change its state in place.
        self.server.restore({k: v.clone() for k, v in unpacked(snapshot, "cpu").items()})


class EvalActor(_Actor):
    """Actor that evaluates the global model while the next round trains.

    Args:
        heartbeat: where to send heartbeats.
        plan: the run.
    """

    def __init__(self, heartbeat: Address, plan: Plan):
        super().__init__(heartbeat, plan, plan.config.resources.server_on_gpu)
        with self.heartbeat.working():
            self.evaluator = Evaluator(plan, self.device)

    @working
    def evaluate(self, broadcast: Tree, parts: EvaluationParts) -> dict[str, float]:
        """Return the metrics of a version of the model.

        Args:
            broadcast: the version as numpy arrays.
            parts: what to measure.

        Raises:
            RaysimError: the net or a probe failed.
        """
        return self.evaluator.evaluate(read_broadcast(self._fetch(broadcast)), parts)


def _nbytes(tensors: dict[str, Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def as_limbs(sums: dict[str, FixedTotal]) -> dict[str, Tensor]:
    """Return the limbs of fixed sums by "NAME/EXPONENT", the form in which actors send them.

    Args:
        sums: fixed sums by name.
    """
    limbs = {}
    for name, total in sums.items():
        for exponent, limb in total.items():
            limbs[f"{name}/{exponent}"] = limb
    return limbs


def read_limbs(limbs: dict[str, Tensor]) -> dict[str, FixedTotal]:
    """Return the fixed sums whose limbs are `limbs`: the inverse of `as_limbs`.

    Args:
        limbs: limbs by "NAME/EXPONENT".
    """
    sums: dict[str, FixedTotal] = {}
    for place, limb in limbs.items():
        name, _, exponent = place.rpartition("/")
        sums.setdefault(name, {})[int(exponent)] = limb
    return sums


def as_groups(broadcast: Broadcast) -> dict[str, dict[str, Tensor]]:
    """Return a broadcast as groups of tensors, the form in which actors send it.

    Args:
        broadcast: a version of the model, with the server's shared tensors and BatchNorm
            statistics.
    """
    return {"shared": broadcast.shared, "buffers": {"": broadcast.buffers}}


def read_broadcast(groups: Tree) -> Broadcast:
    """Return the broadcast in `groups`: the inverse of `as_groups`.

    Args:
        groups: the groups "shared" and "buffers".
    """
    return Broadcast(groups["shared"], groups["buffers"][""])
