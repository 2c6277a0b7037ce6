"""The registry: how the names in a configuration become rules, and which pairs of rules fit.

A method is found by its name if it ships with raysim, or if another distribution offers it as an
entry point of the group `raysim.algorithms`; a user's own is given as path.py:NAME or module:NAME.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from raysim.config import entry_points, python_objects
from raysim.config.explain import annotation_types, explain_validation_error
from raysim.config.references import load_file, load_object, place_of
from raysim.config.renamed import UPLOAD_MODES
from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.errors import ConfigError, did_you_mean, in_a_line
from raysim.rules.contract import (
    ALGORITHMS,
    CLIENT_RULES,
    SERVER_RULES,
    SHIPPED_PACKAGE,
    Algorithm,
    ClientRule,
    ServerRule,
)
from raysim.rules.misspelled import refuse_misspelled_methods, untyped
from raysim.rules.renamed import refuse_former_names
from raysim.rules.rule import Rule
from raysim.rules.uploads import UploadMode, why_not_declared
from raysim.rules.user_code import class_defined_at
from raysim.system.signals import reraise_stop

FEDAVG = "fedavg"
"""The name of the client rule that is local SGD, and of the server rule that averages."""


def discover() -> None:
    """Import the shipped methods, which enter their rules and algorithms into the registries."""
    for module in pkgutil.iter_modules(importlib.import_module(SHIPPED_PACKAGE).__path__):
        importlib.import_module(f"{SHIPPED_PACKAGE}.{module.name}")


def _is_shipped(name: str) -> bool:
    return any(name in registry for registry in (CLIENT_RULES, SERVER_RULES, ALGORITHMS))


def _is_offered(name: str) -> bool:
    """Return whether another distribution has a method of this name."""
    return entry_points.find_reference(entry_points.ALGORITHMS, name) is not None


def _installed(section: str, name: str) -> Any:
    """Return what another distribution offers under a name, None if none does."""
    return entry_points.load_offered(
        entry_points.ALGORITHMS, f"{section}.name", name, _is_shipped(name)
    )


def rule_reference(rule: type[Rule], algorithm: str) -> str:
    """Return the name by which a configuration finds the class of a rule again.

    A shipped rule is named by its class if another distribution offers a method of the same name.

    Args:
        rule: the class.
        algorithm: the name of the algorithm that brought it.

    Raises:
        ConfigError: it is defined inside a function, where nothing finds it.
    """
    registry: Mapping[str, type] = CLIENT_RULES if issubclass(rule, ClientRule) else SERVER_RULES
    name = rule.name
    if registry.get(name) is rule:
        return f"{rule.__module__}:{rule.__qualname__}" if _is_offered(name) else name
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
        name: a registered name, or path.py:Name.

    Raises:
        ConfigError: nothing has that name, or it is no such class.
    """
    discover()
    registry: Mapping[str, Any] = {
        "client": CLIENT_RULES,
        "server": SERVER_RULES,
        "algorithm": ALGORITHMS,
    }[section]
    if ":" in name:
        return _as_part(section, name, load_object(name, f"{section}.name", _offered))
    if name.endswith(".py"):
        reference = full_reference(section, name)
        return _as_part(section, reference, load_object(reference, f"{section}.name", _offered))
    if (installed := _installed(section, name)) is not None:
        return _as_part(section, name, installed)
    if name in registry:
        return registry[name]
    known = [*registry, *(p.name for p in entry_points.entry_points(entry_points.ALGORITHMS))]
    raise ConfigError(
        f"{section}.name: unknown {PART_NAMES[section]} '{name}'{did_you_mean(name, known)}; "
        "your own is given as path.py:Class"
    )


def full_reference(section: str, name: str) -> str:
    """Return a name in a configuration with the object that it means.

    A file alone means its only Algorithm. Other names are returned unchanged.

    Args:
        section: "client", "server" or "algorithm".
        name: the name.

    Raises:
        ConfigError: the file does not have exactly one Algorithm, or a rule is asked for.
    """
    if not name.endswith(".py"):
        return name
    module = load_file(name, f"{section}.name")
    algorithms = _algorithms(module)
    if section == "algorithm" and len(algorithms) == 1:
        return f"{name}:{algorithms[0]}"
    offered = _offered(module)
    raise ConfigError(
        f"{section}.name: which object of {name}? Give it as {name}:NAME; "
        + (f"it has {', '.join(offered)}" if offered else "it has no Algorithm and no rule")
    )


