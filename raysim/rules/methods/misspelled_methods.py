"""Mistakes in a user's class that Python accepts: wrong or missing methods, and untyped fields."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

from raysim.errors import ConfigError
from raysim.spelling import lacking

SIMILARITY = 0.8
"""Smallest similarity, from 0 to 1, at which a method counts as a misspelled one."""


def refuse_misspelled_methods(rule: type, section: str) -> None:
    """Check that a rule's class has no method that is a misspelled method of the contract.

    Such a method overrides nothing, and its name is close to one of the contract. A helper whose
    name begins with an underscore is none.

    Args:
        rule: the class; one that is no rule is not checked.
        section: the section of the configuration that names it.

    Raises:
        ConfigError: it has one; names it and the method that was probably meant.
    """
    family = next((c for c in rule.__mro__ if c.__name__ in ("ClientRule", "ServerRule")), None)
    if family is None or rule.__module__.startswith(family.__module__.partition(".")[0] + "."):
        return
    contract = public_names(dir(family))
    for cls in rule.__mro__[: rule.__mro__.index(family)]:
        for name in lacking(public_names(vars(cls)), contract):
            value = vars(cls)[name]
            if not inspect.isroutine(value) and not isinstance(value, property):
                continue
            for near in difflib.get_close_matches(name, contract, n=1, cutoff=SIMILARITY):
                raise ConfigError(
                    f"{section}.name: {cls.__name__} has an unknown method '{name}'; did you mean "
                    f"{near}? If not, begin its name with an underscore"
                )


def refuse_missing_methods(cls: type, section: str) -> None:
    """Check that a class defines the methods that its base class marks as abstract.

    Args:
        cls: the class of a user's rule, task, stage or the like.
        section: the section of the configuration that names it.

    Raises:
        ConfigError: it lacks one; names it and its arguments.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if getattr(method, "__isabstractmethod__", False):
            arguments = ", ".join(inspect.signature(method).parameters)
            raise ConfigError(
                f"{section}.name: {cls.__name__} defines no `{name}`; write one, "
                f"`def {name}({arguments})`"
            )


def public_names(names: Iterable[str]) -> list[str]:
    """Return the names that do not begin with an underscore.

    Args:
        names: names of attributes.
    """
    return [name for name in names if not name.startswith("_")]


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
