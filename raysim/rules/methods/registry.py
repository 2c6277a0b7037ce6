"""The registry: how a name becomes a rule or an algorithm, and what there is.

A method is found by its name if it ships with raysim, or if another distribution offers it as an
entry point of the group `raysim.algorithms`; a user's own is given as path.py:NAME or module:NAME.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from raysim.config import entry_points
from raysim.config.objects import python_objects
from raysim.config.references import load_file, load_object, place_of
from raysim.config.schema import FEDAVG, GENERAL
from raysim.errors import ConfigError
from raysim.rules.contract import (
    ALGORITHMS,
    CLIENT_RULES,
    SERVER_RULES,
    SHIPPED_PACKAGE,
    Algorithm,
    ClientRule,
    ServerRule,
    half_of,
)
from raysim.rules.errors.user_code import class_defined_at
from raysim.rules.rule import Rule, family
from raysim.spelling import did_you_mean

REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "client": CLIENT_RULES,
    "server": SERVER_RULES,
    "algorithm": ALGORITHMS,
}
"""Shipped rules and algorithms, by section and name."""

RULES = {"client": ClientRule, "server": ServerRule}
"""The class of the rules that a section names."""

FITTING = {
    "client": "a ClientRule",
    "server": "a ServerRule",
    "algorithm": "an Algorithm, a ClientRule or a ServerRule",
}
"""The classes that each section accepts, as messages name them."""


@functools.cache
def discover() -> None:
    """Import the shipped methods, which enter their rules and algorithms into the registries."""
    folders = importlib.import_module(SHIPPED_PACKAGE).__path__
    for module in pkgutil.walk_packages(folders, f"{SHIPPED_PACKAGE}."):
        name = module.name.rpartition(".")[2]
        if not name.startswith("test_"):  # such as `raysim new method` writes beside it
            importlib.import_module(module.name)


def _installed(section: str, name: str) -> Any:
    """Return what another distribution offers under a name, None if none does."""
    is_shipped = name in {**CLIENT_RULES, **SERVER_RULES, **ALGORITHMS}
    return entry_points.load_offered(entry_points.ALGORITHMS, f"{section}.name", name, is_shipped)


def is_shipped(rule: Rule) -> bool:
    """Return whether a rule ships with raysim.

    Args:
        rule: a client or server rule.
    """
    return REGISTRIES[half_of(rule)].get(rule.name) is type(rule)


def source_of(rules: Iterable[Rule]) -> str:
    """Return the sha256 of the files of shipped methods that define rules.

    Args:
        rules: client and server rules; those of users are left out.
    """
    classes = {c for rule in rules if is_shipped(rule) for c in type(rule).__mro__}
    files = {inspect.getfile(c) for c in classes if c.__module__.startswith(f"{SHIPPED_PACKAGE}.")}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def is_tried(rule: Rule) -> bool:
    """Return whether a rule is tried on the run's own net before the run.

    The shipped methods outside of families are not: their tests try them on nets of all kinds, and
    their `check` says what they need.

    Args:
        rule: a client or server rule.
    """
    return not is_shipped(rule) or family(type(rule).__module__) != GENERAL


def rule_reference(rule: type[Rule], algorithm: str) -> str:
    """Return the name by which a configuration finds the class of a rule again.

    A shipped rule is named by its class if another distribution offers a method of the same name.

    Args:
        rule: class of a rule.
        algorithm: name of the algorithm to which the rule belongs.

    Raises:
        ConfigError: it is defined inside a function, where nothing finds it.
    """
    registry: Mapping[str, type] = CLIENT_RULES if issubclass(rule, ClientRule) else SERVER_RULES
    name = rule.name
    if registry.get(name) is rule:
        is_offered = entry_points.find_reference(entry_points.ALGORITHMS, name) is not None
        return f"{rule.__module__}:{rule.__qualname__}" if is_offered else name
    if algorithm.startswith(python_objects.PREFIX):
        return python_objects.reference(rule)
    if "<locals>" in rule.__qualname__:
        raise ConfigError(
            f"algorithm.name: {rule.__qualname__} of '{algorithm}' is defined inside a function, "
            "where a resumed run could "
            "not find it; define it at the top of its module"
        )
    where, place = algorithm.rpartition(":")[0], place_of(rule.__module__)
    if place is None:
        return f"{rule.__module__}:{rule.__qualname__}"
    home = os.path.dirname(where)
    beside = os.path.relpath(place, os.path.abspath(os.path.expanduser(home)))
    file = where if os.path.basename(where) == beside else os.path.join(home, beside)
    return f"{file}:{rule.__qualname__}"


PART_NAMES = {"client": "client rule", "server": "server rule", "algorithm": "algorithm"}


def find_rule(section: str, name: str) -> Any:
    """Return the class (or Algorithm) that a section's name means.

    Args:
        section: "client", "server" or "algorithm".
        name: a registered name, path.py:NAME, or path.py with a single Algorithm.

    Raises:
        ConfigError: nothing has that name, or it is not what the section names.
    """
    discover()
    reference = full_reference(section, name)
    if ":" in reference:
        part = load_object(reference, f"{section}.name", offered_names)
        return _as_part(section, reference, part)
    if (installed := _installed(section, name)) is not None:
        return _as_part(section, name, installed)
    registry = REGISTRIES[section]
    if name in registry:
        return registry[name]
    other = _of_another_kind(section, name)
    if other:
        raise ConfigError(f"{section}.name: '{name}' is {other}")
    known = [*registry, *(p.name for p in entry_points.entry_points(entry_points.ALGORITHMS))]
    in_file = _in_file_of_name(registry, name)
    hint = f"; did you mean {' or '.join(in_file)}?" if in_file else did_you_mean(name, known)
    raise ConfigError(
        f"{section}.name: unknown {PART_NAMES[section]} '{name}'{hint}; "
        f"`raysim list {section}s` names all, and your own is given as path.py:Class"
    )


def _in_file_of_name(registry: Mapping[str, Any], name: str) -> list[str]:
    """Return the names of a registry whose shipped file is called `name`, such as fedopt."""
    found = []
    for known, part in registry.items():
        module = part.module if isinstance(part, Algorithm) else part.__module__
        if module.rpartition(".")[2] == name:
            found.append(known)
    return found


def _of_another_kind(section: str, name: str) -> str:
    """Return what else is called by a name, and how to use it; "" if nothing is."""
    if section == "algorithm" and name in CLIENT_RULES:
        return (
            f"a client rule and no algorithm; for some clients: "
            f"groups.{name}={{share: 0.2, client: {name}}}, for all: algorithm=null client={name}"
        )
    if section == "algorithm" and name in SERVER_RULES:
        return f"a server rule and no algorithm: algorithm=null server={name}"
    if name in ALGORITHMS:
        return f"an algorithm and no {PART_NAMES[section]}: algorithm={name}"
    return ""


def full_reference(section: str, name: str) -> str:
    """Return the name in a configuration, completed by the object if it is a file alone.

    A file alone means its only Algorithm. Other names are returned unchanged.

    Args:
        section: "client", "server" or "algorithm".
        name: a registered name, path.py:NAME, or path.py.

    Raises:
        ConfigError: the file does not have exactly one Algorithm, or a rule is asked for.
    """
    if not name.endswith(".py"):
        return name
    module = load_file(name, f"{section}.name")
    algorithms = _algorithms(module)
    if section == "algorithm" and len(algorithms) == 1:
        return f"{name}:{algorithms[0]}"
    offered = offered_names(module)
    raise ConfigError(
        f"{section}.name: which object of {name}? Give it as {name}:NAME; "
        + (f"it has {', '.join(offered)}" if offered else "it has no Algorithm and no rule")
        + ("" if algorithms else "; an Algorithm counts by its name there: NAME = Algorithm(…)")
    )


def _algorithms(module: ModuleType) -> list[str]:
    """Return the names of the Algorithms of a user's module."""
    return [name for name, value in vars(module).items() if isinstance(value, Algorithm)]


