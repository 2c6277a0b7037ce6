"""The global random generators, from which no code of a run may draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class GlobalGenerators:
    """States of the global random generators of torch, NumPy and Python at one moment."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def drawn_from(self) -> str | None:
        """Return the library whose generator has changed since; None for none."""
        if not torch.equal(self._torch, torch.get_rng_state()):
            return "torch"
        numpy: Any = np.random.get_state()
        if not all(np.array_equal(a, b) for a, b in zip(self._numpy, numpy, strict=True)):
            return "NumPy"
        return None if self._python == random.getstate() else "Python"

    def restore(self) -> None:
        """Put the generators back into these states."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators back at the end into the states that they have at the beginning."""
    before = GlobalGenerators()
    try:
        yield
    finally:
        before.restore()
