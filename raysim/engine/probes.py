"""Probes: measurements about training that no method needs.

The engine, the trainer and the evaluator know only the class `Probe`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from raysim.engine.plan import (
    EvaluatedModel,
    Plan,
    Probe,
    ProbedRun,
    evaluates_models,
    measures_clients,
)
from raysim.errors import ProbeError, round_name
from raysim.models.default_device import tensors_on
from raysim.rules.errors.user_code import translate_errors
from raysim.server.round_cohort import RoundCohort
from raysim.training.client_start import PreparedClient
from raysim.training.messages import WorkerResult
from raysim.training.trainers.trainer import Measure, Trainer
from raysim.training.uploads.client_update import ClientUpdate

RESUME_HINT = "; correct or remove this probe, then resume the run"
"""The fix at the end of the message when a probe fails in a run."""

METRIC_NAME_PATTERN = re.compile(r"[\w\-. /]+", re.ASCII)
"""Names of metrics that a tracker accepts."""


def name_of(probe: Probe) -> str:
    """Return the first part of the names of a probe's metrics.

    Args:
        probe: the probe; without a `name` the name of its class is used.
    """
    return probe.name or type(probe).__name__


# -- on the driver --------------------------------------------------------------------------------


class Probes:
    """All probes of a run, behind one interface for the engine.

    Args:
        run: the facts about the run.
    """

    def __init__(self, run: ProbedRun):
        # Copies: after a failure of the server, measuring begins anew with the configured probes.
        self.probes = copy.deepcopy(run.plan.probes)
        for probe in self.probes:
            with guarded(probe, "begin"):
                probe.begin(run)

    def requests(self, round: RoundCohort) -> dict[int, dict[str, Any]]:
        """Return the probes' requests for a round, by client id and name of the probe.

        Args:
            round: the clients of the round.

        Raises:
            ProbeError: a probe fails, or requests a client that is not in the round.
        """
        requests: dict[int, dict[str, Any]] = {}
        for probe in self.probes:
            with guarded(probe, "request", f"{round_name(round.t)}: "):
                requested = _mapping(probe.request(round), "of clients to requests")
                for client, request in requested.items():
                    if client not in round.ids:
                        raise ValueError(
                            f"client {client} is not in the round's cohort {round.ids}"
                        )
                    requests.setdefault(client, {})[name_of(probe)] = request
        return requests

    def metrics(self, round: RoundCohort, outcomes: list[WorkerResult]) -> dict[str, float]:
        """Return the probes' metrics of a round whose clients have trained.

        Args:
            round: the round and its clients.
            outcomes: what the workers of the round returned, with the probes' measurements of
                clients.

        Returns:
            Metrics by name, as "PROBE/METRIC".

        Raises:
            ProbeError: a probe failed.
        """
        results_by_probe: dict[str, dict[int, dict[str, Any]]] = {}
        clients = [result for outcome in outcomes for result in outcome.clients]
        for result in sorted(clients, key=lambda result: result.client):
            for name, values in result.measured.items():
                results_by_probe.setdefault(name, {})[result.client] = values
        metrics: dict[str, float] = {}
        for probe in self.probes:
            with guarded(probe, "metrics", f"{round_name(round.t)}: "):
                results = results_by_probe.get(name_of(probe), {})
                metrics |= _named(probe, probe.metrics(round, results))
        return metrics

    def due(self, rounds_done: int) -> list[str]:
        """Return the names of the probes that evaluate the model after `rounds_done` rounds.

        Args:
            rounds_done: number of completed rounds.

        Raises:
            ProbeError: a probe failed.
        """
        due = []
        for probe in self.probes:
            with guarded(probe, "evaluates", f"after {rounds_done} rounds: "):
                if probe.evaluates(rounds_done):
                    due.append(name_of(probe))
        return due

    def follow(self, record: Mapping[str, float]) -> dict[str, float]:
        """Return the probes' metrics that are computed from the complete record of a round.

        Args:
            record: the metrics of the round, with those of the server and of the evaluation.

        Returns:
            Metrics by name, as "PROBE/METRIC".

        Raises:
            ProbeError: a probe failed.
        """
        metrics: dict[str, float] = {}
        for probe in self.probes:
            with guarded(probe, "follow", f"after {record['round']:g} rounds: "):
                metrics |= _named(probe, probe.follow(dict(record)))
        return metrics


# -- on workers and evaluators --------------------------------------------------------------------


def measures(plan: Plan) -> dict[str, Measure]:
    """Return the `measure` of each probe by its name, for a trainer.

    An exception in `measure` becomes a ProbeError that names probe and client.

    Args:
        plan: the plan of the run.
    """
    return {
        # A copy, so that inline, too, what `measure` stores is not seen by `metrics`.
        name_of(probe): _guarded_measure(copy.deepcopy(probe))
        for probe in plan.probes
        if measures_clients(probe)
    }


def _guarded_measure(probe: Probe) -> Measure:
    """Return a probe's `measure` with its exceptions turned into ProbeError."""

    def measure(
        trainer: Trainer, client: PreparedClient, update: ClientUpdate, request: Any
    ) -> dict[str, Any]:
        tensors = {**client.broadcast.shared, **update.report, "local_params": update.local_params}
        with guarded(probe, "measure", f"client {client.task.client}: "), _unchanged(tensors):
            # A copy: a probe may put other tensors into it, and the run still needs the report.
            seen = replace(update, report={**update.report})
            return probe.measure(trainer, client, seen, request)

    return measure


