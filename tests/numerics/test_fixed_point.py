"""Fixed-point sums: no grouping shows, nothing that does not fit gets through."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fixed_sums import fixed_sum, same

import raysim
from raysim.errors import RaysimError
from raysim.numerics import NonFiniteError, combine, dot, gram, norm, to_float
from raysim.numerics.fixed_point import (
    HIGH_LIMB_UNIT,
    MAX_LIMB_SUM,
    MAX_MAGNITUDE,
    MAX_WAITING_BYTES,
    SMALL_BLOCK,
    SMALL_SUM,
    BlockSum,
    FixedSum,
    FixedTotal,
    is_short,
)
from raysim.numerics.inner_products import LazyGram, aligned, cross


def vectors(seed: int, k: int, P: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(k, P, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rounded(block: BlockSum) -> FixedTotal:
    """A block of one limb, rounded half to even, without the code that is tested."""
    scaled = block.value.double().numpy() * block.weight * 2.0**-block.exponent
    return {block.exponent: torch.from_numpy(np.rint(scaled).astype(np.int64))}


def shifted(v: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements off the boundary of an allocation."""
    home = torch.empty(v.numel() + offset, dtype=v.dtype)[offset:].view(v.shape)
    return home.copy_(v)


def test_the_largest_value_fits_and_overflow_across_blocks_is_refused():
    largest = fixed_sum(torch.full((1, 3), 2.0**60 - 2.0**40), [1.0])
    assert to_float(largest, torch.float64).tolist() == [2.0**60 - 2.0**40] * 3
    with pytest.raises(NonFiniteError):
        combine([{-40: torch.full((3,), 2**62)}] * 3)
    negative = {exponent: -limb for exponent, limb in largest.items()}
    assert to_float(combine([largest, negative]), torch.float32).tolist() == [0.0] * 3


def test_small_entries_beside_a_large_one_are_rounded_half_to_even():
    units = torch.tensor([[2.0**80, 0.75, -0.75, 1.5, 2.5]])
    found = to_float(fixed_sum(units * 2.0**-40, [1.0]), torch.float64) * 2.0**40
    assert found.tolist() == [2.0**80, 1.0, -1.0, 2.0, 2.0]
    fine = to_float(fixed_sum(units.double() * 2.0**-80, [1.0]), torch.float64) * 2.0**80
    assert fine.tolist() == [2.0**80, 1.0, -1.0, 2.0, 2.0]


def test_weights_and_rows_must_match():
    with pytest.raises(ValueError):
        fixed_sum(torch.zeros(2, 3), [1.0])


KINDS = [
    "one float32", "one float64", "one bfloat16", "one float16", "three", "large", "just large",
    "mixed", "zeros",
]  # fmt: skip


def block(seed: int, P: int, kind: str) -> BlockSum:
    """Blocks of one row or of several, small ones and such as need the high limb."""
    if kind.startswith("one"):
        dtype = getattr(torch, kind.split()[1])
        return BlockSum(vectors(seed, 1, P, torch.float64).to(dtype), [0.3 + seed % 7])
    scale = {"three": 0.01, "large": 1e7, "just large": HIGH_LIMB_UNIT, "mixed": 1.0, "zeros": 0.0}[
        kind
    ]
    rows = scale * vectors(seed, 3, P, torch.float64)
    if kind == "just large":
        rows = rows.clamp(-HIGH_LIMB_UNIT, HIGH_LIMB_UNIT)
        rows[0] = HIGH_LIMB_UNIT
        return BlockSum(rows[:1], [1.0])
    if kind == "mixed":
        rows[1, -1] = -5e5
    return BlockSum(rows, [0.1, -0.7, 0.2])


