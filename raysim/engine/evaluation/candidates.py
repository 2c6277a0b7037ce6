"""Losses of the candidates of a selection (`ServerRule.candidates`), measured on the workers."""

from __future__ import annotations

from dataclasses import replace

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


def evaluate_candidates(
    plan: Plan, executor: Executor[ModelHandle], pool: SelectionPool, store: ClientStateStore
) -> tuple[SelectionPool, list[int], Record]:
    """Ask the server rule for the candidates of a round, and measure their losses.

    The losses are those of the newest version of the model.

    Args:
        plan: the plan of the run.
        executor: the executor of the run.
        pool: the number of the round, and the clients to select from.
        store: the states of the clients.

    Returns:
        The pool with the losses of the candidates, the numbers of the candidates, and metrics of
        the round.

    Raises:
        RaysimError: the rule or an evaluation failed.
    """
    t = pool.round
    rng = generator(plan.config.seed, "candidates", t)
    asked = executor.candidates(pool, rng).get()
    metrics = {"clients/candidates": float(len(asked))}
    if not asked:
        metrics["system/candidate_evaluation_seconds"] = 0.0
        return pool, asked, metrics
    # Without clients, so that `before_round` waits for those that will be selected.
    model = executor.broadcast(make_cohort(plan, synchronous_round(t, [])))
    blocks = evaluation_blocks(asked, t, store, have_own_models(plan), "training")
    try:
        results = executor.evaluate_clients(t, model, blocks).get()
        failed_clients(
            results,
            f"{round_name(t)}: the evaluation of candidate {{}} failed",
            plan.config.faults.on_client_error,
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
    return replace(pool, current_loss=loss), asked, metrics
