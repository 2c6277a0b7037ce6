"""`raysim list algorithms NAME`: one method with its hyper-parameters and configurations."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from raysim.cli.base import print_table
from raysim.cli.terminal import say

if TYPE_CHECKING:
    from raysim.rules.contract import Algorithm
    from raysim.rules.rule import Rule


def method_page(name: str) -> dict[str, Any]:
    """Return the facts about a method: its paper, rules, hyper-parameters and configurations.

    Args:
        name: name of an algorithm, or path.py:NAME.

    Returns:
        The facts by the titles of a page.

    Raises:
        ConfigError: there is no such method.
    """
    from raysim.config.shipped_files import shipped_files
    from raysim.rules import contract
    from raysim.rules.methods import registry

    method = registry.find_rule("algorithm", registry.full_reference("algorithm", name))
    word = re.compile(rf"\b{re.escape(method.name)}\b")
    is_shipped = contract.ALGORITHMS.get(method.name) is method
    files = shipped_files() if is_shipped else {}
    return {
        "name": method.name,
        "paper": method.paper,
        "client rule": _headline(method.client),
        "server rule": _headline(method.server),
        "state": method.state,
        "traffic": method.traffic,
        "hyper-parameters": _hyper_parameters(method),
        "presets": _plain(method.presets),
        "defaults": _plain(method.defaults),
        "configurations": [key for key, path in files.items() if word.search(path.read_text())],
    }


def print_method(page: Mapping[str, Any], name: str) -> None:
    """Print a method.

    Args:
        page: what `method_page` returned.
        name: name of the method as the user gave it.
    """
    facts = Table(show_header=False, box=None)
    for key in ("name", "paper", "client rule", "server rule", "state", "traffic"):
        facts.add_row(key, page[key])
    for preset, values in page["presets"].items():
        facts.add_row(f"preset {preset}", json.dumps(values))
    if page["defaults"]:
        facts.add_row("sets, unless you do", json.dumps(page["defaults"]))
    facts.add_row("run it", f"raysim run quickstart algorithm={name}")
    if page["configurations"]:
        facts.add_row("configurations", ", ".join(page["configurations"]))
    print_table(facts)
    say()
    keys = Table("key", "of", "default", "what", box=None)
    for row in page["hyper-parameters"]:
        keys.add_row(*row.values())
    print_table(keys)


def first_paragraph(documented: Any) -> str:
    """Return the first paragraph of a docstring in one line; "" if there is none.

    Args:
        documented: a class or a function.
    """
    text = documented.__doc__ or ""
    if text.startswith(f"{documented.__name__}("):  # the one that dataclass makes
        return ""
    return " ".join(text.split("\n\n")[0].split())


def _headline(rule: type[Rule]) -> str:
    """Return the name of a rule, and its summary if it has one."""
    return ": ".join(filter(None, (rule.name, first_paragraph(rule))))


def _hyper_parameters(method: Algorithm) -> list[dict[str, str]]:
    """Return a row for each hyper-parameter of a method."""
    from raysim.rules.methods.field_docs import field_docs

    rows: dict[str, dict[str, str]] = {}
    for half, rule in (("client", method.client), ("server", method.server)):
        docs = field_docs(rule)
        for field in dataclasses.fields(rule):
            default = method.settings.get(field.name, field.default)
            if default is dataclasses.MISSING:
                default = ""
            text = default if isinstance(default, str) else json.dumps(default)
            rows[field.name] = {
                "key": f"algorithm.{field.name}",
                "of": "both" if field.name in rows else half,
                "default": text,
                "what": docs.get(field.name, ""),
            }
    return list(rows.values())


def _plain(value: Any) -> Any:
    """Return mappings, also nested ones, as dicts."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value
