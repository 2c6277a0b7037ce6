"""Executors of a run: the interface that the engine uses, and `Inline`, for this process.

`raysim.distributed` has the executor over Ray. Both compute the same bits.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from numpy.random import Generator

from raysim.data import Examples
from raysim.engine import learning, probes
from raysim.engine.dp_noise import NoisyMean
from raysim.engine.plan import Plan
from raysim.engine.selection import Candidates
from raysim.engine.server import RoundCohort, Server
from raysim.engine.trainers import make_trainer
from raysim.errors import RaysimError, in_a_line
from raysim.models.flat import BoundModel
from raysim.numerics import use_threads
from raysim.rules.contract import State
from raysim.rules.sampling import SelectionPool
from raysim.rules.uploads import declared
from raysim.signals import reraise_stop
from raysim.training.evaluation import measure
from raysim.training.messages import Block, Broadcast, WorkerResult
from raysim.training.server_task import ServerTask
from raysim.training.trainer import Trainer

T = TypeVar("T", covariant=True)
ModelHandle = TypeVar("ModelHandle")
"""How an executor refers to a version of the model."""
GivenModelHandle = TypeVar("GivenModelHandle", contravariant=True)


class Future(Protocol[T]):
    """A value that is there, or on its way."""

    def ready(self) -> bool:
        """Return whether `get` returns without waiting."""
        ...

    def get(self) -> T:
        """Wait for the value and return it."""
        ...


@dataclass
class CompletedResult(Generic[T]):
    """A result that is there already."""

    value: T

    def ready(self) -> bool:
        """Return True."""
        return True

    def get(self) -> T:
        """Return the value."""
        return self.value


@dataclass
class FailedResult:
    """A result that never comes, because computing it has failed."""

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
    """Uploads for the server. They stay where they were computed (in the object store, say); only
    the executor that made it looks inside."""
    workers: list[WorkerResult]
    """Result of each client, without its vectors."""
    metrics: dict[str, float]
    """Seconds of training, and what else the executor measured in this round."""


@dataclass
class PendingServerStep(Generic[ModelHandle]):
    """A server update that is done, or on its way."""

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

    Every method may raise ServerStateLost: what the server knew is gone. Then the engine calls
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
            t: the round.
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

    def candidates(self, pool: SelectionPool, rng: Generator) -> Future[Candidates]:
        """Return the clients whose loss the server rule asks for before it selects a round.

        Args:
            pool: the round, and the clients to select from.
            rng: a keyed generator.
        """
        ...

    def select(self, pool: SelectionPool, rng: Generator) -> Future[list[int]]:
        """Return the clients that the server rule selects for a round.

        Args:
            pool: the round, and the clients to select from.
            rng: a keyed generator.
        """
        ...

    def evaluate(self, broadcast: ModelHandle, parts: Sequence[str]) -> Future[dict[str, float]]:
        """Evaluate the newest version of the model, beside the training of the next round.

        Args:
            broadcast: the version.
            parts: what to measure: "test" for the test set, or names of probes.
        """
        ...

    def evaluate_clients(
        self, version: int, broadcast: ModelHandle, blocks: list[Block]
    ) -> Future[RoundResults]:
        """Evaluate clients with the newest version of the model, on the workers.

        Args:
            version: the number of the version.
            broadcast: the version.
            blocks: the clients, in blocks of evaluation.
        """
        ...

    def snapshot(self) -> Future[State]:
        """Return all that the server knows as of now, on the CPU, for a checkpoint."""
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


def configure_process(threads: int) -> None:
    """Configure this process for training.

    It pins torch's threads and switches TF32 off. It also keeps glibc from returning every freed
    megabyte to the kernel, which costs 10 to 25 % of a round.

    Args:
        threads: number of torch threads.
    """
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        False  # cosines near 0 decide the QPs
    )
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, -1)
    except OSError:  # not glibc: nothing to settle
        return


def make_server(plan: Plan, device: str) -> Server:
    """The central server on a device.

    Args:
        plan: the plan of the run.
        device: name of the torch device.
    """
    use_threads(plan.config.resources.server_threads)
    x0, buffers = plan.initial
    shapes = {
        key: upload.resolved(plan.problem, plan.dtype).shape
        for key, upload in declared(plan.client.sends).items()
    }
    mask = plan.personal.mask
    privacy = plan.config.client_privacy
    noisy_mean = None
    if privacy is not None:
        key = next(iter(plan.server.uploads))
        noisy_mean = NoisyMean(privacy, key, plan.config.schedule.size, plan.config.seed)
    public = learning.make_public_data(plan.dataset, plan.dtype, device, [plan.server])
    task = None
    if public is not None:
        task = ServerTask(plan.config, plan.model(device), x0.to(device), public)
    return Server(
        plan.server,
        x0.to(device),
        buffers.to(device),
        plan.problem,
        shapes,
        None if mask is None else mask.to(device),
        noisy_mean,
        task,
        plan.collusion,
    )


class Evaluator:
    """Evaluates versions of the model.

    The part "test" gives the metrics of the learning task (on request also the accuracy on each
    class) and the mean loss on the whole test set, in eval mode, and the same with prefix val/ on
    held-out examples if there are any. The other parts are names of probes.
    """

    def __init__(self, plan: Plan, device: str):
        data, held_out = plan.dataset, plan.clients.validation
        self.examples = Examples.of(data, "test", device, plan.dtype)
        self.validation = Examples(
            data.x[held_out],
            data.y[held_out],
            data.scale,
            data.shift,
            device=device,
            dtype=plan.dtype,
        )
        self.name = plan.config.model.name
        self.net, self.size = BoundModel(plan.model(device)), plan.config.evaluate.batch_size
        self.metrics = plan.metrics
        self.classes = plan.problem.classes if plan.config.evaluate.per_class else 0
        self.probes = probes.evaluations(plan)
        self.trainer = make_trainer(plan, device) if self.probes else None

    def evaluate(self, broadcast: Broadcast, parts: Sequence[str]) -> dict[str, float]:
        """Return the metrics of a version of the model.

        Args:
            broadcast: the version.
            parts: "test", or names of probes.

        Raises:
            RaysimError: the net failed; it may be a user's.
        """
        try:
            found = self._test(broadcast) if "test" in parts else {}
            for name, evaluate in self.probes.items():
                if name in parts and self.trainer is not None:
                    found |= evaluate(self.trainer, broadcast)
        except RaysimError:
            raise
        except BaseException as error:
            reraise_stop(error)
            raise RaysimError(
                f"the evaluation of model '{self.name}' failed: {in_a_line(error)}"
            ) from error
        return found

    def _test(self, broadcast: Broadcast) -> dict[str, float]:
        self.net.w.copy_(broadcast.global_params)
        buffers = broadcast.buffers.to(self.net.w.device)
        found = measure(
            self.net, buffers, self.examples, self.size, self.metrics, classes=self.classes
        )
        if len(self.validation):
            held_out = measure(self.net, buffers, self.validation, self.size, self.metrics)
            found |= {f"val/{k}": v for k, v in held_out.items()}
        return found


class Inline:
    """Executor that computes everything in this process, one block after the other, without Ray.

    A handle is the version itself.
    """

    def __init__(self) -> None:
        self.recoveries: Counter[str] = Counter()

    def open(self, plan: Plan) -> None:
        """Create trainer, server and evaluator in this process. See `Executor.open`."""
        device = "cuda:0" if plan.config.resources.gpus else "cpu"
        self.threads = torch.get_num_threads()
        configure_process(plan.config.resources.threads)
        self.trainer, self.server = make_trainer(plan, device), make_server(plan, device)
        self.evaluator = Evaluator(plan, device)

    def broadcast(self, following: RoundCohort) -> Broadcast:
        """Return the server's model for the clients of a round. See `Executor.broadcast`."""
        return self.server.broadcast(following)

    def training(self, t: int) -> InlineRound:
        """Return the local training of round t, with no client yet.

        Args:
            t: the round.
        """
        return InlineRound(self.trainer)

    def advance(
        self,
        round: RoundCohort,
        trained: RoundResults,
        bases: Mapping[int, Broadcast],
        following: RoundCohort,
    ) -> PendingServerStep[Broadcast]:
        """Aggregate a round's updates and return the next version. See `Executor.advance`."""
        done = self.server.advance(round, trained.uploads, bases, following)
        return PendingServerStep(CompletedResult(done.metrics), done.broadcast)

    def update(
        self, round: RoundCohort, trained: RoundResults, bases: Mapping[int, Broadcast]
    ) -> CompletedResult[dict[str, float]]:
        """Aggregate a round's updates. See `Executor.update`."""
        return CompletedResult(self.server.update(round, trained.uploads, bases))

    def candidates(self, pool: SelectionPool, rng: Generator) -> CompletedResult[Candidates]:
        """Return the clients whose loss the server rule asks for. See `Executor.candidates`."""
        return CompletedResult(self.server.candidates(pool, rng))

    def select(self, pool: SelectionPool, rng: Generator) -> CompletedResult[list[int]]:
        """Return the clients that the server rule selects. See `Executor.select`."""
        return CompletedResult(self.server.select(pool, rng))

    def evaluate(self, broadcast: Broadcast, parts: Sequence[str]) -> Future[dict[str, float]]:
        """Evaluate a version now; an error is raised where the metrics are read, as on actors.

        See `Executor.evaluate`.
        """
        try:
            return CompletedResult(self.evaluator.evaluate(broadcast, parts))
        except (
            RaysimError
        ) as error:  # raised where the engine asks for the metrics, as by an evaluator on an actor
            return FailedResult(error)

    def evaluate_clients(
        self, version: int, broadcast: Broadcast, blocks: list[Block]
    ) -> CompletedResult[RoundResults]:
        """Evaluate clients now. See `Executor.evaluate_clients`."""
        outcome = self.trainer.train({version: broadcast}, blocks)
        return CompletedResult(RoundResults([], [outcome], {}))

    def snapshot(self) -> CompletedResult[State]:
        """Return the server's state."""
        return CompletedResult(self.server.snapshot())

    def restore(self, snapshot: State) -> None:
        """Set the server's state. See `Executor.restore`."""
        self.server.restore(snapshot)

    def download_version(self, broadcast: Broadcast) -> Broadcast:
        """Return the version itself. See `Executor.download_version`."""
        return broadcast

    def upload_version(self, version: Broadcast) -> Broadcast:
        """Return the version on the training device. See `Executor.upload_version`."""
        device = self.trainer.x0.device
        shared = {k: v.to(device, copy=True) for k, v in version.shared.items()}
        return Broadcast(shared, version.buffers.to(device, copy=True))

    def recover(self) -> None:
        """Do nothing: a server in this process dies with it only."""

    def close(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self.threads)


class InlineRound:
    """Local training of one round in this process; it runs when `get` is called."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.work = trainer, []

    def add(self, broadcasts: Mapping[int, Broadcast], blocks: list[Block]) -> None:
        """Add blocks; nothing is trained yet. See `RoundHandle.add`."""
        self.work.append((broadcasts, blocks))

    def get(self) -> RoundResults:
        """Train all blocks and return their results."""
        outcomes = [self.trainer.train(broadcasts, blocks) for broadcasts, blocks in self.work]
        return RoundResults(
            outcomes,
            outcomes,
            {"system/train_seconds": sum(outcome.seconds for outcome in outcomes)},
        )
