"""Partitions that are given: index lists from a file, or from a user's function."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config.sections.data import OwnPartition
from raysim.config.sections.phases import OwnPhases
from raysim.config.users_function import users_function
from raysim.data.own.npz import read_arrays
from raysim.data.own.stored import is_stored, stored_arrays
from raysim.data.partition.clients import ExampleLists
from raysim.errors import ConfigError, unreadable
from raysim.system.json_files import parsed


def read_partition(path: Path, n: int) -> ExampleLists:
    """Read a partition from a file; the order of the indices is kept.

    Args:
        path: a JSON list of index lists, or an .npz file of `indices` and `offsets`.
        n: number of training examples.

    Raises:
        ConfigError: the file cannot be read, or its indices are wrong.
    """
    try:
        if path.suffix == ".npz":
            advice = "save the integer arrays indices and offsets with np.savez"
            arrays = read_arrays(path, "partition.path", ("indices", "offsets"), (), advice)
            lists = ExampleLists(*map(_whole_numbers, (arrays["indices"], arrays["offsets"])))
        else:
            with unreadable(f"partition.path: {path}"):
                lists = _joined(parsed(path.read_bytes(), list))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"partition.path: {path} is neither a JSON list of lists of indices nor an .npz of the "
            f"integer arrays indices and offsets: {error}"
        ) from None
    offsets, last = lists.offsets, len(lists.indices)
    if len(offsets) < 2 or [*offsets[[0, -1]]] != [0, last] or (np.diff(offsets) < 0).any():
        raise ConfigError(
            f"partition.path: {path}: offsets must rise from 0 to the number of indices, {last}"
        )
    # A partition from Python is in a file that the user does not know.
    place = "partition" if is_stored(path) else f"partition.path: {path}"
    check_indices(lists, n, place)
    return lists


def divide_by_function(p: OwnPartition, y: np.ndarray, rng: np.random.Generator) -> ExampleLists:
    """Divide the examples by a user's function; the order of the indices is kept.

    Args:
        p: the section `partition`, which names the function.
        y: the targets of the training examples, [n, ...].
        rng: the generator that the function gets.

    Raises:
        ConfigError: the function fails, or what it returns is no partition.
    """
    place = f"partition.name: {p.name}"
    lists = lists_of_function("partition", p, (y, p.clients, rng), f"{place} returned", p.clients)
    check_indices(lists, len(y), place, p.overlap)
    return lists


def lists_of_function(
    section: str,
    p: OwnPartition | OwnPhases,
    arguments: tuple[Any, ...],
    place: str,
    n_clients: int,
) -> ExampleLists:
    """Return the lists of a user's function, which is called twice with copies of its arguments.

    Args:
        section: section of the configuration that names the function.
        p: the section.
        arguments: the function's arguments; the last one is its generator.
        place: key, name of the function and "returned", with which errors begin.
        n_clients: number of clients.

    Raises:
        ConfigError: the function fails, returns no list of positions for each client, or others
            the second time.
    """
    function = users_function(section, p.name, p.parameters, len(arguments))
    calls = []
    for _ in range(2):
        returned = function(*copy.deepcopy(arguments))
        try:
            lists = _joined(returned)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{place} a {type(returned).__name__}; return a list with the positions of each "
                f"client's examples: {error}"
            ) from None
        if len(lists) != n_clients:
            raise ConfigError(f"{place} {len(lists)} clients; partition.clients is {n_clients}")
        calls.append(lists)
    first, second = calls
    for a, b in ((first.indices, second.indices), (first.offsets, second.offsets)):
        if not np.array_equal(a, b):
            raise ConfigError(
                f"{place} other lists when it was called again, and a resumed run calls it again; "
                "draw from its last argument, a numpy.random.Generator"
            )
    return first


def _joined(entries: Iterable[Any]) -> ExampleLists:
    """Return the lists of all clients; raise `ValueError` or `TypeError` for no whole numbers."""
    lists = list(map(_whole_numbers, entries))
    indices = np.concatenate([np.empty(0, dtype=np.int64), *lists])
    return ExampleLists(indices, np.cumsum([0, *map(len, lists)]))


def is_lists(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping holds index lists by client, and not the keys of a section.

    Args:
        value: a mapping that was given as `partition`.
    """
    no_lists = (str, int, float, Mapping, type(None))
    return bool(value) and not any(isinstance(entry, no_lists) for entry in value.values())


