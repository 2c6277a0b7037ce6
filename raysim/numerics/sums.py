"""Sums that come out the same, to the bit, however they are grouped.

A block of clients is summed in client order in float64, then rounded once to fixed point. From there on sums are
integer sums, which are associative: no grouping by arrival, node or tree can show in the result.

A fixed sum is int64 [L, P]: a low limb in multiples of `UNIT` and, where some block reached `HIGH` in magnitude (the
running variances of clients with two examples do), a high limb in multiples of `HIGH`. How a block is split depends
on the block alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-40
HIGH = 2.0**10
LIMIT = 2.0**60  # what is larger counts as non-finite
ROOM = 2.0**22  # what the low limbs of all blocks may add up to; int64 itself ends at 2**63 * UNIT = 2**23
MAGIC = 1.5 * 2.0**52  # a float64 of this size has its last bit at 1, so adding it rounds to whole units in one pass
MAGIC_BITS = int(np.float64(MAGIC).view(np.int64))


class NonFiniteError(ArithmeticError):
    """A vector holds NaN, an infinity, or a value too large for what is to be done with it."""


class FixedSum:
    """A running fixed sum of vectors [P]; `total` is None until something was added."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.bound = 0.0

    def add(self, rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> None:
        """Adds one block, the weighted sum of `rows` ([k, P] or k tensors [P] of any float dtype, k >= 1).

        Raises `NonFiniteError`, and adds nothing, if an entry of the block's sum is not finite or its magnitude is
        `LIMIT` or more, or if so many large blocks were added that the total could leave the range of int64.
        """
        if len(rows) != len(weights):
            raise ValueError(f"{len(rows)} rows and {len(weights)} weights")
        value, weight = rows[0], weights[0]
        if len(weights) > 1:
            value, weight = torch.zeros(rows[0].shape, dtype=torch.float64, device=rows[0].device), 1.0
            for row, share in zip(rows, weights, strict=True):
                value.add_(row, alpha=share)
        size = max(abs(float(bound)) for bound in torch.aminmax(value)) * abs(weight)
        if not size < LIMIT:  # NaN comes through, and fails the comparison
            raise NonFiniteError(f"the sum of {len(weights)} updates reaches {size}; it must stay below {LIMIT:.0e}")
        self.bound += min(size, HIGH)
        if self.bound >= ROOM:
            raise NonFiniteError("the sum of all blocks may leave the range of fixed point")
        limbs = _low(value, weight) if size < HIGH else _low_and_high(value, weight)
        self.total = limbs if self.total is None else _plus(self.total, limbs)


def _low(value: Tensor, weight: float) -> Tensor:
    magic = torch.full((1,), MAGIC, dtype=torch.float64, device=value.device).expand(value.shape)
    return torch.add(magic, value, alpha=weight / UNIT).view(torch.int64).sub_(MAGIC_BITS)[None]


def _low_and_high(value: Tensor, weight: float) -> Tensor:
    exact = value.to(torch.float64) * weight
    high = (exact / HIGH).round_()
    return torch.stack([((exact - high * HIGH) / UNIT).round_(), high]).to(torch.int64)


def _plus(total: Tensor, limbs: Tensor) -> Tensor:
    """The sum, in the place of the one with more limbs."""
    more, less = (total, limbs) if len(total) >= len(limbs) else (limbs, total)
    more[: len(less)] += less
    return more


def fixed_sum(rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum of one block in fixed point: int64 [L, P]; see `FixedSum.add`."""
    block = FixedSum()
    block.add(rows, weights)
    assert block.total is not None
    return block.total


def combine(totals: Iterable[Tensor], bound: float | None = None) -> Tensor:
    """Adds fixed sums [L, P] of several blocks: exact, so any order and any grouping gives the same bits.

    `bound`, the sum of their `FixedSum.bound`, spares a look at every number. Raises `NonFiniteError` where the result
    could leave the range of int64.
    """
    first, *others = totals
    if not others:
        return first
    units = sum(map(_magnitude, (first, *others))) if bound is None else bound / UNIT
    total = first.clone()
    for other in others:
        total = _plus(total, other if len(other) <= len(total) else other.clone())
    if units >= 2**63:
        raise NonFiniteError(f"the sum of {len(others) + 1} blocks may leave the range of fixed point")
    return total


def to_float(total: Tensor, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """The fixed sum `total` (int64 [L, P]) as floating point [P], divided by `divisor`; rounded once to `dtype`."""
    value = total[0].to(torch.float64).mul_(UNIT / divisor)
    if len(total) > 1:
        value += total[1].to(torch.float64).mul_(HIGH / divisor)
    return value.to(dtype)


def _magnitude(total: Tensor) -> int:
    low, high = torch.aminmax(total)
    return max(-int(low), int(high))
