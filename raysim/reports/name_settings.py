"""Settings that reports show beside the name of a method, or of another section: fedprox(mu=0.1).

A setting that only some methods have gets no column, because it mostly follows from the method.
One that is not the method's default does not: it stands beside the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from raysim.config.sections.base import with_settings
from raysim.config.shipped_files import shipped_schema
from raysim.reports.published import same_value
from raysim.tracking.recorder import flatten_parameters

Settings = Mapping[tuple[str, str], str]
"""Settings beside a name, such as "(mu=0.1)", by the parameter of the name and the name."""


def settings_of_names(
    params: pd.DataFrame, differing: Iterable[str], keys: Iterable[str], columns: Sequence[str]
) -> Settings:
    """Return the settings to show beside each name.

    These are the settings that differ between the runs, have no column, and are not the defaults of
    the name. Several values of one name are all shown: (mu=0.1|0.01).

    Args:
        params: Parameters, a row for each run, with "null" where a run has none.
        differing: Parameters that differ between the runs.
        keys: Parameters that are shown, of which those of names count.
        columns: All parameters that have a column, an axis or a panel.
    """
    hidden = [key for key in differing if key not in columns and not key.endswith(".name")]
    schema = shipped_schema()
    texts: dict[tuple[str, str], str] = {}
    for key in keys:
        section, _, last = key.rpartition(".")
        if last != "name" or key not in params:
            continue
        # A rule with a column for its own name has its settings there.
        halves = [half for half in ("client", "server") if f"{half}.name" not in columns]
        prefixes = halves if section == "algorithm" else [section]
        for name, runs in params.groupby(params[key]):
            defaults = _defaults(schema, section, str(name))
            settings: dict[str, str] = {}
            for prefix in prefixes:
                settings |= _settings(runs, hidden, f"{prefix}.", defaults)
            texts[key, str(name)] = with_settings("", settings)
    return texts


def _settings(
    runs: pd.DataFrame, hidden: Iterable[str], prefix: str, defaults: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the settings below a prefix that are not the defaults of the runs' one method."""
    settings = {}
    for key in hidden:
        setting = key.removeprefix(prefix)
        if setting == key or (defaults is not None and setting not in defaults):
            continue
        own = f"own_defaults.{key}"
        recorded = set(runs[own]) if own in runs else set()
        if defaults is not None:
            default = defaults[setting]
        elif len(recorded) == 1:
            default = str(recorded.pop())
        else:  # a run is of an older version, or the file has changed
            default = ""
        values = [value for value in dict.fromkeys(runs[key]) if value != "null"]
        if any(not same_value(value, default) for value in values):
            settings[setting] = "|".join(values)
    return settings


def _defaults(schema: Mapping[str, Any], section: str, name: str) -> dict[str, str] | None:
    """Return the defaults of a shipped method, or of another section, as text.

    A setting without a default has "". Returns None for what does not ship with raysim.
    """
    if section.startswith("groups."):
        section = section.split(".", 2)[2]  # without the name of the group
    node = schema
    for part in section.split("."):
        node = _referred(schema, node).get("properties", {}).get(part, {})
    for kind in _referred(schema, node).get("anyOf", []):
        properties = _referred(schema, kind).get("properties", {})
        of_name = properties.get("name", {})
        if name in (of_name.get("const"), of_name.get("default")):
            defaults = {key: field.get("default", "") for key, field in properties.items()}
            return flatten_parameters(defaults)
    return None


def _referred(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a JSON Schema that a node refers to, or the node itself."""
    reference = node.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else node
