"""Dry run of users' server rules: two rounds with the uploads of two small clients, twice.

A rule that selects clients also selects the first two rounds of the run. The dry run uses the
clients of `client_rule`. The rule's methods are `watched`, so random numbers without a key and
certain mistakes in the code are found; the server checks the values that they return. In addition,
the tensors of the broadcast must not change while clients use them, nor the state of a checkpoint.

An error of the rule's computation does not count: it may come from the small rounds, for example
from too few clients for a trimmed mean. The run itself will report it, with the uploads that the
rule received.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_server
from raysim.engine.round_clients import weigh
from raysim.errors import ContractError, RaysimError
from raysim.models.comparison import same_values
from raysim.prepare.dry_run.client_rule import keeps_something, only_breaches, repeated, try_rule
from raysim.prepare.dry_run.small_clients import (
    LARGE_NET_PARAMETERS,
    SmallClients,
    cohort_of,
    device_of,
    next_task,
)
from raysim.prepare.dry_run.watched import watched
from raysim.randomness import generator
from raysim.rules.client_sampling import SelectionPool
from raysim.rules.contract import ServerRule, State, overridden
from raysim.rules.errors.user_code import breach
from raysim.rules.methods.registry import is_tried
from raysim.schedule import Synchronous, make_schedule
from raysim.server.round_cohort import RoundCohort
from raysim.server.selection import ClientHistory
from raysim.spelling import did_you_mean
from raysim.training.groups import ClientGroup
from raysim.training.messages import Block, ClientTask
from raysim.training.trainers.group_trainer import GroupTrainer

logger = logging.getLogger("raysim")

LONGER = (2, 10)
"""How many times as long a run is for which `init` has to return the same."""


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
    try_rule(plan.server, key, "round", partial(check_contract, plan))


def check_contract(plan: Plan) -> None:
    """Check the contract of the server rule in two rounds of two clients, and in a selection.

    Args:
        plan: the plan of the run.

    Raises:
        ContractError: the rule breaks its contract.
    """
    rule, plan = plan.server, replace(plan, server=watched(plan.server))
    with only_breaches("the dry run of the server rule ended early"):
        _refuse_use_of_rounds(plan)
        for first, second in zip(_train_two_rounds(plan), _train_two_rounds(plan), strict=False):
            for key in first.keys() & second.keys():
                if not repeated(plan, first[key], second[key]):
                    raise keeps_something(rule, f"the state has a '{key}' that differs")
        if overridden(plan.server, ["select"]):
            metrics = _reported_metrics(plan)
            first_chosen: dict[int, list[int]] = {}
            for t in (0, 0, 1, 0, 1):
                chosen = _select(plan, min(t, plan.config.rounds - 1), metrics)
                if first_chosen.setdefault(t, chosen) != chosen:
                    raise keeps_something(rule, "`select` returns other clients")


def _train_two_rounds(plan: Plan) -> list[State]:
    """Train two clients in two rounds; return the server's state after each update.

    It ends early if they fail. When a rule is tried again, the second round lies between: a rule
    that keeps a mean of what it sees would give the same twice in a row.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    plan = _of_two_clients(plan)
    resources = plan.config.resources
    trainer, _, tasks = SmallClients(plan).stage(device_of(resources.gpus))
    samples = trainer.clients.sizes.tolist()
    server = make_server(plan, device_of(resources.server_on_gpu))
    states: list[State] = []
    broadcast = server.broadcast(cohort_of(tasks, samples, 0))
    for t in range(min(2, plan.config.rounds)):
        round = cohort_of(tasks, samples, t)
        tasks = _weighed(plan, tasks, round)
        outcome = GroupTrainer([trainer]).train({t: broadcast}, [Block(0, tasks)])
        if any(result.error for result in outcome.clients):
            break
        with _unchanged(server.rule, "update", broadcast.shared):
            server.update(round, [outcome], {t: broadcast})
        states.append({key: tensor.clone() for key, tensor in server.state.items()})
        kept = {result.client: result.client_state for result in outcome.clients}
        tasks = [
            replace(task, base=t + 1, seen=True, client_state=kept[task.client]) for task in tasks
        ]
        with _unchanged(server.rule, "before_round", {**server.state, **broadcast.shared}):
            following = server.broadcast(cohort_of(tasks, samples, t + 1))
        broadcast = following
    return states


def _of_two_clients(plan: Plan) -> Plan:
    """Return a plan whose server's state is small: some rules keep a vector for each client."""
    return replace(
        plan, problem=replace(plan.problem, n_clients=2, cohort=2, n_nonempty=2, n_held_out=0)
    )


