"""Objects that are given from Python where a configuration has names: nets, rules, functions.

A class or a function from a module that is a user's file is named path.py:Name, as in a
configuration file. What has no such place (classes of a notebook or a script, instances of nets) is
named `python:NAME-DIGEST` and kept in this process, large ones up to a limit. The digest is that of
its description. A run of such an object is resumed from Python, with an object of the same content.
An object that holds something whose content cannot be read, such as an open file, has a name of its
own each time, so its run is resumed in the same process only.
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
from weakref import WeakValueDictionary, finalize

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
        self.name = name
        self.given = given
        self.reason = f"{key}: '{name}' was given as an object in Python, and this process has none"
        self.reason += " of the same content"
        fix = "give it again, in Python"
        if UNREADABLE in name:
            held = name.partition(UNREADABLE)[2].rpartition("-")[0]
            self.reason += f": it holds a {held}, whose content cannot be read"
            fix = "start a new run"
        super().__init__(f"{self.reason}; {fix}")


_OBJECTS: WeakValueDictionary[str, PythonObject] = WeakValueDictionary()
"""The objects of this process by name: those below, and those that a call or a result still has."""

_LAST_GIVEN: dict[str, PythonObject] = {}
"""The objects that are kept for a next call, such as `resume`, by name; the last one at the end."""

KEPT_BYTES = 1 << 30
"""Bytes of the objects that are kept for the next call. A notebook may train hundreds of nets."""


_IN_USE: ContextVar[dict[str, tuple[PythonObject, Values]] | None] = ContextVar(
    "in use", default=None
)
"""The objects that a call uses by name, with their values when it began to."""


def _keep(name: str, value: Any, texts: Mapping[str, bytes], nbytes: int) -> PythonObject:
    # The new object, since an earlier one of this content may have been changed in place.
    kept = _OBJECTS[name] = PythonObject(name, value, texts, nbytes)
    _LAST_GIVEN.pop(name, None)
    _LAST_GIVEN[name] = kept
    return kept


def _forget_oldest() -> None:
    """Keep no more objects than fit into `KEPT_BYTES`, and the last one."""
    objects = [*_LAST_GIVEN.values()]
    total = sum(kept.nbytes for kept in objects)
    for kept in objects[:-1]:
        # One with unreadable content could not be given again.
        if total > KEPT_BYTES and kept.nbytes and UNREADABLE not in kept.name:
            _LAST_GIVEN.pop(kept.name, None)
            total -= kept.nbytes


@contextmanager
def noting_changes() -> Iterator[None]:
    """Note what changes in the objects that are used inside of this.

    It counts as before when they are given again, so that counters and tables of known results that
    a run fills do not make another object of them.
    """
    used: dict[str, tuple[PythonObject, Values]] = {}
    token = _IN_USE.set(used)
    try:
        yield
    finally:
        _IN_USE.reset(token)
        for kept, values in used.values():
            note_changes(kept.value, values)
        _forget_oldest()


def keep_with(owner: object) -> None:
    """Keep the objects of the call that goes on as long as another object, such as its result.

    Args:
        owner: the other object.
    """
    objects = [kept for kept, _ in (_IN_USE.get() or {}).values()]
    # Until the owner is gone, the finalizer has them as an argument.
    finalize(owner, objects.clear).atexit = False


def find(name: str, key: str) -> PythonObject:
    """Return the object of a name that begins with `PREFIX`.

    Args:
        name: name of the object, with the prefix.
        key: key of the configuration that names it.

    Raises:
        ObjectMissing: this process has no such object.
    """
    found, used = _OBJECTS.get(name), _IN_USE.get()
    if found is None:
        # What an object with unreadable content differs in cannot be told.
        can_be_told = UNREADABLE not in name
        alike = [kept for known, kept in _OBJECTS.items() if label_of(known) == label_of(name)]
        raise ObjectMissing(name, key, alike[-1] if alike and can_be_told else None)
    if used is not None and name not in used:
        used[name] = found, Description(found.value).values
    return found


def is_known(name: str) -> bool:
    """Return whether this process has an object.

    Args:
        name: name of the object in a configuration, with the prefix.
    """
    return name in _OBJECTS


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
        if known.value is value:
            return name
    if place := _place_of(value):
        return place
    description, label = Description(value), _label(value)
    if description.unreadable is None:
        name = f"{label}-{digest_of(description.texts())[:DIGEST_CHARACTERS]}"
    else:
        name = _name_of_unreadable(value, label, description.unreadable)
    kept = _keep(f"{PREFIX}{name}", value, description.shown(), description.nbytes)
    if used is not None:
        used[kept.name] = kept, description.values
    return kept.name


def _place_of(value: Any) -> str:
    """Return where another process finds an object, as path.py:Name or module:Name; "" if not."""
    module, place = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module in (None, "__main__") or not pickling.resolves(module, place, value):
        return ""
    file = getattr(sys.modules[module], "__file__", None) or ""
    is_users_file = file.endswith(".py") and distribution_of(module) is None
    return f"{os.path.abspath(file) if is_users_file else module}:{place}"


def _label(value: Any) -> str:
    """Return the name of an object in its code."""
    place, own = getattr(value, "__qualname__", ""), getattr(value, "name", "")
    if not place and isinstance(own, str) and own.isidentifier():  # of an Algorithm, for one
        place = own
    return (place or type(value).__qualname__).rpartition(".")[2]


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