@settings(deadline=None, max_examples=80, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(KINDS)), min_size=1, max_size=12),
    st.sampled_from([1, 5, 2**15 - 1, 2**15 + 3]),
    st.sampled_from([0, 1000, 2**18, MAX_WAITING_BYTES]),
    st.randoms(use_true_random=False),
)
def test_waiting_does_not_show(given, P, together, random):
    """Any order; any number of blocks that wait, and are looked at in between; any grouping into
    several sums: the same bits, which are the exact ones to half a unit for each block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysim.numerics.fixed_point.MAX_WAITING_BYTES", together)

        def added(some: list[tuple[int, str]], look: bool) -> FixedSum:
            total = FixedSum()
            for seed, kind in some:
                total.add(block(seed, P, kind))
                if look and random.random() < 0.3:
                    assert total.total is not None
            return total

        expected = added(given, False).total
        assert expected is not None and all(x.dtype == torch.int64 for x in expected.values())
        shuffled = random.sample(given, len(given))
        again = added(shuffled, True).total
        assert same(again, expected)
        at = random.randint(0, len(given))
        parts = [added(part, True) for part in (shuffled[:at], shuffled[at:]) if part]
        assert same(
            combine([part.total for part in parts], sum(part.bound for part in parts)), expected
        )
        single = [block(seed, P, kind) for seed, kind in given]
        exact = sum(one.value.double() * one.weight for one in single)
        error = (to_float(expected, torch.float64) - exact).abs().max()
        assert error <= len(given) * 2.0**-41 + 1e-15 * sum(one.size for one in single)


def test_a_small_block_is_rounded_to_units_half_to_even():
    units = [0.0, 0.49, 0.5, 1.5, 2.5, -0.5, -1.5, -2.51, 2.0**49 - 0.5, 1.0 - 2.0**49]
    value = torch.tensor(units, dtype=torch.float64) * 2.0**-37  # with the weight 2**-40 each
    total = FixedSum()
    total.add(BlockSum([value], [0.125]))
    assert total.total[-40].tolist() == list(map(round, units))


@pytest.mark.parametrize("n", [1, 2, 8, 9])
@pytest.mark.parametrize("P", [1, 2**15 + 3])
def test_waiting_blocks_are_added_in_units(n, P):
    blocks = [block(i, P, ("one float32", "three", "one bfloat16")[i % 3]) for i in range(n)]
    total = FixedSum()
    for one in blocks:
        total.add(one)
    assert len(total._waiting) == n
    assert same(total.total, combine(map(rounded, blocks)))


@pytest.mark.parametrize("times", [1 - 2**-40, 1, 3, 7.9, 100, 1e9])
def test_a_block_has_a_high_limb_from_where_it_needs_one(times):
    values = torch.tensor(
        [times * HIGH_LIMB_UNIT, -times * HIGH_LIMB_UNIT, 0.123, 2.0**-40], dtype=torch.float64
    )
    total = FixedSum()
    total.add(BlockSum([values], [1.0]))
    found = total.total
    assert set(found) == ({-40} if times < 1 else {-40, 10})
    assert torch.allclose(
        to_float(found, torch.float64),
        values,
        rtol=0,
        atol=2.0**-41 + 1e-16 * times * HIGH_LIMB_UNIT,
    )


@pytest.mark.parametrize("P", [1, 2**15 + 1])
def test_one_by_one_or_all_together_whatever_waits(P, monkeypatch):
    """No more waits than may; the sum of very many is the sum of their own fixed sums."""
    blocks = [block(i, P, "one float32" if i % 3 else "three") for i in range(40)]
    monkeypatch.setattr("raysim.numerics.fixed_point.MAX_WAITING_BYTES", 3 * 4 * P)
    total, most = FixedSum(), 0
    for one in blocks:
        total.add(one)
        most = max(most, len(total._waiting))
    assert 1 <= most <= 3
    own = []
    for one in blocks:
        by_itself = FixedSum()
        by_itself.add(one)
        own.append(by_itself.total)
    assert same(total.total, combine(own))


@pytest.mark.parametrize("waiting", [0, 3])
@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, MAX_MAGNITUDE, -MAX_MAGNITUDE, 1e300]
)
@pytest.mark.parametrize("k", [1, 2])
def test_what_is_refused_leaves_those_who_wait_alone(bad, k, waiting):
    total, wanted = FixedSum(), FixedSum()
    for i in range(waiting):
        total.add(block(i, 50, "three"))
        wanted.add(block(i, 50, "three"))
    rows = vectors(1, k, 50, torch.float64)
    rows[-1, 7] = bad
    with pytest.raises(NonFiniteError, match=f"{k} updates"):
        total.add(BlockSum(rows, [1.0] * k))
    assert total.bound == wanted.bound
    if not waiting:
        assert total.total is None
    else:
        assert same(total.total, wanted.total)


@pytest.mark.parametrize("size", [HIGH_LIMB_UNIT * (1 - 2**-20), HIGH_LIMB_UNIT + 500, 3.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_stay_in_the_range_of_fixed_point(size, sign):
    """As many as there is room for, and not one more; what is refused adds nothing, and the sum is
    right to the last. Of blocks that reach `HIGH_LIMB_UNIT` only what is left below counts."""
    value = torch.full((4,), sign * size, dtype=torch.float64)
    before = MAX_LIMB_SUM - 10 * HIGH_LIMB_UNIT  # as if many had come already
    total = FixedSum()
    total.bound = before
    total._limbs[-40] = torch.full((4,), int(sign * before) * 2**40)
    added = 0
    with pytest.raises(NonFiniteError, match="all blocks"):
        for _ in range(5000):
            total.add(BlockSum([value], [1.0]))
            added += 1
    assert total.bound < MAX_LIMB_SUM
    counted = size - HIGH_LIMB_UNIT if size > HIGH_LIMB_UNIT else size
    room = 10 * HIGH_LIMB_UNIT - min(size, HIGH_LIMB_UNIT)  # a block is refused by its bound
    assert added == math.ceil(room / counted)
    found = to_float(total.total, torch.float64)
    assert found.tolist() == pytest.approx([sign * (before + size * added)] * 4, rel=1e-10)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_whether_a_sum_is_in_range_does_not_depend_on_workers(workers):
    """10,000 times 1,500 is in range, as is what cancels; 1,530 leaves 506 to the low limb."""

    def total(sizes: list[float]) -> torch.Tensor:
        sums = [FixedSum() for _ in range(workers)]
        for i, size in enumerate(sizes):
            sums[i % workers].add(BlockSum([torch.tensor([size])], [1.0]))
        parts = [part.total for part in sums]
        return to_float(combine(parts, sum(part.bound for part in sums)), torch.float64)

    assert total([1500.0] * 10_000).item() == 1500 * 10_000
    assert total([1000.0, -1000.0, 1000.0, -1000.0, 1000.0, -1000.0] * 2000).item() == 0
    with pytest.raises(NonFiniteError, match="all blocks"):
        total([1530.0] * 16_700)


def test_a_sum_out_of_range_names_its_upload(base, monkeypatch):
    monkeypatch.setattr("raysim.numerics.fixed_point.MAX_LIMB_SUM", 1e-9)
    with pytest.raises(RaysimError, match=r"mean of upload 'delta': .*batching\.size"):
        raysim.run(base | {"algorithm": "fedavg", "model": "logistic", "rounds": 1})


def test_as_many_as_there_is_room_for_do_not_wrap_round():
    """Each adds the largest low limb that there is: all of them together stay in int64."""
    largest = HIGH_LIMB_UNIT * (1 - 2**-40)
    total = FixedSum()
    value = torch.full((2,), largest, dtype=torch.float64)
    one = BlockSum([value], [1.0])
    with pytest.raises(NonFiniteError, match="all blocks"):
        for _ in range(9000):
            total.add(one)
    assert to_float(total.total, torch.float64)[0] == pytest.approx(MAX_LIMB_SUM, rel=2e-3)
    assert total.bound >= float(to_float(total.total, torch.float64).max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1.0, -0.25, 1e-3, 0.0, 700.0])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 0.01, 0.3, 20.0, 6e4])
@pytest.mark.parametrize("k", [1, 3])
def test_the_size_of_a_block_bounds_it_and_is_exact_unless_small(dtype, weight, scale, k):
    """bfloat16's own norm is right to a 256th; none is bounded so loosely that sums would be
    refused for it."""
    rows = (scale * vectors(4, k, 300, torch.float64)).clamp(-6e4, 6e4).to(dtype)
    one = BlockSum(rows, [weight] * k)
    found = (rows.double() * weight).sum(0)
    largest, norm = float(found.abs().max()), float(found.norm())
    assert (
        largest * (1 - 2**-8) - 1e-7
        <= one.size
        <= max(largest * (1 + 1e-12), min(norm * (1 + 2**-7), SMALL_SUM))
    )


@pytest.mark.parametrize("k", [1, 2])
def test_vectors_of_nothing_add_up_to_nothing(k):
    """Running statistics of nets without any."""
    total = FixedSum()
    assert total.total is None
    for _ in range(3):
        total.add(BlockSum([torch.zeros(0)] * k, [0.5] * k))
    assert total.total is not None and total.total[-40].shape == (0,) and total.bound == 0
    assert to_float(combine([total.total, total.total], 0.0), torch.float32).shape == (0,)


@pytest.mark.parametrize("P", [1, 7, 333, 5000, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_do_not_see_alignment(P, dtype):
    rows = vectors(3, 4, P, dtype)
    expected, few, products = (
        gram(rows),
        LazyGram(list(rows), [P]).gram(),
        cross(aligned(rows[:1]), aligned(rows)),
    )
    for offset in range(1, 18):
        moved = [shifted(row, (offset * (i + 1)) % 19) for i, row in enumerate(rows)]
        assert torch.equal(gram(moved), expected)
        assert torch.equal(gram(shifted(rows, offset)), expected)
        assert torch.equal(LazyGram(moved, [P]).gram(), few)
        assert torch.equal(cross(aligned(moved[:1]), aligned(moved)), products)
        assert same(fixed_sum(moved, [0.3] * 4), fixed_sum(rows, [0.3] * 4))


@pytest.mark.parametrize("P", [1, 5, 4096, 12_345])
def test_inner_products_are_right(P):
    rows = vectors(5, 4, P)
    exact = rows.double() @ rows.double().T
    assert torch.allclose(gram(rows), exact, rtol=1e-13, atol=1e-12)
    assert torch.allclose(LazyGram(list(rows), [P]).gram()[0], exact, rtol=1e-13, atol=1e-12)
    assert torch.allclose(cross(aligned(rows), aligned(rows)), exact, rtol=1e-5, atol=1e-5 * P**0.5)
    assert norm(rows[0]) == pytest.approx(float(rows[0].double().norm()), rel=1e-14)
    assert dot(rows[0], rows[1]) == pytest.approx(float(exact[0, 1]), rel=1e-9, abs=1e-12)


def test_gram_by_segment_and_batch():
    segments, rows = [3, 10, 1, 6], vectors(9, 5, 20, torch.float64)
    parts = gram(rows, segments)
    assert parts.shape == (4, 5, 5)
    assert torch.allclose(parts.sum(0), gram(rows)) and torch.allclose(
        parts, LazyGram(list(rows), segments).gram()
    )
    assert torch.allclose(parts[1], rows[:, 3:13] @ rows[:, 3:13].T)
    assert torch.allclose(cross(aligned(rows), aligned(rows), segments), parts)
    batch = torch.stack([rows, 2 * rows])
    assert torch.allclose(gram(batch, segments)[1], 4 * parts)


def test_a_bad_row_spoils_its_own_row_and_column_only():
    rows = vectors(1, 3, 50)
    rows[1, 7] = torch.nan
    good = gram(rows).isfinite()
    assert good.tolist() == [[True, False, True], [False, False, False], [True, False, True]]


# -- Small numbers.

MAGNITUDES = [1e-300, 1e-160, 1e-40, 1e-20, 1e-11, 1e-8, 5e-5, 1e-3, 1.0, 2e3, 1e9, 1e15]
FEWEST_BITS = {torch.float32: 2.0**-27, torch.float64: 2.0**-52}
"""Rounding of a block, as a share of its largest entry."""


def magnitude_block(seed: int, magnitude: float, P: int, dtype: torch.dtype) -> BlockSum:
    """A block whose entries are of very different sizes, up to about `magnitude`."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 4))
    spread = 10.0 ** rng.uniform(-12, 0, (k, P))
    rows = torch.from_numpy(magnitude * spread * rng.choice([-1.0, 1.0], (k, P)))
    return BlockSum(rows.to(dtype), rng.uniform(0.1, 1.0, k).tolist())


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(MAGNITUDES)), min_size=1, max_size=12
    ),
    st.sampled_from([1, 7, 2**15 + 3]),
    st.sampled_from([torch.float32, torch.float64]),
    st.randoms(use_true_random=False),
)
def test_sums_of_any_magnitudes_have_the_same_bits_in_every_grouping(given, P, dtype, random):
    """Blocks of 1e-300 beside blocks of 1e15: any order, any grouping into several sums and any
    tree of these; and each block is right to its share of its largest entry."""
    is_fine = dtype == torch.float64

    def added(some: list[tuple[int, float]]) -> FixedSum:
        total = FixedSum(is_fine)
        for seed, magnitude in some:
            total.add(magnitude_block(seed, magnitude, P, dtype))
        return total

    expected = added(given)
    pool = []
    rest = random.sample(given, len(given))
    while rest:
        size = random.randint(1, len(rest))
        part = added(rest[:size])
        pool.append((part.total, part.bound))
        rest = rest[size:]
    while len(pool) > 1:
        random.shuffle(pool)
        some = [pool.pop() for _ in range(random.randint(2, len(pool)))]
        bound = sum(bound for _, bound in some)
        pool.append((combine([total for total, _ in some], bound), bound))
    assert same(pool[0][0], expected.total)
    blocks = [magnitude_block(seed, magnitude, P, dtype) for seed, magnitude in given]
    found = to_float(pool[0][0], torch.float64).numpy()
    columns = torch.stack([one.value.double() * one.weight for one in blocks]).T[:50]
    exact = np.array([math.fsum(column) for column in columns.tolist()])
    sizes = [float((one.value.double() * one.weight).abs().max()) for one in blocks]
    allowed = FEWEST_BITS[dtype] * sum(sizes) + 2.0**-50 * np.abs(exact)
    assert (np.abs(found[:50] - exact) <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-5, -8, -11, -14, -20, -37])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_small_means_are_right(n, exponent, dtype):
    """The mean of n clients, each in a block of its own, to float32's digits."""
    rows = (10.0**exponent * (1 + vectors(n, n, 400, torch.float64).abs())).to(dtype)
    total = FixedSum(dtype == torch.float64)
    for row in rows:
        total.add(BlockSum([row], [1 / n]))
    exact = np.array([math.fsum(column) for column in rows.double().T.tolist()]) / n
    found = to_float(total.total, torch.float64).numpy()
    tolerance = 1e-15 if dtype == torch.float64 else 1e-9
    if dtype == torch.float32 and 10.0**exponent / n > SMALL_BLOCK / 8:
        tolerance = 2.0**-26  # ordinary blocks
    assert (np.abs(found - exact) <= tolerance * np.abs(exact)).all()


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("exponent", range(-1022, 60, 17))
def test_nothing_is_lost_down_to_the_smallest_normal_number(exponent, is_fine):
    value = torch.tensor([1.0, -0.999999999, 0.1, 1 / 3], dtype=torch.float64) * 2.0**exponent
    total = FixedSum(is_fine)
    total.add(BlockSum([value], [1.0]))
    error = (to_float(total.total, torch.float64) - value).abs() * 2.0**-exponent
    tolerance = 2.0**-53 if is_fine else 2.0**-30
    if not is_fine and -14 <= exponent < -10:
        tolerance = 2.0**-27  # ordinary blocks
    assert float(error.max()) <= tolerance


