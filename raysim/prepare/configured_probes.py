"""The probes that a configuration selects."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from raysim.config import entry_points
from raysim.config.references import load_object
from raysim.config.schema import Config
from raysim.config.sections.base import Named, with_value
from raysim.engine.plan import (
    Plan,
    Probe,
)
from raysim.engine.probes import guarded, name_of
from raysim.errors import ConfigError, ProbeError
from raysim.metrics import reserved_prefixes
from raysim.rules.methods.parameters import build_part
from raysim.spelling import did_you_mean
from raysim.system.signals import failing_as

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

PROBE_NAME_PATTERN = re.compile(r"[\w\-.]+", re.ASCII)
"""Valid names of probes."""


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
    checked = build_part(key, cls, named.parameters)
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
            with guarded(probe, "check"):
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
    return with_value(config, "evaluate.probes", probes)