def _refuse_use_of_rounds(plan: Plan) -> None:
    """Raise ContractError if the first state depends on the run's length, which resume changes."""
    plan = _of_two_clients(plan)
    state = make_server(plan, "cpu").state
    for factor in LONGER:
        longer = replace(plan.problem, rounds=factor * plan.problem.rounds)
        other = state
        with only_breaches(f"init is not tried with {longer.rounds} rounds"):  # it may refuse them
            other = make_server(replace(plan, problem=longer), "cpu").state
        for key in state.keys() | other.keys():
            if key not in state or key not in other or not same_values(state[key], other[key]):
                raise breach(
                    plan.server,
                    "init",
                    f"returns another '{key}' for another number of rounds, and a run that is "
                    "resumed for more rounds would have the state of the shorter one; make the "
                    "length of a schedule a hyper-parameter",
                )


def _weighed(plan: Plan, tasks: list[ClientTask], round: RoundCohort) -> list[ClientTask]:
    """Return the tasks of a round with the weights of a rule's own `weigh`.

    Raises:
        ContractError: it breaks its contract, or gives something else the second time.
    """
    rule = plan.server
    if plan.config.client_privacy is not None or not overridden(rule, ["weigh"]):
        return tasks
    with only_breaches("weigh is not checked"):
        round.weights = weigh(rule, round, plan.problem)
        _weigh_others(plan, round)
        if weigh(rule, round, plan.problem) != round.weights:
            raise keeps_something(rule, "`weigh` returns other weights")
    return [replace(task, weight=weight) for task, weight in zip(tasks, round.weights, strict=True)]


def _weigh_others(plan: Plan, round: RoundCohort) -> None:
    """Let a rule weigh the run's last clients, which a rule that keeps something would notice."""
    last = len(plan.clients) - 1
    try:
        weigh(plan.server, replace(round, ids=[last - i for i in round.ids]), plan.problem)
    except RaysimError as error:
        logger.debug("weigh is not tried with other clients: %s", error)


@dataclass(frozen=True)
class _TriedPool(SelectionPool):
    """A pool that refuses metrics that no client reports."""

    def metric(self, name: str) -> np.ndarray:
        if name not in self.metrics:
            raise ContractError(
                f"pool.metric('{name}'): no client reports it{did_you_mean(name, self.metrics)}; "
                "a client rule logs it by task.log from its first round on, as nan if it has none"
            )
        return super().metric(name)


def _reported_metrics(plan: Plan) -> set[str] | None:
    """Return the names of metrics that clients of all groups report in their first two rounds.

    None if clients fail: they may depend on the examples.

    Raises:
        RaysimError: the server rule fails, or breaks its contract.
    """
    others = ClientGroup("", plan.client, plan.config, plan.stages)
    names: set[str] = set()
    for group in (others, *plan.groups):
        of_group = replace(plan, config=group.config, client=group.rule, stages=group.stages)
        trainer, broadcast, tasks = SmallClients(of_group, group.name).stage()
        for t in range(min(2, plan.config.rounds)):
            tasks = [replace(task, base=t) for task in tasks]
            updates = trainer.train_block({t: broadcast}, Block(0, tasks))
            if any(update.error for update in updates):
                return None
            names |= {key for update in updates for key in update.report}
            tasks = [next_task(update.task, update) for update in updates]
    return {key.removeprefix("metric/") for key in names if key.startswith("metric/")}


def _select(plan: Plan, t: int, metrics: set[str] | None) -> list[int]:
    """Return the clients of round `t`. What the pool knows of them are random numbers.

    Args:
        plan: the plan of the run.
        t: the round.
        metrics: names of the metrics that clients report; None if they are not known.

    Raises:
        RaysimError: the rule fails, or breaks its contract.
    """
    server = make_server(plan, "cpu")
    seed, size = plan.config.seed, plan.config.schedule.size
    schedule = make_schedule(plan.config, plan.clients.sizes_by_round)
    assert isinstance(schedule, Synchronous)
    pool = ClientHistory(len(plan.clients)).pool(schedule.available(t), size, t)
    losses = generator(seed, "dry run", t).random(len(pool.ids))
    if t > 0:
        zeros = np.zeros(len(pool.ids), np.int64)
        known = losses.copy()
        pool = replace(pool, loss=known, duration=known, last_round=zeros, n_rounds=zeros + 1)
    if metrics is not None:
        values = losses.copy() if t > 0 else np.full(len(pool.ids), np.nan)
        pool = _TriedPool(**{**vars(pool), "metrics": dict.fromkeys(sorted(metrics), values)})
    candidates = server.candidates(pool, generator(seed, "candidates", t))
    losses[~np.isin(pool.ids, candidates)] = np.nan
    return server.select(replace(pool, current_loss=losses), generator(seed, "cohort", t))


@contextmanager
def _unchanged(rule: ServerRule, method: str, tensors: State) -> Iterator[None]:
    """Raise ContractError if a method changes one of some tensors in place."""
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    yield
    for key, copy in copies.items():
        if not same_values(tensors[key], copy):
            raise breach(
                rule,
                method,
                f"changes '{key}' in place, which clients or a checkpoint may still use; write "
                "x = x - step for x -= step",
            )
