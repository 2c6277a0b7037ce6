"""Sums with the same bits in every grouping.

A block of clients is summed in client order in float64, then rounded once to fixed point. From
there on sums are integer sums, which are associative. The grouping by arrival, node or tree cannot
show in the result.

A fixed sum consists of limbs: an int64 vector [P] for each unit in use, by the unit's exponent.
Most blocks have one limb, in multiples of `FIXED_POINT_UNIT`. A block has others if its largest
entry asks for it:

- of `HIGH_LIMB_UNIT` or more: a limb in multiples of that, and the rest in `FIXED_POINT_UNIT`
- below `SMALL_BLOCK`: a limb in multiples of a unit that suits it, in place of `FIXED_POINT_UNIT`
- in a sum of float64 vectors: a last limb that is finer by `FINE_BITS` bits

So the rounding of a block is below 2^-27 of its largest entry, below 2^-30 if that is small, and
below 2^-53 in a sum of float64 vectors. Which limbs a block has depends on the block alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

FixedTotal = dict[int, Tensor]
"""A fixed sum: limbs, int64 [P], by exponent e; the sum is the sum of all limbs times 2^e."""

UNIT_EXPONENT = -40
"""Exponent of `FIXED_POINT_UNIT`."""

FIXED_POINT_UNIT = 2.0**UNIT_EXPONENT
"""Value of one unit of the limb that ordinary blocks have."""

HIGH_LIMB_EXPONENT = 10
"""Exponent of `HIGH_LIMB_UNIT`."""

HIGH_LIMB_UNIT = 2.0**HIGH_LIMB_EXPONENT
"""Value of one unit of the high limb; blocks below it need no high limb. The running variances of
clients with two examples reach it."""

SMALL_BLOCK = 2.0**-14
"""Blocks whose entries are all below it have a unit of their own."""

SMALL_BLOCK_BITS = 29
"""The unit of a small block is at most 2^-29 of its largest entry."""

EXPONENTS_APART = 10
"""Small blocks have units 2^-50, 2^-60 and so on, so that blocks of one round mostly share one."""

FINE_BITS = 40
"""How much finer the last limb of float64 vectors is, in bits."""

SMALLEST_FACTOR_EXPONENT = -500
"""Units below 2^-500 are applied in two factors, because 2^1024 is no float64."""

MAX_MAGNITUDE = 2.0**60
"""Entries of this magnitude or more count as non-finite."""

MAX_LIMB_SUM = 2.0**23 - 1
"""Largest limb of a sum, in multiples of 2^40 units; int64 ends at 2^23 of them. That is the value
of a limb in `FIXED_POINT_UNIT`. What is left is more than the rounding of all blocks."""

MAX_OTHER_LIMB = 0.5
"""Largest entry of the limbs of small blocks and of last limbs, in multiples of 2^40 units."""

ROUNDING_SHIFT = 1.5 * 2.0**52
"""Adding it to a float64 rounds to whole units in one pass, because its last bit counts 1."""

ROUNDING_SHIFT_BITS = int(np.float64(ROUNDING_SHIFT).view(np.int64))
"""The bits of `ROUNDING_SHIFT`, read as an integer."""

ENTRIES_PER_PIECE = 2**15
"""Entries of a vector that are processed together, so that they stay in a CPU's cache."""

ENTRIES_PER_SUM = 2**18
"""Entries of a block's rows that are summed together. A call for fewer entries takes longer than
the sum, and more do not fit into a CPU's cache."""

MAX_BLOCKS_PER_PASS = 8
"""Number of blocks of one unit that are added in one pass over the total."""

MAX_WAITING_BYTES = 2**24
"""Bytes of blocks that may wait to be added."""

