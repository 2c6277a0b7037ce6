"""Dry run of users' server rules: one round with the uploads of two small clients.

A rule that selects clients also selects the first round of the run. The dry run uses the clients of
`client_rule`. The rule's methods are `watched`, so random numbers without a key and certain
mistakes in the code are found; the server checks the values that they return. In addition, the
tensors of the broadcast must not change while clients use them.

An error of the rule's computation does not count: it may come from the small round, for example
from too few clients for a trimmed mean. The run itself will report it, with the uploads that the
rule received.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from torch import Tensor

from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_server
from raysim.errors import ConfigError, ContractError, RaysimError
from raysim.models.comparison import same_values
from raysim.prepare.dry_run.client_rule import (
    DRY_RUN_TIMEOUT_S,
    LARGE_NET_PARAMETERS,
    RuleDryRun,
    keeps_something,
)
from raysim.prepare.dry_run.watched import watched
from raysim.randomness import generator
from raysim.rules.contract import overridden
from raysim.rules.errors.user_code import breach
from raysim.rules.methods.registry import is_tried
from raysim.schedule import Synchronous, make_schedule
from raysim.server.central_server import RoundCohort, Server
from raysim.server.selection import ClientHistory
from raysim.system.processes import limited
from raysim.training.messages import Block, Broadcast, ClientTask, WorkerResult
from raysim.training.trainers.group_trainer import GroupTrainer

logger = logging.getLogger("raysim")


def dry_run_server_rule(plan: Plan, key: str) -> None:
    """Check a user's server rule in a dry run; rules that raysim ships are skipped.

    A rule that exceeds `DRY_RUN_TIMEOUT_S` stays unchecked, with a warning. Nets of more than
    `LARGE_NET_PARAMETERS` are not checked, because the server's state may be many times as large.

    Args:
        plan: the plan of the run.
        key: configuration key of the server rule, for messages.

    Raises:
        ConfigError: the rule breaks its contract. The message names the rule, its key and line.
    """
    if not is_tried(plan.server) or plan.problem.size > LARGE_NET_PARAMETERS:
        return

    def check() -> None:
        try:
            check_contract(plan)
        except ContractError as error:
            raise ConfigError(f"{key}: {error}") from None

    if not limited(check, DRY_RUN_TIMEOUT_S):
        logger.warning(
            "server rule '%s' did not finish one round within %g s, so it is not checked",
            plan.server.name,
            DRY_RUN_TIMEOUT_S,
        )


def check_contract(plan: Plan) -> None:
    """Check the contract of the server rule in one round of two clients, and in a selection.

    Args:
        plan: the plan of the run.

    Raises:
        ContractError: the rule breaks its contract.
    """
    rule, plan = plan.server, replace(plan, server=watched(plan.server))
    try:
        first, second = _train_one_round(plan), _train_one_round(plan)
        for key in first.keys() & second.keys():
            if not same_values(first[key], second[key]):
                raise keeps_something(rule, f"the state has a '{key}' that differs")
        if overridden(plan.server, ["select"]):
            chosen = _select_first_round(plan)
            if _select_first_round(plan) != chosen:
                raise keeps_something(rule, "`select` returns other clients")
    except ContractError:
        raise
    except RaysimError as error:
        logger.debug("the dry run of the server rule ended early: %s", error)


def _train_one_round(plan: Plan) -> dict[str, Tensor]:
    """Train two clients, and return the server's state after its update; {} if they fail.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    problem = replace(plan.problem, n_clients=2, cohort=2, n_nonempty=2, n_held_out=0)
    plan = replace(plan, problem=problem)
    trainer, _, tasks = RuleDryRun(plan).stage()
    server = make_server(plan, "cpu")
    first = _round(tasks, trainer.clients.sizes.tolist(), 0)
    broadcast = server.broadcast(first)
    outcome = GroupTrainer([trainer]).train({0: broadcast}, [Block(0, tasks)])
    if any(result.error for result in outcome.clients):
        return {}
    _update(server, first, outcome, broadcast)
    server.broadcast(_round(tasks, first.samples, 1))
    return {key: tensor.clone() for key, tensor in server.state.items()}


def _select_first_round(plan: Plan) -> list[int]:
    """Return the clients of the run's first round. The losses of candidates are random numbers.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    server = make_server(plan, "cpu")
    seed, size = plan.config.seed, plan.config.schedule.size
    schedule = make_schedule(plan.config, plan.clients.sizes_by_round)
    assert isinstance(schedule, Synchronous)
    pool = ClientHistory(len(plan.clients)).pool(schedule.available(0), size, 0)
    candidates = server.candidates(pool, generator(seed, "candidates", 0)).ids
    losses = generator(seed, "dry run").random(len(pool.ids))
    losses[~np.isin(pool.ids, candidates)] = np.nan
    return server.select(replace(pool, current_loss=losses), generator(seed, "cohort", 0))


def _round(tasks: list[ClientTask], samples: list[int], t: int) -> RoundCohort:
    """Return a synchronous round of the two clients."""
    return RoundCohort(
        t,
        ids=[task.client for task in tasks],
        bases=[t] * len(tasks),
        weights=[task.weight for task in tasks],
        samples=samples,
        steps=[task.steps for task in tasks],
    )


def _update(
    server: Server, round: RoundCohort, outcome: WorkerResult, broadcast: Broadcast
) -> None:
    """Update the server.

    Raises:
        ContractError: the rule breaks its contract, or changes a tensor of the broadcast in place.
    """
    copies = {key: tensor.clone() for key, tensor in broadcast.shared.items()}
    server.update(round, [outcome], {0: broadcast})
    for key, copy in copies.items():
        if not same_values(broadcast.shared[key], copy):
            raise breach(
                server.rule,
                "update",
                f"changes '{key}' of the broadcast in place, which clients may still use; write "
                "x = x - step for x -= step",
            )
