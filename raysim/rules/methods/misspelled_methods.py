"""Mistakes in a rule's class that Python accepts: misspelled methods, and fields without a type."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

from raysim.errors import ConfigError

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
    contract = [name for name in dir(family) if not name.startswith("_")]
    for cls in rule.__mro__[: rule.__mro__.index(family)]:
        for name, value in vars(cls).items():
            is_method = inspect.isroutine(value) or isinstance(value, property)
            if name.startswith("_") or name in contract or not is_method:
                continue
            near = difflib.get_close_matches(name, contract, n=1, cutoff=SIMILARITY)
            if near:
                raise ConfigError(
                    f"{section}.name: {cls.__name__} has an unknown method '{name}'; did you mean "
                    f"{near[0]}? If not, begin its name with an underscore"
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
