"""YAML with limits: on its size, on its nesting, and on what its aliases come to.

A configuration is a page of text. What is far larger, or would become far larger when it is read,
is a mistake or an attack, and is refused before it is built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic_core import PydanticSerializationError, to_jsonable_python
from yaml.constructor import ConstructorError

from raysim.errors import shortened

MAX_CHARACTERS = 500_000
"""Characters of one text, with every alias replaced by what it stands for."""
MAX_NESTING_DEPTH = 32
"""Levels of lists and mappings inside one another."""
MAX_DIGITS = 500
"""Characters of one number. Python itself refuses more than 4,300 digits, also of what is computed
from a number."""

OCTAL = re.compile(r"[-+]?0[0-7_]+$")
"""A whole number that begins with 0; YAML 1.1 reads its digits to base 8, and 1:30 to base 60."""

if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
    _SafeDumper = yaml.SafeDumper
else:
    _SafeLoader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    _SafeDumper = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


class _Loader(_SafeLoader):
    """Loader of plain values; it refuses repeated keys and scalars that contradict their tag."""

    def __init__(self, text: str):
        super().__init__(text)
        self._checked: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if node not in self._checked:  # before keys that are merged (<<) come in
            self._checked.add(node)
            self._refuse_repeated_keys(node)
        super().flatten_mapping(node)

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        """Compare keys by their values: `yes` and `true` are one key."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict | set):
                raise ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"'{key}' is given twice", key_node.start_mark)
            seen.add(key)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value):,} characters; at most {MAX_DIGITS} are read"
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            problem = f"'{node.value}' is no {kind}"
            raise ConstructorError(None, None, problem, node.start_mark) from None
        if kind in ("int", "float") and (":" in node.value or OCTAL.match(node.value)):
            problem = f"'{node.value}' is {value} in YAML; write that, or quotes around a word"
            raise ConstructorError(None, None, problem, node.start_mark)
        return value


# A date is a word, such as the name of an experiment.
_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if not entry[0].endswith(":timestamp")]
    for first, entries in _SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(_SafeDumper):
    """Writer of plain values, which `_Loader` reads back."""


# 1e-3 is a number, as it is in Python; the text has quotes.
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_yaml(text: str) -> Any:
    """Return the value that a YAML text stands for.

    Args:
        text: one document of plain values. 1e-3 is a number, 2024-01-02 a word.

    Raises:
        yaml.YAMLError: the text is not YAML or not valid UTF-8, a key is given twice, or a limit
            is passed.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise yaml.YAMLError("it is not valid UTF-8") from None
    _check_limits(text)
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> Any:
    """Return the value that a YAML file stands for.

    Args:
        path: a file with one document of plain values.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read as text.
        yaml.YAMLError: as in `load_yaml`.
    """
    with path.open(encoding="utf-8") as file:
        return deepcopy(_document(file.read(MAX_CHARACTERS + 1)))


# A sweep reads its file anew for each of its trials.
_document = lru_cache(maxsize=4)(load_yaml)


def plain(value: Any) -> Any:
    """Return a value as YAML holds it: numbers, texts, lists, and mappings with such keys.

    Tuples and sets become lists, dataclasses mappings, paths texts, and NumPy scalars numbers.

    Args:
        value: a value of a configuration.

    Raises:
        ValueError: YAML cannot hold the value.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, set | frozenset):
        # A set of texts has another order in each process; short ones first leaves 9 before 10.
        value = sorted(map(plain, value), key=lambda part: (len(repr(part)), repr(part)))
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | None):
                raise ValueError(f"the key {key!r} of a mapping is neither a word nor a number")
        return {plain(key): plain(part) for key, part in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        return to_jsonable_python(value)
    except PydanticSerializationError:
        raise ValueError(f"a {type(value).__name__} is no value of a configuration") from None


def are_same(first: Any, second: Any) -> bool:
    """Return whether two values are equal; so are two that are not a number.

    Args:
        first: a value that was written.
        second: the value that was read.
    """
    return first == second or repr(first) == repr(second)


def dump_yaml(value: Any) -> str:
    """Return the YAML text from which `load_yaml` reads a value.

    Args:
        value: a value as `plain` returns it.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def check_value(value: Any) -> None:
    """Check a value that is given from Python against the limits of a text.

    Args:
        value: a number, text, or nested lists and mappings of these.

    Raises:
        yaml.YAMLError: a number is too long, or lists and mappings are too deep or hold too much.
    """
    waiting = [(value, 0)]
    count = 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
            raise yaml.YAMLError(f"a number of more than {MAX_DIGITS} digits")
        if isinstance(item, Mapping | list | tuple):
            if depth == MAX_NESTING_DEPTH:
                problem = f"more than {MAX_NESTING_DEPTH} lists and mappings inside one another"
                raise yaml.YAMLError(problem)
            parts = item.values() if isinstance(item, Mapping) else item
            waiting += [(part, depth + 1) for part in parts]
        # What waits counts too: lists that share their parts would fill the memory first.
        if count + len(waiting) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} values")


def explain_yaml_error(error: yaml.YAMLError) -> str:
    """Return a parser's message as one short line.

    Args:
        error: as `load_yaml` raises it.
    """
    text = shortened(" ".join(str(error).replace('in "<unicode string>", ', "at ").split()))
    if re.search(r"scanning an? (alias|anchor|tag)|undefined alias|constructor for the tag", text):
        text += "; text that begins with *, & or ! needs quotes, in a shell KEY='\"*\"'"
    return text


def _check_limits(text: str) -> None:
    """Raise YAMLError if a text is too large or too deep, before anything is built from it."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters; a configuration is shorter")
    size = 0
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, size))
            size += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size_before = open_nodes.pop()
            sizes[anchor] = size - size_before
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = len(event.value) + 1
            size += sizes[event.anchor]
        problem = None
        if isinstance(event, yaml.AliasEvent):
            size += sizes.get(event.anchor, 1)
            if event.anchor in [anchor for anchor, _ in open_nodes]:
                problem = f"'*{event.anchor}' stands for something that it is a part of"
        if size > MAX_CHARACTERS:
            problem = f"with its aliases written out it has more than {MAX_CHARACTERS:,} characters"
        if len(open_nodes) > MAX_NESTING_DEPTH:
            problem = f"more than {MAX_NESTING_DEPTH} lists and mappings inside one another"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
