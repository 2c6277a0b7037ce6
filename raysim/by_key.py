"""Grouping of things by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def by_key(things: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Return things by what they have in common, in order of first appearance.

    Args:
        things: Things to group.
        key: Function from a thing to what those of its group share.
    """
    groups: dict[Any, list[T]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups
