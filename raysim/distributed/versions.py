"""What a job was sent off by, and whether the cluster has the same. Imports nothing heavy: every command asks."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata

from raysim.errors import ConfigError
from raysim.version import __version__

EXPECTED = "RAYSIM_EXPECTED"
"""The environment variable in which a job is told."""


def here() -> dict[str, str]:
    """Those that must agree."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"raysim": __version__, "ray": metadata.version("ray"), "python": python}


def as_variable() -> dict[str, str]:
    """For the environment of a job."""
    return {EXPECTED: json.dumps(here())}


def told() -> bool:
    """Whether this is a job that knows what sent it off."""
    return EXPECTED in os.environ


def check() -> None:
    """Raises ConfigError in a job that was sent off by others than there are here."""
    if not told():
        return
    there = here()
    for name, version in json.loads(os.environ[EXPECTED]).items():
        if there.get(name) != version:
            raise ConfigError(
                f"submit: this job was sent off by {name} {version}, the cluster has {there.get(name)}; install the "
                "same on both"
            )