def offered_names(module: ModuleType) -> list[str]:
    """Return the names of the Algorithms of a user's module, then those of its rules."""
    rules = []
    for name, value in vars(module).items():
        if _is_rule(value) and value.__module__ == module.__name__:
            rules.append(name)
    return _algorithms(module) + rules


def _as_part(section: str, name: str, part: Any) -> Any:
    """Return a user's object as a section needs it; FedAvg is the other half of a single rule.

    Raises:
        ConfigError: it is something else.
    """
    for rule in _rules_in(part):
        if _is_rule(rule) and "__dataclass_params__" not in rule.__dict__:
            raise ConfigError(
                f"{section}.name: put @dataclass(frozen=True) above class {rule.__name__} "
                f"({class_defined_at(rule)}): without it its fields are not hyper-parameters"
            )
    if section == "algorithm" and _is_rule(part, ClientRule):
        part = Algorithm(name, part, SERVER_RULES[FEDAVG], name)
    elif section == "algorithm" and _is_rule(part, ServerRule):
        part = Algorithm(name, CLIENT_RULES[FEDAVG], part, name)
    if not _fits(section, part):
        raise ConfigError(f"{section}.name: '{name}' is not {FITTING[section]}")
    return part


def _fits(section: str, part: Any) -> bool:
    """Return whether a section can name this object."""
    kind = RULES.get(section)
    return isinstance(part, Algorithm) if kind is None else _is_rule(part, kind)


