"""Fields of configuration sections and rules as Markdown definition lists."""

from __future__ import annotations

import json
from dataclasses import MISSING
from typing import Any

from pydantic import BaseModel

from raysim.cli.pages.keys import Key


def entry(key: Key, values: str, prefix: str = "") -> str:
    """Return the entry of a key in a Markdown definition list.

    Args:
        key: the key.
        values: the values that it accepts, in Markdown.
        prefix: path before its name.
    """
    default = key.default
    if isinstance(default, BaseModel):  # of a section its name, and nothing if it has none
        default = getattr(default, "name", "")
    about = values if default in (MISSING, "") else f"{values}; default `{_plain(default)}`"
    text = f"\n\n  {key.meaning}" if key.meaning else ""
    return f"`{prefix}{key.name}`\n: {about}{text}\n"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
