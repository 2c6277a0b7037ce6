"""Vectors between processes of one machine, through shared memory.

Ray's object store takes some 2 ms to hand on a megabyte that is made anew every round. Where all actors live on one
machine they write such vectors into mailboxes instead, pieces of shared memory mapped once at the start, and send
only a `Letter` that says where to look. A mailbox has one writer and holds one message; the round's order of events
makes sure that it has been read before it is written again.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from math import prod

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
    """A piece of shared memory: made by `new`, opened by everybody else by its path, and gone with the last of them."""

    def __init__(self, path: str):
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.size = len(self._map)

    @classmethod
    def new(cls, size: int) -> Mailbox:
        """Takes `size` bytes of shared memory, which other processes of this machine can open as long as this one
        keeps the mailbox.

        Raises OSError if there is not so much.
        """
        handle = os.memfd_create("raysim")
        try:
            os.posix_fallocate(handle, 0, max(size, 1))
            box = cls(f"/proc/{os.getpid()}/fd/{handle}")
        except OSError:
            os.close(handle)
            raise
        weakref.finalize(box, os.close, handle)
        return box

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
