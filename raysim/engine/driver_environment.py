"""Environment variables that the process of a run has set, for its workers.

Ray's workers have the variables of the process that started Ray. A rule, net, loss or metric that
reads one which a script or a notebook has set later computes the same everywhere only if workers
get it too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NOT_FOR_WORKERS = re.compile(
    r"(RAY|CUDA|CUBLAS|NVIDIA|MLFLOW|PYTEST|LD)_|PYTHON|.*_(NUM_THREADS|USERNAME|PASSWORD|TOKEN"
    r"|SECRET|KEY|CREDENTIALS)|(PATH|HOME|TMPDIR|TMP|TEMP|USER|HOSTNAME)$"
)
"""Beginnings of names of variables that stay here: those of Ray, CUDA, MLflow and the loaders of
programs, numbers of threads, logins, and what is of one machine."""


def own_variables() -> dict[str, str | None]:
    """Return the variables that this process has set, changed or deleted (None) since it started.

    Empty where /proc does not tell with which variables a process started.
    """
    try:
        initial = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = [os.fsdecode(entry).partition("=") for entry in initial if entry]
    started_with = {name: value for name, _, value in pairs}
    return {
        name: os.environ.get(name)
        for name in sorted({*started_with, *os.environ})
        if os.environ.get(name) != started_with.get(name) and not NOT_FOR_WORKERS.match(name)
    }


def set_variables(variables: dict[str, str | None]) -> None:
    """Set variables of this process, and delete those that are None.

    Args:
        variables: values by name, as `own_variables` returns them.
    """
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class EnvironmentOfDriver:
    """Sets the variables of the process that pickled it where it is unpickled."""

    def __reduce__(self) -> tuple:
        return set_variables, (own_variables(),)
