"""Objects that installed distributions offer by name: methods, data sets, nets and probes.

A distribution registers an object as an entry point of a group. The name of the entry point is the
name in a configuration, its value is the object, as module:NAME. Nothing is imported before its
name is used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from itertools import groupby
from typing import Any

from raysim.config.references import load_object
from raysim.errors import ConfigError
from raysim.version import __version__

logger = logging.getLogger("raysim")


@dataclass(frozen=True)
class EntryPointGroup:
    """A group of entry points."""

    name: str
    """Name of the group in a distribution's metadata."""
    kind: str
    """Meaning of a name of the group, for messages."""
    value: str
    """Object that an entry point of the group must be, for messages."""


ALGORITHMS = EntryPointGroup("raysim.algorithms", "a method", "an Algorithm or a rule")
DATA = EntryPointGroup("raysim.data", "a data set", "a function that returns the examples")
MODELS = EntryPointGroup(
    "raysim.models", "a net", "a torch.nn.Module or a function that returns one"
)
PROBES = EntryPointGroup("raysim.probes", "a probe", "a Probe")


def entry_points(group: EntryPointGroup, name: str | None = None) -> list[EntryPoint]:
    """Return the entry points of a group, without importing them.

    Args:
        group: kind of the entry points, such as `DATA`.
        name: only the entry points of this name, one for each distribution that offers it; None:
            all.

    Returns:
        The entry points, sorted by name, then by distribution.
    """
    points = _entry_points(group.name, tuple(sys.path))
    matching = [point for point in points if name in (None, point.name)]
    return sorted(matching, key=lambda point: (point.name, distribution(point)))


@lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    return metadata.entry_points(group=group)


def distribution(point: EntryPoint) -> str:
    """Return name and version of the distribution that offers an entry point.

    Args:
        point: the entry point.
    """
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def find_reference(group: EntryPointGroup, name: str) -> str | None:
    """Return the reference that an entry point of this name stands for.

    Args:
        group: kind of the entry points, such as `DATA`.
        name: a name in a configuration.

    Returns:
        "module:ATTRIBUTE"; None if no installed distribution offers the name.
    """
    return next((f"{p.module}:{p.attr}" for p in entry_points(group, name)), None)


def offered_reference(group: EntryPointGroup, key: str, name: str, is_shipped: bool) -> str | None:
    """Return the only reference that a name of a configuration stands for.

    Args:
        group: kind of the entry points, such as `DATA`.
        key: key of the configuration whose value is the name, for errors.
        name: the name in the configuration.
        is_shipped: whether raysim has something of this name and kind.

    Returns:
        "module:ATTRIBUTE"; None if no installed distribution offers the name.

    Raises:
        ConfigError: several distributions, one of which may be raysim, offer the name; or the entry
            point names a whole module.
    """
    points = entry_points(group, name)
    if not points:
        return None
    owners = list(map(distribution, points))
    if is_shipped:
        owners.insert(0, f"raysim {__version__}")
    if len(owners) > 1:
        raise ConfigError(
            f"{key}: '{name}' is {group.kind} of {' and of '.join(owners)}; uninstall all but one "
            f"of them, or give one as {points[0].value}"
        )
    if not points[0].attr:
        raise ConfigError(
            f"{key}: entry point '{name}' of {owners[0]} names the module {points[0].value}; it "
            f"must name {group.value} in it, as module:NAME"
        )
    return f"{points[0].module}:{points[0].attr}"


def load_offered(group: EntryPointGroup, key: str, name: str, is_shipped: bool) -> Any:
    """Return what another distribution offers under a name, None if none does.

    Only this object is imported.

    Args:
        group: kind of the entry points, such as `DATA`.
        key: key of the configuration whose value is the name, for errors.
        name: the name in the configuration.
        is_shipped: whether raysim has something of this name and kind.

    Raises:
        ConfigError: as in `offered_reference`, or the object cannot be imported.
    """
    target = offered_reference(group, key, name, is_shipped)
    return None if target is None else load_object(target, key)


def offered(
    group: EntryPointGroup, key: str, shipped: Collection[str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield name, object and distribution of everything that other distributions offer.

    What cannot be used (it fails on import, or its name is taken) is logged and left out.

    Args:
        group: kind of the entry points, such as `DATA`.
        key: key of the configuration whose value such a name can be, for messages.
        shipped: names of raysim's own objects of this kind.
    """
    for name, points in groupby(entry_points(group), key=lambda point: point.name):
        try:
            loaded = load_offered(group, key, name, name in shipped)
        except ConfigError as error:
            logger.warning("%s", error)
            continue
        yield name, loaded, distribution(next(points))
