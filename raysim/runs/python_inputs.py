"""Python objects in place of names: arrays and data sets, nets, rules.

`named_inputs` replaces each object by a section of the configuration that means it. Examples are
written to a file that is named after their content, so that the run can be resumed from anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raysim.config import python_objects
from raysim.config.loading import parse_overrides
from raysim.data import own
from raysim.errors import ConfigError
from raysim.rules import Algorithm, ClientRule, ServerRule
from raysim.rules.contract import ALGORITHMS, CLIENT_RULES, SERVER_RULES

SECTIONS_OF_RULES: dict[str, Mapping[str, Any]] = {
    "algorithm": ALGORITHMS,
    "client": CLIENT_RULES,
    "server": SERVER_RULES,
}
"""The shipped methods of the sections that name rules."""


def named_inputs(given: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, or overrides, without objects.

    Args:
        given: the mapping; texts "key=value" are parsed, and cannot hold objects.

    Raises:
        ConfigError: an object is neither data, a net nor a rule; the message names its key.
    """
    if not isinstance(given, Mapping):
        return parse_overrides(given)
    result = dict(given)
    for section in ("data", "model", *SECTIONS_OF_RULES):
        for key in (section, f"{section}.name"):
            if key in result and not _is_plain(result[key]):
                named = _named(section, result[key])
                result[key] = named if key == section else named["name"]
    return result


def named_source(source: str | Path | Mapping[str, Any]) -> str | Path | dict[str, Any]:
    """Return a configuration file unchanged, and a mapping without objects.

    Args:
        source: a configuration file, the name of a shipped one, or a mapping.
    """
    return named_inputs(source) if isinstance(source, Mapping) else source


def _is_plain(value: Any) -> bool:
    """Return whether a section is as in a file: a name, or a mapping of keys."""
    if isinstance(value, Mapping):
        name = value.get("name")
        return not own.is_content(value) and (name is None or isinstance(name, str))
    return value is None or isinstance(value, str)


def _named(section: str, value: Any) -> dict[str, Any]:
    """Return the section that means an object."""
    if section == "data":
        return own.stored(value)
    if isinstance(value, Mapping):
        return {**value, **_named(section, value["name"])}
    if section == "model":
        if not callable(value):
            raise ConfigError(
                f"model: a {type(value).__name__} is neither a torch.nn.Module nor a function that "
                "returns one"
            )
        return {"name": python_objects.reference(value)}
    is_instance = isinstance(value, ClientRule | ServerRule)
    cls = type(value) if is_instance else value
    is_class = isinstance(cls, type) and issubclass(cls, ClientRule | ServerRule)
    if not is_class and not isinstance(value, Algorithm):
        raise ConfigError(
            f"{section}: a {type(value).__name__} is not a rule; give a ClientRule or a "
            "ServerRule, an instance of one, or an Algorithm"
        )
    shipped = [name for name, known in SECTIONS_OF_RULES[section].items() if known is cls]
    name = shipped[0] if shipped else python_objects.reference(cls)
    fields = dataclasses.fields(value) if is_instance else ()
    return {"name": name, **{f.name: getattr(value, f.name) for f in fields}}
