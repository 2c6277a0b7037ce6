"""Find data sets that give another example each time, as random transforms do.

raysim reads each example once. What such a data set gives would be drawn once for all rounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raysim.data.images import is_picture

MIN_EXAMPLES_READ_AGAIN = 1024
"""Examples that are read again, if there are as many."""

EXAMPLES_FOR_ONE_MORE = 16
"""One more example is read again for each of these, so that loading large data sets takes a
sixteenth longer."""

EXAMPLES_READ_OFTEN = 32
"""Examples that are read again `TIMES_READ_OFTEN` times more, for transforms that change few."""

TIMES_READ_OFTEN = 4

SCALARS = {bool, int, float, complex, str, bytes, type(None)}
"""Types whose representation tells their values apart."""


def first_changed(read: Callable[[int], Any], examples: Sequence[Any]) -> int | None:
    """Return an example that differs when it is read again; None if none is found.

    The global generators have other states in each pass, and get their old ones back.

    Args:
        read: returns the example of a position.
        examples: the examples as they were read first.
    """
    n = len(examples)
    # Spread without a pattern, which the data set may have too.
    positions = np.random.default_rng(0).permutation(n)
    positions = positions[: MIN_EXAMPLES_READ_AGAIN + n // EXAMPLES_FOR_ONE_MORE].tolist()
    # Digests are taken first: an example may be a view of memory that the next reading changes.
    before = {k: _digest(examples[k]) for k in positions}
    with generators_kept():
        for repetition in range(1 + TIMES_READ_OFTEN):
            _seed_generators(repetition)
            for k in positions if not repetition else positions[:EXAMPLES_READ_OFTEN]:
                if _digest(read(k)) != before[k]:
                    return k
    return None


def _seed_generators(seed: int) -> None:
    """Give the global generators of Python, NumPy and torch a state that no one chose."""
    random.seed(f"raysim {seed}")
    np.random.seed(926_535 + seed)
    torch.default_generator.manual_seed(926_535 + seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators their states back at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _digest(value: Any) -> bytes:
    """Return a digest of the numbers of an example, its types and shapes."""
    whole = hashlib.blake2b(digest_size=16)
    _add(whole, value)
    return whole.digest()


def _add(whole: Any, value: Any) -> None:
    """Add an example, or a part of it, to a digest."""
    kind = type(value)
    whole.update(kind.__name__.encode())
    is_list = kind in (list, tuple)
    if kind in SCALARS or (is_list and set(map(type, value)) <= SCALARS):
        whole.update(repr(value).encode())
        return
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        # The bytes of types that NumPy lacks, such as bfloat16.
        flat = value.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
        whole.update(f"{value.dtype}{list(value.shape)}".encode())
        whole.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            whole.update(repr(key).encode())
            _add(whole, entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _add(whole, entry)
    elif is_picture(value):
        whole.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    elif hasattr(value, "__array__"):
        _add_array(whole, np.asarray(value))
    elif isinstance(value, str | int | float):  # of a subclass, such as an enumeration
        whole.update(repr(value).encode())


def _add_array(whole: Any, array: np.ndarray) -> None:
    """Add an array to a digest."""
    whole.update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.kind == "O":
        _add(whole, array.tolist())
    else:
        whole.update(np.ascontiguousarray(array).tobytes())
