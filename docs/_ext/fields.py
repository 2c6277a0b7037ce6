"""Fields of configuration sections and rules as Markdown definition lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from pydantic import BaseModel

from raysim.cli.pages.keys import Key

BOOLEAN = "`true` or `false`"


def entry(key: Key, values: str, prefix: str = "") -> str:
    """Return the entry of a key in a Markdown definition list.

    Args:
        key: the key.
        values: what values it accepts.
        prefix: path before its name.
    """
    default = key.default
    if isinstance(default, BaseModel):  # of a section its name, and nothing if it has none
        default = getattr(default, "name", "")
    about = values if default in (MISSING, "") else f"{values}; default `{_plain(default)}`"
    text = f"\n\n  {key.meaning}" if key.meaning else ""
    return f"`{prefix}{key.name}`\n: {about}{text}\n"


def values_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return what values a JSON schema allows, in words."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return "a section" if target.get("type") == "object" else values_text(target, definitions)
    if "const" in schema:
        return f"`{_plain(schema['const'])}`"
    if "enum" in schema:
        return _alternatives([f"`{_plain(value)}`" for value in schema["enum"]])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _alternatives(dict.fromkeys(values_text(one, definitions) for one in choices))
    kind: str = schema.get("type", "any value")
    if kind == "array":
        first = schema.get("prefixItems", [{}])[0].get("type")
        return {"integer": "[first round, value]", "number": "two numbers"}.get(first, "a list")
    name: str = {
        "integer": "an integer",
        "number": "a number",
        "string": "a string",
        "boolean": BOOLEAN,
        "null": "`null`",
        "object": "a mapping",
    }.get(kind, kind)
    if "minimum" in schema and "maximum" in schema:
        return f"{name} from {_number(schema['minimum'])} to {_number(schema['maximum'])}"
    bounds = [
        f"{sign} {_number(schema[bound])}"
        for bound, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if bound in schema
    ]
    return " ".join([name, ", ".join(bounds)]).strip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parts(text: str) -> list[str]:
    return ["`true`", "`false`"] if text == BOOLEAN else [text]


def _alternatives(texts: Iterable[str]) -> str:
    *most, last = (part for text in texts for part in _parts(text))
    return f"{', '.join(most)} or {last}" if most else last
