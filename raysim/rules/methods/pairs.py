"""The pair of rules that a configuration names, and which pairs fit."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.errors import ConfigError, errors_begin
from raysim.rules.contract import Algorithm, ClientRule, ServerRule, half_of, overridden
from raysim.rules.errors.user_code import class_defined_at
from raysim.rules.methods.misspelled_methods import public_names, untyped
from raysim.rules.methods.parameters import build_part
from raysim.rules.methods.registry import (
    RULES,
    discover,
    find_rule,
    hyperparameter_names,
    is_shipped,
)
from raysim.rules.uploads import UploadMode, modes_of, why_not_declared
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import failing_as


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
            parts[half] = _built(half, section)
        elif half not in parts:
            raise ConfigError(
                f"{half}: missing; give an algorithm (algorithm=fedavg), or both a client and a "
                "server rule"
            )
    for half, rule in parts.items():
        _check_properties(config.section_of_rule(half), rule)
    client, server = parts["client"], parts["server"]
    refuse_pair(client, server)
    return client, server


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
    rules = dict.fromkeys(config.groups, client)
    for name, group in config.groups.items():
        if group.client is not None:
            with errors_begin(f"groups.{name}."):
                rules[name] = _built("client", group.client)
                _check_properties("client", rules[name])
            with errors_begin(f"groups.{name}.client: "):
                refuse_pair(rules[name], server)
    return rules


def _built(half: str, section: Named) -> Any:
    """Return the rule that a section names."""
    return build_part(half, find_rule(half, section.name), section.parameters)


def refuse_pair(client: ClientRule, server: ServerRule) -> None:
    """Check that two rules fit.

    Args:
        client: the client rule.
        server: the server rule.

    Raises:
        ConfigError: one needs what the other does not give; names both.
    """
    _refuse_unknown_keys(client, server)
    pair = f"client rule '{client.name}' with server rule '{server.name}'"
    if missing := lacking(client.needs, server.provides):
        raise ConfigError(
            f"{pair}: the client needs {_quoted(missing)}, which the server does not broadcast"
            + _fix_of_pair(missing, server.provides, server, "the server provides")
        )
    if missing := lacking(server.uploads, client.sends):
        raise ConfigError(
            f"{pair}: the server takes {_quoted(missing)}, which the client does not send"
            + _fix_of_pair(missing, client.sends, client, "the client sends")
        )
    if (why := why_not_declared(server.uploads, client.sends)) is not None:
        raise ConfigError(f"{pair}: {why}")


def _refuse_unknown_keys(client: ClientRule, server: ServerRule) -> None:
    """Refuse keys that are no tuple or the engine's, and uploads in an unknown mode."""
    known = get_args(UploadMode)
    for rule, name in ((client, "needs"), (client, "sends"), (server, "provides")):
        keys = getattr(rule, name)
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise ConfigError(
                f"{half_of(rule)} rule '{rule.name}': {name} is {keys!r}; write a tuple of keys, "
                f'such as {name} = ("x",), with the comma'
            )
    for key in client.sends:
        if key == "buffers" or key.startswith(("metric/", "privacy/")):
            raise ConfigError(
                f"client rule '{client.name}': sends has '{key}', which is a key of the engine's; "
                "give the upload another name"
            )
    if not isinstance(server.uploads, Mapping):
        raise ConfigError(
            f"server rule '{server.name}': uploads is no mapping of keys to modes; write "
            'uploads = {"delta": "mean"}, or a property that returns such a mapping'
        )
    for key in server.uploads:
        for mode in lacking(modes_of(server.uploads, key), known):
            raise ConfigError(
                f"server rule '{server.name}': uploads '{key}' in an unknown mode '{mode}'"
                f"{did_you_mean(mode, known)}"
            )


