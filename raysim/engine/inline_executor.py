"""Executor that computes a run in this process, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from numpy.random import Generator

from raysim.engine.evaluation.evaluator import Evaluator
from raysim.engine.executor import (
    CompletedResult,
    FailedResult,
    Future,
    PendingServerStep,
    RoundResults,
)
from raysim.engine.plan import Plan
from raysim.engine.process_setup import configure_process, make_server, make_trainer
from raysim.errors import RaysimError
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import State
from raysim.server.round_cohort import RoundCohort
from raysim.training.messages import Block, Broadcast, EvaluationParts
from raysim.training.trainers.group_trainer import GroupTrainer


class Inline:
    """Executor that computes everything in this process, one block after the other, without Ray.

    A handle is the version itself.
    """

    def __init__(self) -> None:
        self.recoveries: Counter[str] = Counter()
        self._restore_process: Callable[[], None] = lambda: None

    def open(self, plan: Plan) -> None:
        """Create trainer, server and evaluator in this process. See `Executor.open`."""
        resources = plan.config.resources
        self.device = "cuda:0" if resources.gpus else "cpu"
        self.server_device = "cuda:0" if resources.server_on_gpu else "cpu"
        on_gpu = bool(resources.gpus or resources.server_on_gpu)
        self._restore_process = configure_process(resources, on_gpu)
        self.trainer = make_trainer(plan, self.device)
        self.trainer.serves_this_process = True
        self.server = make_server(plan, self.server_device)
        self.evaluator = Evaluator(plan, self.server_device)

    def broadcast(self, following: RoundCohort) -> Broadcast:
        """Return the server's model for the clients of a round. See `Executor.broadcast`."""
        return self.server.broadcast(following)

    def training(self, t: int) -> InlineRound:
        """Return the local training of round t, with no client yet.

        Args:
            t: number of the round, from 0.
        """
        return InlineRound(self.trainer, self.device)

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

    def candidates(self, pool: SelectionPool, rng: Generator) -> CompletedResult[list[int]]:
        """Return the clients whose loss the server rule asks for. See `Executor.candidates`."""
        return CompletedResult(self.server.candidates(pool, rng))

    def select(self, pool: SelectionPool, rng: Generator) -> CompletedResult[list[int]]:
        """Return the clients that the server rule selects. See `Executor.select`."""
        return CompletedResult(self.server.select(pool, rng))

    def evaluate(self, broadcast: Broadcast, parts: EvaluationParts) -> Future[dict[str, float]]:
        """Evaluate a version now; an error is raised when the metrics are read, as on actors.

        See `Executor.evaluate`.
        """
        try:
            return CompletedResult(self.evaluator.evaluate(broadcast.for_evaluation(), parts))
        except RaysimError as error:
            return FailedResult(error)

    def evaluate_clients(
        self, version: int, broadcast: Broadcast, blocks: list[Block]
    ) -> CompletedResult[RoundResults]:
        """Evaluate clients now. See `Executor.evaluate_clients`."""
        evaluated = broadcast.for_evaluation().to(self.device)
        outcome = self.trainer.train({version: evaluated}, blocks)
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
        """Return a copy of the version on the server's device. See `Executor.upload_version`."""
        return version.to(self.server_device, copy=True)

    def recover(self) -> None:
        """Do nothing: a server in this process dies with it only."""

    def close(self) -> None:
        """Restore the settings of this process."""
        self._restore_process()


class InlineRound:
    """Local training of one round in this process; it runs when `get` is called."""

    def __init__(self, trainer: GroupTrainer, device: str):
        self.trainer, self.device, self.work = trainer, device, []

    def add(self, broadcasts: Mapping[int, Broadcast], blocks: list[Block]) -> None:
        """Add blocks; nothing is trained yet. See `RoundHandle.add`."""
        here = {version: sent.to(self.device) for version, sent in broadcasts.items()}
        self.work.append((here, blocks))

    def get(self) -> RoundResults:
        """Train all blocks and return their results."""
        outcomes = [self.trainer.train(broadcasts, blocks) for broadcasts, blocks in self.work]
        return RoundResults(
            outcomes,
            outcomes,
            {"system/train_seconds": sum(outcome.seconds for outcome in outcomes)},
        )