def _rules_in(part: Any) -> tuple[Any, ...]:
    """Return the classes of the rules of an Algorithm; of anything else, itself."""
    return (part.client, part.server) if isinstance(part, Algorithm) else (part,)


def _is_rule(value: Any, family: Any = ClientRule | ServerRule) -> bool:
    """Return whether a value is the class of a rule."""
    return isinstance(value, type) and issubclass(value, family)


def catalogue(section: Literal["client", "server", "algorithm"]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, class (or Algorithm) and distribution of every method for a section.

    What other distributions offer but cannot be used (it fails on import, or its name is taken) is
    logged and left out.

    Args:
        section: "client", "server" or "algorithm".
    """
    discover()
    registry = REGISTRIES[section]
    for name, part in registry.items():
        yield name, part, "raysim"
    taken = {*CLIENT_RULES, *SERVER_RULES, *ALGORITHMS}
    for name, part, origin in entry_points.offered(
        entry_points.ALGORITHMS, f"{section}.name", taken
    ):
        if _fits(section, part):
            yield name, part, origin


def hyperparameter_names(rule: type) -> list[str]:
    """Return the names of a rule's hyper-parameters.

    Args:
        rule: class of a rule, a dataclass.
    """
    return [f.name for f in dataclasses.fields(rule)]


def shared_keys(section: str, before: str, name: str) -> set[str]:
    """Return the keys that mean the same in two algorithms, client rules or server rules.

    These are the keys that both inherit from one class: every server's `weights`, but not beta2 of
    GradMA and of FedAdam.

    Args:
        section: "client", "server" or "algorithm".
        before: name of one of them.
        name: name of the other.

    Returns:
        The keys, "preset" among them; none if a name is unknown.
    """
    try:
        old, new = (_owners(find_rule(section, n)) for n in (before, name))
    except ConfigError:
        return set()
    return {"preset"} | {key for key, owners in new.items() if owners <= old.get(key, set())}


def _owners(part: Any) -> dict[str, set[type]]:
    """Return for each hyper-parameter the classes that define it."""
    owners: dict[str, set[type]] = {}
    for rule in _rules_in(part):
        for key in hyperparameter_names(rule):
            owners.setdefault(key, set()).add(
                next(c for c in rule.__mro__ if key in inspect.get_annotations(c))
            )
    return owners


def algorithm_defaults(name: str) -> Mapping[str, Any]:
    """Return an algorithm's defaults of other sections; {} if there is none of this name.

    Args:
        name: a registered name, or path.py:NAME.

    Returns:
        Values by section and key. An unknown name is not an error here: `resolve_rules` reports it.
    """
    try:
        return find_rule("algorithm", name).defaults
    except ConfigError:  # `resolve_rules` reports it, with all the rest
        return {}
