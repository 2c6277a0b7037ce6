"""Rehearsal of a GPU: on a CPU, lanes capture and replay local steps by a stand-in for CUDA graphs.

It shows without a GPU whether a client rule's step can be captured, and whether a replay gives what
the step itself gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_rehearses = False


def rehearses() -> bool:
    """Return whether trainers that are made now treat the CPU as a GPU."""
    return _rehearses


@contextmanager
def rehearsal() -> Iterator[None]:
    """Rehearse a GPU: trainers that are made in this context treat the CPU as one."""
    global _rehearses
    before, _rehearses = _rehearses, True
    try:
        yield
    finally:
        _rehearses = before