SMALL_SUM = 0.25
"""Blocks below this magnitude are bounded by their norm, which is faster to compute than the
largest entry: a million of them are far from `MAX_LIMB_SUM`."""


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
        extremes: [2], the smallest and the largest entry of `value`, for a block on a GPU. Whoever
            has several blocks may put copies in the host's memory in their place, so that the host
            need not wait for each.

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
            # A cache is no concern on a GPU, where each part would be a kernel of its own.
            size = ENTRIES_PER_SUM if self.value.device.type == "cpu" else max(len(self.value), 1)
            parts = self.value.split(size)
            row_parts = zip(*(row.split(size) for row in rows), strict=True)
            for part, rows_here in zip(parts, row_parts, strict=True):
                for row_part, weight in zip(rows_here, weights, strict=True):
                    part.add_(row_part, alpha=weight)
        self.extremes: Tensor | None = None
        self._known_sizes: tuple[float, float] | None = None
        if self.value.device.type == "cpu":
            self._known_sizes = self._sizes()
        elif self.value.numel():
            self.extremes = torch.stack(torch.aminmax(self.value))

    @property
    def size(self) -> float:
        """Bound of the magnitudes; NaN or infinite if an entry is."""
        return self._read()[0]

    @property
    def exponent(self) -> int:
        """Exponent of the block's unit."""
        largest = self._read()[1]
        if not 0 < largest < SMALL_BLOCK:
            return UNIT_EXPONENT
        exponent_of_largest = math.frexp(largest)[1] - 1
        steps = (exponent_of_largest - SMALL_BLOCK_BITS) // EXPONENTS_APART
        return EXPONENTS_APART * steps

    def _read(self) -> tuple[float, float]:
        """Return what `_sizes` returns, computed once."""
        if self._known_sizes is None:
            self._known_sizes = self._sizes()
        return self._known_sizes

    def _sizes(self) -> tuple[float, float]:
        """Return a bound of the magnitudes, and the largest one if it is below `SMALL_BLOCK`.

        Whether a block is small must not depend on a norm's last bits, which may depend on the
        number of torch's threads.
        """
        factor = abs(self.weight)
        if self.extremes is not None:
            low, high = self.extremes.tolist()
            largest = max(-low, high) * factor
            return largest, largest
        pieces = _cache_sized_pieces(self.value)
        if len(pieces) > 1:
            norm = float(torch.linalg.vector_norm(self.value)) * factor
            if norm < SMALL_SUM:
                # The first piece mostly shows that a block is not small.
                largest = _largest(pieces, factor, SMALL_BLOCK)
                return (largest if largest < SMALL_BLOCK else norm), largest
        largest = _largest(pieces, factor, math.inf)
        return largest, largest

    def exponents(self, is_fine: bool) -> list[int]:
        """Return the exponents of the block's limbs, in descending order.

        Args:
            is_fine: whether the block belongs to a sum of float64 vectors.
        """
        high = [HIGH_LIMB_EXPONENT] if self.size >= HIGH_LIMB_UNIT else []
        fine = [self.exponent - FINE_BITS] if is_fine else []
        return [*high, self.exponent, *fine]