@contextmanager
def _unchanged(tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Raise ValueError if a probe changes one of these tensors in place, which the run uses."""
    before = {key: (t, t._version) for key, t in tensors.items() if t is not None}
    yield
    for key, (tensor, version) in before.items():
        if tensor._version != version:
            raise ValueError(
                f"it changes '{key}' in place, which the run still uses; change a clone()"
            )


def evaluations(plan: Plan) -> dict[str, Callable[[Trainer, EvaluatedModel], dict[str, float]]]:
    """Return the `evaluate` of each probe by its name, for the evaluator.

    The names of the metrics begin with the name of the probe.

    Args:
        plan: the plan of the run.
    """
    return {
        name_of(probe): _guarded_evaluate(copy.deepcopy(probe))
        for probe in plan.probes
        if evaluates_models(probe)
    }


def _guarded_evaluate(probe: Probe) -> Callable[[Trainer, EvaluatedModel], dict[str, float]]:
    """Return a probe's `evaluate` with its exceptions turned into ProbeError."""

    def evaluate(trainer: Trainer, model: EvaluatedModel) -> dict[str, float]:
        place = f"after {model.rounds_done} rounds: "
        on_device = tensors_on(trainer.model.device)
        with on_device, guarded(probe, "evaluate", place), _unchanged(model.shared):
            return _named(probe, probe.evaluate(trainer, model))

    return evaluate


# -- errors ---------------------------------------------------------------------------------------


@contextmanager
def guarded(probe: Probe, method: str, where: str = "") -> Iterator[None]:
    """Turn every exception of a probe into a ProbeError that names the probe."""
    failed = f"{where}{method} of probe '{name_of(probe)}' failed: "
    hint = "" if method == "check" else RESUME_HINT
    with translate_errors(lambda text: ProbeError(f"{failed}{text}{hint}")):
        yield


def _mapping(returned: Any, content: str) -> Mapping[Any, Any]:
    """Return the mapping that a probe's method returned; {} for None."""
    if returned is None:
        return {}
    if not hasattr(returned, "items"):  # a Series of pandas has them too
        raise TypeError(
            f"it returned a {type(returned).__name__}; return a mapping {content}, or None"
        )
    return returned


def _named(probe: Probe, metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats, with the name of their probe in front of their names."""
    named = {}
    for key, value in _mapping(metrics, "of names of metrics to numbers").items():
        if not METRIC_NAME_PATTERN.fullmatch(key):
            raise ValueError(
                f"{key!r} is not a valid name of a metric; use letters, digits, '_', '-', '.', "
                "' ' and '/'"
            )
        named[f"{name_of(probe)}/{key}"] = float(value)
    return named
