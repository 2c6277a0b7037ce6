"""The reference of former names, from the tables by which they are refused."""

from __future__ import annotations

from collections.abc import Mapping

from raysim.config.renamed import TABLES


def pages() -> dict[str, str]:
    """Return the page `renamed`."""
    return {"renamed": "\n".join(_section(*table) for table in TABLES.items())}


def _section(title: str, names: Mapping[str, str]) -> str:
    rows = [f"| `{former}` | `{present}` |" for former, present in sorted(names.items())]
    return "\n".join([f"## {title}\n", "| former name | name now |", "|---|---|", *rows, ""])
