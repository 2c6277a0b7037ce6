"""Sums that come out the same, to the bit, however they are grouped.

A block of clients is summed in client order in float64, then rounded once to 64-bit fixed point. From there on
sums are integer sums, which are associative: no grouping by arrival, node or tree can show in the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-40
LIMIT = 2.0**22  # largest magnitude of one block's sum; int64 itself ends at 2**63 * UNIT = 2**23
QUICK = 2.0**10  # magnitude below which adding MAGIC rounds to whole units, in one pass instead of three
MAGIC = 1.5 * 2.0**52  # a float64 of this size has its last bit at 1, and keeps the sign of what is added
MAGIC_BITS = int(np.float64(MAGIC).view(np.int64))


class NonFiniteError(ArithmeticError):
    """A vector holds NaN, an infinity, or a value too large for what is to be done with it."""


class FixedSum:
    """A running fixed-point sum of vectors: `total` is int64 [P], in multiples of `UNIT`."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.bound = 0.0

    def add(self, rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> None:
        """Adds one block, the weighted sum of `rows` ([k, P] or k tensors [P] of any float dtype, k >= 1).

        Raises `NonFiniteError`, and adds nothing, if an entry of the block's sum is not finite or its magnitude is
        `LIMIT` or more, or if the total could leave the range of int64.
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
            raise NonFiniteError(f"the sum of {len(weights)} updates reaches {size}; it must stay within ±{LIMIT:.0f}")
        if self.bound + size >= 2 * LIMIT:
            raise NonFiniteError(f"the sum of all blocks may leave the range ±{2 * LIMIT:.0f} of fixed point")
        if size < QUICK:
            magic = torch.full((1,), MAGIC, dtype=torch.float64, device=value.device).expand(value.shape)
            units = torch.add(magic, value, alpha=weight / UNIT).view(torch.int64).sub_(MAGIC_BITS)
        else:
            units = value.to(torch.float64).mul_(weight / UNIT).round_().to(torch.int64)
        self.bound += size
        self.total = units if self.total is None else self.total.add_(units)


def fixed_sum(rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum of one block in fixed point: int64 [P]; see `FixedSum.add`."""
    block = FixedSum()
    block.add(rows, weights)
    assert block.total is not None
    return block.total


def combine(totals: Iterable[Tensor]) -> Tensor:
    """Adds fixed sums [P] of several blocks: exact, so any order and any grouping gives the same bits.

    Raises `NonFiniteError` where the result could leave the range of int64.
    """
    first, *others = totals
    if not others:
        return first
    total, bound = first.clone(), _magnitude(first)
    for other in others:
        bound += _magnitude(other)
        total += other
    if bound >= 2**63:
        raise NonFiniteError(
            f"the sum of {len(others) + 1} blocks may leave the range ±{2**63 * UNIT:.0f} of fixed point"
        )
    return total


def to_float(total: Tensor, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """The fixed sum `total` (int64 [P]) as floating point [P], divided by `divisor`; rounded once to `dtype`."""
    return total.to(torch.float64).mul_(UNIT / divisor).to(dtype)


def _magnitude(total: Tensor) -> int:
    low, high = torch.aminmax(total)
    return max(-int(low), int(high))