def _algorithms(module: ModuleType) -> list[str]:
    """Return the names of the Algorithms of a user's module."""
    return [name for name, value in vars(module).items() if isinstance(value, Algorithm)]


def _offered(module: ModuleType) -> list[str]:
    """Return the names of the Algorithms of a user's module, then those of its rules."""
    return _algorithms(module) + [
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, ClientRule | ServerRule)
        and value.__module__ == module.__name__
    ]


def _as_part(section: str, name: str, part: Any) -> Any:
    """Return a user's object as a section needs it; FedAvg is the other half of a single rule.

    Raises:
        ConfigError: it is something else.
    """
    if section == "algorithm" and isinstance(part, type):
        if issubclass(part, ClientRule):
            return Algorithm(name, part, SERVER_RULES[FEDAVG], name)
        if issubclass(part, ServerRule):
            return Algorithm(name, CLIENT_RULES[FEDAVG], part, name)
    for rule in (part.client, part.server) if isinstance(part, Algorithm) else (part,):
        is_rule = isinstance(rule, type) and issubclass(rule, ClientRule | ServerRule)
        if is_rule and "__dataclass_params__" not in rule.__dict__:
            raise ConfigError(
                f"{section}.name: put @dataclass(frozen=True) above class {rule.__name__} "
                f"({class_defined_at(rule)}): without it its fields are not hyper-parameters"
            )
    family = {"client": ClientRule, "server": ServerRule}.get(section)
    if not (
        isinstance(part, Algorithm)
        if family is None
        else isinstance(part, type) and issubclass(part, family)
    ):
        wanted = (
            "an Algorithm, a ClientRule or a ServerRule"
            if family is None
            else f"a {family.__name__}"
        )
        raise ConfigError(f"{section}.name: '{name}' is not {wanted}")
    return part


def catalogue(section: Literal["client", "server", "algorithm"]) -> Iterator[tuple[str, Any, str]]:
    """Yield name, class (or Algorithm) and distribution of every method for a section.

    What other distributions offer but cannot be used (it fails on import, or its name is taken) is
    logged and left out.

    Args:
        section: name of the section.
    """
    discover()
    registry: Mapping[str, Any] = {
        "client": CLIENT_RULES,
        "server": SERVER_RULES,
        "algorithm": ALGORITHMS,
    }[section]
    kind = {"client": ClientRule, "server": ServerRule}.get(section, Algorithm)
    for name, part in registry.items():
        yield name, part, "raysim"
    taken = {*CLIENT_RULES, *SERVER_RULES, *ALGORITHMS}
    for name, part, origin in entry_points.offered(
        entry_points.ALGORITHMS, f"{section}.name", taken
    ):
        if isinstance(part, kind) or (isinstance(part, type) and issubclass(part, kind)):
            yield name, part, origin


def hyperparameter_names(rule: type) -> list[str]:
    """Return the names of a rule's hyper-parameters.

    Args:
        rule: the rule.
    """
    return [f.name for f in dataclasses.fields(rule)]


def shared_keys(section: str, before: str, name: str) -> set[str]:
    """Return the keys that mean the same in two algorithms, client rules or server rules.

    These are the keys that both inherit from one class: every server's `weights`, but not beta2 of
    GradMA and of FedAdam.

    Args:
        section: client, server or algorithm.
        before: the name of one.
        name: the name of the other.
    """
    try:
        old, new = (_owners(find_rule(section, n)) for n in (before, name))
    except ConfigError:
        return set()
    return {"preset"} | {key for key, owners in new.items() if owners <= old.get(key, set())}


def _owners(part: Any) -> dict[str, set[type]]:
    """Return for each hyper-parameter the classes that define it."""
    owners: dict[str, set[type]] = {}
    for rule in [part.client, part.server] if isinstance(part, Algorithm) else [part]:
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
    except ConfigError:  # said by `resolve_rules`, with all the rest
        return {}


