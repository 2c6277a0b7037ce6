"""Objects that are given from Python where a configuration has names: nets, rules, functions.

A class or a function from a module that is a user's file is named path.py:Name, as in a
configuration file. What has no such place (classes of a notebook or a script, instances of nets) is
named `python:NAME-DIGEST` and kept in this process. The digest is that of its description. A run of
such an object is resumed from Python, with an object of the same content. An object that holds
something whose content cannot be read, such as an open file, has a name of its own each time, so
its run is resumed in the same process only.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from raysim.config.distributions import distribution_of
from raysim.config.objects import pickling
from raysim.config.objects.description import Description, Values, digest_of, note_changes
from raysim.errors import ConfigError

logger = logging.getLogger("raysim")

PREFIX = "python:"
"""Begin of the names of objects that only this process has."""

DIGEST_CHARACTERS = 12
"""Hexadecimal digits of the digest in a name."""

UNREADABLE = "-holds-"
"""Part of the name of an object that holds something whose content cannot be read."""

pickling.register()


@dataclass(frozen=True)
class PythonObject:
    """An object that was given from Python. Workers have it after they unpickle a plan."""

    name: str
    """Name of the object in the configuration."""
    value: Any
    """The object."""
    texts: Mapping[str, bytes]
    """Sources and values that identify the object, by name."""
    nbytes: int
    """Bytes of its arrays and tensors."""

    def __reduce__(self) -> tuple:
        return _keep, (self.name, self.value, dict(self.texts), self.nbytes)


class ObjectMissing(ConfigError):
    """A configuration names an object that was given in Python, which this process does not have.

    Args:
        name: the name of the object.
        key: the key of the configuration.
        given: an object with the same name in its code, but another content; None: there is none.
    """

    def __init__(self, name: str, key: str, given: PythonObject | None = None):
        self.given = given
        self.section = key.partition(".")[0]
        self.reason = f"{key}: '{name}' was given as an object in Python, and this process has none"
        fix = f"give it again: raysim.resume(RUN, {{'{self.section}': ...}})"
        if UNREADABLE in name:
            held = name.partition(UNREADABLE)[2].rpartition("-")[0]
            self.reason += f" of the same content: it holds a {held}, whose content cannot be read"
            fix = "start a new run"
        else:
            self.reason += " of the same content"
        super().__init__(f"{self.reason}; {fix}")


_OBJECTS: dict[str, PythonObject] = {}
"""The objects of this process by name, the last one that was given at the end."""

KEPT_BYTES = 1 << 30
"""Bytes that objects may have in all, to be found again when their run is resumed or loaded."""


_IN_USE: ContextVar[dict[str, tuple[Any, Values]] | None] = ContextVar("in use", default=None)
"""The objects that a call uses by name, with their values when it began to."""


def _keep(name: str, value: Any, texts: Mapping[str, bytes], nbytes: int) -> PythonObject:
    # The new object, since an earlier one of this content may have been changed in place.
    _OBJECTS.pop(name, None)
    _OBJECTS[name] = PythonObject(name, value, texts, nbytes)
    return _OBJECTS[name]


def _forget_oldest() -> None:
    """Forget objects that are not in use while all are too large. A notebook may train hundreds."""
    used, total = _IN_USE.get(), sum(kept.nbytes for kept in _OBJECTS.values())
    for name in [name for name, kept in _OBJECTS.items() if kept.nbytes]:
        if total > KEPT_BYTES and used is not None and name not in used:
            total -= _OBJECTS.pop(name).nbytes


@contextmanager
def noting_changes() -> Iterator[None]:
    """Note what changes in the objects that are used inside of this.

    It counts as before when they are given again, so that counters and tables of known results that
    a run fills do not make another object of them.
    """
    used: dict[str, tuple[Any, Values]] = {}
    token = _IN_USE.set(used)
    try:
        yield
    finally:
        _IN_USE.reset(token)
        for value, values in used.values():
            note_changes(value, values)


def find(name: str, key: str) -> PythonObject:
    """Return the object of a name that begins with `PREFIX`.

    Args:
        name: name of the object, with the prefix.
        key: key of the configuration that names it.

    Raises:
        ObjectMissing: this process has no such object.
    """
    if name not in _OBJECTS:
        # What an object with unreadable content differs in cannot be told.
        can_be_told = UNREADABLE not in name
        alike = [kept for known, kept in _OBJECTS.items() if label_of(known) == label_of(name)]
        raise ObjectMissing(name, key, alike[-1] if alike and can_be_told else None)
    found, used = _OBJECTS[name], _IN_USE.get()
    if used is not None and name not in used:
        used[name] = found.value, Description(found.value).values
    return found


def label_of(name: str) -> str:
    """Return the name of an object in its code.

    Args:
        name: name of the object in a configuration, with the prefix.
    """
    return name.removeprefix(PREFIX).partition("-")[0]


def reference(value: Any) -> str:
    """Return the name of a class, function or net in configurations, and keep it if need be.

    Args:
        value: the class, function or net. One that the same call has named keeps its name, whatever
            the call has changed since.
    """
    used = _IN_USE.get()
    for name, (known, _) in (used or {}).items():
        if known is value:
            return name
    module, place = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    if module not in (None, "__main__") and pickling.resolves(module, place, value):
        if file.endswith(".py") and distribution_of(module) is None:
            return f"{os.path.abspath(file)}:{place}"
        return f"{module}:{place}"
    description = Description(value)
    own = getattr(value, "name", "")  # of an Algorithm, for one
    if not place and isinstance(own, str) and own.isidentifier():
        place = own
    label = (place or type(value).__qualname__).rpartition(".")[2]
    if description.unreadable is None:
        name = f"{label}-{digest_of(description.texts())[:DIGEST_CHARACTERS]}"
    else:
        name = _name_of_unreadable(value, label, description.unreadable)
    if used is not None:
        used[f"{PREFIX}{name}"] = value, description.values
    kept = _keep(f"{PREFIX}{name}", value, description.shown(), description.nbytes)
    _forget_oldest()
    return kept.name


def _name_of_unreadable(value: Any, label: str, kind: str) -> str:
    """Return the name, without prefix, of an object that holds something of an unreadable kind."""
    logger.warning(
        "%s holds a %s, whose content cannot be read: its run cannot be resumed by another process",
        label,
        kind,
    )
    for kept in _OBJECTS.values():
        if kept.value is value:
            return kept.name.removeprefix(PREFIX)
    return f"{label}{UNREADABLE}{kind}-{uuid.uuid4().hex[:DIGEST_CHARACTERS]}"
