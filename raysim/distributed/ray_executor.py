"""Executor over Ray: send the engine's requests to the actors of a `WorkerPool`.

A round costs one call per ClientActor, which trains its blocks and sends one fixed-point sum. If
the server runs on another node, a NodeAggregator first sums the uploads of each node. The driver
only passes references from actor to actor (`actor_calls`). `engine.failure_policy` says what
follows a failure.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import ray
from numpy.random import Generator

from raysim.distributed.actors import as_groups, packed, read_broadcast, unpacked
from raysim.distributed.round import MODEL_VERSION, ClientEvaluationRound, RayRound
from raysim.distributed.transport import actor_calls
from raysim.distributed.transport.actor_calls import Actor, Reference, Reply
from raysim.distributed.transport.shared_memory import SharedBufferRef
from raysim.distributed.waiting import first_line
from raysim.distributed.worker_pool import WorkerPool
from raysim.engine.executor import CompletedResult, PendingServerStep, RoundResults
from raysim.engine.failure_policy import ActorDied, Decision, Work
from raysim.engine.plan import Plan
from raysim.errors import RaysimError, round_name
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import State
from raysim.server.round_cohort import RoundCohort
from raysim.system.signals import Stopped
from raysim.training.messages import Block, Broadcast, EvaluationParts

T = TypeVar("T")


class RayExecutor:
    """Executor that trains, aggregates and evaluates in Ray actors.

    Args:
        log: called with one line of text for each failure and recovery.
        pool: the actors; None creates a `WorkerPool`, which `open` starts.
    """

    def __init__(self, log: Callable[[str], None], pool: WorkerPool | None = None):
        self.pool = pool or WorkerPool(log)
        self.recoveries: Counter[str] = self.pool.recoveries
        """Number of failed actors, of blocks trained again and of server restarts in this run."""

    def open(self, plan: Plan) -> None:
        """Start the actors of the run.

        Args:
            plan: the run; its `resources` say which actors there are.

        Raises:
            ConfigError: the cluster has fewer resources than the configuration asks for.
            RaysimError: an actor does not start in time.
            Stopped: a signal came while Ray started.
        """
        self.needs_base_params = plan.server.needs_base_params
        self.sends_rows = bool(plan.sent_per_client)
        try:
            self.pool.start(plan)
        except SystemExit:
            # While Ray starts, it turns a SIGTERM into SystemExit.
            raise Stopped(signal.SIGTERM) from None

    def broadcast(self, following: RoundCohort) -> Reference:
        """Return a reference to the model as the server has it, for the cohort `following`.

        See `Executor.broadcast`.
        """
        (version,) = self.pool.server.call("broadcast", following)
        return version

    def training(self, t: int) -> RayRound:
        """Return the training of a round, with no client yet.

        Args:
            t: number of the round, from 0.
        """
        return RayRound(self.pool, t, self.sends_rows)

    def advance(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, Reference],
        following: RoundCohort,
    ) -> PendingServerStep[Reference]:
        """Start the server update of a round, and return it without waiting.

        Args:
            round: the cohort that trained.
            trained: its uploads, as references.
            bases: references to the model versions that the clients started from, by number.
            following: the cohort of the next round.

        Returns:
            The metrics, as a future, and a reference to the next model version.
        """
        sent = self._sent(trained, bases)
        server = self.pool.server
        metrics, broadcast = server.call("advance", round, following, *sent)
        future = RayFuture(self.pool, metrics, _update_of(round), server)
        return PendingServerStep(future, broadcast)

    def update(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, Reference],
    ) -> RayFuture[dict[str, float]]:
        """Start the server update of a round, and return its metrics as a future.

        Args:
            round: the cohort that trained.
            trained: its uploads, as references.
            bases: references to the model versions that the clients started from, by number.
        """
        sent = self._sent(trained, bases)
        return self._of_server(_update_of(round), "update", round, *sent)

    def _sent(self, trained: RoundResults, bases: Mapping[int, Reference]) -> tuple[Any, ...]:
        """Return uploads and versions as the arguments of a server update."""
        uploads = [(upload.ids, upload.bound, len(upload.vectors)) for upload in trained.uploads]
        vectors = [vector for upload in trained.uploads for vector in upload.vectors]
        sent_bases = dict(bases) if self.needs_base_params else {}
        # Each vector is an argument: Ray replaces references by their values there, not in lists.
        return uploads, list(sent_bases), *vectors, *sent_bases.values()

    def _of_server(self, awaited: str, method: str, *arguments: Any) -> RayFuture[Any]:
        """Call a method of the server that has one result, and return it as a future."""
        server = self.pool.server
        (result,) = server.call(method, *arguments)
        return RayFuture(self.pool, result, awaited, server)

    def candidates(self, pool: SelectionPool, rng: Generator) -> RayFuture[list[int]]:
        """Ask the server rule for the candidates of a round, and return them as a future.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: generator that is keyed by seed and round.
        """
        awaited = f"the candidates of {round_name(pool.round)}"
        return self._of_server(awaited, "candidates", pool, rng)

    def select(self, pool: SelectionPool, rng: Generator) -> RayFuture[list[int]]:
        """Ask the server rule for the clients of a round, and return them as a future.

        Args:
            pool: the number of the round, and the clients to select from.
            rng: generator that is keyed by seed and round.
        """
        awaited = f"the selection of {round_name(pool.round)}"
        return self._of_server(awaited, "select", pool, rng)

    def evaluate(
        self, broadcast: Reference, parts: EvaluationParts
    ) -> _EvaluationFuture | CompletedResult[dict[str, float]]:
        """Start the evaluation of the newest model version, and return its metrics as a future.

        Args:
            broadcast: reference to the newest version. The server publishes this version again,
                because the next one overwrites the shared buffer.
            parts: what to measure.
        """
        evaluator = self.pool.eval
        if evaluator is None:
            return CompletedResult({})
        (version,) = self.pool.server.call("publish", True)
        return _EvaluationFuture(self.pool, evaluator, version, parts)

    def evaluate_clients(
        self, version: int, broadcast: Reference, blocks: list[Block]
    ) -> ClientEvaluationRound:
        """Start the evaluation of clients on the ClientActors, and return it as a future.

        Args:
            version: number of the newest model version.
            broadcast: reference to it; the server publishes it again, as for `evaluate`.
            blocks: the clients, in blocks of evaluation.
        """
        evaluation = ClientEvaluationRound(self.pool, version)
        (evaluated,) = self.pool.server.call("publish", True)
        evaluation.add({version: evaluated}, blocks)
        return evaluation

    def snapshot(self) -> RayFuture[State]:
        """Return the server's state, as tensors on the CPU, as a future."""
        future = self._of_server("the server's state", "snapshot")
        future.read = lambda arrays: unpacked(arrays, "cpu")
        return future

    def restore(self, snapshot: State) -> None:
        """Set the server's state.

        Args:
            snapshot: a state that `snapshot` returned, for example from a checkpoint.

        Raises:
            ServerStateLost: the server has failed.
            RaysimError: Ray itself has failed, or the server raised an error.
        """
        self._of_server("the server to restore its state", "restore", packed(snapshot)).get()

    def download_version(self, broadcast: Reference) -> Broadcast:
        """Return a model version, on the CPU.

        Args:
            broadcast: reference to the version. A version in shared memory must be the newest.

        Raises:
            ServerStateLost: the server has failed.
            RaysimError: Ray itself has failed, or the server raised an error.
        """
        version = self.pool.supervisor.wait(broadcast, MODEL_VERSION, self.pool.server)
        # The driver does not open the shared buffers, so the server publishes this version again.
        if isinstance(version, SharedBufferRef):
            version = self._of_server("the last version of the model", "publish", False).get()
        return read_broadcast(unpacked(version, "cpu"))

    def upload_version(self, version: Broadcast) -> Reference:
        """Put a model version into the object store and return its reference.

        See `Executor.upload_version`.
        """
        return ray.put(packed(as_groups(version)))

    def recover(self) -> None:
        """Start a new server in its initial state; `restore` sets its state.

        Raises:
            ActorDied: no new server starts.
        """
        self.pool.restart_server()

    def close(self) -> None:
        """End all actors, and Ray if this process started it."""
        self.pool.close()