def build_part(section: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    """Build a dataclass from a section's parameters, checked against its annotations.

    Args:
        section: the section's key, which errors name, such as "client".
        cls: the dataclass; its fields are the keys that the section may have.
        parameters: the section's parameters, without `name`.

    Returns:
        An instance of `cls`; fields that are not given have their defaults.

    Raises:
        ConfigError: a parameter is unknown, or has a wrong value; names its key.
    """
    refuse_former_names(cls, section)
    refuse_misspelled_methods(cls, section)
    for key in parameters:
        if key not in hyperparameter_names(cls):
            raise ConfigError(
                f"{section}.{key}: unknown key of {cls.__name__}"
                f"{untyped([cls], key) or did_you_mean(key, hyperparameter_names(cls))}"
            )
    kinds = get_type_hints(cls)
    for key, value in parameters.items():
        if isinstance(value, bool) and bool not in annotation_types(
            kinds[key]
        ):  # pydantic would take true for 1
            raise ConfigError(
                f"{section}.{key}: {str(value).lower()} is neither a number nor a word"
            )
    try:
        return TypeAdapter(cls).validate_python(dict(parameters))
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, parameters, cls, f"{section}.")) from None
    except BaseException as error:
        reraise_stop(error)
        raise ConfigError(
            f"{section}.name: {cls.__name__} cannot be built: {in_a_line(error)}"
        ) from None


def _of_a_replaced_half(algorithm: Algorithm, config: Config, key: str) -> str:
    """Return the fix for a hyper-parameter whose rule `client` or `server` replaces, or ""."""
    halves = {"client": algorithm.client, "server": algorithm.server}
    for half, kept in (("client", "server"), ("server", "client")):
        section: Named | None = getattr(config, half)
        if section is not None and key in hyperparameter_names(halves[half]):
            return (
                f"belongs to the {half} rule of '{algorithm.name}', which {half}={section.name} "
                f"replaces; write algorithm=null {kept}={halves[kept].name} {half}={section.name}"
            )
    return ""


def resolve_rules(config: Config) -> tuple[ClientRule, ServerRule]:
    """Return the two rules of a configuration.

    The sections `client` and `server` replace the halves of the algorithm.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a name or a parameter is wrong, or the rules do not fit; names the key.
    """
    discover()
    parts = _rules_of_algorithm(config)
    for half in ("client", "server"):
        section: Named | None = getattr(config, half)
        if section is not None:
            parts[half] = build_part(half, find_rule(half, section.name), section.parameters)
        elif half not in parts:
            raise ConfigError(
                f"{half}: missing; give an algorithm (algorithm=fedavg), or both a client and a "
                "server rule"
            )
    for half, rule in parts.items():
        _check_properties(config.section_of_rule(half), rule)
    client, server = parts["client"], parts["server"]
    try:
        refuse_pair(client, server)
    except ConfigError as error:
        raise ConfigError(f"{error}{_pair_of_a_single_rule(config)}") from None
    return client, server


def _half(rule: type) -> str:
    """Return which half of a method a rule is."""
    return "client" if issubclass(rule, ClientRule) else "server"


def _pair_of_a_single_rule(config: Config) -> str:
    """Return the hint for `algorithm=FILE:RULE` whose other half is in the same file; else ""."""
    name = config.algorithm.name if config.algorithm else ""
    if ":" not in name or name.startswith(python_objects.PREFIX):
        return ""
    rule = load_object(name, "algorithm.name")
    module = sys.modules.get(rule.__module__) if isinstance(rule, type) else None
    if module is None:
        return ""
    where = name.rpartition(":")[0]
    for offered in _offered(module):
        part = getattr(module, offered)
        if isinstance(part, Algorithm):
            if rule in (part.client, part.server):
                return f"; or write algorithm={where}:{offered}, its own pair"
            continue
        pair = {_half(rule): (rule, name), _half(part): (part, f"{where}:{offered}")}
        with suppress(ConfigError, KeyError, TypeError):
            refuse_pair(pair["client"][0](), pair["server"][0]())
            return f"; or write client={pair['client'][1]} server={pair['server'][1]}"
    return ""


def _rules_of_algorithm(config: Config) -> dict[str, Any]:
    """Return the rules of the algorithm that no section replaces, by section."""
    if config.algorithm is None:
        return {}
    algorithm: Algorithm = find_rule("algorithm", config.algorithm.name)
    classes = {"client": algorithm.client, "server": algorithm.server}
    classes = {half: cls for half, cls in classes.items() if getattr(config, half) is None}
    parameters = config.algorithm.parameters
    preset = _preset_values(algorithm, parameters.pop("preset", None))
    _refuse_unknown_parameters(algorithm, classes.values(), parameters, config)
    values = {**algorithm.settings, **preset, **parameters}
    return {
        half: build_part(
            "algorithm", cls, {k: v for k, v in values.items() if k in hyperparameter_names(cls)}
        )
        for half, cls in classes.items()
    }


