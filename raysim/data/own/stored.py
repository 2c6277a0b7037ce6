"""Files of the arrays that were given from Python, so that a run can be resumed from anywhere."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from raysim.config.sections.data import data_root
from raysim.errors import ConfigError
from raysim.system import files

STORED_FOLDER = "from_python"
"""Folder of the files, in that of the data sets."""


def is_stored(path: Path) -> bool:
    """Return whether a file is one that `stored_arrays` has written.

    Args:
        path: the file.
    """
    return path.parent.name == STORED_FOLDER


def stored_arrays(section: str, arrays: Mapping[str, np.ndarray], identity: str = "") -> Path:
    """Write arrays to a file that is named after their content, unless it is there.

    Args:
        section: the section of the configuration that they are for.
        arrays: the arrays by name.
        identity: a text that identifies them; by default they are digested.

    Returns:
        The absolute path of the .npz file.

    Raises:
        ConfigError: the file cannot be written.
    """
    whole = hashlib.sha256(identity.encode())
    for name, array in arrays.items() if not identity else ():
        whole.update(f"{name} {array.dtype}{array.shape}".encode() + array.tobytes())
    stem = "python" if section == "data" else section
    path = data_root().absolute() / STORED_FOLDER / f"{stem}-{whole.hexdigest()[:16]}.npz"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Runs that start at the same time may write the same content, each to its own file.
            own = path.with_name(f"{secrets.token_hex(4)}-{path.name}")
            with files.whole(own) as partial:
                np.savez(partial, allow_pickle=False, **arrays)
            own.replace(path)
        except OSError as error:
            raise ConfigError(
                f"{section}: {path} cannot be written: {error.strerror}; set $RAYSIM_DATA to a "
                "folder for data sets"
            ) from None
    return path
