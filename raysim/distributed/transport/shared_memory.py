"""Shared memory for vectors that travel between processes of one machine.

Ray's object store copies every vector into a new object. If all actors of a run are on one machine,
they write into shared buffers instead, which they map once at the start, and send only a
`SharedBufferRef` with the positions of the arrays. A buffer has one writer and holds one message.
The order of events in a synchronous round ensures that it is read before it is written again.

CPU time of a round of all processes with two actors, through the object store over that through
shared buffers, median of 5 or 7 pairs of turns (smallest, largest):

    one step on one example, P = 199,210 (a round trip)     1.87 (1.56, 2.00), saves 12 ms
    FedAvg, MLP 784-200-200-10, 10 clients, 5 steps of 64   1.18 (1.06, 1.25), saves 14 ms
    the same net, 1000 clients, one step of 6, pooled       1.08 (0.97, 1.19)
    GradMA, 784-200-100-10, 10 clients, 5 steps of 64       1.00 (0.99, 1.04)

So it is worth having for short rounds only.

    python benchmarks/earns_its_place.py memory
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import numpy as np

from raysim.training.messages import ClientResult, ClientTask

ALIGNMENT_BYTES = 64
"""Every array starts at a multiple of this, like memory that torch allocates."""

OfClient = TypeVar("OfClient", ClientTask, ClientResult)

ArrayGroups = dict[str, dict[str, np.ndarray]]
"""Arrays by group and name."""

Place = tuple[str, tuple[int, ...], int]
"""An array's dtype, its shape and its offset in bytes."""


@dataclass(frozen=True)
class SharedBufferRef:
    """Reference to the arrays in a shared buffer, for processes that have opened it."""

    writer: str
    """Name of the process that writes the buffer."""

    layout: dict[str, dict[str, Place]]
    """Place of each array, by group and name."""


class SharedBuffer:
    """Shared memory that exists as long as a process has it open.

    `new` allocates one; other processes open it by its path.

    Args:
        path: file of the memory, which must exist; `new` returns a buffer with one.
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.size = len(self._map)

    @classmethod
    def new(cls, size: int) -> SharedBuffer:
        """Allocate shared memory, which others can open while this process keeps the buffer.

        Args:
            size: size of the buffer, in bytes.

        Returns:
            The buffer, which this process has open.

        Raises:
            OSError: the machine has too little shared memory.
        """
        handle = os.memfd_create("raysim")
        try:
            # Allocated now: without it, a write to full memory would kill the process (SIGBUS).
            os.posix_fallocate(handle, 0, max(size, 1))
            # By the open file of this process: a memfd has no name that a crash could leave behind.
            buffer = cls(f"/proc/{os.getpid()}/fd/{handle}")
        except OSError:
            os.close(handle)
            raise
        weakref.finalize(buffer, os.close, handle)
        return buffer

    def write(self, writer: str, groups: ArrayGroups) -> SharedBufferRef | None:
        """Copy arrays into the buffer.

        Args:
            writer: name of the process that writes, for the reference.
            groups: arrays by group and name. They replace what was written before.

        Returns:
            The reference to send to readers; None, with nothing written, if the arrays do not fit.
        """
        layout: dict[str, dict[str, Place]] = {}
        end = 0
        for group, arrays in groups.items():
            layout[group] = {}
            for name, array in arrays.items():
                layout[group][name] = (array.dtype.str, array.shape, end)
                end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end > self.size:
            return None
        for group, arrays in groups.items():
            for name, array in arrays.items():
                self._view(*layout[group][name])[...] = array
        return SharedBufferRef(writer, layout)

    def read(self, ref: SharedBufferRef) -> ArrayGroups:
        """Return the arrays without copying them: they change when the writer writes again.

        Args:
            ref: what the writer's last `write` returned.
        """
        return {
            group: {name: self._view(*place) for name, place in places.items()}
            for group, places in ref.layout.items()
        }

    def _view(self, dtype: str, shape: tuple[int, ...], offset: int) -> np.ndarray:
        return np.frombuffer(self._map, np.dtype(dtype), prod(shape), offset).reshape(shape)


def states_of(writer: str) -> str:
    """Return the name of the buffer with the client states that `writer` sends.

    Args:
        writer: name of the buffer with what it sends else.
    """
    return f"states of {writer}"


def move_states(
    items: list[OfClient], name: str, buffer: SharedBuffer
) -> tuple[list[OfClient], SharedBufferRef | None]:
    """Write the client states of tasks or results into a shared buffer.

    Args:
        items: tasks or results of clients.
        name: name of the buffer.
        buffer: the buffer.

    Returns:
        The items without states, and the place of the states. If there are none or they do not fit,
        the items as they are, and None.
    """
    # Arrays: only an inline run keeps tensors.
    states: Any = {str(item.client): item.client_state for item in items if item.client_state}
    place = buffer.write(name, states) if states else None
    if place is None:
        return items, None
    return [replace(item, client_state=None) for item in items], place


def attach_states(items: Iterable[OfClient], states: ArrayGroups) -> None:
    """Give tasks or results the states that `move_states` took from them, without copies.

    Args:
        items: tasks or results of clients.
        states: the arrays of their place.
    """
    for item in items:
        item.client_state = states.get(str(item.client))
