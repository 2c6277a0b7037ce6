"""Users' own methods and models, found by path or module name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from raysim.errors import ConfigError, did_you_mean

PREFIX = "raysim_user_"
"""Modules loaded from a path are named so; workers get them by value, as they could not import them."""


def load_object(reference: str, key: str) -> Any:
    """The object that `path.py:Name` or `package.module:Name` means; `key` is where the configuration says so.

    Raises ConfigError if there is no such file, module or name in it, or if it fails on import.
    """
    where, _, name = reference.rpartition(":")
    path = Path(where).expanduser()
    if where.endswith(".py") and not path.is_file():
        raise ConfigError(f"{key}: there is no file '{where}' (seen from {Path.cwd()})")
    try:
        module = _from_file(path) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and not where.endswith(".py"):
            raise ConfigError(f"{key}: cannot import '{where}': {error}") from None
        raise ConfigError(f"{key}: {where} fails on import: {type(error).__name__}: {error}") from None
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise ConfigError(f"{key}: {where} defines no '{name}'{did_you_mean(name, names)}")
    return getattr(module, name)


def _from_file(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
