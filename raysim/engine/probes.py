"""Probes: measurements about training that no method needs.

The engine, the trainer and the evaluator know only the class `Probe`. The configuration selects the
probes of a run: each key of `BUILT_IN_PROBES` that is set attaches the probe of that key, and
`evaluate.probes` names users' probes.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from raysim.config import entry_points
from raysim.config.references import load_object
from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.engine.plan import (
    EvaluatedModel,
    Plan,
    Probe,
    ProbedRun,
    evaluates_models,
    measures_clients,
)
from raysim.errors import ConfigError, ProbeError, round_name
from raysim.metrics import reserved_prefixes
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods import registry
from raysim.server.central_server import RoundCohort
from raysim.spelling import did_you_mean
from raysim.system.signals import failing_as
from raysim.training.client_start import PreparedClient
from raysim.training.messages import WorkerResult
from raysim.training.trainers.trainer import Measure, Trainer
from raysim.training.uploads.client_update import ClientUpdate

BUILT_IN_PROBES = {
    "record_updates": "raysim.diagnostics.recorded_updates:RecordedUpdates",
    "evaluate.forgetting": "raysim.diagnostics.forgetting:ForgettingProbe",
    "evaluate.theory": "raysim.diagnostics.convergence:ConvergenceMonitor",
}
"""The probe that each section of the configuration attaches. The keys of the section are the
parameters of the probe."""

CLASS_TASKS = "raysim.diagnostics.class_tasks:ClassTaskMetrics"
"""The probe of runs with `partition.phases: classes`."""

RESERVED_PROBE_NAMES = (*reserved_prefixes(), "record_updates", "test")
"""First parts of the names of other metrics, which a user's probe may not use."""

RESUME_HINT = "; correct or remove this probe, then resume the run"
"""The fix at the end of the message when a probe fails in a run."""

PROBE_NAME_PATTERN = re.compile(r"[\w\-.]+", re.ASCII)
"""Valid names of probes."""

METRIC_NAME_PATTERN = re.compile(r"[\w\-. /]+", re.ASCII)
"""Names of metrics that a tracker accepts."""


def catalogue() -> Iterator[tuple[str, Any, str]]:
    """Yield name, class and distribution of every probe that has a name.

    The name of one of raysim's own is the key of the configuration that attaches it.
    """
    for key, reference in BUILT_IN_PROBES.items():
        yield key, load_object(reference, key), "raysim"
    yield from entry_points.offered(entry_points.PROBES, "evaluate.probes", ())


def attached(config: Config) -> tuple[Probe, ...]:
    """Return the probes that a configuration selects.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a user's probe cannot be loaded or built, or its name is in use.
    """
    probes: list[Probe] = []
    for key, reference in BUILT_IN_PROBES.items():
        section = operator.attrgetter(key)(config)
        if section is not None:
            probes.append(load_object(reference, key)(**dict(section)))
    if config.has_class_tasks:
        probes.append(load_object(CLASS_TASKS, "partition.phases")())
    taken = set(RESERVED_PROBE_NAMES)
    for key, named in config.evaluate.named_probes().items():
        probe = _user_probe(key, named)
        name = name_of(probe)
        problem = ""
        if name in taken:
            problem = "is the name of other metrics"
        elif not PROBE_NAME_PATTERN.fullmatch(name):
            problem = "may have letters, digits, '_', '-' and '.' only"
        if problem:
            raise ConfigError(
                f"{key}.name: the probe's name '{name}' {problem}; set name = \"...\" in the class"
            )
        taken.add(name)
        probes.append(probe)
    return tuple(probes)


def _probe_reference(key: str, name: str) -> str:
    """Return the reference to a user's probe that is given by reference or by an offered name."""
    if ":" in name:
        return name
    if offered := entry_points.offered_reference(entry_points.PROBES, f"{key}.name", name, False):
        return offered
    if name.endswith(".py"):
        raise ConfigError(f"{key}.name: which class of {name}? Give it as {name}:NAME")
    known = [point.name for point in entry_points.entry_points(entry_points.PROBES)]
    raise ConfigError(
        f"{key}.name: unknown probe '{name}'{did_you_mean(name, known)}; give it as path.py:Class"
    )