def _update_of(round: RoundCohort) -> str:
    """Return the name of a server update, for errors."""
    return f"the server update of {round_name(round.t)}"


class RayFuture(Generic[T]):
    """Future result of an actor.

    Args:
        pool: the actors of the run.
        reference: reference to the result.
        awaited: the result's name in errors.
        *actors: the actor that computes the result, then the actors whose results it needs.
    """

    def __init__(
        self,
        pool: WorkerPool,
        reference: Reference,
        awaited: str,
        *actors: Actor,
    ):
        self.pool = pool
        self.reference = reference
        self.awaited = awaited
        self.actors = actors
        self.read: Callable[[Any], T] = lambda value: value
        """Computes the result from the received value."""

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        return bool(actor_calls.wait([self.reference], timeout=0)[0])

    def get(self) -> T:
        """Wait for the result and return it.

        Raises:
            ActorDied: the actor that computes the result has failed.
            ServerStateLost: another actor has failed, or Ray does not deliver a needed result.
            RaysimError: Ray itself has failed, or an actor raised an error.
        """
        return self.read(self.pool.supervisor.wait(self.reference, self.awaited, *self.actors))


class _EvaluationFuture(RayFuture[dict[str, float]]):
    """Future metrics of an evaluation, which a new EvalActor repeats if the first one fails."""

    def __init__(
        self,
        pool: WorkerPool,
        evaluator: Actor,
        version: Reference,
        parts: EvaluationParts,
    ):
        self.pool = pool
        self.version = version
        self.parts = parts
        self._send(evaluator)

    def _send(self, evaluator: Actor) -> None:
        """Call an EvalActor and wait for its result from now on."""
        self.evaluator = evaluator
        server = self.pool.server
        version: Any = self.version
        if isinstance(version, Reply):  # the evaluator is called through Ray
            version = self.pool.supervisor.wait(version, MODEL_VERSION, server)
        (metrics,) = self.evaluator.call("evaluate", version, self.parts)
        super().__init__(self.pool, metrics, "the evaluation", self.evaluator, server)

    def get(self) -> dict[str, float]:
        """Wait for the metrics and return them; repeat the evaluation if the EvalActor fails.

        Raises:
            ServerStateLost: the server has failed.
            RaysimError: EvalActors fail repeatedly, Ray has failed, or an actor raised an error.
        """
        attempts = 0
        while True:
            try:
                return super().get()
            except ActorDied as died:
                attempts += 1
                evaluator = self.pool.restart_evaluator(self.evaluator, first_line(died))
                decision = self.pool.failure_policy.decide(died, Work.EVALUATION, attempts)
                if decision is Decision.RAISE:
                    raise RaysimError(
                        f"{attempts} EvalActors failed during one evaluation; "
                        "the log has the reason for each"
                    ) from None
                self._send(evaluator)