def test_small_entries_beside_large_ones_keep_a_doubles_digits_in_float64():
    value = torch.tensor([[1000.0, 1.0, 1e-3, 1e-6, 1e-9]], dtype=torch.float64) / 3
    found = to_float(fixed_sum(value, [1.0]), torch.float64)
    assert torch.allclose(found, value[0], rtol=2e-15, atol=0)
    assert torch.allclose(to_float(fixed_sum(value, [1.0]), torch.float64, 7.0), value[0] / 7)


@pytest.mark.parametrize("P", [3, 2**15 + 3, 3 * 2**15])
@pytest.mark.parametrize("largest", [SMALL_BLOCK, SMALL_BLOCK * (1 - 2**-20)])
@pytest.mark.parametrize("at", [0, -1])
def test_whether_a_block_is_small_depends_on_its_largest_entry_alone(P, largest, at):
    """Wherever that is, however long the vector and however large its norm."""
    value = torch.full((P,), SMALL_BLOCK / 3)
    value[at] = largest
    for weight, factor in ((1.0, 1.0), (-0.25, 4.0)):
        block = BlockSum([value * factor], [weight])
        assert block.exponent == (-40 if largest >= SMALL_BLOCK else -50)
        assert block.size >= largest
    assert BlockSum([value / 2**7], [1.0]).exponent == (-50 if largest >= SMALL_BLOCK else -60)


