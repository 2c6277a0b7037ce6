"""Find data sets that give another example each time, as random transforms do.

raysim reads each example once. What such a data set gives would be drawn once for all rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raysim.system.global_generators import GENERATORS, generators_kept, seed_generators

MIN_EXAMPLES_READ_AGAIN = 1024
"""Examples that are read again, if there are as many."""

EXAMPLES_FOR_ONE_MORE = 16
"""One more example is read again for each of these, so that loading large data sets takes a
sixteenth longer."""

SEED_OF_NO_ONE = 926_535
"""A seed that no data set has chosen."""

Example = tuple[Any, Any, Any]
"""x and y, each an array or an image of Pillow, and the user."""


def first_changed(read: Callable[[int], Example], examples: Sequence[Example]) -> int | None:
    """Return an example that differs when it is read again; None if none is found.

    The global generators have other states meanwhile, and get their old ones back.

    Args:
        read: returns the example of a position.
        examples: the examples as they were read first.
    """
    n = len(examples)
    # Spread without a pattern, which the data set may have too.
    order = np.random.default_rng(0).permutation(n)
    positions: list[int] = order[: MIN_EXAMPLES_READ_AGAIN + n // EXAMPLES_FOR_ONE_MORE].tolist()
    # Digests are taken first: an example may be a view of memory that the next reading changes.
    before = {k: _digests(examples[k]) for k in positions}
    with generators_kept():
        seed_generators(GENERATORS, SEED_OF_NO_ONE)
        for k in positions:
            if _digests(read(k)) != before[k]:
                return k
    return None


def _digests(example: tuple[Any, ...]) -> list[str]:
    """Return digests of x and y with their types and shapes, and the user."""
    *parts, user = example
    digests = [repr(user)]
    for part in parts:
        if isinstance(part, dict):  # several inputs
            digests += _digests((*part.values(), None))
            continue
        array = np.asarray(part)
        content = hashlib.sha256(array.tobytes()).hexdigest()
        digests.append(f"{array.dtype} {array.shape} {content}")
    return digests
