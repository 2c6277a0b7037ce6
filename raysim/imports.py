"""Imports of large packages such as torch, and the places of modules for other processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's search for cyclic garbage, for imports inside the block.

    The import of torch makes hundreds of thousands of objects. The search would go through all of
    them again and again, and free none: a fifth of the time of the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Moves all objects to the oldest generation. Otherwise the next searches of the
            # younger ones would go through them: a quarter of the time of the import.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def python_path() -> str:
    """Return PYTHONPATH for a process that imports the same modules as this one.

    With Python's option -P, the folder in which a user works is no place for modules, unless it is
    one here. Python ignores places that are no texts, such as a `Path`.
    """
    return os.pathsep.join(place or os.getcwd() for place in sys.path if isinstance(place, str))