@pytest.mark.parametrize("is_fine", [False, True])
def test_many_small_blocks_stay_in_the_range_of_int64(is_fine):
    """Each has the largest limbs that there are; what no longer fits is refused, not wrapped."""
    total = FixedSum(is_fine)
    largest = 2.0**-21 * (1 - 2**-40)
    one = BlockSum([torch.tensor([largest, -largest], dtype=torch.float64)], [1.0])
    total.add(one)
    for _ in range(22):
        doubled = combine([total.total, total.total], 2 * total.bound)
        total._limbs, total.bound = doubled, 2 * total.bound
    found = to_float(total.total, torch.float64)
    assert found.tolist() == pytest.approx([largest * 2**22, -largest * 2**22], rel=1e-9)
    with pytest.raises(NonFiniteError, match="all blocks"):
        combine([total.total] * 4, 4 * total.bound)


def test_a_sum_is_short_if_its_blocks_cancel():
    def short(values: list[list[float]], dtype: torch.dtype) -> bool:
        is_fine = dtype == torch.float64
        total = FixedSum(is_fine)
        for value in values:
            total.add(BlockSum([torch.tensor(value, dtype=torch.float64)], [0.5]))
        return is_short(total.total, to_float(total.total, dtype, 0.5), 0.5, is_fine)

    for dtype in (torch.float32, torch.float64):
        assert not short([[1.0, 1e-9], [1.0, 1e-9]], dtype)
        assert not short([[1e-11, 0.0], [2e-11, 1e-12]], dtype)
        assert not short([[1e8, 1.0], [1.0, 1.0]], dtype)
        assert not short([[0.0, 0.0]], dtype)
        assert short([[1.0, 1.0], [-1.0, -1.0 + 2.0**-22]], dtype) == (dtype == torch.float32)
        assert not short([[1.0, 0.5], [-1.0, 0.5]], dtype)
        assert not short([[1e-20], [-1e-20 * (1 - 1e-2)]], dtype)
        assert short([[1e-20], [-1e-20 * (1 - 1e-6)]], dtype) == (dtype == torch.float32)
