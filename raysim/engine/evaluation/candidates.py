"""Losses of the candidates of a selection (`ServerRule.candidates`), measured on the workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from raysim.engine.evaluation.client_evaluation import evaluation_blocks, have_own_models
from raysim.engine.executor import Executor, ModelHandle, Record
from raysim.engine.plan import Plan
from raysim.engine.round_clients import failed_clients, make_cohort
from raysim.engine.state.client_store import ClientStateStore
from raysim.errors import ClientError, RaysimError, round_name
from raysim.randomness import generator
from raysim.rules.client_sampling import SelectionPool
from raysim.schedule import synchronous_round


@dataclass
class CandidateEvaluation:
    """The evaluation of a round's candidates."""

    pool: SelectionPool
    """The clients to select from, with the losses of the candidates."""
    ids: list[int] = field(default_factory=list)
    """Numbers of the candidates."""
    metrics: Record = field(default_factory=dict)
    """Metrics of the round."""

    def n_not_among(self, selected: list[int]) -> int:
        """Return the number of candidates that were not selected.

        Args:
            selected: the clients of the round.
        """
        return len(set(self.ids) - set(selected))


class CandidateEvaluator:
    """Measures the losses of candidates with the newest version of the model.

    Args:
        plan: the plan of the run.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.sends_states = have_own_models(plan)

    def evaluate(
        self, executor: Executor[ModelHandle], pool: SelectionPool, store: ClientStateStore
    ) -> CandidateEvaluation:
        """Ask the server rule for the candidates of a round, and measure their losses.

        Args:
            executor: the executor of the run.
            pool: the number of the round, and the clients to select from.
            store: the states of the clients.

        Returns:
            The pool with the losses of the candidates (NaN for all others), and the metrics.

        Raises:
            RaysimError: the rule fails, or an evaluation, and `faults.on_client_error` is "stop".
        """
        t = pool.round
        rng = generator(self.plan.config.seed, "candidates", t)
        asked = executor.candidates(pool, rng).get()
        metrics = {"clients/candidates": float(len(asked))}
        if not asked:
            metrics["system/candidate_evaluation_seconds"] = 0.0
            return CandidateEvaluation(pool, asked, metrics)
        # Without clients, so that `before_round` waits for those that will be selected.
        model = executor.broadcast(make_cohort(self.plan, synchronous_round(t, [])))
        blocks = evaluation_blocks(asked, t, store, self.sends_states, "training")
        try:
            results = executor.evaluate_clients(t, model, blocks).get()
            failed_clients(
                results,
                f"{round_name(t)}: the evaluation of candidate {{}} failed",
                self.plan.config.faults.on_client_error,
                "leaves its loss unknown",
            )
        except ClientError as error:
            # The server is one round ahead of the engine, so no checkpoint may be written now, as
            # the engine does for a ClientError.
            raise RaysimError(str(error)) from None
        metrics["system/candidate_evaluation_seconds"] = sum(w.seconds for w in results.workers)
        loss = np.full(len(pool.ids), np.nan)
        for done in results.evaluations:
            if not done.error:
                # The ids of a pool ascend.
                loss[np.searchsorted(pool.ids, done.client)] = done.metrics["loss"]
        return CandidateEvaluation(replace(pool, current_loss=loss), asked, metrics)
