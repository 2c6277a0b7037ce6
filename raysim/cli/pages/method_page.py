"""`raysim list algorithms NAME`: one method with its hyper-parameters and configurations."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raysim.cli.pages.keys import first_paragraph, key_rows, plain, print_page
from raysim.config import entry_points
from raysim.config.shipped_files import shipped_files, shipped_schema

if TYPE_CHECKING:
    from raysim.rules.contract import Algorithm
    from raysim.rules.rule import Rule


IN_SCHEMA = "x-methods"
"""Key of the shipped JSON Schema for the facts about the shipped methods, which `shipped_pages`
returns: to find them takes seconds."""


def method_page(name: str) -> dict[str, Any]:
    """Return the facts about a method: its paper, rules, hyper-parameters and configurations.

    Args:
        name: name of an algorithm, or path.py:NAME.

    Returns:
        The facts by the titles of a page.

    Raises:
        ConfigError: there is no such method.
    """
    shipped = shipped_schema()[IN_SCHEMA].get(name)
    if shipped is None or entry_points.find_reference(entry_points.ALGORITHMS, name) is not None:
        return {**_facts(name), "configurations": []}
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = [key for key, path in shipped_files().items() if word.search(path.read_text())]
    return {**shipped, "configurations": files}


def shipped_pages() -> dict[str, dict[str, Any]]:
    """Return the facts about each method that ships with raysim, by its name.

    The list of configurations is left out: other files determine it.
    """
    from raysim.rules.methods import registry

    catalogue = registry.catalogue("algorithm")
    return {name: _facts(name) for name, _, origin in catalogue if origin == "raysim"}


def _facts(name: str) -> dict[str, Any]:
    """Return the facts about a method that its code states."""
    from raysim.rules.methods import registry

    method = registry.find_rule("algorithm", registry.full_reference("algorithm", name))
    return {
        "name": method.name,
        "paper": method.paper,
        "client rule": _headline(method.client),
        "server rule": _headline(method.server),
        "state": method.state,
        "traffic": method.traffic,
        "hyper-parameters": _hyper_parameters(method),
        "presets": plain(method.presets),
        "defaults": plain(method.defaults),
        "command": command(method),
    }


def command(method: Algorithm) -> str:
    """Return the command at the end of the docstring of a method's file; "" if there is none.

    Args:
        method: a method.
    """
    module = sys.modules.get(method.module)
    found = re.search(r"^Run: (.+)", (module and module.__doc__) or "", re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def print_method(page: Mapping[str, Any], name: str) -> None:
    """Print a method.

    Args:
        page: what `method_page` returned.
        name: name of the method as the user gave it.
    """
    facts = {
        key: page[key]
        for key in ("name", "paper", "client rule", "server rule", "state", "traffic")
    }
    for preset, values in page["presets"].items():
        facts[f"preset {preset}"] = json.dumps(values)
    if page["defaults"]:
        facts["sets, unless you do"] = json.dumps(page["defaults"])
    facts["run it"] = page["command"] or f"raysim run quickstart algorithm={name}"
    if page["configurations"]:
        facts["configurations"] = ", ".join(page["configurations"])
    print_page(facts, page["hyper-parameters"])


def _headline(rule: type[Rule]) -> str:
    """Return the name of a rule, and its summary if it has one."""
    return ": ".join(filter(None, (rule.name, first_paragraph(rule))))


def _hyper_parameters(method: Algorithm) -> list[dict[str, str]]:
    """Return a row for each hyper-parameter of a method."""
    rows: dict[str, dict[str, str]] = {}
    for half, rule in (("client", method.client), ("server", method.server)):
        for row in key_rows(rule, "algorithm.", method.settings):
            name = row["key"]
            rows[name] = {"key": name, "of": "both" if name in rows else half, **row}
    return list(rows.values())
