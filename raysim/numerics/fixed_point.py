"""Sums with the same bits in every grouping.

A block of clients is summed in client order in float64, then rounded once to fixed point. From
there on sums are integer sums, which are associative. The grouping by arrival, node or tree cannot
show in the result.

A fixed sum is int64 [L, P]. Its low limb counts multiples of `FIXED_POINT_UNIT`. It has a high
limb, in multiples of `HIGH_LIMB_UNIT`, if some block reached that magnitude (the running variances
of clients with two examples do). How a block is split depends on the block alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

FIXED_POINT_UNIT = 2.0**-40
"""Value of one unit of the low limb."""

HIGH_LIMB_UNIT = 2.0**10
"""Value of one unit of the high limb; blocks below it need no high limb."""

MAX_MAGNITUDE = 2.0**60
"""Entries of this magnitude or more count as non-finite."""

MAX_LOW_LIMB_SUM = 2.0**22
"""Largest sum of the low limbs of all blocks. int64 ends at 2**63 * FIXED_POINT_UNIT = 2**23."""

ROUNDING_SHIFT = 1.5 * 2.0**52
"""Adding it to a float64 rounds to whole units in one pass, because its last bit counts 1."""

ROUNDING_SHIFT_BITS = int(np.float64(ROUNDING_SHIFT).view(np.int64))
"""The bits of `ROUNDING_SHIFT`, read as an integer."""

ENTRIES_PER_PIECE = 2**15
"""Entries of a vector that are processed together, so that they stay in a CPU's cache."""

MAX_BLOCKS_PER_PASS = 8
"""Number of small blocks that are added in one pass over the total."""

MAX_WAITING_BYTES = 2**24
"""Bytes of small blocks that may wait to be added."""

SMALL_SUM = 0.25
"""Blocks below this magnitude are bounded by their norm, which is faster to compute than the
largest entry: a million of them are far from `MAX_LOW_LIMB_SUM`."""


class NonFiniteError(ArithmeticError):
    """A vector holds NaN, an infinity, or a value too large for the operation."""


class BlockSum:
    """Weighted sum of one block's rows, in client order, in float64.

    Args:
        rows: the vectors, [k, P] or k tensors [P] of any float dtype, k ≥ 1.
        weights: the weight of each row.

    Attributes:
        count: number of rows.
        value: [P]; the sum is `value` times `weight`.
        weight: factor of `value`; 1 unless the block has a single row.
        size: bound of the magnitudes; NaN or infinite if an entry is.

    Raises:
        ValueError: there are not as many weights as rows.
    """

    def __init__(self, rows: Tensor | Sequence[Tensor], weights: Sequence[float]):
        if len(rows) != len(weights):
            raise ValueError(f"{len(rows)} rows and {len(weights)} weights")
        self.count = len(weights)
        self.value = rows[0]
        self.weight = weights[0]
        if self.count > 1:
            self.value = rows[0].new_zeros(rows[0].shape, dtype=torch.float64)
            self.weight = 1.0
            parts = _cache_sized_pieces(self.value)
            scratch = torch.empty_like(parts[0])
            for part, *row_parts in zip(parts, *map(_cache_sized_pieces, rows), strict=True):
                exact = scratch[: len(part)]
                for row_part, weight in zip(row_parts, weights, strict=True):
                    # Two steps, each of them vectorised.
                    part.add_(exact.copy_(row_part), alpha=weight)
        largest = float(torch.linalg.vector_norm(self.value))
        if not largest * abs(self.weight) < SMALL_SUM:
            largest = max(map(abs, map(float, torch.aminmax(self.value))))
        self.size = largest * abs(self.weight)