def _fix_of_pair(
    missing: Iterable[str],
    keys: Iterable[str],
    rule: ClientRule | ServerRule,
    has: str,
) -> str:
    """Return the end of the message of two rules that do not fit.

    Args:
        missing: the keys that `rule` lacks.
        keys: the keys that it has.
        rule: the rule that lacks them; if it is a user's one, the keys may be misspelled.
        has: the words before its keys.
    """
    if is_shipped(rule):
        return (
            f"; pair it with a {half_of(rule)} rule that does (`raysim list pairs`), as "
            "client=NAME server=NAME or an Algorithm of both"
        )
    near = [word for word in missing if difflib.get_close_matches(word, keys, n=1)]
    hint = f"; did you mean {_quoted(near)}?" if near else ""
    if isinstance(rule, ServerRule) and overridden(rule, ["sent_to"]):
        hint = "; `needs` names keys of `provides`, also where `sent_to` sends others to a client"
    return f"; {has} {_quoted(keys)}{hint} ({class_defined_at(type(rule))})"


def _rules_of_algorithm(config: Config) -> dict[str, Any]:
    """Return the rules of the algorithm that no section replaces, by section."""
    if config.algorithm is None:
        return {}
    algorithm: Algorithm = find_rule("algorithm", config.algorithm.name)
    classes = {"client": algorithm.client, "server": algorithm.server}
    classes = {half: cls for half, cls in classes.items() if getattr(config, half) is None}
    parameters = config.algorithm.parameters
    _refuse_unknown_values(algorithm)
    preset = _preset_values(algorithm, parameters.pop("preset", None))
    _refuse_unknown_parameters(algorithm, classes.values(), parameters)
    values = {**algorithm.settings, **preset, **parameters}
    return {
        half: build_part(
            "algorithm", cls, {k: v for k, v in values.items() if k in hyperparameter_names(cls)}
        )
        for half, cls in classes.items()
    }


def _refuse_unknown_values(algorithm: Algorithm) -> None:
    """Refuse settings and presets of an algorithm that none of its rules has."""
    rules = algorithm.client, algorithm.server
    known = {*itertools.chain(*map(hyperparameter_names, rules))}
    places = {f"presets['{name}']": values for name, values in algorithm.presets.items()}
    for place, values in {"settings": algorithm.settings, **places}.items():
        for key in lacking(values, known):
            raise ConfigError(
                f"algorithm.name: {place} of Algorithm '{algorithm.name}' has '{key}', which is no "
                f"hyper-parameter of its rules{did_you_mean(key, known)}"
            )


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
    algorithm: Algorithm, classes: Collection[type], parameters: Iterable[str]
) -> None:
    """Refuse a parameter of the section `algorithm` that none of its rules in use has."""
    known = {*itertools.chain(*map(hyperparameter_names, classes))}
    whole = len(classes) == 2
    without = "" if whole else ", of which `client` or `server` replaces a rule"
    for key in lacking(parameters, known):
        hint = untyped(classes, key) or did_you_mean(key, known)
        raise ConfigError(f"algorithm.{key}: unknown key of '{algorithm.name}'{without}{hint}")
    if not whole:
        return
    of_client = hyperparameter_names(algorithm.client)
    for key in parameters:
        if key in hyperparameter_names(ServerRule) and key in of_client:
            raise ConfigError(
                f"algorithm.{key}: every server rule has this key, and so has "
                f"{algorithm.client.__name__}; give that of the client rule another name"
            )


def _check_properties(section: str, rule: ClientRule | ServerRule) -> None:
    """Read all attributes of a rule that the contract has; some may be properties of a user.

    Raises:
        ConfigError: reading one raises any exception; names the rule and the property.
    """
    half = half_of(rule)
    for name in public_names(dir(RULES[half])):
        failed = f"{section}.name: {name} of {half} rule '{type(rule).name}' failed"
        with failing_as(lambda why, failed=failed: ConfigError(f"{failed}: {why}")):
            getattr(rule, name)


def _quoted(words: Iterable[str]) -> str:
    return ", ".join(f"'{w}'" for w in words)
