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
            _check_kind(path, key, advice)
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


def _check_kind(path: Path, key: str, advice: str) -> None:
    """Refuse files of other kinds, which NumPy would take for pickles; the message says which."""
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        if all(name.endswith(".npy") for name in members):
            return
        kind = f"a zip archive with {members[0]}, as torch.save and spreadsheets make"
    elif start.startswith(b"\x93NUMPY"):
        kind = "one array of np.save"
    elif not start:
        kind = "empty"
    elif start.startswith(b"PK"):
        kind = "a damaged or cut-off zip archive"
    else:
        kind = f"a file that begins with {start[:20].decode(errors='replace')!r}"
    raise ConfigError(f"{key}: {path} is not an .npz file but {kind}; {advice}")