class FixedSum:
    """Running fixed sum of blocks.

    Attributes:
        bound: sum of the blocks' sizes, each at most `HIGH_LIMB_UNIT`.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: list[BlockSum] = []
        self.bound = 0.0

    @property
    def total(self) -> Tensor | None:
        """The sum so far, int64 [L, P]; None before the first block."""
        self._add_waiting()
        return self._total

    def add(self, block: BlockSum) -> None:
        """Add one block.

        Args:
            block: the weighted sum of a block of clients. The total does not depend on the order in
                which blocks are added.

        Raises:
            NonFiniteError: an entry of the block is not finite or reaches `MAX_MAGNITUDE`, or the
                total could leave the range of int64. Nothing is added.
        """
        if not block.size < MAX_MAGNITUDE:  # NaN fails the comparison
            raise NonFiniteError(
                f"the sum of {block.count} updates reaches {block.size}; "
                f"it must stay below {MAX_MAGNITUDE:.0e}"
            )
        if self.bound + min(block.size, HIGH_LIMB_UNIT) >= MAX_LOW_LIMB_SUM:
            raise NonFiniteError("the sum of all blocks may leave the range of fixed point")
        self.bound += min(block.size, HIGH_LIMB_UNIT)
        if block.size >= HIGH_LIMB_UNIT:
            limbs = _low_and_high(block.value, block.weight)
            self._total = limbs if self._total is None else _plus(self._total, limbs)
            return
        self._waiting.append(block)
        if len(self._waiting) * block.value.nbytes > MAX_WAITING_BYTES:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add the small blocks that wait: `in_units` of each, with the same bits but faster.

        Several blocks are added in one pass over the total, which is larger than their pieces.
        """
        while self._waiting:
            blocks = self._waiting[:MAX_BLOCKS_PER_PASS]
            self._waiting = self._waiting[MAX_BLOCKS_PER_PASS:]
            value = blocks[0].value
            is_first = self._total is None
            if self._total is None:
                self._total = torch.empty_like(value, dtype=torch.int64)[None]
            totals, *columns = map(
                _cache_sized_pieces, (self._total[0], *(block.value for block in blocks))
            )
            scratch = torch.empty(
                len(blocks), len(totals[0]), dtype=torch.float64, device=value.device
            )
            shift = scratch.new_tensor(ROUNDING_SHIFT)
            for total, *parts in zip(totals, *columns, strict=True):
                is_only = is_first and len(blocks) == 1
                shifted = total.view(torch.float64)[None] if is_only else scratch[:, : len(total)]
                for row, part, block in zip(shifted.unbind(), parts, blocks, strict=True):
                    torch.add(
                        shift, row.copy_(part), alpha=block.weight / FIXED_POINT_UNIT, out=row
                    )
                if is_first and not is_only:
                    torch.sum(shifted.view(torch.int64), 0, out=total)
                elif not is_first:
                    total += shifted.view(torch.int64).sum(0)
                # int64 wraps around, and so does the number that is subtracted.
                total -= (len(blocks) * ROUNDING_SHIFT_BITS + 2**63) % 2**64 - 2**63


def _cache_sized_pieces(vector: Tensor) -> tuple[Tensor, ...]:
    """Split a vector on a CPU into pieces that stay in its cache; leave others whole."""
    return vector.split(ENTRIES_PER_PIECE) if vector.device.type == "cpu" else (vector,)


def in_units(block: BlockSum) -> Tensor:
    """Return a small block as multiples of `FIXED_POINT_UNIT`, rounded half to even, int64 [P].

    Adding `ROUNDING_SHIFT` in float64 rounds. The bits of the sum, read as an integer, count units
    from `ROUNDING_SHIFT_BITS` on.

    Args:
        block: a block whose `size` is below `HIGH_LIMB_UNIT`.
    """
    value = block.value.to(torch.float64)
    shift = value.new_tensor(ROUNDING_SHIFT)
    shifted = torch.add(shift, value, alpha=block.weight / FIXED_POINT_UNIT)
    return shifted.view(torch.int64) - ROUNDING_SHIFT_BITS


def _low_and_high(value: Tensor, weight: float) -> Tensor:
    """Return `value` times `weight` as two limbs, int64 [2, P]."""
    exact = value.to(torch.float64) * weight
    high = (exact / HIGH_LIMB_UNIT).round_()
    return torch.stack([((exact - high * HIGH_LIMB_UNIT) / FIXED_POINT_UNIT).round_(), high]).to(
        torch.int64
    )


def _plus(total: Tensor, limbs: Tensor) -> Tensor:
    """Add two fixed sums, in place of the one with more limbs."""
    more, less = (total, limbs) if len(total) >= len(limbs) else (limbs, total)
    more[: len(less)] += less
    return more


def fixed_sum(rows: Tensor | Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum of one block in fixed point, int64 [L, P].

    Args:
        rows: the vectors, [k, P] or k tensors [P].
        weights: the weight of each row.

    Raises:
        NonFiniteError: see `FixedSum.add`.
    """
    total = FixedSum()
    total.add(BlockSum(rows, weights))
    assert total.total is not None
    return total.total


def combine(totals: Iterable[Tensor], bound: float | None = None) -> Tensor:
    """Return the sum of fixed sums. Any order and any grouping gives the same bits.

    Args:
        totals: fixed sums of several blocks, int64 [L, P].
        bound: sum of their `FixedSum.bound`; None: it is computed in a pass over the numbers.

    Raises:
        NonFiniteError: the result could leave the range of int64.
    """
    first, *others = totals
    if not others:
        return first
    units = sum(map(_magnitude, (first, *others))) if bound is None else bound / FIXED_POINT_UNIT
    total = first.clone()
    for other in others:
        total = _plus(total, other if len(other) <= len(total) else other.clone())
    if units >= 2**63:
        raise NonFiniteError(
            f"the sum of {len(others) + 1} blocks may leave the range of fixed point"
        )
    return total


def to_float(total: Tensor, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """Return a fixed sum as floating point.

    Args:
        total: the sum, int64 [L, P].
        dtype: the result's dtype; the value is rounded to it once.
        divisor: number by which the sum is divided.

    Returns:
        [P], in `dtype`.
    """
    value = total[0].to(torch.float64).mul_(FIXED_POINT_UNIT / divisor)
    if len(total) > 1:
        value += total[1].to(torch.float64).mul_(HIGH_LIMB_UNIT / divisor)
    return value.to(dtype)


def _magnitude(total: Tensor) -> int:
    """Return the largest magnitude in a fixed sum, in units."""
    low, high = torch.aminmax(total)
    return max(-int(low), int(high))
