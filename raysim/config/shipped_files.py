"""Files that raysim ships below configs/: configurations, published numbers, rules of studies."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = "configs/"
"""Beginning of the path of a shipped file, in a clone and from any other folder."""


@cache
def shipped_files(kind: str = "yaml") -> dict[str, Path]:
    """Return the shipped files of a kind by their paths below configs/, without the ending.

    Args:
        kind: ending of the files, without the dot, such as "yaml", "csv" or "py".
    """
    package = Path(__file__).resolve().parents[1]
    folders = (package / "configs", package.parent / "configs")
    return {
        str(p.relative_to(f).with_suffix("")): p
        for f in folders
        for p in sorted(f.rglob(f"*.{kind}"))
    }


def shipped_schema() -> dict[str, Any]:
    """Return the shipped JSON Schema of a configuration, configs/schema.json."""
    return json.loads(shipped_files("json")["schema"].read_text(encoding="utf-8"))
