"""A round and its clients: their cohort, their tasks, and those of them that failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic

import numpy as np
from torch import Tensor

from raysim.engine.executor import ModelHandle, Record, RoundHandle, RoundResults
from raysim.engine.plan import Plan
from raysim.engine.round_metrics import UPDATES_NOT_USED
from raysim.engine.state.client_store import ClientStateStore
from raysim.errors import ClientError, RaysimError, round_name
from raysim.rules.contract import ServerRule
from raysim.rules.errors.user_code import breach
from raysim.rules.reports import WEIGHT_TOLERANCE
from raysim.rules.rule import Problem
from raysim.schedule import ScheduledRound
from raysim.server.round_cohort import RoundCohort
from raysim.server.update_checks import errors_name_rule
from raysim.training.messages import ClientTask

logger = logging.getLogger("raysim")


@dataclass
class ActiveRound(Generic[ModelHandle]):
    """A round from its schedule to its record."""

    scheduled: ScheduledRound
    """The clients whose updates arrive in it, by the virtual clock."""
    cohort: RoundCohort
    """The part of the round that the server receives."""
    requests: dict[int, dict[str, Any]]
    """Requests of probes, by client and by probe."""
    training: RoundHandle[ModelHandle]
    """Its local training on the executor."""
    tasks: list[ClientTask] = field(default_factory=list)
    """Its clients that were dispatched."""
    probed: Record = field(default_factory=dict)
    """The metrics of probes."""
    timing: Record = field(default_factory=dict)
    """Seconds of the round and of its parts."""

    @property
    def exhausted(self) -> bool:
        """Whether the round cannot take place, because no client will ever arrive again."""
        return bool(self.scheduled.exhausted)


def make_cohort(plan: Plan, scheduled: ScheduledRound) -> RoundCohort:
    """Return the cohort of a scheduled round, with the weights that the server rule gives it.

    Under client-level privacy all weights are 1 / `schedule.cohort`, however many clients take
    part.

    Args:
        plan: the plan of the run.
        scheduled: the clients whose updates the server will receive.

    Raises:
        RaysimError: the weights are refused; see `weigh`.
    """
    rule = plan.server
    bases = [arrival.base for arrival in scheduled.arrivals]
    sizes_at = plan.clients.sizes_by_round.at
    sizes = [int(sizes_at(t)[i]) for i, t in zip(scheduled.ids, bases, strict=True)]
    steps = [
        plan.local_steps(plan.group(i).config.local, n)
        for i, n in zip(scheduled.ids, sizes, strict=True)
    ]
    cohort = RoundCohort(
        scheduled.t,
        scheduled.ids,
        bases,
        [],
        sizes,
        steps,
        [arrival.draws for arrival in scheduled.arrivals],
    )
    if plan.config.client_privacy is not None:
        cohort.weights = [1 / plan.config.schedule.size] * len(cohort.ids)
    elif cohort.ids:
        cohort.weights = weigh(rule, cohort, plan.problem)
    return cohort


def weigh(rule: ServerRule, round: RoundCohort, problem: Problem) -> list[float]:
    """Return the weights that a server rule gives the clients of a round.

    Args:
        rule: the server rule.
        round: the clients.
        problem: the facts about the run.

    Raises:
        ContractError: it gives no number for each client, a negative or infinite one, or weights
            that sum to more than 1.
        RaysimError: it fails, or all weights are 0.
    """
    n = len(round.ids)
    with errors_name_rule(rule, "weigh", round.t):
        returned = rule.at(round.t).weigh(round.cohort(problem))
        if not isinstance(returned, Iterable | Tensor) or isinstance(returned, Mapping):
            kind = "nothing" if returned is None else f"a {type(returned).__name__}"
            raise breach(rule, "weigh", f"returns {kind}; return a list of {n} numbers")
        weights = [float(weight) for weight in returned]
    array = np.array(weights)
    if len(weights) != n or not (np.isfinite(array) & (array >= 0)).all():
        raise breach(
            rule,
            "weigh",
            f"must give a number for each of {n} clients, none negative; it gave {weights}",
        )
    if not array.any():
        raise RaysimError(f"server rule '{rule.name}': weigh gave 0 for all of {n} clients")
    if array.sum() > 1 + WEIGHT_TOLERANCE:
        raise breach(
            rule,
            "weigh",
            f"gives {weights}, which sum to {array.sum():g}, and reports.mean would be as many "
            "times a mean; divide them by their sum, raysim.rules.normalised(weights)",
        )
    return weights


def make_tasks(
    plan: Plan,
    store: ClientStateStore,
    cohort: RoundCohort,
    which: Iterable[bool] | None = None,
    requests: Mapping[int, dict[str, Any]] = MappingProxyType({}),
) -> list[ClientTask]:
    """Return the tasks of a cohort's clients.

    Args:
        plan: the plan of the run.
        store: the clients' states and batch cursors.
        cohort: the clients of the round, with weights, base versions and numbers of steps.
        which: for each client, whether its task is made; None: all of them.
        requests: requests of probes, by client and by probe.
    """
    # In a synchronous round the states are used before its clients' new ones are put.
    copy = plan.config.schedule.name != "sync"
    # A share is times N, so that it is about 1; the server divides the differences by N.
    by_samples = plan.server.weights == "samples"
    n_clients = plan.problem.n_nonempty
    sizes_at = plan.clients.sizes_by_round.at
    tasks = []
    for i, is_chosen in enumerate([True] * len(cohort.ids) if which is None else which):
        if not is_chosen:
            continue
        client = cohort.ids[i]
        share = 1.0
        if by_samples:
            share = cohort.samples[i] * n_clients / int(sizes_at(cohort.bases[i]).sum())
        tasks.append(
            ClientTask(
                client,
                cohort.bases[i],
                int(store.cursors[client]),
                cohort.weights[i],
                cohort.steps[i],
                share,
                bool(store.seen[client]),
                store.get(client, copy),
                requests.get(client, {}),
            )
        )
    return tasks


def failed_clients(
    results: RoundResults, failure: str, on_error: str, effect: str
) -> dict[int, str]:
    """Return the clients that failed, each with its error in one line, and log them.

    Args:
        results: the results of a round, or of an evaluation.
        failure: what has failed, with {} for the client.
        on_error: `faults.on_client_error`, "stop" or "drop".
        effect: what "drop" does with the clients, for the message.

    Raises:
        ClientError: a client failed, and `on_error` is "stop".
    """
    failed = {}
    advice = f"(faults.on_client_error=drop {effect})"
    # A client that could not even be evaluated, since its workers died, is among the trained ones.
    for result in sorted([*results.evaluations, *results.clients], key=lambda done: done.client):
        if result.error is not None:
            what = failure.format(result.client)
            if on_error == "stop":
                raise ClientError(f"{what}: {result.error}\n{advice}")
            failed[result.client] = result.error.strip().splitlines()[0]
            logger.warning("%s: %s %s", what, failed[result.client], advice)
    return failed


def failed_in_training(t: int, results: RoundResults, on_error: str) -> dict[int, str]:
    """Return the clients whose training failed in round t; see `failed_clients`.

    Args:
        t: number of the round, from 0.
        results: the results of the round.
        on_error: `faults.on_client_error`.
    """
    failure = f"client {{}} failed in {round_name(t)}"
    return failed_clients(results, failure, on_error, "continues without such clients")


def require_used_updates(history: Sequence[Record], on_empty_run: str, first_failure: str) -> None:
    """Require that some client's update was used in a run.

    Args:
        history: the records of all rounds.
        on_empty_run: `faults.on_empty_run`; "finish" accepts a run without updates.
        first_failure: the first client that failed, and why; "" if none did.

    Raises:
        RaysimError: no update was used, and `on_empty_run` is "fail".
    """
    counts: Counter[str] = Counter()
    for record in history:
        counts.update({key: record.get(key, 0.0) for key in ("clients/used", *UPDATES_NOT_USED)})
    if counts["clients/used"]:
        return
    fates = [f"{counts[key]:g} {fate}" for key, fate in UPDATES_NOT_USED.items() if counts[key]]
    why = ", ".join(fates) or "no client arrived"
    if first_failure:
        why += f"; the first: {first_failure}"
    message = f"no client's update was used in {int(history[-1]['round'])} rounds ({why})"
    if on_empty_run == "fail":
        raise RaysimError(
            f"{message}, so nothing was trained (faults.on_empty_run=finish accepts such a run)"
        )
    logger.warning("%s", message)
