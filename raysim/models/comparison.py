"""Tools of the checks of nets: comparison of tensors, names of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def same_values(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values; nan equals nan.

    Args:
        tensor: a tensor.
        other: a tensor of the same type.
    """
    if tensor.shape != other.shape:
        return False
    if torch.equal(tensor, other):
        return True
    return tensor.is_floating_point() and torch.allclose(tensor, other, 0.0, 0.0, equal_nan=True)


class Snapshot:
    """A tensor and a copy of its values, to see later if it was changed in place.

    Args:
        value: the tensor; other values, as between stages of a net, count as unchanged.
    """

    def __init__(self, value: Any):
        self._tensor = value if isinstance(value, Tensor) else None
        if self._tensor is not None:
            self._copy, self._version = self._tensor.clone(), self._tensor._version

    def has_changed(self) -> bool:
        """Return whether the tensor was changed in place, also by its `data`."""
        if self._tensor is None:
            return False
        # A change by `x.data` does not count as a version.
        return self._tensor._version != self._version or not same_values(self._tensor, self._copy)


CANCELLED = 0.01
"""Share of the tolerance within which two sums may differ whose terms cancel."""


def close(a: Tensor, b: Tensor, tolerance: float | None = None, magnitude: float = 0.0) -> bool:
    """Return whether two tensors are equal up to rounding.

    Args:
        a: a tensor.
        b: the tensor that it is compared with.
        tolerance: largest difference, as a share of the largest magnitude in `b`; None: that of a
            different order of operations in the type of `b`.
        magnitude: that of the terms of which both are sums. The terms can cancel, as in the
            gradient of a bias before BatchNorm, which is nothing but their rounding.
    """
    if a.shape != b.shape:
        return False
    if tolerance is None:
        tolerance = 1e-7 if b.dtype is torch.float64 else 5e-3
    scale = _largest(b)
    if not np.isfinite(scale):
        return torch.equal(torch.isfinite(a), torch.isfinite(b))
    return _largest(a - b) <= tolerance * max(scale, CANCELLED * magnitude) + 1e-12


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a tensor, without a copy of it; nan if it has one."""
    if not tensor.numel():
        return 0.0
    if not tensor.is_floating_point():
        return float(tensor.abs().max())
    return float(torch.linalg.vector_norm(tensor, torch.inf))


def magnitude(tensors: Iterable[Tensor | None]) -> float:
    """Return the largest finite magnitude in some tensors, or 0.

    Args:
        tensors: the tensors; None stands for one without numbers.
    """
    largest = 0.0
    for tensor in tensors:
        if tensor is not None:
            of_tensor = _largest(tensor)
            if not np.isfinite(of_tensor):
                of_tensor = _largest(tensor.nan_to_num(0.0, 0.0, 0.0))
            largest = max(largest, of_tensor)
    return largest


def layer_names(net: nn.Module) -> dict[nn.Module, str]:
    """Return name and kind of each layer of a net, for messages.

    Args:
        net: the net.
    """
    return {
        module: f"{name or 'the net'} ({type(module).__name__})"
        for name, module in net.named_modules()
    }
