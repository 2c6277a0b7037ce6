"""Keys of a part of a configuration: of a section, of a rule or probe, or of a net.

Sections are classes of pydantic; rules, probes, tasks and stages are dataclasses. Both describe a
key in the docstring below its field. The keys of a net are the parameters of a function.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from raysim.cli.base import facts_table, print_table, rows_table
from raysim.cli.terminal import say
from raysim.config.sections.base import OWN_CODE

KeyRow = dict[str, str]
"""Name, default, values and meaning of a key."""

NO_DEFAULT = "(required)"
"""The default of a key that must be set."""


@dataclass(frozen=True)
class Key:
    """One key of a part of a configuration."""

    name: str
    default: Any
    """Its default; `MISSING` if it must be set."""
    meaning: str
    """One sentence or more, in one line."""

    @property
    def default_text(self) -> str:
        """The default as it is written in a configuration."""
        if self.default is MISSING:
            return NO_DEFAULT
        if isinstance(self.default, str):
            return self.default
        return json.dumps(to_jsonable_python(self.default, fallback=str))


def keys_of(part: type[Any], settings: Mapping[str, Any] | None = None) -> list[Key]:
    """Return the keys of a section, or of a dataclass such as a rule.

    Args:
        part: the class.
        settings: other defaults of a dataclass, such as those of a method; None: none.
    """
    meanings = _docstrings_of_fields(part)
    if issubclass(part, BaseModel):
        return [
            Key(field.alias or name, _section_default(field), meanings.get(name, ""))
            for name, field in part.model_fields.items()
        ]
    # A server rule that counts clients equally refuses weights, one without steps lr.
    refused = {
        "weights": getattr(part, "counts_equally", False),
        "lr": not getattr(part, "steps_by_lr", True),
    }
    return [
        Key(
            field.name,
            (settings or {}).get(field.name, _field_default(field)),
            meanings.get(field.name, ""),
        )
        for field in dataclasses.fields(part)
        if not refused.get(field.name)
    ]


def values_of_keys(part: type[Any]) -> dict[str, str]:
    """Return the values that each key of a section or of a dataclass may have.

    Args:
        part: the class.

    Returns:
        Such as "number > 0" or "exact | sum", by key; {} if its types are not those of a file.
    """
    try:
        schema = TypeAdapter(part).json_schema()
    except (PydanticUserError, NameError, TypeError):  # users' classes have any types
        return {}
    schema = schema.get("$defs", {}).get(part.__name__, schema)
    return {key: _values(kind) for key, kind in schema.get("properties", {}).items()}


def key_rows(
    part: type[Any], prefix: str, settings: Mapping[str, Any] | None = None
) -> list[KeyRow]:
    """Return the keys of a section or of a dataclass as texts.

    Args:
        part: the class.
        prefix: path before the names of its keys.
        settings: other defaults of a dataclass, as for `keys_of`.
    """
    values = values_of_keys(part)
    return [
        {
            "key": prefix + key.name,
            "default": key.default_text,
            "values": values.get(key.name, ""),
            "what": key.meaning,
        }
        for key in keys_of(part, settings)
    ]


BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
"""Signs of the bounds of a number, by their names in a JSON Schema."""


def _values(kind: Mapping[str, Any]) -> str:
    """Return the values that a JSON Schema allows."""
    if "$ref" in kind:
        return "section"
    if kinds := kind.get("anyOf") or kind.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_values, kinds)))
    if kind == OWN_CODE:
        return "path.py:NAME"
    if "enum" in kind:
        return " | ".join(map(str, kind["enum"]))
    if "const" in kind:
        return str(kind["const"])
    if "prefixItems" in kind:
        return f"[{', '.join(map(_values, kind['prefixItems']))}]"
    if kind.get("type") == "array":
        return f"[{_values(kind.get('items', {}))}, ...]"
    if kind.get("type") == "boolean":
        return "true | false"
    bounds = [f"{sign} {kind[name]}" for name, sign in BOUNDS.items() if name in kind]
    return " ".join([kind.get("type", "any value"), ", ".join(bounds)]).strip()


def net_keys(name: str) -> list[Key]:
    """Return the keys of a net, with those that every net has.

    Args:
        name: name of a shipped or installed net, or path.py:NAME.

    Raises:
        ConfigError: there is no such net.
    """
    from raysim.models import build

    parameters = build.net_parameters(name)
    meanings = build.net_parameter_docs(name)
    keys = []
    for key, parameter in parameters.items():
        is_required = parameter.default is inspect.Parameter.empty
        default = MISSING if is_required else parameter.default
        keys.append(Key(key, default, meanings.get(key, "")))
    for key, (_, meaning) in build.COMMON_KEYS.items():
        if key not in parameters:
            keys.append(Key(key, None, meaning))
    return keys


def first_paragraph(documented: Any) -> str:
    """Return the first paragraph of a docstring in one line; "" if there is none.

    Args:
        documented: a class or a function.
    """
    text = documented.__doc__ or ""
    if text.startswith(f"{documented.__name__}("):  # the one that dataclass makes
        return ""
    return " ".join(text.split("\n\n")[0].split())


def plain(value: Any) -> Any:
    """Return mappings, also nested ones, as dicts.

    Args:
        value: a mapping; anything else is returned as it is.
    """
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def print_page(facts: Mapping[str, str], rows: list[dict[str, str]]) -> None:
    """Print facts about a part of a configuration, and a table of its keys if it has any.

    Args:
        facts: texts by title.
        rows: texts of each key by column.
    """
    print_table(facts_table(facts))
    if rows:
        say()
        print_table(rows_table(rows))


def _section_default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return MISSING if default is PydanticUndefined else default


def _field_default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _docstrings_of_fields(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of those that it inherits from."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        docs |= _docstrings_of_own_fields(part)
    return docs


@functools.cache  # hundreds of rules and sections inherit from a few
def _docstrings_of_own_fields(cls: type) -> dict[str, str]:
    """Return the docstring below each field that a class itself has; {} without its source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return {}
    docs: dict[str, str] = {}
    for field, below in pairwise(tree.body if isinstance(tree, ast.ClassDef) else ()):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
