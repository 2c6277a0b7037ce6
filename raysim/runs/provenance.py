"""Provenance of a run: its command, the versions of its libraries and the installed packages."""

from __future__ import annotations

import platform
import shlex
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from raysim.config.tracking_uri import mask_secrets
from raysim.version import __version__

REQUIREMENTS_FILE = "requirements.txt"
"""File of the installed packages, in a run's folder and among its artifacts."""

_NO_COMMAND = ("ipykernel_launcher.py", "default_worker.py", "-c", "")
"""Programs whose command no user typed: notebooks, Ray's workers and code passed to Python."""

_TRIALS = ("sweeps", "trials", "__main__.py")
"""The process that trains trials of a sweep; the sweep's own run has the command."""


def command_line() -> str:
    """Return the command that started this process, without passwords; "" if no user typed it."""
    program = Path(sys.argv[0])
    if program.name in _NO_COMMAND or program.parts[-3:] == _TRIALS:
        return ""
    if program.name == "raysim" or program.parts[-2:] == ("raysim", "__main__.py"):
        words = ["raysim", *sys.argv[1:]]
    else:
        words = ["python", *sys.orig_argv[1:]]
    return shlex.join(mask_secrets(word) for word in words)


def command_tag(name: str = "command") -> dict[str, str]:
    """Return the command that started this process as a tag; {} if no user typed it.

    Args:
        name: name of the tag.
    """
    command = command_line()
    return {name: command} if command else {}


@cache
def versions() -> dict[str, str]:
    """Return the versions, by name, on which the result of a run may depend.

    Returns:
        Versions of raysim, Python, torch, NumPy, Ray and MLflow.
    """
    others = ("torch", "numpy", "ray", "mlflow")
    return {
        "raysim": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in others},
    }


@cache
def installed_packages() -> str:
    """Return the installed packages as a requirements file."""
    versions_by_name: dict[str, str] = {}
    for package in metadata.distributions():
        facts = package.metadata
        if "Name" in facts and "Version" in facts:  # which the rest of a removed package lacks
            versions_by_name[facts["Name"]] = facts["Version"]
    names = sorted(versions_by_name, key=str.lower)
    return "".join(f"{name}=={versions_by_name[name]}\n" for name in names)
