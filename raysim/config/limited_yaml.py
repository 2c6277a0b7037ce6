"""YAML with limits: on its size, on its nesting, and on what its aliases come to.

A configuration is a page of text. What is far larger, or would become far larger when it is read,
is a mistake or an attack, and is refused before it is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from yaml.constructor import ConstructorError

from raysim.errors import shortened

MAX_CHARACTERS = 500_000
"""Characters of one text, with every alias replaced by what it stands for."""
MAX_NESTING_DEPTH = 32
"""Levels of lists and mappings inside one another."""
MAX_DIGITS = 500
"""Characters of one number. Python itself refuses more than 4,300 digits, also of what is computed
from a number."""

_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


if TYPE_CHECKING:
    _Parser = yaml.SafeLoader
else:
    _Parser = object  # the parsers that `_Limited` is mixed into follow it in the order of methods


class _Limited(_Parser):
    """Loader of plain values; it refuses duplicate keys and scalars that contradict their tag."""

    def __init__(self, text: str):
        super().__init__(text)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self._checked:  # before keys that are merged (<<) come in
            self._checked.add(id(node))
            self._refuse_repeated_keys(node)
        super().flatten_mapping(node)

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict, set)):
                raise ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise ConstructorError(None, None, f"'{key}' is given twice", key_node.start_mark)
            seen.add(key)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value):,} characters; at most {MAX_DIGITS} are read"
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            raise ConstructorError(
                None, None, f"'{node.value}' is no {kind}", node.start_mark
            ) from None


class _Loader(_Limited, yaml.SafeLoader):
    """The limits on PyYAML's own parser."""


def _loaders() -> list[type[_Limited]]:
    """Return the loaders of this installation, the fastest first."""
    loaders: list[type[_Limited]] = [_Loader]
    if yaml.__with_libyaml__:
        loaders.insert(0, type("_CLoader", (_Limited, yaml.CSafeLoader), {}))
    for loader in loaders:  # 1e-3 is a number, as it is in Python
        loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return loaders


YAML_LOADERS = _loaders()


def load_yaml(text: str, loader: type | None = None) -> Any:
    """Return the value that a YAML text stands for.

    Args:
        text: one document of plain values. 1e-3 is a number.
        loader: one of `YAML_LOADERS`; libyaml's by default, where it is there.

    Raises:
        yaml.YAMLError: the text is not YAML or not valid UTF-8, a key is given twice, or a limit
            is passed.
    """
    loader = loader or YAML_LOADERS[0]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise yaml.YAMLError("it is not valid UTF-8") from None
    _check_limits(text, loader)
    return yaml.load(text, Loader=loader)


def read_yaml(path: Path, loader: type | None = None) -> Any:
    """Return the value that a YAML file stands for.

    Args:
        path: a file with one document of plain values.
        loader: one of `YAML_LOADERS`; libyaml's by default, where it is there.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read as text.
        yaml.YAMLError: as in `load_yaml`.
    """
    with path.open(encoding="utf-8") as file:
        return load_yaml(file.read(MAX_CHARACTERS + 1), loader)


def check_value(value: Any) -> None:
    """Check a value that is given from Python against the limits of a text.

    Args:
        value: a number, text, or nested lists and mappings of these.

    Raises:
        yaml.YAMLError: a number is too long, or lists and mappings are too deep or hold too much.
    """
    waiting, count = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        count += 1
        if isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
            raise yaml.YAMLError(f"a number of more than {MAX_DIGITS} digits")
        if isinstance(item, Mapping | list | tuple):
            if depth == MAX_NESTING_DEPTH:
                raise yaml.YAMLError(
                    f"more than {MAX_NESTING_DEPTH} lists and mappings inside one another"
                )
            inner = item.values() if isinstance(item, Mapping) else item
            waiting += [(part, depth + 1) for part in inner]
        if count + len(waiting) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} values")


def explain_yaml_error(error: yaml.YAMLError) -> str:
    """Return a parser's message as one short line.

    Args:
        error: as `load_yaml` raises it.
    """
    text = shortened(" ".join(str(error).replace('in "<unicode string>", ', "at ").split()))
    if re.search(r"scanning an? (alias|anchor|tag)|undefined alias|constructor for the tag", text):
        text += "; text that begins with *, & or ! needs quotes"
    return text


def _check_limits(text: str, loader: type) -> None:
    """Raise YAMLError if a text is too large or too deep, before anything is built from it."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"more than {MAX_CHARACTERS:,} characters; a configuration is shorter")
    size, open_nodes, sizes = 0, [], {}
    for event in yaml.parse(text, Loader=loader):
        match event:
            case yaml.AliasEvent():
                if event.anchor in [anchor for anchor, _ in open_nodes]:
                    raise _yaml_error(
                        event, f"'*{event.anchor}' stands for something that it is a part of"
                    )
                size += sizes.get(event.anchor, 1)
            case yaml.ScalarEvent():
                sizes[event.anchor] = max(1, len(event.value))
                size += sizes[event.anchor]
            case yaml.CollectionStartEvent():
                open_nodes.append((event.anchor, size))
                size += 1
                if len(open_nodes) > MAX_NESTING_DEPTH:
                    raise _yaml_error(
                        event,
                        f"more than {MAX_NESTING_DEPTH} lists and mappings inside one another",
                    )
            case yaml.CollectionEndEvent():
                anchor, before = open_nodes.pop()
                sizes[anchor] = size - before
        if size > MAX_CHARACTERS:
            raise _yaml_error(
                event,
                f"with its aliases written out it has more than {MAX_CHARACTERS:,} characters",
            )


def _yaml_error(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