class FixedSum:
    """Running fixed sum of blocks.

    Args:
        is_fine: whether blocks have a last limb, for float64 vectors.

    Attributes:
        bound: bound of the limbs, in multiples of 2^40 units.
    """

    def __init__(self, is_fine: bool = False) -> None:
        self.is_fine = is_fine
        self._limbs: FixedTotal = {}
        self._waiting: list[BlockSum] = []
        self.bound = 0.0

    @property
    def total(self) -> FixedTotal | None:
        """The sum so far; None before the first block."""
        self._add_waiting()
        return self._limbs or None

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
        exponents = block.exponents(self.is_fine)
        bound = min(block.size, HIGH_LIMB_UNIT)
        if exponents[-1] < UNIT_EXPONENT:
            bound = max(bound, MAX_OTHER_LIMB)
        if self.bound + bound >= MAX_LIMB_SUM:
            # The bound is far too large if blocks cancel each other, or have high limbs.
            self._add_waiting()
            self.bound = _largest_limb([self._limbs])
        if self.bound + bound >= MAX_LIMB_SUM:
            raise NonFiniteError("the sum of all blocks may leave the range of fixed point")
        self.bound += bound
        if len(exponents) > 1 or exponents[0] < SMALLEST_FACTOR_EXPONENT:
            self._add_split(block, exponents)
            return
        self._waiting.append(block)
        if len(self._waiting) * block.value.nbytes > MAX_WAITING_BYTES:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Add the blocks that wait, all blocks of one unit together."""
        while self._waiting:
            exponent = self._waiting[0].exponent
            same = [block for block in self._waiting if block.exponent == exponent]
            self._waiting = [block for block in self._waiting if block.exponent != exponent]
            for start in range(0, len(same), MAX_BLOCKS_PER_PASS):
                self._add_in_one_pass(same[start : start + MAX_BLOCKS_PER_PASS], exponent)

    def _add_in_one_pass(self, blocks: list[BlockSum], exponent: int) -> None:
        """Add blocks of one limb, rounded half to even, in one pass over the total.

        Adding `ROUNDING_SHIFT` in float64 rounds. The bits of the sum, read as an integer, count
        units from `ROUNDING_SHIFT_BITS` on.
        """
        unit = 2.0**exponent
        value = blocks[0].value
        is_first = exponent not in self._limbs
        if is_first:
            self._limbs[exponent] = torch.empty_like(value, dtype=torch.int64)
        totals, *columns = map(
            _cache_sized_pieces, (self._limbs[exponent], *(block.value for block in blocks))
        )
        scratch = torch.empty(len(blocks), len(totals[0]), dtype=torch.float64, device=value.device)
        shift = scratch.new_full((), ROUNDING_SHIFT)
        for total, *parts in zip(totals, *columns, strict=True):
            is_only = is_first and len(blocks) == 1
            shifted = total.view(torch.float64)[None] if is_only else scratch[:, : len(total)]
            for row, part, block in zip(shifted.unbind(), parts, blocks, strict=True):
                torch.add(shift, row.copy_(part), alpha=block.weight / unit, out=row)
            if is_first and not is_only:
                torch.sum(shifted.view(torch.int64), 0, out=total)
            elif not is_first:
                total += shifted.view(torch.int64).sum(0)
            # int64 wraps around, and so does the number that is subtracted.
            total -= (len(blocks) * ROUNDING_SHIFT_BITS + 2**63) % 2**64 - 2**63

    def _add_split(self, block: BlockSum, exponents: list[int]) -> None:
        """Add a block of several limbs: each takes what the coarser ones left, half to even."""
        lift = SMALLEST_FACTOR_EXPONENT if exponents[0] < SMALLEST_FACTOR_EXPONENT else 0
        value = block.value
        for exponent in exponents:
            if exponent not in self._limbs:
                self._limbs[exponent] = torch.zeros_like(value, dtype=torch.int64)
        limbs = [self._limbs[exponent] for exponent in exponents]
        units = [2.0 ** (exponent - lift) for exponent in exponents]
        parts, *columns = map(_cache_sized_pieces, (value, *limbs))
        scratch = torch.empty(2, len(parts[0]), dtype=torch.float64, device=value.device)
        shift = scratch.new_full((), ROUNDING_SHIFT)
        for part, *limb_parts in zip(parts, *columns, strict=True):
            rest, whole = scratch[:, : len(part)].unbind()
            rest.copy_(part).mul_(2.0**-lift).mul_(block.weight)
            for limb, unit in zip(limb_parts, units, strict=True):
                torch.add(shift, rest, alpha=1 / unit, out=whole)
                limb += whole.view(torch.int64)
                limb -= ROUNDING_SHIFT_BITS
                if unit != units[-1]:
                    rest.sub_(whole.sub_(shift), alpha=unit)  # exact, like the product


def _cache_sized_pieces(vector: Tensor) -> tuple[Tensor, ...]:
    """Split a vector on a CPU into pieces that stay in its cache; leave others whole."""
    return vector.split(ENTRIES_PER_PIECE) if vector.device.type == "cpu" else (vector,)


def _largest(pieces: Sequence[Tensor], factor: float, enough: float) -> float:
    """Return the largest magnitude in pieces of a vector times a factor; NaN if an entry is NaN.

    The pieces after one that reaches `enough` are not looked at.
    """
    largest = 0.0
    for piece in pieces:
        if piece.numel():
            low, high = torch.aminmax(piece)
            found = max(-float(low), float(high)) * factor
            if not found <= largest:
                largest = found
            if not largest < enough:
                return largest
    return largest


def combine(totals: Iterable[FixedTotal], bound: float | None = None) -> FixedTotal:
    """Return the sum of fixed sums. Any order and any grouping gives the same bits.

    Args:
        totals: fixed sums of several blocks.
        bound: sum of their `FixedSum.bound`; None: the numbers themselves are looked at, as they
            are where the bound is too large.

    Raises:
        NonFiniteError: the result leaves the range of int64.
    """
    first, *others = totals
    if not others:
        return first
    if bound is None or bound >= MAX_LIMB_SUM:
        bound = _largest_limb([first, *others])
    if bound >= MAX_LIMB_SUM:
        raise NonFiniteError("the sum of all blocks leaves the range of fixed point")
    total = {exponent: limb.clone() for exponent, limb in first.items()}
    for other in others:
        for exponent, limb in other.items():
            if exponent in total:
                total[exponent] += limb
            else:
                total[exponent] = limb.clone()
    return total


def to_float(total: FixedTotal, dtype: torch.dtype, divisor: float = 1.0) -> Tensor:
    """Return a fixed sum as floating point.

    Args:
        total: the sum.
        dtype: the result's dtype; the value is rounded to it once.
        divisor: number by which the sum is divided.

    Returns:
        [P], in `dtype`.
    """
    value = None
    for exponent, limb in sorted(total.items()):
        first_factor = max(exponent, SMALLEST_FACTOR_EXPONENT)
        part = limb.to(torch.float64).mul_(2.0**first_factor / divisor)
        if exponent < first_factor:
            part.mul_(2.0 ** (exponent - first_factor))
        value = part if value is None else value.add_(part)
    assert value is not None
    return value.to(dtype)


def is_short(total: FixedTotal, value: Tensor, divisor: float, is_fine: bool) -> bool:
    """Return whether a unit of fixed point shows in float32's digits of the sum's largest entry.

    Only blocks that cancel each other do that: a unit is small beside each block.

    Args:
        total: the sum.
        value: what `to_float` returned for it, [P].
        divisor: number by which the sum was divided there.
        is_fine: whether its blocks had a last limb, for float64 vectors.
    """
    # Blocks were rounded to the units below the high limb's, or in the last limbs of these.
    coarsest = max(exponent for exponent in total if exponent < HIGH_LIMB_EXPONENT)
    unit = 2.0 ** (coarsest - (FINE_BITS if is_fine else 0))
    enough = unit / float(np.finfo(np.float32).eps) * 2
    return 0 < _largest(_cache_sized_pieces(value), divisor, enough) < enough


def _largest_limb(totals: Sequence[FixedTotal]) -> float:
    """Return the largest entry of the limbs of a sum of fixed sums, in multiples of 2^40 units."""
    limbs: dict[int, Tensor] = {}
    for total in totals:
        for exponent, limb in total.items():
            # In float64, which does not wrap around.
            limbs[exponent] = limbs.get(exponent, 0.0) + limb.double()
    return max((_largest([limb], 2.0**-40, math.inf) for limb in limbs.values()), default=0.0)
