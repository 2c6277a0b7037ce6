"""The order of each coordinate is that of torch and NumPy, also for NaN, ties and few vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raysim.numerics import median_of_coordinates, sort_coordinates
from raysim.numerics.coordinates import COORDINATES_PER_PIECE

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def vectors(k: int, P: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.randn(k, P, generator=torch.Generator().manual_seed(k))
    rows[:, ::3] = rows[:, ::3].round()  # ties
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 7, 60])
@pytest.mark.parametrize("P", [1, 50, COORDINATES_PER_PIECE + 3])
def test_each_coordinate_is_in_order(k: int, P: int, dtype: torch.dtype):
    rows = vectors(k, P, dtype)
    before = rows.clone()
    assert torch.equal(
        sort_coordinates(rows), torch.from_numpy(np.sort(rows.double(), 0)).to(dtype)
    )
    assert torch.equal(rows, before)


@pytest.mark.parametrize("k", [1, 2, 7, 60])
def test_the_median_of_each_coordinate(k: int):
    rows = vectors(k, 100, torch.float64)
    expected = torch.from_numpy(np.median(rows, axis=0))
    assert torch.allclose(median_of_coordinates(rows), expected, rtol=1e-15, atol=0)


def test_nan_counts_as_the_largest_and_spoils_the_median_of_its_coordinate_alone():
    rows = vectors(5, 4, torch.float32)
    rows[1, 2] = torch.nan
    assert sort_coordinates(rows).isnan().nonzero().tolist() == [[4, 2]]
    assert median_of_coordinates(rows).isnan().tolist() == [False, False, True, False]
