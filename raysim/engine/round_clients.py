"""A round and its clients: their cohort, their tasks, and those of them that failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic

import numpy as np

from raysim.engine.executor import ModelHandle, Record, RoundHandle, RoundResults
from raysim.engine.plan import Plan
from raysim.engine.round_metrics import UPDATES_NOT_USED
from raysim.engine.state.client_store import ClientStateStore
from raysim.errors import ClientError, RaysimError, round_name
from raysim.schedule import ScheduledRound
from raysim.server.central_server import RoundCohort
from raysim.server.update_checks import errors_name_rule
from raysim.training.messages import ClientTask

logger = logging.getLogger("raysim")

WEIGHT_TOLERANCE = 1e-6
"""Rounding in the sum of a round's weights."""


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
        RaysimError: the rule's weights are not one finite number for each client, none of them
            negative and not all of them 0.
    """
    rule = plan.server
    bases = [arrival.base for arrival in scheduled.arrivals]
    sizes_at = plan.clients.sizes_by_round.at
    sizes = [int(sizes_at(t)[i]) for i, t in zip(scheduled.ids, bases, strict=True)]
    steps = [plan.local_steps(plan.local(i), n) for i, n in zip(scheduled.ids, sizes, strict=True)]
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
        with errors_name_rule(rule, "weigh", scheduled.t):
            weights = rule.at(scheduled.t).weigh(cohort.cohort(plan.problem))
            cohort.weights = [float(weight) for weight in weights]
        _check_weights(rule.name, cohort)
    return cohort


def _check_weights(rule: str, cohort: RoundCohort) -> None:
    """Raise RaysimError unless a rule gave each client a weight, none negative and not all 0."""
    weights = np.array(cohort.weights)
    is_sound = bool((np.isfinite(weights) & (weights >= 0)).all() and weights.any())
    if len(weights) != len(cohort.ids) or not is_sound:
        raise RaysimError(
            f"server rule '{rule}': weigh must give a number for each of {len(cohort.ids)} "
            f"clients, none negative and not all of them 0; it gave {cohort.weights}"
        )
    if weights.sum() > 1 + WEIGHT_TOLERANCE:
        raise RaysimError(
            f"server rule '{rule}': weigh gave {cohort.weights}, which sum to {weights.sum():g}, "
            "and reports.mean would be as many times a mean; divide them by their sum, "
            "raysim.rules.normalised(weights)"
        )


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
    t: int, tasks: list[ClientTask], results: RoundResults, on_error: str
) -> dict[int, str]:
    """Return the failed clients of a round, each with its error in one line, and log them.

    Args:
        t: number of the round, from 0.
        tasks: the tasks of its clients.
        results: the results of these tasks.
        on_error: `faults.on_client_error`, "stop" or "drop".

    Raises:
        ClientError: a client failed, and `on_error` is "stop".
    """
    done = {result.client: result for result in results.clients}
    failed = {}
    for task in tasks:
        if error := done[task.client].error:
            failed[task.client] = error.strip().splitlines()[0]
            if on_error == "stop":
                raise ClientError(
                    f"client {task.client} failed in {round_name(t)}: {error}\n"
                    "(faults.on_client_error=drop continues without such clients)"
                )
            logger.warning(
                "%s: client %d is dropped: %s", round_name(t), task.client, failed[task.client]
            )
    if not tasks:
        logger.warning("%s: no client arrived", round_name(t))
    return failed


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
