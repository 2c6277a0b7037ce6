"""The records of a run's rounds.

A record is begun when the clients of its round have trained. It is complete when the metrics of the
server and of the evaluation are available, which may be while the next rounds train.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

from raysim.engine.evaluation.client_evaluation import ClientEvaluations
from raysim.engine.executor import (
    Executor,
    Future,
    ModelHandle,
    PendingServerStep,
    Record,
    RoundResults,
)
from raysim.engine.probes import Probes
from raysim.engine.round_clients import ActiveRound
from raysim.engine.round_metrics import (
    Stopwatch,
    client_metrics,
    client_state_metrics,
    participation_metrics,
    privacy_metrics,
    staleness_metrics,
    virtual_time_metric,
)
from raysim.engine.state.run_state import RunState
from raysim.schedule import ScheduledRound
from raysim.training.messages import EvaluationParts

logger = logging.getLogger("raysim")


class Records(Generic[ModelHandle]):
    """The records that are not complete yet, and the measurements for them.

    Args:
        executor: the executor, which evaluates the model.
        state: the state of the run; complete records go to its `history`.
    """

    def __init__(self, executor: Executor[ModelHandle], state: RunState[ModelHandle]):
        self.executor, self.state = executor, state
        self.config = state.config
        self.pending: deque[tuple[Record, list[Future[Record]]]] = deque()
        """Records, each with futures of the metrics that it still lacks."""
        self.stopwatch = Stopwatch()
        self.warned = False

    def start(self, probes: Probes, run_dir: Path | None) -> None:
        """Start to measure, after the rounds that are done by now.

        Args:
            probes: the probes of the run.
            run_dir: folder of the run, for tables of clients; None if it has none.
        """
        self.probes = probes
        self.evaluations = ClientEvaluations(self.state.plan, run_dir, self.state.done)
        self.stopwatch = Stopwatch()

    def begin_initial(self) -> None:
        """Begin the record of the model before training, unless the run was resumed."""
        if not self.state.history:
            self._begin({"round": 0.0, **virtual_time_metric(self.config, 0.0)}, [])

    def begin(
        self,
        active: ActiveRound[ModelHandle],
        results: RoundResults,
        step: PendingServerStep[ModelHandle],
    ) -> None:
        """Begin the record of a round; server and evaluation metrics are added when they arrive.

        Args:
            active: the round, whose clients have trained.
            results: what its training returned.
            step: the server's update, which may not be done yet.
        """
        record = {**self._record(active, results), **active.probed, **active.timing}
        self._begin(record, [step.metrics])

    def _begin(self, record: Record, results: list[Future[dict[str, float]]]) -> None:
        """Begin a record, and evaluate the newest version: inline now, on actors meanwhile."""
        done, versions = self.state.done, self.state.versions
        parts = ["test"] if self.config.evaluate.due(done, self.config.rounds) else []
        parts += self.probes.due(done)
        with self.stopwatch.evaluating():
            if self.evaluations.due(done):
                evaluate = self.evaluations.start
                results.append(evaluate(self.executor, done, versions[done], self.state.store))
            if parts:
                asked = EvaluationParts(done, tuple(parts))
                results.append(self.executor.evaluate(versions[done], asked))
        # Last: a record whose evaluation could not begin would be complete without it.
        self.pending.append((record, results))

    def completed(self, max_pending: int) -> Iterator[Record]:
        """Yield the completed records in order.

        Args:
            max_pending: wait for metrics while more records than this are incomplete.

        Raises:
            RaysimError: the server's update or an evaluation failed.
        """
        pending = self.pending
        while pending and (
            len(pending) > max_pending
            or (len(pending) > 1 and all(r.ready() for r in pending[0][1]))
        ):
            record, results = pending[0]
            for result in results:
                record.update(result.get())
            record.update(self.probes.follow(record))
            self._warn_of_losses(record)
            pending.popleft()
            self.state.history.append(record)
            yield record

    def _warn_of_losses(self, record: Record) -> None:
        """Log the first loss that is not finite; parameters always are, or the run ends.

        A training loss may be NaN by intention: of a rule that reports none.
        """
        losses = [name for name in ("loss", "val/loss") if not math.isfinite(record.get(name, 0))]
        losses += ["train_loss"] if math.isinf(record.get("train_loss", 0)) else []
        if losses and not self.warned:
            self.warned = True
            logger.warning(
                "round %d: %s is %s, though the parameters are finite; the loss of the task takes "
                "a logarithm, a root or a quotient where it has none, or local.lr is too large",
                record["round"],
                losses[0],
                record[losses[0]],
            )

    def evaluate_last(self) -> Record:
        """Evaluate the newest version if its round did not; for a run that ends early.

        Returns:
            The metrics, which the last record has from now on; {} if it had them.

        Raises:
            RaysimError: an evaluation failed.
        """
        done, versions = self.state.done, self.state.versions
        evaluate, rounds = self.config.evaluate, self.config.rounds
        metrics: Record = {}
        if evaluate.every and not evaluate.due(done, rounds):
            asked = EvaluationParts(done, ("test",))
            metrics |= self.executor.evaluate(versions[done], asked).get()
        if evaluate.clients is not None and not evaluate.clients.due(done, rounds):
            start = self.evaluations.start
            metrics |= start(self.executor, done, versions[done], self.state.store).get()
        self.state.history[-1].update(metrics)
        return metrics

    def _record(self, active: ActiveRound[ModelHandle], trained: RoundResults) -> Record:
        """Return the metrics of a round, except those of the server and of the evaluation."""
        plan, store, traffic = self.state.plan, self.state.store, self.state.traffic
        # By client: a mean of floats depends on the order, and results come in that of the workers.
        used = [done for done in trained.clients if done.client not in active.cohort.dropped]
        used.sort(key=lambda done: done.client)
        traffic.count(active.scheduled, trained, used, self.state.versions)
        return {
            **participation_metrics(
                self.config,
                active.scheduled,
                n_used=len(used),
                n_failed=len(active.cohort.dropped),
                n_never_seen=plan.problem.n_nonempty - int(store.seen.sum()),
            ),
            "bytes_down": float(traffic.down),
            "bytes_up": float(traffic.up),
            **active.scheduled.selection.metrics,
            **client_state_metrics(store),
            **self._asynchronous_metrics(active.scheduled),
            **trained.metrics,
            **self.state.all_recoveries(self.executor),
            **privacy_metrics(self.config, active.scheduled.t + 1, plan.clients, store.cursors),
            **client_metrics(used),
        }

    def _asynchronous_metrics(self, scheduled: ScheduledRound) -> Record:
        """Return staleness and versions in memory; {} in a synchronous run."""
        if self.config.schedule.name == "sync":
            return {}
        versions, bytes_of = self.state.versions, self.state.traffic.version_bytes
        return {
            "system/versions_in_memory": float(len(versions)),
            "system/versions_bytes": float(sum(map(bytes_of, versions))),
            **staleness_metrics(scheduled),
        }
