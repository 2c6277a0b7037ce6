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
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from raysim.config import entry_points
from raysim.config.explain import annotation_types, explain_validation_error, misplaced_switch
from raysim.config.limited_yaml import are_same, plain
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
from raysim.rules.methods.misspelled_methods import (
    refuse_missing_methods,
    refuse_misspelled_methods,
    refuse_untyped_fields,
    untyped,
)
from raysim.rules.rule import Rule, family
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import failing_as

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
        "your own is given as path.py:Class"
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


def algorithm_hyperparameters(name: str) -> set[str]:
    """Return the names of the hyper-parameters of an algorithm's rules; empty if there is none.

    Args:
        name: a registered name, or path.py:NAME.
    """
    try:
        algorithm = find_rule("algorithm", name)
    except ConfigError:  # `resolve_rules` reports it, with all the rest
        return set()
    return {*hyperparameter_names(algorithm.client), *hyperparameter_names(algorithm.server)}


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


def build_part(section: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    """Build a dataclass from a section's parameters, checked against its annotations.

    Args:
        section: the section's key, which errors name, such as "client".
        cls: the dataclass; its fields are the keys that the section may have.
        parameters: the section's parameters, without `name`.

    Returns:
        An instance of `cls`; fields that are not given have their defaults, as their annotations
        read them.

    Raises:
        ConfigError: a parameter is unknown, or has a wrong value; or a resumed run would not read
            it back from config.yaml. It names the key.
    """
    refuse_misspelled_methods(cls, section)
    refuse_untyped_fields(cls, section)
    refuse_missing_methods(cls, section)
    known = hyperparameter_names(cls)
    if "name" in known:
        raise ConfigError(
            f"{section}.name: {cls.__name__} has the field 'name', but a section's name is that of "
            "its class; give the field another name, or write it as name: ClassVar[str] = ..."
        )
    for key in lacking(parameters, known):
        hint = untyped([cls], key) or did_you_mean(key, known)
        raise ConfigError(f"{section}.{key}: unknown key of {cls.__name__}{hint}")
    return _read_again(section, _read(section, cls, parameters))


def _read(section: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    """Return a dataclass with the parameters that a section has; others have their defaults."""
    kinds = get_type_hints(cls)
    for key, value in parameters.items():
        # pydantic would take true for 1
        if switch := misplaced_switch(value, annotation_types(kinds[key])):
            raise ConfigError(f"{section}.{key}: {switch} is neither a number nor a word")
    failed = f"{section}.name: {cls.__name__} cannot be built"
    try:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ValidationError,)):
            return _adapter(cls).validate_python(dict(parameters))
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, parameters, cls, f"{section}.")) from None


@functools.lru_cache(maxsize=64)  # users' classes are loaded again and again in a notebook
def _adapter(cls: type) -> TypeAdapter:
    """Return the adapter that builds a dataclass, which takes milliseconds to make."""
    return TypeAdapter(cls)


def _read_again(section: str, built: Any) -> Any:
    """Return a dataclass as a resumed run builds it, from the values of all fields in config.yaml.

    One that would have other values there is refused.
    """
    name = type(built).__name__
    written = {}
    for entry in dataclasses.fields(built):
        value = getattr(built, entry.name)
        if not entry.init:
            raise ConfigError(
                f"{section}.name: {name} has the field '{entry.name}' with init=False; "
                "make it a property, since a configuration has all fields"
            )
        try:
            written[entry.name] = plain(value)
        except ValueError:
            raise ConfigError(
                f"{section}.name: {name} has the field '{entry.name}' with a "
                f"{type(value).__name__}, which a configuration cannot have; make it in a method, "
                "or a global constant"
            ) from None
    try:
        again = _read(section, type(built), written)
    except ConfigError as error:
        raise _unreadable(section, built, str(error).partition("\n")[0]) from None
    for key in written:
        value, read = getattr(built, key), getattr(again, key)
        # An annotation may read a list as a tuple; what YAML cannot hold is lost before.
        is_plain = are_same(value, written[key]) and not hasattr(built, "__post_init__")
        if not is_plain and not are_same(value, read):
            fix = f"annotate it as {_annotation_of(value)}"
            if hasattr(built, "__post_init__"):
                fix += ", and leave it in __post_init__ as it is"
            raise ConfigError(
                f"{section}.{key}: {name} has {value!r} there, which a resumed run would read as "
                f"{read!r}; {fix}"
            )
    return again


def _unreadable(section: str, built: Any, problem: str) -> ConfigError:
    """Return the error for a field that holds what its annotation refuses."""
    key = problem.removeprefix(f"{section}.").partition(":")[0].partition(".")[0]
    if key not in hyperparameter_names(type(built)):  # of __post_init__
        return ConfigError(
            f"{problem} (from the values of its own fields, as a resumed run has them)"
        )
    kind = inspect.formatannotation(get_type_hints(type(built))[key])
    fix = f"give it a default that {kind} allows, or None with {kind} | None"
    if getattr(built, key, ...) is None:
        fix = f"annotate it as {kind} | None"
    return ConfigError(
        f"{problem}; {type(built).__name__} holds this itself, and a resumed run reads it: {fix}"
    )


def _annotation_of(value: Any) -> str:
    """Return the annotation of a field by which a value is read back as it was."""
    name = type(value).__name__
    match value:
        case None:
            return "None"
        case tuple():
            return f"tuple[{_annotation_of_all(value)}, ...]"
        case Mapping():
            return f"dict[{_annotation_of_all(value)}, {_annotation_of_all(value.values())}]"
        case list() | set() | frozenset():
            return f"{name}[{_annotation_of_all(value)}]"
    return name


def _annotation_of_all(values: Iterable[Any]) -> str:
    return " | ".join(sorted(set(map(_annotation_of, values)))) or "Any"
