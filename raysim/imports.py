"""Imports of large packages such as torch, which make hundreds of thousands of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's search for cyclic garbage, for imports inside the block.

    It would go through all objects again and again, and free none: a tenth of the time of the
    import of torch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
