"""Keyed random number generators, the only source of randomness in raysim.

Every random number of a run comes from `generator(seed, stream, ...)`. This generator is
counter-based, and its key depends only on the arguments. There is no state between calls: the same
arguments give the same numbers in any process, on any node and after any crash, whatever other
code has drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.random.bit_generator import ISeedSequence


class _Key(ISeedSequence):
    """Ready 128-bit key for Philox; numpy's SeedSequence would hash it again, ten times slower."""

    __slots__ = ("_words",)

    def __init__(self, words: np.ndarray):
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """Return the first `n_words` words of the key, viewed as `dtype`."""
        return self._words.view(dtype)[:n_words]


def generator(seed: int, stream: str, *place: int) -> Generator:
    """Return the NumPy generator of one stream at one place.

    An example is `generator(seed, "order", client, number_of_the_pass)`.

    Args:
        seed: seed of the run.
        stream: the purpose ("partition", "init", "cohort", "order", "dropout", ...). Streams never
            overlap.
        place: integers that identify the place of use: round, client, pass over the data.

    Returns:
        A new generator at the start of its sequence.
    """
    key: Any = _Key(key_words(seed, stream, *place))
    return Generator(Philox(key))


def key_words(seed: int, stream: str, *place: int) -> np.ndarray:
    """Return the key of the generator of one stream at one place, [2] words of 64 bits.

    Args:
        seed: seed of the run.
        stream: the purpose, as in `generator`.
        place: integers that identify the place of use.
    """
    name = f"{seed}/{stream}/" + "/".join(map(str, place))
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype=np.uint64)


class KeyedStream:
    """Keyed sequence of random numbers for each place, for example for each client.

    Numbers are drawn in chunks of 16, because creating a generator costs more than its numbers:
    number k of a place is number k mod 16 of `generator(seed, stream, *place, k // 16)`.

    Args:
        seed: the run's seed.
        stream: the purpose, as in `generator`.
        draw: a method of `numpy.random.Generator` that takes a count, such as `Generator.random`.
    """

    def __init__(self, seed: int, stream: str, draw: Callable[[Generator, int], np.ndarray]):
        self._seed = seed
        self._stream = stream
        self._draw = draw
        self._chunks: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}

    def number(self, k: int, *place: int) -> float:
        """Return the `k`-th number of a place.

        Args:
            k: index of the number, from 0.
            place: integers that identify the place, such as the number of a client.
        """
        chunk, position = divmod(k, _CHUNK_SIZE)
        cached_chunk, values = self._chunks.get(place, (-1, _NO_NUMBERS))
        if cached_chunk != chunk:
            values = self._draw(generator(self._seed, self._stream, *place, chunk), _CHUNK_SIZE)
            self._chunks[place] = chunk, values
        return float(values[position])


_CHUNK_SIZE = 16
"""Numbers drawn from one generator; part of the definition of the sequence."""

_NO_NUMBERS = np.empty(0)
"""Chunk of a place from which no number has been drawn yet."""