def _check_probe_class(key: str, cls: type[Probe]) -> None:
    """Check that a user's probe is a dataclass that measures what it requests."""
    fields = [kind for kind in inspect.get_annotations(cls).values() if "ClassVar" not in str(kind)]
    if fields and "__dataclass_params__" not in vars(cls):
        raise ConfigError(f"{key}.name: put @dataclass above class {cls.__name__}")
    if cls.request is not Probe.request and cls.measure is Probe.measure:
        raise ConfigError(
            f"{key}.name: {cls.__name__} requests measurements of clients; define the "
            "method measure"
        )


def _user_probe(key: str, named: Named) -> Probe:
    """Return a user's probe with its parameters."""
    cls = load_object(_probe_reference(key, named.name), f"{key}.name")
    if not (isinstance(cls, type) and issubclass(cls, Probe)):
        raise ConfigError(f"{key}.name: '{named.name}' is not a Probe; derive it from raysim.Probe")
    _check_probe_class(key, cls)
    checked = registry.build_part(key, cls, named.parameters)
    failed = f"{key}.name: {cls.__name__} cannot be built"
    with failing_as(lambda why: ConfigError(f"{failed}: {why}")):
        # Build it again: pydantic does not call an `__init__` that the class defines.
        return cls(**probe_parameters(checked))


def probe_parameters(probe: Probe) -> dict[str, Any]:
    """Return a probe's parameters.

    Args:
        probe: the probe, a dataclass.

    Returns:
        The values of its fields by name.
    """
    return {f.name: getattr(probe, f.name) for f in dataclasses.fields(probe) if f.init}


def check_probes(plan: Plan) -> None:
    """Check that a plan's probes can measure its run.

    Args:
        plan: the plan of the run.

    Raises:
        ConfigError: a probe cannot, or its `check` fails.
    """
    for probe in plan.probes:
        try:
            with _guarded(probe, "check"):
                probe.check(plan)
        except ProbeError as error:
            raise ConfigError(f"evaluate.probes: {error}") from None


def with_probe_parameters(config: Config, attached_probes: Sequence[Probe]) -> Config:
    """Return the configuration with every parameter of users' probes written out.

    Args:
        config: the configuration of the run.
        attached_probes: the probes that `attached` returned for it.
    """
    # `attached` lists them last.
    user_probes = attached_probes[len(attached_probes) - len(config.evaluate.probes) :]
    sections = zip(config.evaluate.probes, user_probes, strict=True)
    probes = tuple(
        Named.model_validate({"name": named.name, **probe_parameters(probe)})
        for named, probe in sections
    )
    return config.model_copy(
        update={"evaluate": config.evaluate.model_copy(update={"probes": probes})}
    )


def name_of(probe: Probe) -> str:
    """Return the first part of the names of a probe's metrics.

    Args:
        probe: the probe; without a `name` the name of its class is used.
    """
    return probe.name or type(probe).__name__


# -- on the driver -------------------------------------------------------------------------------


class Probes:
    """All probes of a run, behind one interface for the engine.

    Args:
        run: the facts about the run.
    """

    def __init__(self, run: ProbedRun):
        # Copies: after a failure of the server, measuring begins anew with the configured probes.
        self.probes = copy.deepcopy(run.plan.probes)
        for probe in self.probes:
            with _guarded(probe, "begin"):
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
            with _guarded(probe, "request", f"{round_name(round.t)}: "):
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
            with _guarded(probe, "metrics", f"{round_name(round.t)}: "):
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
            with _guarded(probe, "evaluates", f"after {rounds_done} rounds: "):
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
            with _guarded(probe, "follow", f"after {record['round']:g} rounds: "):
                metrics |= _named(probe, probe.follow(dict(record)))
        return metrics


# -- on workers and evaluators -------------------------------------------------------------------


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
        with _guarded(probe, "measure", f"client {client.task.client}: "), _unchanged(tensors):
            # The run goes on with the report, of which a probe may replace entries.
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
        with _guarded(probe, "evaluate", place), _unchanged(model.shared):
            return _named(probe, probe.evaluate(trainer, model))

    return evaluate


# -- errors --------------------------------------------------------------------------------------


@contextmanager
def _guarded(probe: Probe, method: str, where: str = "") -> Iterator[None]:
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
