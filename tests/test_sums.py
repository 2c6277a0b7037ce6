"""Fixed-point sums: no grouping shows, nothing that does not fit gets through."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.numerics import NonFiniteError, combine, dot, fixed_sum, gram, norm, to_float
from raysim.numerics.inner import aligned, cross


def vectors(seed: int, k: int, P: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(k, P, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shifted(v: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values, `offset` elements off the boundary of an allocation."""
    home = torch.empty(v.numel() + offset, dtype=v.dtype)[offset:].view(v.shape)
    return home.copy_(v)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40), st.randoms(use_true_random=False))
def test_any_order_and_grouping_of_blocks_gives_the_same_bits(seed, blocks, P, random):
    totals = [fixed_sum(vectors(seed + b, 3, P), [0.1, 0.7, 0.2]) for b in range(blocks)]
    expected = combine(totals)
    pool = list(totals)
    while len(pool) > 1:  # a random tree
        random.shuffle(pool)
        pool.append(combine([pool.pop() for _ in range(random.randint(2, len(pool)))]))
    assert torch.equal(pool[0], expected)


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 200), st.sampled_from([torch.float32, torch.float64]))
def test_the_sum_is_right_to_half_a_unit(seed, k, P, dtype):
    rows, weights = vectors(seed, k, P, dtype), (np.arange(k) + 0.5) / k
    exact = weights @ rows.double().numpy()
    found = to_float(fixed_sum(rows, weights.tolist()), torch.float64)
    assert np.abs(found.numpy() - exact).max() <= 2.0**-41 + 1e-14
    assert torch.equal(to_float(fixed_sum(list(rows), weights.tolist()), torch.float64, 4.0), found / 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**60, -(2.0**60)])
def test_what_does_not_fit_is_refused(value):
    rows = torch.zeros(2, 5)
    rows[1, 3] = value
    with pytest.raises(NonFiniteError):
        fixed_sum(rows, [1.0, 1.0])


def test_the_largest_value_fits_and_overflow_across_blocks_is_refused():
    largest = fixed_sum(torch.full((1, 3), 2.0**60 - 2.0**40), [1.0])
    assert to_float(largest, torch.float64).tolist() == [2.0**60 - 2.0**40] * 3
    with pytest.raises(NonFiniteError):
        combine([torch.full((1, 3), 2**62)] * 3)
    assert to_float(combine([largest, -largest]), torch.float32).tolist() == [0.0] * 3


def test_large_and_small_blocks_add_up_in_any_order():
    """Running variances of two-sample clients reach 1e7 and more, beside
    values of 1e-3: both must come through, whatever the grouping."""
    blocks = [
        torch.tensor([[3e-3, 5e6, -7e9, 1.0]]),
        torch.tensor([[1e-3, 2e-3, 7e9, 2.0]]),
        torch.tensor([[0.0, -5e6, 0.5, 3e12]]),
    ]
    fixed = [fixed_sum(block.double(), [0.25]) for block in blocks]
    columns = torch.cat(blocks).double().T.tolist()
    expected = torch.tensor([math.fsum(0.25 * v for v in column) for column in columns], dtype=torch.float64)
    forward, backward = combine(fixed), combine([combine([fixed[2].clone(), fixed[0]]), fixed[1]])
    assert torch.equal(forward, backward)
    assert torch.allclose(to_float(forward, torch.float64), expected, rtol=1e-14, atol=2.0**-39)


def test_weights_and_rows_must_match():
    with pytest.raises(ValueError):
        fixed_sum(torch.zeros(2, 3), [1.0])


@pytest.mark.parametrize("P", [1, 7, 333, 5000, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inner_products_do_not_see_alignment(P, dtype):
    rows = vectors(3, 4, P, dtype)
    expected, products = gram(rows), cross(aligned(rows[:1]), aligned(rows))
    for offset in range(1, 18):
        moved = [shifted(row, (offset * (i + 1)) % 19) for i, row in enumerate(rows)]
        assert torch.equal(gram(moved), expected)
        assert torch.equal(gram(shifted(rows, offset)), expected)
        assert torch.equal(cross(aligned(moved[:1]), aligned(moved)), products)
        assert torch.equal(fixed_sum(moved, [0.3] * 4), fixed_sum(rows, [0.3] * 4))


@pytest.mark.parametrize("P", [1, 5, 4096, 12_345])
def test_inner_products_are_right(P):
    rows = vectors(5, 4, P)
    exact = rows.double() @ rows.double().T
    assert torch.allclose(gram(rows), exact, rtol=1e-13, atol=1e-12)
    assert torch.allclose(cross(aligned(rows), aligned(rows)), exact, rtol=1e-5, atol=1e-5 * P**0.5)
    assert norm(rows[0]) == pytest.approx(float(rows[0].double().norm()), rel=1e-14)
    assert dot(rows[0], rows[1]) == pytest.approx(float(exact[0, 1]), rel=1e-9, abs=1e-12)


def test_gram_by_segment_and_batch():
    segments, rows = [3, 10, 1, 6], vectors(9, 5, 20, torch.float64)
    parts = gram(rows, segments)
    assert parts.shape == (4, 5, 5)
    assert torch.allclose(parts.sum(0), gram(rows))
    assert torch.allclose(parts[1], rows[:, 3:13] @ rows[:, 3:13].T)
    assert torch.allclose(cross(aligned(rows), aligned(rows), segments), parts)
    batch = torch.stack([rows, 2 * rows])
    assert torch.allclose(gram(batch, segments)[1], 4 * parts)


def test_a_bad_row_spoils_its_own_row_and_column_only():
    rows = vectors(1, 3, 50)
    rows[1, 7] = torch.nan
    good = gram(rows).isfinite()
    assert good.tolist() == [[True, False, True], [False, False, False], [True, False, True]]
