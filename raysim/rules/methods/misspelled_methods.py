"""Mistakes in a user's class that Python accepts: wrong or missing methods, and untyped fields."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from raysim.errors import ConfigError
from raysim.rules.errors.user_code import class_defined_at

SIMILARITY = 0.8
"""Smallest similarity, from 0 to 1, at which a method counts as a misspelled one."""


def refuse_misspelled_methods(rule: type, section: str) -> None:
    """Check that a rule's class has no misspelled method or attribute of the contract.

    Such a method overrides nothing, and its name is close to one of the contract. A helper whose
    name begins with an underscore is none, and neither is a hyper-parameter. A value in the place
    of a method of the contract is refused, too.

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
    fields = [entry.name for entry in dataclasses.fields(rule)]
    for cls in rule.__mro__[: rule.__mro__.index(family)]:
        for name in public_names({**vars(cls), **inspect.get_annotations(cls)}):
            value = vars(cls).get(name)
            is_method = inspect.isroutine(value) or isinstance(value, property)
            _refuse_value(cls, section, name, getattr(family, name, None))
            if name in contract or (name in fields and not is_method):
                continue
            for near in difflib.get_close_matches(name, contract, n=1, cutoff=SIMILARITY):
                kind = "method" if is_method else "attribute"
                raise ConfigError(
                    f"{section}.name: {cls.__name__} has an unknown {kind} '{name}'; did you mean "
                    f"{near}? If not, begin its name with an underscore"
                )


def _refuse_value(cls: type, section: str, name: str, of_contract: Any) -> None:
    """Refuse a value of a class, or a field, that has the name of a method of the contract."""
    value = vars(cls).get(name)
    can_be_method = callable(value) or hasattr(value, "__get__")
    if inspect.isroutine(of_contract) and not can_be_method:
        raise ConfigError(
            f"{section}.name: {cls.__name__} has a value '{name}', which is a method of the "
            f"contract; give it another name ({class_defined_at(cls)})"
        )


def refuse_untyped_fields(cls: type, section: str) -> None:
    """Check that no class gives one of its fields a value without a type, which has no effect.

    Only an annotation makes a field. Without one the instances keep the default of the base class.

    Args:
        cls: a dataclass.
        section: the section of the configuration that names it.

    Raises:
        ConfigError: it has one; names it and what to write.
    """
    for entry in dataclasses.fields(cls):
        owner = next((base for base in cls.__mro__ if entry.name in vars(base)), None)
        if owner is None or entry.name in inspect.get_annotations(owner):
            continue
        value = vars(owner)[entry.name]
        if inspect.ismemberdescriptor(value):  # of a class with slots
            continue
        written = f"= {value!r}" if isinstance(value, bool | int | float | str) else "= …"
        kind = entry.type if isinstance(entry.type, str) else type(value).__name__
        raise ConfigError(
            f"{section}.name: {cls.__name__} sets '{entry.name}' without a type, which has no "
            f"effect: it is a field of a base class; write `{entry.name}: {kind} {written}` "
            f"({class_defined_at(cls)})"
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