def _preset_values(algorithm: Algorithm, name: Any) -> Mapping[str, Any]:
    """Return the hyper-parameters of an algorithm's preset; none if no preset is named."""
    if name is None:
        return {}
    if not isinstance(name, str):
        raise ConfigError(f"algorithm.preset: expected the name of a preset, not {name!r}")
    if name not in algorithm.presets:
        known = did_you_mean(name, algorithm.presets) or f" ({algorithm.name} has no presets)"
        raise ConfigError(f"algorithm.preset: unknown preset '{name}'{known}")
    return algorithm.presets[name]


def _refuse_unknown_parameters(
    algorithm: Algorithm, classes: Collection[type], parameters: Iterable[str], config: Config
) -> None:
    """Refuse a parameter of the section `algorithm` that none of its rules in use has."""
    known = {name for cls in classes for name in hyperparameter_names(cls)}
    for key in parameters:
        if key not in known:
            raise ConfigError(
                f"algorithm.{key}: "
                + (
                    _of_a_replaced_half(algorithm, config, key)
                    or f"unknown key of '{algorithm.name}'"
                    f"{untyped(classes, key) or did_you_mean(key, known)}"
                )
            )


def resolve_group_rules(
    config: Config, client: ClientRule, server: ServerRule
) -> dict[str, ClientRule]:
    """Return the client rule of each group of a configuration.

    Args:
        config: the configuration of the run.
        client: the rule of clients of no group, and of groups without one of their own.
        server: the server rule.

    Raises:
        ConfigError: a name or a parameter is wrong, or a rule does not fit the server rule.
    """
    rules = {}
    for name, group in config.groups.items():
        rules[name] = client
        if group.client is not None:
            try:
                rule_class = find_rule("client", group.client.name)
                rules[name] = build_part("client", rule_class, group.client.parameters)
                _check_properties("client", rules[name])
            except ConfigError as error:
                raise ConfigError(f"groups.{name}.{error}") from None
            try:
                refuse_pair(rules[name], server)
            except ConfigError as error:
                raise ConfigError(f"groups.{name}.client: {error}") from None
    return rules


def _check_properties(section: str, rule: ClientRule | ServerRule) -> None:
    """Read everything that a rule's class tells of it, which may be properties of the user's.

    Raises:
        ConfigError: reading one raises any exception; names the rule and the property.
    """
    kind, family = (
        ("client", ClientRule) if isinstance(rule, ClientRule) else ("server", ServerRule)
    )
    for name in filter(lambda name: not name.startswith("_"), dir(family)):
        try:
            getattr(rule, name)
        except BaseException as error:
            reraise_stop(error)
            raise ConfigError(
                f"{section}.name: {name} of {kind} rule '{type(rule).name}' failed: "
                f"{in_a_line(error)}"
            ) from None


def refuse_pair(client: ClientRule, server: ServerRule) -> None:
    """Check that two rules fit.

    Args:
        client: number of the client.
        server: the server rule.

    Raises:
        ConfigError: one needs what the other does not give; names both.
    """
    for key, modes in server.uploads.items():
        for mode in (modes,) if isinstance(modes, str) else modes:
            if mode not in get_args(UploadMode):
                raise ConfigError(
                    f"server rule '{server.name}': uploads '{key}' in an unknown mode '{mode}'"
                    + (
                        f", which is now called '{UPLOAD_MODES[mode]}'"
                        if mode in UPLOAD_MODES
                        else did_you_mean(mode, get_args(UploadMode))
                    )
                )
    pair = f"client rule '{client.name}' with server rule '{server.name}'"
    if missing := [k for k in client.needs if k not in server.provides]:
        raise ConfigError(
            f"{pair}: the client needs {_quoted(missing)}, which the server does not broadcast; "
            f"pair it with a server rule that does"
        )
    if missing := [k for k in server.uploads if k not in client.sends]:
        raise ConfigError(
            f"{pair}: the server takes {_quoted(missing)}, which the client does not send; "
            f"pair it with a client rule that does"
        )
    if (why := why_not_declared(server.uploads, client.sends)) is not None:
        raise ConfigError(f"{pair}: {why}")


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"'{w}'" for w in words)
