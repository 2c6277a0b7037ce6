"""Interface between the loop and what computes its rounds, and the results that pass through it.

`engine.inline_executor` computes a run in this process, `raysim.distributed` over Ray. Both compute
the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from numpy.random import Generator

from raysim.engine.plan import Plan
from raysim.errors import RaysimError
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import State
from raysim.server.round_cohort import RoundCohort
from raysim.training.messages import (
    Block,
    Broadcast,
    ClientEvaluation,
    ClientResult,
    EvaluationParts,
    WorkerResult,
)

Record = dict[str, float]
"""The metrics of one round, by name."""

T = TypeVar("T", covariant=True)
ModelHandle = TypeVar("ModelHandle")
"""How an executor refers to a version of the model."""
GivenModelHandle = TypeVar("GivenModelHandle", contravariant=True)


class Future(Protocol[T]):
    """A value that is available now or later."""

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        ...

    def get(self) -> T:
        """Wait for the value and return it."""
        ...


@dataclass
class CompletedResult(Generic[T]):
    """A result that is available already."""

    value: T

    def ready(self) -> bool:
        """Return True."""
        return True

    def get(self) -> T:
        """Return the value."""
        return self.value


@dataclass
class FailedResult:
    """A result that could not be computed."""

    error: RaysimError

    def ready(self) -> bool:
        """Return True."""
        return True

    def get(self) -> Any:
        """Raise the error.

        Raises:
            RaysimError: always; it is `error`.
        """
        raise self.error


@dataclass
class RoundResults:
    """Results of a round's clients."""

    uploads: list[Any]
    """Uploads for the server. They stay where they were computed, for example in the object store;
    only the executor that made them reads them."""
    workers: list[WorkerResult]
    """Result of each client, without its vectors."""
    metrics: dict[str, float]
    """Seconds of training, and what else the executor measured in this round."""

    @property
    def clients(self) -> list[ClientResult]:
        """Result of each client that was trained, in the order of the workers."""
        return [result for worker in self.workers for result in worker.clients]

    @property
    def evaluations(self) -> list[ClientEvaluation]:
        """Result of each client that was evaluated, in the order of the workers."""
        return [result for worker in self.workers for result in worker.evaluations]


@dataclass
class PendingServerStep(Generic[ModelHandle]):
    """A server update that is done or in progress."""

    metrics: Future[dict[str, float]]
    """The server rule's metrics of the round that was aggregated."""
    broadcast: ModelHandle
    """The version of the model that it made."""


class RoundHandle(Protocol[GivenModelHandle]):
    """One round's local training."""

    def add(self, broadcasts: Mapping[int, GivenModelHandle], blocks: list[Block]) -> None:
        """Dispatch blocks of clients. May be called several times before `get`.

        Args:
            broadcasts: the versions of the model that these clients start from, by number.
            blocks: the clients, in the blocks that are trained together.
        """
        ...

    def get(self) -> RoundResults:
        """Wait until all clients that were dispatched have trained, or failed.

        Returns:
            The uploads for the server, and the result of each client.

        Raises:
            ClientError: a client cannot be trained at all, and `faults.on_client_error` is "stop".
            ProbeError: a probe failed.
            ServerStateLost: something that a worker needed is lost, or the server.
        """
        ...


