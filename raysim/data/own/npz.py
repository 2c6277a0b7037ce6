"""Arrays of the .npz files that a configuration names."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysim.errors import ConfigError, in_a_line, unreadable
from raysim.spelling import did_you_mean, lacking


def read_arrays(
    path: Path, key: str, needed: Sequence[str], optional: Sequence[str], advice: str
) -> dict[str, Any]:
    """Return the arrays of an .npz file by name; those with a dot in their names as a mapping.

    Args:
        path: the file.
        key: key of the configuration that names it.
        needed: names of arrays that it must have.
        optional: names of the other arrays that it may have.
        advice: what to give instead of a file of another kind; ends the message.

    Raises:
        ConfigError: the file cannot be read, does not fit in memory, or has other arrays.
    """
    try:
        with unreadable(f"{key}: {path}"):
            with open(path, "rb") as content:
                # NumPy would take files of other kinds for pickles.
                if not zipfile.is_zipfile(content):
                    raise ConfigError(f"{key}: {path} is no whole .npz file; {advice}")
            with np.load(path, allow_pickle=False) as file:
                names = list(dict.fromkeys(name.partition(".")[0] for name in file))
                _check_names(names, f"{key}: {path}", needed, optional)
                return _grouped(file)
    except MemoryError as error:
        # A damaged header can claim any size.
        raise ConfigError(
            f"{key}: {path} does not fit in memory: {' '.join(str(error).split())}; if the array "
            "should be smaller, the file is damaged: write it again"
        ) from None
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        if "Object arrays" in str(error):
            raise ConfigError(
                f"{key}: {path} holds an array of Python objects; save arrays of numbers"
            ) from None
        raise ConfigError(f"{key}: {path} is not an .npz file: {in_a_line(error)}") from None


def _grouped(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arrays by name; those of several inputs, such as "x.image" and "x.age", together."""
    grouped: dict[str, Any] = {}
    for name, array in arrays.items():
        entry, dot, part = name.partition(".")
        if dot:
            grouped.setdefault(entry, {})[part] = array
        else:
            grouped[entry] = array
    return grouped


def _check_names(
    names: Sequence[str], place: str, needed: Sequence[str], optional: Sequence[str]
) -> None:
    """Refuse a file that lacks an array, or has an unknown one."""
    if missing := lacking(needed, names):
        raise ConfigError(
            f"{place} has no array {' and no '.join(missing)}; it has {', '.join(names) or 'none'}"
        )
    known = (*needed, *optional)
    for name in lacking(names, known):
        raise ConfigError(f"{place}: unknown array {name}{did_you_mean(name, known)}")
