"""A home of the tests' own, and a fixture that fails a test which opens files elsewhere.

On import, before raysim is imported, HOME becomes an empty folder, and variables that name data,
caches or servers of this machine are dropped. Processes that tests start inherit both. So a test
that needs a data set or a setting of the machine where it was written fails there too.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import shutil
import sqlite3
import sqlite3.dbapi2
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]

MACHINE_SETTINGS = (
    "DATABRICKS_", "HF_", "MLFLOW_", "MPLCONFIGDIR", "RAYSIM_", "RAY_", "TORCH_HOME", "WANDB_",
    "XDG_",
)  # fmt: skip
"""First letters of the variables that are dropped."""

FOREIGN_FOLDERS = "TESTS_FOREIGN_FOLDERS"
"""Variable with the folders that no test may open, for the workers of pytest-xdist."""

DEFAULT_OUTPUTS = ("runs", "mlruns", "mlartifacts", "mlflow.db")
"""Paths in the working folder where a run writes if it is not told otherwise."""

OPENING = (
    (builtins, "open"),
    (io, "open"),
    (os, "open"),
    (os, "listdir"),
    (os, "scandir"),
    (sqlite3, "connect"),
    (sqlite3.dbapi2, "connect"),
)
"""Functions whose first argument is a path. (An audit hook would be called for every `id` of a
`deepcopy` as well, which takes a tenth of the tests' time.)
"""


def isolate() -> list[str]:
    """Give this process an empty home, and return the folders that no test may open."""
    if FOREIGN_FOLDERS in os.environ:  # the process that started this one has made the home
        return os.environ[FOREIGN_FOLDERS].split(os.pathsep)
    foreign = [os.path.expanduser("~"), os.environ.get("RAYSIM_DATA", "")]
    foreign += [str(CHECKOUT / name) for name in DEFAULT_OUTPUTS]
    foreign = [os.path.abspath(folder) for folder in foreign if folder not in ("", "/")]
    for name in list(os.environ):
        if name.startswith(MACHINE_SETTINGS):
            del os.environ[name]
    home = tempfile.mkdtemp(prefix="home-of-tests-")
    os.environ["HOME"] = home
    os.environ["TERM"] = "xterm"  # a dumb terminal has no colours and no live line
    os.environ[FOREIGN_FOLDERS] = os.pathsep.join(foreign)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a fork
            shutil.rmtree(home, ignore_errors=True)

    atexit.register(remove)
    return foreign


def watch(foreign: list[str]) -> list[str]:
    """Return a list to which each foreign path is added when this process opens it."""
    own = [str(CHECKOUT), os.environ["HOME"], tempfile.gettempdir(), sys.prefix, sys.base_prefix]
    own += [folder for folder in (*sys.path, os.environ.get("TESTS_DATA")) if folder]
    is_foreign = dict.fromkeys(foreign, True)
    is_foreign |= dict.fromkeys(map(os.path.abspath, own), False)
    opened: list[str] = []
    os_open = os.open

    def note(path: Any) -> None:
        path = os.path.abspath(os.fsdecode(path))
        folder = path  # the innermost folder that is known decides
        while folder not in is_foreign and folder != "/":
            folder = os.path.dirname(folder)
        if is_foreign.get(folder):
            opened.append(path)

    def watched(function: Callable[..., Any], in_folders: bool) -> Callable[..., Any]:
        """Note the paths with which a function is called.

        Args:
            function: any of `OPENING`.
            in_folders: whether a relative path may lie in another folder than the working folder,
                as those that shutil.rmtree opens.
        """

        @wraps(function)
        def call(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
            if isinstance(path, str | bytes | os.PathLike) and not (
                in_folders and not os.path.isabs(path)
            ):
                note(path)
            return function(path, *arguments, **keywords)

        return call

    for module, name in OPENING:
        function = getattr(module, name)
        setattr(module, name, watched(function, in_folders=function is os_open))
    return opened


OPENED = watch(isolate())


@pytest.fixture(autouse=True)
def opens_nothing_foreign() -> Iterator[None]:
    """Fail a test that opens a file of the machine's: in its user's home, or outputs of runs."""
    yield
    opened = sorted({*OPENED})
    OPENED.clear()
    assert not opened, f"a test opens what is not its own: {', '.join(opened[:5])}"