class Executor(Protocol[ModelHandle]):
    """Executor of a run.

    A version of the model is known to the engine by a `ModelHandle` only, which need not hold it in
    this process: the engine stores handles and passes them back. No method waits for training, the
    server or the evaluator, except where it says so. All executors compute the same bits.

    Every method may raise ServerStateLost: the state of the server is lost. Then the engine calls
    `recover`, and begins again from a checkpoint.
    """

    recoveries: Counter[str]
    """The number of failures that were recovered from, by kind."""

    def open(self, plan: Plan) -> None:
        """Start the workers, the server and the evaluator of a run, and wait until they are ready.

        Args:
            plan: the run; its `resources` say how many workers there are.

        Raises:
            ConfigError: the resources that the plan asks for cannot be had.
        """
        ...

    def broadcast(self, following: RoundCohort) -> ModelHandle:
        """Return the model as the server has it, for the clients of a round.

        Called at the start, after `restore`, after `update`, and for candidates of a selection;
        all other versions come from `advance`.

        Args:
            following: the round whose clients receive it. The server rule admits them. A round
                without clients does not change the server.
        """
        ...

    def training(self, t: int) -> RoundHandle[ModelHandle]:
        """Return the local training of round t, with no client yet.

        Args:
            t: number of the round, from 0.
        """
        ...

    def advance(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, ModelHandle],
        following: RoundCohort,
    ) -> PendingServerStep[ModelHandle]:
        """Aggregate a round's updates and make the next version of the model.

        Args:
            round: the round that has trained; updates of its `dropped` clients are not used.
            trained: what `RoundHandle.get` returned for it.
            bases: the versions of the model that its clients started from, by number.
            following: the next round, whose clients the server rule admits.

        Returns:
            The server rule's metrics of the round, as a future, and the next version of the model.
        """
        ...

    def update(
        self, round: RoundCohort, trained: RoundResults, bases: Mapping[int, ModelHandle]
    ) -> Future[dict[str, float]]:
        """Aggregate a round's updates; `select` and `broadcast` follow.

        Called in place of `advance` if the server rule selects clients.

        Args:
            round: as for `advance`.
            trained: as for `advance`.
            bases: as for `advance`.

        Returns:
            The server rule's metrics of the round.
        """
        ...

    def candidates(self, pool: SelectionPool, rng: Generator) -> Future[list[int]]:
        """Return the clients whose loss the server rule asks for before it selects a round.

        Args:
            pool: the round, and the clients to select from.
            rng: generator that is keyed by seed and round.
        """
        ...

    def select(self, pool: SelectionPool, rng: Generator) -> Future[list[int]]:
        """Return the clients that the server rule selects for a round.

        Args:
            pool: the round, and the clients to select from.
            rng: generator that is keyed by seed and round.
        """
        ...

    def evaluate(self, broadcast: ModelHandle, parts: EvaluationParts) -> Future[dict[str, float]]:
        """Evaluate the newest version of the model while the next round trains.

        Args:
            broadcast: the newest version of the model.
            parts: what to measure.

        Returns:
            The metrics by name, as a future.
        """
        ...

    def evaluate_clients(
        self, version: int, broadcast: ModelHandle, blocks: list[Block]
    ) -> Future[RoundResults]:
        """Evaluate clients with the newest version of the model, on the workers.

        Args:
            version: the number of the version.
            broadcast: this version.
            blocks: the clients, in blocks of evaluation.

        Returns:
            The results of the clients, in `RoundResults.evaluations`, as a future.
        """
        ...

    def snapshot(self) -> Future[State]:
        """Return the complete state of the server, on the CPU, for a checkpoint."""
        ...

    def restore(self, snapshot: State) -> None:
        """Set the server to a snapshot, and wait for that.

        Args:
            snapshot: the server's state, as `snapshot` gave it.

        Raises:
            RaysimError: the snapshot is that of another rule or model.
        """
        ...

    def download_version(self, broadcast: ModelHandle) -> Broadcast:
        """Return the tensors of a version of the model, on this machine; waits for them.

        Args:
            broadcast: a version that has not been released.
        """
        ...

    def upload_version(self, version: Broadcast) -> ModelHandle:
        """Return a handle for a version that a checkpoint kept; inverse of `download_version`.

        Args:
            version: the tensors of the version.
        """
        ...

    def recover(self) -> None:
        """Start a new server in its initial state after ServerStateLost; wait until it is ready."""
        ...

    def close(self) -> None:
        """Release all that was opened. Works after any failure, and does not wait without end."""
        ...
