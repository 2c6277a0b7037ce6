"""NumPy's random words on any device: Philox 4x64-10 in integer arithmetic of tensors.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a key and a counter
to four random words. So a GPU can compute the words of `raysim.randomness.generator`, bit for
bit, without drawing them on the CPU and copying them.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
KEY_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""The constants of Philox 4x64."""
ROUNDS = 10
LOW = 0xFFFFFFFF
"""The low half of a word of 64 bits."""
WORDS_PER_COUNTER = 8
"""Words of 32 bits that one counter gives."""


def random_words(keys: Tensor, count: int, first: int = 0) -> Tensor:
    """Return random words of 32 bits of several generators.

    Args:
        keys: [K, 2], int64: the two words of each generator's key, see
            `raysim.randomness.key_words`.
        count: how many words of each.
        first: how many words to skip, a multiple of `WORDS_PER_COUNTER`.

    Returns:
        [K, count], int32, on the device of the keys: the bits of what `Generator.integers(0, 2**32,
        count, dtype=np.uint32)` of NumPy gives.
    """
    # NumPy counts before it computes, so its first counter is 1.
    begin, n_counters = first // WORDS_PER_COUNTER + 1, -(-count // WORDS_PER_COUNTER)
    counter = torch.arange(begin, begin + n_counters, device=keys.device).expand(len(keys), -1)
    zero = torch.zeros_like(counter)
    words = torch.stack(philox((counter, zero, zero, zero), keys[:, :1], keys[:, 1:]), -1)
    # NumPy takes the low half of a word first.
    return words.view(torch.int32).flatten(1)[:, :count]


def uniform(words: Tensor) -> Tensor:
    """Return a uniform number in [0, 1) for each random word.

    Args:
        words: int32, of any shape: random words, see `random_words`.

    Returns:
        float32: what `Generator.random(dtype=np.float32)` of NumPy gives, the upper 24 bits.
    """
    return ((words >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key0: Tensor, key1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of each counter under a key.

    Words of 64 bits are int64 with the same bits; all tensors broadcast.

    Args:
        counter: the words of the counters.
        key0: the first word of the keys.
        key1: their second word.
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        if i:
            key0, key1 = key0 + _signed(KEY_INCREMENTS[0]), key1 + _signed(KEY_INCREMENTS[1])
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    return c0, c1, c2, c3


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of the product of unsigned words of 64 bits."""
    a_low, a_high = a & LOW, _upper(a)
    m_low, m_high = m & LOW, m >> 32
    low, middle0, middle1 = a_low * m_low, a_high * m_low, a_low * m_high
    carry = _upper(low) + (middle0 & LOW) + (middle1 & LOW)
    high = a_high * m_high + _upper(middle0) + _upper(middle1) + (carry >> 32)
    return high, a * _signed(m)


def _upper(word: Tensor) -> Tensor:
    """Return the upper half of an unsigned word."""
    return (word >> 32) & LOW  # >> keeps the sign


def _signed(word: int) -> int:
    """Return the integer of int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >= 1 << 63 else word
