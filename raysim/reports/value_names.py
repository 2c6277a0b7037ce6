"""Readable names in reports: of rules and nets that users give, of files, and a user's own names.

A rule from a file is a parameter such as "/home/me/study/my.py:MyClient", a net from Python is one
such as "python:Net-3fa2c1d45e6f", and the content of a file is a digest. Tables and legends show
"MyClient", "Net" and "version 3fa2c1d4", the digest's first letters. A list of upload stages is
shown as "topk(share=0.1)", an empty list as "none". `--where` finds these names too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from raysim.config.objects.python_objects import PREFIX, label_of
from raysim.config.sections.base import with_settings
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean

Names = Mapping[str, str]
"""Names to show, by the value, KEY=VALUE, parameter or header that they replace."""

NO_NAMES: Names = {}
"""No names: everything is shown as it is."""

_FILE = re.compile(
    r"(?=/|[^:]*\.py(:|$))(?P<folder>(?:[^:]*/)?)(?P<file>[^/:]+)(?P<object>(?::\w+)?)"
)
"""An absolute path, or one of Python code; also with an object of the file."""

_STAGES = re.compile(r'\[\{"name": .*\}\]')
"""A list of sections with names, such as that of the stages of uploads."""

DIGEST_LETTERS = 8
"""Number of first letters of the digest of a file that name its version."""

_DIGEST = re.compile("[0-9a-f]{64}")


def readable(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the parameters of rows with readable names of files; equal names mean equal values.

    Args:
        rows: Values by parameter, of each row.
    """
    table: Any = pd.DataFrame(list(rows), dtype=object)
    for key in table:
        table[key] = table[key].map(readable_values(table[key].dropna()))
    return [row.dropna().to_dict() for _, row in table.iterrows()]


def readable_values(values: Iterable[str]) -> dict[str, str]:
    """Return the readable name of each value of a parameter, by the value.

    Args:
        values: All values of the parameter.
    """
    names: dict[str, str] = {}
    forms = {value: _short_forms(value) for value in values}
    shared = Counter(itertools.chain.from_iterable(map(set, forms.values())))
    for value in forms:
        # The shortest form that no other value may be taken for.
        names[value] = next((form for form in forms[value] if shared[form] == 1), value)
    return names


def _short_forms(value: str) -> list[str]:
    """Return the forms of a path, an object of Python, a digest or a list, the shortest first."""
    if value == "[]":
        return ["none", value]
    if _STAGES.fullmatch(value):
        sections = json.loads(value)
        if all(isinstance(part, dict) and isinstance(part.get("name"), str) for part in sections):
            return [" + ".join(map(_stage, sections)), value]
    if _DIGEST.fullmatch(value):
        # A number would belong to another version as soon as one is added.
        return [f"version {value[:DIGEST_LETTERS]}", value]
    if value.startswith(PREFIX):
        return [label_of(value), value]
    match = _FILE.fullmatch(value)
    if match is None:
        return [value]
    parts = match["folder"].split("/")[:-1]
    name = f"{match['file']}{match['object']}"
    tails = ["/".join([*parts[i:], name]) for i in range(len(parts), -1, -1)]
    first = match["object"].removeprefix(":") or match["file"].removesuffix(".py")
    return [first, *tails]


def _stage(section: dict[str, Any]) -> str:
    """Return a section with a name as name(key=value), without the keys that are null."""
    settings = {key: value for key, value in section.items() if value is not None}
    name = settings.pop("name")
    return with_settings(_short_forms(name)[0], settings)


def named(text: str, names: Names) -> str:
    """Return the name of a value, or of several values with commas the names of each.

    Args:
        text: The value or values.
        names: The names.
    """
    return names.get(text) or ", ".join(names.get(part, part) for part in text.split(", "))


def names_given(given: str | Sequence[str] | Names, things: Sequence[str]) -> Names:
    """Return the names that a user gives.

    Args:
        given: Names by what they replace, or texts VALUE=NAME. Of a text with several "=" the
            longest part that the table has is the value.
        things: What the table has: values, KEY=VALUE, parameters and headers. The " %" of a header
            may be left out.

    Raises:
        ConfigError: A text is not VALUE=NAME, or the table does not have the value.
    """
    known = {thing.replace(" %", ""): thing for thing in things}
    known |= {thing: thing for thing in things}
    if not isinstance(given, Mapping):
        texts = [given] if isinstance(given, str) else given
        given = dict(_split(text, known) for text in texts)
    for thing in given:
        if thing not in known:
            hint = did_you_mean(thing, things) or f"; it has {', '.join(things)}"
            raise ConfigError(
                f"label (--label): there is no value, parameter or header '{thing}'{hint}"
            )
    return {known[thing]: name for thing, name in given.items()}


def _split(text: str, things: Container[str]) -> tuple[str, str]:
    """Return the two parts of VALUE=NAME."""
    parts = text.split("=")
    if len(parts) < 2:
        raise ConfigError(f"label (--label): '{text}' is not VALUE=NAME")
    ends = [i for i in range(1, len(parts)) if "=".join(parts[:i]) in things]
    end = max(ends, default=1)
    return "=".join(parts[:end]), "=".join(parts[end:])
