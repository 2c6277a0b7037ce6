"""NumPy's uniform random numbers on any device: Philox 4x64-10 in integer arithmetic of tensors.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a key and a counter
to four random words. So a GPU can compute the numbers of `raysim.randomness.generator`, bit for
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
NUMBERS_PER_COUNTER = 8
"""Numbers of float32 that one counter gives: two of each word."""


def uniform(keys: Tensor, count: int) -> Tensor:
    """Return the first numbers of several generators, in [0, 1).

    Args:
        keys: [K, 2], int64: the two words of each generator's key, see
            `raysim.randomness.key_words`.
        count: how many numbers of each.

    Returns:
        [K, count], float32, on the device of the keys: what `Generator.random(count,
        dtype=np.float32)` of NumPy gives.
    """
    n_counters = -(-count // NUMBERS_PER_COUNTER)
    # NumPy counts before it computes, so its first counter is 1.
    first = torch.arange(1, n_counters + 1, device=keys.device).expand(len(keys), -1)
    zero = torch.zeros_like(first)
    words = torch.stack(philox((first, zero, zero, zero), keys[:, :1], keys[:, 1:]), -1)
    # NumPy takes the low half of a word first, and of each half the upper 24 bits.
    halves = torch.stack((words & LOW, _upper(words)), -1)
    return (halves.flatten(1)[:, :count] >> 8).to(torch.float32) * 2.0**-24


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
