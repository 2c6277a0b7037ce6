"""The global random generators of torch, NumPy and Python.

Only nets in training may draw from them. A run seeds them before each training pass of such a net.
They belong to the process, so one thread at a time uses them.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("raysim")

_USED = threading.RLock()
"""Held by the thread that uses the generators."""


def _unlocked_in_fork() -> None:
    """Take a new lock in a fork, in which the thread that holds the old one is missing."""
    global _USED
    _USED = threading.RLock()


os.register_at_fork(after_in_child=_unlocked_in_fork)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let one thread of this process at a time into the block; the others wait.

    The thread inside may enter it again, such as in a function that a run calls.
    """
    used = _USED
    if not used.acquire(blocking=False):
        logger.warning(
            "another thread of this process trains, and this one waits for it; to train at the "
            "same time, use raysim.sweep, or a process for each run"
        )
        used.acquire()
    try:
        yield
    finally:
        used.release()


@dataclass(frozen=True)
class Generator:
    """A global generator."""

    state: Callable[[], Any]
    """Returns its state."""
    set_state: Callable[[Any], None]
    """Sets its state."""
    seed: Callable[[int], Any]
    """Seeds it with a number below 2^32."""


def _torch_states() -> list[bytes]:
    """Return the states of torch's generators of the CPU and, if in use, of the current GPU."""
    states = [torch.get_rng_state()]
    # While steps are captured, the state of a GPU's generator cannot be read.
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


def _set_torch_states(states: list[bytes]) -> None:
    """Set the states of torch's generators."""
    tensors = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
    torch.set_rng_state(tensors[0])
    for state in tensors[1:]:
        torch.cuda.set_rng_state(state)


def _seed_torch(number: int) -> None:
    """Seed torch's generators. Unlike `torch.manual_seed` it starts no GPU that is not in use."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def _numpy_state() -> tuple[Any, ...]:
    """Return the state of NumPy's generator, with the words as bytes, so that states compare."""
    name, words, *rest = np.random.get_state()
    assert isinstance(words, np.ndarray)
    return name, words.tobytes(), *rest


def _set_numpy_state(state: tuple[Any, ...]) -> None:
    """Set the state of NumPy's generator."""
    name, words, *rest = state
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))


GENERATORS: Mapping[str, Generator] = {
    "torch": Generator(_torch_states, _set_torch_states, _seed_torch),
    "NumPy": Generator(_numpy_state, _set_numpy_state, np.random.seed),
    "Python": Generator(random.getstate, random.setstate, random.seed),
}
"""The generators by library."""


class GlobalGenerators:
    """States of global random generators at one moment.

    Args:
        libraries: those whose generators are looked at, of `GENERATORS`.
    """

    def __init__(self, libraries: Collection[str] = tuple(GENERATORS)):
        self._states = {library: GENERATORS[library].state() for library in libraries}

    def drawn_from(self) -> tuple[str, ...]:
        """Return the libraries whose generators have changed since."""
        return tuple(
            library
            for library, state in self._states.items()
            if GENERATORS[library].state() != state
        )

    def restore(self) -> None:
        """Put the generators back into these states."""
        for library, state in self._states.items():
            GENERATORS[library].set_state(state)


@contextmanager
def generators_kept(libraries: Collection[str] = tuple(GENERATORS)) -> Iterator[None]:
    """Put global generators back at the end into the states that they have at the beginning.

    Args:
        libraries: those whose generators are kept.
    """
    before = GlobalGenerators(libraries)
    try:
        yield
    finally:
        before.restore()


def seed_generators(libraries: Collection[str], number: int) -> None:
    """Seed global generators.

    Args:
        libraries: those whose generators are seeded.
        number: the seed, from 0, below 2^32.
    """
    for library in libraries:
        GENERATORS[library].seed(number)
