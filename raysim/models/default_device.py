"""Tensors that users' code makes without naming a device come to the device that computes.

A rule, a loss or a metric that was written on a CPU then runs on a GPU: `torch.zeros(n)` in it is a
tensor of the GPU. `with torch.device(...)` would do more: it holds for the engine's calls too, and
copies single numbers such as `torch.tensor(0.5)`, for which a local step could not be captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raysim.errors import is_users

FACTORIES: frozenset[Callable[..., Tensor]] = frozenset(
    {
        torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace,
        torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm,
        torch.tril_indices, torch.triu_indices, torch.zeros,
    }
)  # fmt: skip
"""Functions that make a tensor on the device that their argument `device` names."""

CONVERSIONS: frozenset[Callable[..., Tensor]] = frozenset(
    {torch.as_tensor, torch.asarray, torch.tensor}
)
"""Functions that make a tensor of numbers in the host's memory."""

MAKERS = FACTORIES | CONVERSIONS


class _TensorsOn(TorchFunctionMode):
    """Makes tensors on a device where the calls of users' code name none.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = dict(kwargs or {})
        is_named = any(kwargs.get(key) is not None for key in ("device", "generator", "out"))
        if func in MAKERS and not is_named and is_users(sys._getframe(1).f_code):
            if func in FACTORIES:
                kwargs["device"] = self.device
            else:
                made = func(*args, **kwargs)
                # PyTorch takes single numbers of the host together with tensors of any device.
                if not made.ndim or made.device == self.device:
                    return made
                moved = made.detach().to(self.device)
                # A copy of a tensor with a gradient would be no leaf.
                return moved.requires_grad_() if made.requires_grad else moved
        return func(*args, **kwargs)


def tensors_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which users' code makes its tensors on a device.

    Args:
        device: the device; on a CPU nothing changes.
    """
    return nullcontext() if device.type == "cpu" else _TensorsOn(device)


def brought_to(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return what a rule has made, with its tensors on a device; those there are not copied.

    Args:
        values: tensors and other values by name.
        device: the device.
    """
    moved = {}
    for name, value in values.items():
        moved[name] = value.to(device) if isinstance(value, Tensor) else value
    return moved
