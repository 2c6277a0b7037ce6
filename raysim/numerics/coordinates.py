"""Order of the values of each coordinate, for medians and trimmed means of many vectors."""

from __future__ import annotations

import torch
from torch import Tensor

COORDINATES_PER_PIECE = 2**13
"""Coordinates that are sorted together, so that they stay in a CPU's cache."""


def sort_coordinates(rows: Tensor) -> Tensor:
    """Sort the values of each coordinate of k vectors.

    On a CPU it takes a tenth of the time of `rows.sort(dim=0)`: NumPy sorts short contiguous rows
    with vector instructions.

    Args:
        rows: [k, P], of any float dtype.

    Returns:
        [k, P]; row i has the i-th smallest value of each coordinate. NaN counts as the largest.
    """
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        return rows.sort(dim=0).values
    in_order = torch.empty_like(rows)
    pieces = rows.split(COORDINATES_PER_PIECE, dim=1)
    for piece, target in zip(pieces, in_order.split(COORDINATES_PER_PIECE, dim=1), strict=True):
        values = piece.T.clone(memory_format=torch.contiguous_format)
        values.numpy().sort(axis=1)
        target.copy_(values.T)
    return in_order


def median_of_coordinates(rows: Tensor) -> Tensor:
    """Return the median of each coordinate of k vectors, [P].

    Of an even number of vectors it is the mean of the two values in the middle. It is NaN if a
    value is.

    Args:
        rows: [k, P], of any float dtype, k >= 1.
    """
    in_order = sort_coordinates(rows)
    k = len(in_order)
    middle = torch.lerp(in_order[(k - 1) // 2], in_order[k // 2], 0.5)
    return torch.where(in_order[-1].isnan(), in_order[-1], middle)
