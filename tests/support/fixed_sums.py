"""Fixed sums, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raysim.numerics.fixed_point import BlockSum, FixedSum, FixedTotal


def fixed_sum(rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> FixedTotal:
    """The weighted sum of one block in fixed point. float64 vectors have a last limb."""
    total = FixedSum(rows[0].dtype == torch.float64)
    total.add(BlockSum(rows, weights))
    assert total.total is not None
    return total.total


def same(a: FixedTotal | None, b: FixedTotal | None) -> bool:
    """Whether two fixed sums have the same limbs with the same bits."""
    assert a is not None and b is not None
    return a.keys() == b.keys() and all(torch.equal(a[e], b[e]) for e in a)