def store_partition(lists: Sequence[Any] | Mapping[Any, Any]) -> dict[str, Any]:
    """Write a partition that was given from Python to a file that is named after its content.

    Args:
        lists: for each client the positions of its examples in the training half; a mapping has
            the clients 0 to N - 1.

    Returns:
        The section `partition` that reads it.

    Raises:
        ConfigError: an entry is not a list of positions, an example occurs twice, or the file
            cannot be written.
    """
    if isinstance(lists, Mapping):
        lists = _in_order(lists)
    clients = []
    for k, entry in enumerate(lists):
        try:
            clients.append(_whole_numbers(entry))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"partition: expected the positions of client {k}'s examples: {error}"
            ) from None
    joined = _joined(clients)
    check_indices(joined, None, "partition")
    path = stored_arrays("partition", {"indices": joined.indices, "offsets": joined.offsets})
    return {"name": "file", "path": str(path)}


def _in_order(lists: Mapping[Any, Any]) -> list[Any]:
    """Return the index lists of a mapping in the order of the clients' numbers."""
    numbers = [key for key in lists if isinstance(key, int | np.integer)]
    if sorted(numbers) != list(range(len(lists))):
        raise ConfigError(
            f"partition: a mapping of index lists has the clients 0 to {len(lists) - 1} as keys, "
            f"this one has {', '.join(map(repr, list(lists)[:5]))}; give list(partition.values())"
        )
    return [lists[client] for client in range(len(lists))]


def check_indices(lists: ExampleLists, n: int | None, place: str, overlap: bool = False) -> None:
    """Refuse indices that are no examples, and examples that occur twice.

    Args:
        lists: the clients' examples.
        n: number of examples; None: not yet known.
        place: key and source, with which errors begin.
        overlap: whether clients may share examples. No client has one twice.

    Raises:
        ConfigError: there is such an index, or no client has an example.
    """
    indices, client = lists.indices, lists.owners
    if not len(indices):
        raise ConfigError(
            f"{place}: no client has an example; give each client the positions of its examples"
        )
    outside = indices < 0 if n is None else (indices < 0) | (indices >= n)
    if (wrong := np.flatnonzero(outside)).size:
        k = wrong[0]
        last = "n - 1" if n is None else n - 1
        raise ConfigError(
            f"{place}: client {client[k]} has example {indices[k]}, outside 0 to {last}; give "
            "positions of training examples"
        )
    order = np.lexsort((client, indices))
    repeated = np.diff(indices[order]) == 0
    if overlap:
        repeated &= np.diff(client[order]) == 0
    if (twice := np.flatnonzero(repeated)).size:
        first, second = order[twice[0]], order[twice[0] + 1]
        if client[first] == client[second]:
            conflict = "twice"
        else:
            conflict = (
                f"which is also client {client[first]}'s; clients share examples if a function "
                "(path.py:FUNCTION) returns the lists and partition.overlap is true"
            )
        raise ConfigError(
            f"{place}: client {client[second]} has example {indices[second]} {conflict}"
        )


def _whole_numbers(entry: Any) -> np.ndarray:
    """Return one-dimensional integers as int64; raise `ValueError` for anything else."""
    if np.ma.is_masked(entry):
        raise ValueError("expected whole numbers in a row, found masked ones")
    if isinstance(entry, set | frozenset):
        raise ValueError("expected whole numbers in a row, found a set; give sorted() of it")
    if hasattr(entry, "indices") and hasattr(entry, "dataset"):
        raise ValueError(f"found a {type(entry).__name__}; give its attribute indices")
    values = np.asarray(entry)
    if values.ndim == 1 and values.dtype.kind == "b":
        raise ValueError("expected whole numbers, found true and false; take np.flatnonzero of it")
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ValueError(
            f"expected whole numbers in a row, found {values.dtype} of shape {values.shape}"
        )
    return values.astype(np.int64)
