"""Fields of configuration sections and rules as Markdown definition lists."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sphinx.pycode import ModuleAnalyzer

BOOLEAN = "`true` or `false`"


@dataclass(frozen=True)
class Field:
    """One key of a section: name, accepted values, default, and one sentence about it."""

    key: str
    values: str
    default: str
    text: str

    def markdown(self) -> str:
        """Return the entry of a definition list."""
        about = f": {self.values}" + (f"; default {self.default}" if self.default else "")
        text = f"\n\n  {self.text}" if self.text else ""
        return f"`{self.key}`\n{about}{text}\n"


def definition_list(fields: Iterable[Field]) -> str:
    """Return fields as one Markdown definition list."""
    return "\n".join(field.markdown() for field in fields)


def attribute_text(owner: type, name: str) -> str:
    """Return the docstring below a field, from the class that defines it; "" if it has none."""
    for cls in owner.__mro__:
        if name in inspect.get_annotations(cls):
            lines = _attribute_texts(cls.__module__).get((cls.__qualname__, name), [])
            return " ".join(" ".join(lines).split())
    return ""


@cache
def _attribute_texts(module: str) -> Mapping[tuple[str, str], list[str]]:
    return ModuleAnalyzer.for_module(module).find_attr_docs()


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


def default_text(value: Any) -> str:
    """Return a default as it is written in a configuration."""
    return "" if value == "" else f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parts(text: str) -> list[str]:
    return ["`true`", "`false`"] if text == BOOLEAN else [text]


def _alternatives(texts: Iterable[str]) -> str:
    *most, last = (part for text in texts for part in _parts(text))
    return f"{', '.join(most)} or {last}" if most else last
