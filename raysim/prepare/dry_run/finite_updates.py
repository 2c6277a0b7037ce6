"""Check that a client rule has finite updates where plain SGD has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raysim.config.schema import FEDAVG
from raysim.data.partition.clients import Clients
from raysim.engine.plan import Plan
from raysim.errors import ContractError, counted
from raysim.prepare.dry_run.small_clients import SmallClients
from raysim.rules.contract import ClientRule
from raysim.rules.errors.user_code import class_defined_at
from raysim.rules.methods import registry
from raysim.training.messages import Block
from raysim.training.trainers.trainer import Trainer
from raysim.training.uploads.client_update import ClientUpdate

REAL_CLIENTS = 3
"""Clients of the run that are trained if what the two small ones send is not finite."""

REAL_STEPS = 3
"""Largest number of their steps: a quotient without a value is in the first ones."""


def keys_not_finite(trainer: Trainer, update: ClientUpdate) -> list[str]:
    """Return the keys of the uploads of a client that are NaN or infinite somewhere.

    Args:
        trainer: the trainer of the client.
        update: the client's update.
    """
    sent = [key for key in trainer.sent if key in update.report]
    return [key for key in sent if not bool(update.report[key].isfinite().all())]


def refuse_not_finite(plan: Plan, group: str) -> None:
    """Refuse a rule that is not finite for each of a few clients of the run, where SGD is.

    The small clients may lack examples, such as those of a class of which a rule takes the
    mean; and the step size may be too large.

    Args:
        plan: the plan of the run.
        group: the name of the clients' group; "" is that of clients without one.

    Raises:
        ContractError: the rule is not.
    """
    if plan.config.faults.on_client_error == "drop":  # it may do so on purpose
        return
    rule = plan.client
    # The rule's own server may need uploads that SGD does not send.
    fedavg = registry.find_rule("server", FEDAVG)()
    of_rule = _not_finite_on_real_clients(plan, group)
    of_sgd = _not_finite_on_real_clients(replace(plan, client=ClientRule(), server=fedavg), group)
    if of_rule is None or of_sgd is None or any(of_sgd) or not all(of_rule):
        return
    raise ContractError(
        f"client rule '{rule.name}' sends '{of_rule[0][0]}' that is NaN or infinite for each "
        f"of {counted(len(of_rule), 'client')} in the first round, where SGD with the same "
        "local.lr has finite updates; look for a quotient, a root or a logarithm without a "
        'value, such as a division by the norm of state["w"] - shared["x"], which is 0 in the '
        f"first step ({class_defined_at(type(rule))})"
    )


def _not_finite_on_real_clients(plan: Plan, group: str) -> list[list[str]] | None:
    """Return the uploads of a few clients of the run that are not finite after a few local steps.

    Args:
        plan: the plan of the run, with the client rule that they train with.
        group: the name of their group.

    Returns:
        The keys of these uploads for each client; None if there is no client, or if one fails.
    """
    trained = plan.clients.sizes > 0
    if plan.members is not None:
        names = ["", *(of_group.name for of_group in plan.groups)]
        trained &= plan.members == names.index(group)
    ids = np.flatnonzero(trained)[:REAL_CLIENTS].tolist()
    if not ids:
        return None
    lists = [plan.clients.client(i) for i in ids]
    few = SmallClients(replace(plan, stages=()), group)
    offsets = np.cumsum([0, *map(len, lists)])
    few.clients = Clients(np.concatenate(lists), offsets, np.empty(0, np.int64))
    trainer, broadcast, tasks = few.stage()
    steps = [plan.local_steps(plan.config.local, len(examples)) for examples in lists]
    few_steps = [min(n, REAL_STEPS) for n in steps]
    tasks = [replace(task, steps=n) for task, n in zip(tasks, few_steps, strict=True)]
    updates = trainer.train_block({0: broadcast}, Block(0, tasks))
    if any(update.error for update in updates):
        return None
    return [keys_not_finite(trainer, update) for update in updates]
