"""Refusal of random numbers from a global generator, which a run could not repeat."""

from __future__ import annotations

import dis
import functools
import inspect
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from raysim.errors import RaysimError, is_users
from raysim.rules.rule import Rule
from raysim.system.global_generators import GENERATORS, GlobalGenerators

RNG_ARGUMENT = "those of its argument `rng`"
"""Random numbers that a function with such an argument must use, as the end of an error."""

RANDOM_NUMBERS_PAGE = "(docs/how-to/random_numbers.md)"
"""The page that explains keyed random numbers."""


@contextmanager
def keyed_numbers_only(
    refusal: Callable[[str], RaysimError], libraries: Collection[str] = tuple(GENERATORS)
) -> Iterator[None]:
    """Raise an error if a global random generator changes; its state is put back.

    Args:
        refusal: makes the error from what the code did, "draws from NumPy's global generator, …".
        libraries: those whose generators are watched.
    """
    before = GlobalGenerators(libraries)
    yield
    if drawn := before.drawn_from():
        before.restore()
        raise refusal(
            f"draws from {drawn[0]}'s global generator, so a run could not be repeated; use "
            "keyed numbers"
        )


def stream_on_server(method: str) -> str:
    """Return the keyed numbers that a method of a server rule has, as the end of an error.

    Args:
        method: name of the method.
    """
    if method in ("candidates", "select"):
        return RNG_ARGUMENT
    return 'reports.rng("name") or cohort.rng("name")'


@functools.lru_cache
def libraries_to_watch(rule: type[Rule]) -> tuple[str, ...]:
    """Return the libraries from whose generators nothing may be drawn while a rule runs.

    Threads of other libraries draw from Python's generator. So that one is watched only if the
    rule's file uses it.

    Args:
        rule: the class of a client or server rule.
    """
    functions = [
        member
        for cls in rule.__mro__
        for member in vars(cls).values()
        if inspect.isfunction(member) and is_users(member.__code__)
    ]
    uses_python = any(map(_uses_python_generator, functions))
    return ("torch", "NumPy", "Python") if uses_python else ("torch", "NumPy")


def _uses_python_generator(function: FunctionType) -> bool:
    """Return whether a function, or its file, imports `random` or a function of it."""
    imports = any(
        instruction.opname == "IMPORT_NAME" and instruction.argval == "random"
        for instruction in dis.get_instructions(function.__code__)
    )
    return imports or any(map(_is_of_random, list(function.__globals__.values())))


def _is_of_random(value: Any) -> bool:
    """Return whether a value is the module `random`, or a function of its global generator."""
    is_method = isinstance(value, BuiltinMethodType | MethodType)
    return value is random or (is_method and value.__self__ is random.random.__self__)
