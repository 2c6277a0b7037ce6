"""Validate a configuration before torch and the methods are imported, which takes seconds.

What a shipped method contributes to the validation stands in the shipped JSON Schema: the names of
its hyper-parameters, and its defaults of other sections. A method that does not ship with raysim is
left to the validation that follows, which repeats these checks and knows every method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raysim.config import explain, loading
from raysim.config.sections.base import name_of
from raysim.config.shipped_files import shipped_schema

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
    methods = ShippedMethods()
    raw = methods.read(source, overrides)
    if not any(key in raw for key in loading.KEYS_OF_FILES):  # the configuration of one run
        methods.validate(raw)


class ShippedMethods:
    """The shipped algorithms, as the shipped JSON Schema describes them."""

    def __init__(self) -> None:
        self._nodes: dict[str | None, Any] = {}
        for node in shipped_schema()["properties"]["algorithm"]["anyOf"]:
            name = node.get("properties", {}).get("name", {}).get("const")
            if name is not None:
                self._nodes[name] = node

    def read(
        self, source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what `loading.read_config` does for the shipped algorithms.

        Args:
            source: as for `loading.read_config`.
            overrides: as for `loading.read_config`.

        Raises:
            ConfigError: as of `loading.read_config`.
        """

        def defaults(name: str) -> Mapping[str, Any]:
            return self._nodes.get(name, {}).get(DEFAULTS_ELSEWHERE, {})

        return loading.read_config(source, overrides, _shared_keys, defaults)

    def validate(self, raw: Mapping[str, Any]) -> None:
        """Refuse a configuration with a mistake that needs no knowledge of its method.

        Args:
            raw: the configuration of one run, as `read` returns it.

        Raises:
            ConfigError: keys or values are wrong.
        """
        if raw.get("algorithm") is not None:
            node = self._nodes.get(name_of(raw["algorithm"]))
            if node is None:
                return
        explain.validate(raw)


def _shared_keys(section: str, before: str, name: str) -> set[str]:
    """Return what `explain.shared_keys` does; the keys of methods are not validated here."""
    if section in ("algorithm", "client", "server"):
        return set()
    return explain.shared_keys(section, before, name)
