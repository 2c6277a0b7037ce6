"""Vectors between processes of one machine, through shared memory.

Ray's object store takes some 2 ms to hand on a megabyte that is made anew every round. Where all actors live on one
machine they write such vectors into mailboxes instead, pieces of shared memory mapped once at the start, and send
only a `Letter` that says where to look. A mailbox has one writer and holds one message; the round's order of events
makes sure that it has been read before it is written again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

LINE = 64
"""Every array starts on a boundary of so many bytes, as in memory that torch allocates."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Letter:
    """What lies in the mailbox of a writer: name -> (dtype, shape, offset in bytes)."""

    writer: str
    layout: dict[str, tuple[str, tuple[int, ...], int]]


class Mailbox:
    """A piece of shared memory, made by `new` and opened by everybody else by its path."""

    def __init__(self, path: str | Path):
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.size = len(self._map)

    @staticmethod
    def new(size: int) -> Path:
        """Takes `size` bytes of shared memory. The file may be unlinked once everybody has opened it.

        Raises OSError if there is not so much.
        """
        handle, path = tempfile.mkstemp(prefix="raysim-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, max(size, 1))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        return Path(path)

    def write(self, writer: str, arrays: Arrays) -> Letter | None:
        """Copies the arrays in; None, with nothing written, if they do not fit."""
        layout, place = {}, 0
        for name, array in arrays.items():
            layout[name] = (array.dtype.str, array.shape, place)
            place += -(-array.nbytes // LINE) * LINE
        if place > self.size:
            return None
        for name, array in arrays.items():
            self._view(*layout[name])[...] = array
        return Letter(writer, layout)

    def read(self, letter: Letter) -> Arrays:
        """The arrays, without a copy: they change when the writer writes again."""
        return {name: self._view(*where) for name, where in letter.layout.items()}

    def _view(self, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        return np.frombuffer(self._map, np.dtype(dtype), prod(shape), offset).reshape(shape)
