"""From a section's parameters to a dataclass, which a resumed run reads back as it was."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raysim.config.explain import annotation_types, explain_validation_error, misplaced_switch
from raysim.config.limited_yaml import are_same, plain
from raysim.errors import ConfigError
from raysim.rules.methods.misspelled_methods import (
    refuse_missing_methods,
    refuse_misspelled_methods,
    refuse_untyped_fields,
    untyped,
)
from raysim.rules.methods.registry import hyperparameter_names
from raysim.rules.rule import field_types
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import failing_as


def build_part(section: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    """Build a dataclass from a section's parameters, checked against its annotations.

    Args:
        section: the section's key, which errors name, such as "client".
        cls: the dataclass; its fields are the keys that the section may have.
        parameters: the section's parameters, without `name`.

    Returns:
        An instance of `cls`; fields that are not given have their defaults, as their annotations
        read them.

    Raises:
        ConfigError: a parameter is unknown, or has a wrong value; or a resumed run would not read
            it back from config.yaml. It names the key.
    """
    refuse_misspelled_methods(cls, section)
    refuse_untyped_fields(cls, section)
    refuse_missing_methods(cls, section)
    known = hyperparameter_names(cls)
    if "name" in known:
        raise ConfigError(
            f"{section}.name: {cls.__name__} has the field 'name', but a section's name is that of "
            "its class; give the field another name, or write it as name: ClassVar[str] = ..."
        )
    for key in lacking(parameters, known):
        hint = untyped([cls], key) or did_you_mean(key, known)
        raise ConfigError(f"{section}.{key}: unknown key of {cls.__name__}{hint}")
    return _read_again(section, _read(section, cls, parameters))


def _read(section: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    """Return a dataclass with the parameters that a section has; others have their defaults."""
    failed = f"{section}.name: {cls.__name__} cannot be built"
    passing = ConfigError, ValidationError
    try:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), passing):
            kinds = field_types(cls)
            for key, value in parameters.items():
                # pydantic would take true for 1
                if switch := misplaced_switch(value, annotation_types(kinds[key])):
                    raise ConfigError(f"{section}.{key}: {switch} is neither a number nor a word")
            return _adapter(cls).validate_python(dict(parameters))
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, parameters, cls, f"{section}.")) from None


@functools.lru_cache(maxsize=64)  # users' classes are loaded again and again in a notebook
def _adapter(cls: type) -> TypeAdapter:
    """Return the adapter that builds a dataclass, which takes milliseconds to make."""
    return TypeAdapter(cls)


def _read_again(section: str, built: Any) -> Any:
    """Return a dataclass as a resumed run builds it, from the values of all fields in config.yaml.

    One that would have other values there is refused.
    """
    name = type(built).__name__
    written = {}
    for entry in dataclasses.fields(built):
        value = getattr(built, entry.name)
        if not entry.init:
            raise ConfigError(
                f"{section}.name: {name} has the field '{entry.name}' with init=False; "
                "make it a property, since a configuration has all fields"
            )
        try:
            written[entry.name] = plain(value)
        except ValueError:
            raise ConfigError(
                f"{section}.name: {name} has the field '{entry.name}' with a "
                f"{type(value).__name__}, which a configuration cannot have; make it in a method, "
                "or a global constant"
            ) from None
    try:
        again = _read(section, type(built), written)
    except ConfigError as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{problem} ({name} holds this itself, and a resumed run reads it: change the default, "
            "or annotate the field as what it holds, such as float | None)"
        ) from None
    for key in written:
        value, read = getattr(built, key), getattr(again, key)
        # An annotation may read a list as a tuple; what YAML cannot hold is lost before.
        is_plain = are_same(value, written[key]) and not hasattr(built, "__post_init__")
        if not is_plain and not are_same(value, read):
            raise ConfigError(
                f"{section}.{key}: {name} has {value!r} there, which a resumed run would read as "
                f"{read!r}; annotate the field as a {type(value).__name__} of what it holds, and "
                "leave it in __post_init__ as it is"
            )
    return again
