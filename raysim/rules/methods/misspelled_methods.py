"""Mistakes in a rule's class that Python accepts: misspelled methods, and fields without a type."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType

from raysim.errors import ConfigError

SIMILARITY = 0.8
"""Smallest similarity, from 0 to 1, at which a method counts as a misspelled one."""


def refuse_misspelled_methods(rule: type, section: str) -> None:
    """Check that a rule's class has no method that is a misspelled method of the contract.

    Such a method overrides nothing, no code of its module uses it, and its name is close to one of
    the contract.

    Args:
        rule: the class; one that is no rule is not checked.
        section: the section of the configuration that names it.

    Raises:
        ConfigError: it has one; names it and the method that was probably meant.
    """
    family = next((c for c in rule.__mro__ if c.__name__ in ("ClientRule", "ServerRule")), None)
    if family is None or rule.__module__.startswith(family.__module__.partition(".")[0] + "."):
        return
    contract = [name for name in dir(family) if not name.startswith("_")]
    for cls in rule.__mro__[: rule.__mro__.index(family)]:
        for name, value in vars(cls).items():
            if name.startswith("_") or name in contract or _function(value) is None:
                continue
            near = difflib.get_close_matches(name, contract, n=1, cutoff=SIMILARITY)
            if near and name not in _used_names(cls):
                raise ConfigError(
                    f"{section}.name: {cls.__name__} has an unknown method '{name}', which nothing "
                    f"calls; did you mean {near[0]}?"
                )


def untyped(rules: Iterable[type], key: str) -> str:
    """Return the hint for a key that a rule's class has without a type; "" if none has.

    Args:
        rules: classes of rules.
        key: the unknown key.
    """
    for rule in rules:
        for cls in rule.__mro__:
            value = vars(cls).get(key)
            if isinstance(value, bool | int | float | str):
                kind = type(value).__name__
                return (
                    f": {cls.__name__} has {key} without a type; write `{key}: {kind} = {value!r}`"
                )
    return ""


def _function(value: object) -> object | None:
    """Return the function behind an attribute of a class; None if it is no method or property."""
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return function if inspect.isfunction(function) else None


def _used_names(cls: type) -> set[str]:
    """Return all attributes and globals that a class and the functions of its module use."""
    names: set[str] = set()
    module = sys.modules.get(cls.__module__)
    for value in [cls, *(vars(module).values() if module else ())]:
        parts = vars(value).values() if inspect.isclass(value) else (value,)
        for part in list(parts):
            function = _function(part)
            if inspect.isfunction(function) and function.__module__ == cls.__module__:
                for code in _codes(inspect.unwrap(function).__code__):
                    names.update(code.co_names)
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
