"""`raysim list stages NAME`, and likewise for rules, nets, probes and sections: a page of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from raysim.cli.base import check_choice
from raysim.cli.completion import PLACES
from raysim.cli.pages.keys import (
    NO_DEFAULT,
    KeyRow,
    first_paragraph,
    key_rows,
    net_keys,
    print_page,
)
from raysim.errors import ConfigError

TAGS = ("name", "unit")
"""Keys that choose the kind of a section."""

LISTS = ("evaluate.probes", "local.upload")
"""Keys whose values are lists, so that the keys of an entry have no path of their own."""


def key_page(listing: str, name: str) -> list[KeyRow]:
    """Return the keys of one entry of a list.

    Args:
        listing: a key of `PLACES`.
        name: name of the entry, or path.py:NAME.

    Raises:
        ConfigError: there is no such entry.
    """
    prefix = _prefix(listing, name)
    if listing == "models":
        return [
            {"key": prefix + key.name, "default": key.default_text, "what": key.meaning}
            for key in net_keys(name)
        ]
    tags = [prefix + tag for tag in TAGS]
    return [row for row in key_rows(_part(listing, name), prefix) if row["key"] not in tags]


def print_keys(listing: str, name: str) -> None:
    """Print the keys of one entry of a list, and how a configuration names it.

    Args:
        listing: a key of `PLACES`.
        name: name of the entry, or path.py:NAME.
    """
    rows = key_page(listing, name)
    facts = {"name": name}
    if text := first_paragraph(_part(listing, name)):
        facts["what"] = text
    facts["set"] = _setting(listing, name, rows)
    print_page(facts, rows)


def _part(listing: str, name: str) -> Any:
    """Return the class of an entry of a list, or the function that builds a net."""
    from raysim.config import explain
    from raysim.config.references import load_object
    from raysim.models import build
    from raysim.prepare import configured_probes
    from raysim.rules.methods import registry
    from raysim.rules.tasks.shipped_tasks import TASKS
    from raysim.rules.upload_stages import STAGES

    if listing == "models":
        return build.find_factory(name)
    if listing in ("clients", "servers"):
        section = PLACES[listing]
        return registry.find_rule(section, registry.full_reference(section, name))
    registry.discover()  # stages are among the shipped methods
    if ":" in name:
        part = load_object(name, f"list {listing}")
        if not (isinstance(part, type) and dataclasses.is_dataclass(part)):
            raise ConfigError(f"list {listing}: '{name}' is not a class with keys, a dataclass")
        return part
    known: dict[str, Mapping[str, Any]] = {"tasks": TASKS, "stages": STAGES}
    if listing == "probes":
        parts = {probe_name: probe for probe_name, probe, _ in configured_probes.catalogue()}
    else:
        parts = known.get(listing) or explain.choices(PLACES[listing].rpartition(".")[2])
    check_choice(f"list {listing}", name, parts)
    return parts[name]


def _prefix(listing: str, name: str) -> str:
    """Return the path before the keys of an entry."""
    place = PLACES[listing]
    if place not in LISTS:
        return f"{place}."
    return f"{name}." if _is_a_key(listing, name) else ""


def _is_a_key(listing: str, name: str) -> bool:
    """Return whether the name of an entry is itself a key, such as `evaluate.forgetting`."""
    from raysim.prepare import configured_probes

    return listing == "probes" and name in configured_probes.BUILT_IN_PROBES


def _setting(listing: str, name: str, rows: list[KeyRow]) -> str:
    """Return how a command line names an entry, with the keys that must be set."""
    required = [row["key"].rpartition(".")[2] for row in rows if row["default"] == NO_DEFAULT]
    keys = [f"{key}: …" for key in required]
    if _is_a_key(listing, name):
        return f"{name}={{{', '.join(keys)}}}"
    tag = "unit" if listing == "privacy" else "name"
    entry = f"{{{', '.join([f'{tag}: {name}', *keys])}}}"
    if listing == "clients" and _is_for_groups(name):
        return f"groups.{name}={{share: 0.2, client: {entry}}}"
    place = PLACES[listing]
    return f"{place}=[{entry}]" if place in LISTS else f"{place}={entry}"


def _is_for_groups(name: str) -> bool:
    """Return whether a client rule belongs to no algorithm: only some clients have it."""
    from raysim.rules.contract import ALGORITHMS, CLIENT_RULES

    paired = {algorithm.client for algorithm in ALGORITHMS.values()}
    return name in CLIENT_RULES and CLIENT_RULES[name] not in paired
