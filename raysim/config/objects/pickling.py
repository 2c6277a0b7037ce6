"""Pickling of caches and of a few other objects that classes and functions of a script hold.

cloudpickle stores such classes and functions by their content, so that another process gets them.
It stores a cached function by a name of `__main__`, which that process lacks, and fails for others.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import operator
import sys
import weakref
from typing import Any


def resolves(module: str | None, place: str, value: Any) -> bool:
    """Return whether a name of a module means this very object.

    Args:
        module: name of a module; None for an object without one.
        place: name in the module, with dots.
        value: the object.
    """
    try:
        return operator.attrgetter(place)(sys.modules[module or ""]) is value
    except (AttributeError, KeyError):
        return False


def _reduced_cache(cached: Any) -> str | tuple:
    """Reduce what `functools.cache` returns: to its name, or an empty cache of a script's function.

    Another process has another `__main__`.
    """
    if cached.__module__ != "__main__" and resolves(cached.__module__, cached.__qualname__, cached):
        return cached.__qualname__
    return _cached, (cached.__wrapped__, cached.cache_parameters())


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduced_cached_property(value: functools.cached_property) -> tuple:
    """Reduce a property of Python 3.11, which has a lock."""
    state = {"attrname": value.attrname, "__doc__": value.__doc__}
    return functools.cached_property, (value.func,), state


def register() -> None:
    """Tell `copyreg` how these objects are pickled; once is enough for a process."""
    copyreg.pickle(functools._lru_cache_wrapper, _reduced_cache)
    copyreg.pickle(functools.cached_property, _reduced_cached_property)
    # The cache of `functools.singledispatch`; what it knows exists in this process alone.
    copyreg.pickle(weakref.WeakKeyDictionary, lambda cache: (weakref.WeakKeyDictionary, ()))
    # Fields of a dataclass without a default hold this mark, which is compared by identity.
    copyreg.pickle(type(dataclasses.MISSING), lambda mark: "MISSING")
