"""The one source of chance in raysim.

Every random number of a run comes from `generator(seed, stream, ...)`, a counter-based generator whose key is
made from its arguments alone. Nothing is remembered between calls: the same arguments give the same numbers
in any process, on any node, after any crash, whatever was drawn elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence


class _Key(ISeedSequence):
    """Hands Philox a ready 128-bit key (numpy's own SeedSequence would mix it again, ten times slower)."""

    __slots__ = ("_words",)

    def __init__(self, words: np.ndarray):
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return self._words.view(dtype)[:n_words]


def generator(seed: int, stream: str, *place: int) -> Generator:
    """A NumPy generator for one purpose at one place, say `generator(seed, "order", round, client)`.

    Args:
        seed: the run's seed.
        stream: the purpose ("partition", "init", "cohort", "order", "dropout", ...). Streams never overlap.
        place: any integers that name the place of use: round, client, pass over the data.
    """
    name = f"{seed}/{stream}/" + "/".join(map(str, place))
    words = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint64)
    key: Any = _Key(words)
    return Generator(Philox(key))
