"""Sums that come out the same, to the bit, however they are grouped.

A block of clients is summed in client order in float64, then rounded once to 64-bit fixed point. From there on
sums are integer sums, which are associative: no grouping by arrival, node or tree can show in the result.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNIT = 2.0**-40
LIMIT = 2.0**22  # largest magnitude of one fixed sum; int64 itself ends at 2**63 * UNIT = 2**23


class NonFiniteError(ArithmeticError):
    """A vector holds NaN, an infinity, or a value too large for what is to be done with it."""


def fixed_sum(rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum of `rows` in fixed point: int64 [P], in multiples of `UNIT`.

    `rows` is [k, P] or k tensors [P], of any float dtype and on any one device; k >= 1.
    Raises `NonFiniteError` if an entry of the sum is not finite or its magnitude is `LIMIT` or more.
    """
    total = torch.zeros(rows[0].shape, dtype=torch.float64, device=rows[0].device)
    for row, weight in zip(rows, weights, strict=True):
        total.add_(row, alpha=weight)
    low, high = (float(bound) for bound in torch.aminmax(total))  # NaN comes through, and fails the comparison
    if not max(-low, high) < LIMIT:
        raise NonFiniteError(
            f"the sum of {len(weights)} updates ranges over [{low}, {high}]; it must stay within ±{LIMIT:.0f}"
        )
    return total.mul_(1 / UNIT).round_().to(torch.int64)


def combine(totals: Iterable[Tensor]) -> Tensor:
    """Adds fixed sums [P] of several blocks: exact, so any order and any grouping gives the same bits.

    Raises `NonFiniteError` where the result could leave the range of int64.
    """
    first, *others = totals
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
