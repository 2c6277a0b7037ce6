"""Versions of raysim, Ray and Python that must be the same in all processes of a run.

A submitted job has the versions that it expects on its cluster in an environment variable. Every
command imports this module, so it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from raysim.errors import ConfigError
from raysim.version import __version__

EXPECTED_VERSIONS_VARIABLE = "RAYSIM_EXPECTED"
"""Environment variable with the versions of the machine that submitted the job, as JSON."""


def installed_versions() -> dict[str, str]:
    """Return the versions that must match between driver and cluster, by name."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"raysim": __version__, "ray": metadata.version("ray"), "python": python}


def as_variable() -> dict[str, str]:
    """Return the environment variable that passes the installed versions to a job."""
    return {EXPECTED_VERSIONS_VARIABLE: json.dumps(installed_versions())}


def has_expected_versions() -> bool:
    """Return whether this process is a submitted job that knows the versions it expects."""
    return EXPECTED_VERSIONS_VARIABLE in os.environ


def check_versions() -> None:
    """Check the versions in a submitted job; do nothing in other processes.

    Raises:
        ConfigError: a version differs from the one on the machine that submitted the job.
    """
    if not has_expected_versions():
        return
    installed = installed_versions()
    for name, version in json.loads(os.environ[EXPECTED_VERSIONS_VARIABLE]).items():
        if installed.get(name) != version:
            raise ConfigError(
                f"submit: this job was submitted with {name} {version}, the cluster has "
                f"{installed.get(name)}; install the same version on both"
            )


@dataclass(frozen=True)
class SourceCode:
    """The source code of raysim in one process."""

    folder: str
    """Folder of the package."""

    digest: str
    """sha256 of its modules, without the shipped configurations."""


@lru_cache(maxsize=1)
def source_code() -> SourceCode:
    """Return the source code of raysim in this process."""
    folder = Path(__file__).parents[2]
    whole = hashlib.sha256()
    for here, folders, files in os.walk(folder, followlinks=True):
        # In place: `os.walk` then enters the others only, in an order that no disk decides.
        folders[:] = sorted(set(folders) - {"configs", "__pycache__"})
        for file in sorted(name for name in files if name.endswith(".py")):
            path = Path(here, file)
            text = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(folder)} {text}\n".encode())
    return SourceCode(str(folder), whole.hexdigest())


def check_source_code(process: str, there: SourceCode, command: SourceCode) -> None:
    """Check that a process of a run has the same source code of raysim as the command.

    Ray's workers look for packages in the folder where the command was started first. So a folder
    raysim/ there, as in a checkout, comes before the installed package.

    Args:
        process: name of the process, for the message.
        there: its source code.
        command: the source code in the command.

    Raises:
        ConfigError: they differ.
    """
    if there.digest == command.digest:
        return
    if there.folder == command.folder:
        raise ConfigError(
            f"resources: {process} has another raysim than the command, both in {there.folder}: "
            "its files were changed since this process started, so start it again; on another "
            "machine, install the same there"
        )
    raise ConfigError(
        f"resources: {process} has another raysim, in {there.folder}, than the command, in "
        f"{command.folder}; install one of them everywhere (`pip install -e .` in a checkout), "
        "or start from a folder without raysim/"
    )
