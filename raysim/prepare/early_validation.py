"""Validate a configuration before torch and the methods are imported, which takes seconds.

What a shipped method contributes to the validation stands in the shipped JSON Schema: the names of
its hyper-parameters, and its defaults of other sections. A method that does not ship with raysim is
left to the validation that follows, which repeats these checks and knows every method.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raysim.config import explain, loading
from raysim.config.schema import Config
from raysim.config.sections.base import named
from raysim.config.shipped_files import shipped_files

DEFAULTS_ELSEWHERE = "x-defaults-of-other-sections"
"""Key of the JSON Schema for an algorithm's defaults of other sections."""


def validate_early(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()
) -> None:
    """Refuse the configuration of one run if it has a mistake that is visible without importing.

    Args:
        source: path of a YAML file, name of a shipped one, or the configuration as a mapping.
        overrides: values that replace those of `source`, as `key=value` texts or as a mapping.

    Raises:
        ConfigError: a file cannot be read, or keys or values are wrong; the message is that of the
            whole validation.
    """
    methods = _shipped_methods()

    def defaults(name: str) -> Mapping[str, Any]:
        return methods.get(name, {}).get(DEFAULTS_ELSEWHERE, {})

    raw = loading.read_config(source, overrides, _shared_keys, defaults)
    if any(key in raw for key in loading.KEYS_OF_FILES):
        return  # not the configuration of one run
    algorithm = named(raw.get("algorithm"))
    if algorithm is not None:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
        if name not in methods:
            return
        if any(key in methods[name]["properties"] for key in raw.keys() - Config.model_fields):
            return  # a hyper-parameter that lacks its section
    explain.validate(raw)


def _shipped_methods() -> dict[str, Any]:
    """Return the node of the JSON Schema of each shipped algorithm, by name."""
    schema = json.loads(shipped_files("json")["schema"].read_text(encoding="utf-8"))
    methods = {}
    for node in schema["properties"]["algorithm"]["anyOf"]:
        name = node.get("properties", {}).get("name", {}).get("const")
        if name is not None:
            methods[name] = node
    return methods


def _shared_keys(section: str, before: str, name: str) -> set[str]:
    """Return what `explain.shared_keys` does; the keys of methods are not validated here."""
    if section in ("algorithm", "client", "server"):
        return set()
    return explain.shared_keys(section, before, name)
