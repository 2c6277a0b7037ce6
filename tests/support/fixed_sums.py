"""Comparison of fixed sums."""

from __future__ import annotations

import torch

from raysim.numerics.fixed_point import FixedTotal


def same(a: FixedTotal | None, b: FixedTotal | None) -> bool:
    """Whether two fixed sums have the same limbs with the same bits."""
    assert a is not None and b is not None
    return a.keys() == b.keys() and all(torch.equal(a[e], b[e]) for e in a)
