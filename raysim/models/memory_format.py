"""Choice of the memory format of images: convolutions on a CPU are fastest in channels_last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from raysim.rules.task import PassMode
from raysim.system.global_generators import (
    GENERATORS,
    GlobalGenerators,
    generators_kept,
    seed_generators,
)

SAME = 1e-3
"""Relative difference up to which outputs are the same, computed in another order."""


class _GroupNorms(TorchFunctionMode):
    """Notes calls of group normalisation with trained factors on inputs without a gradient."""

    found = False

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is F.group_norm or func is torch.group_norm:
            given = dict(zip(("input", "num_groups", "weight"), args, strict=False))
            given |= kwargs or {}
            weight = given.get("weight")
            is_trained = weight is not None and weight.requires_grad
            self.found = self.found or (is_trained and not given["input"].requires_grad)
        return func(*args, **(kwargs or {}))


def takes_channels_last(forward: Callable[[Tensor, PassMode], Tensor], x: Tensor) -> bool:
    """Return whether images may be in the memory format `channels_last`.

    Not if a net computes something else in it, as code that reads a tensor in the order of its
    memory or draws numbers for it in this order (`F.dropout`), or fails, as `x.view(len(x), -1)`.
    Nor if a group normalisation has trained factors and inputs without a gradient: its backward
    pass then ends the process (PyTorch 2.13, CPU).

    Args:
        forward: makes a pass of the net, and returns its outputs.
        x: [B, C, H, W], images in PyTorch's own format.
    """
    images = x.contiguous(memory_format=torch.channels_last)
    calls = _GroupNorms()
    try:
        with generators_kept():
            with torch.no_grad():
                pairs = [(_seeded(forward, x, "eval"), _seeded(forward, images, "eval"))]
            with torch.enable_grad(), calls:
                in_training = _seeded(forward, images, "train")
            if in_training.draws:
                pairs.append((_seeded(forward, x, "train"), in_training))
    except Exception:  # of the user's forward, which may refuse this format by any error
        return False
    return not calls.found and all(_same(own.outputs, other.outputs) for own, other in pairs)


class _Pass(NamedTuple):
    """A pass of a net, and whether it has drawn random numbers."""

    outputs: Tensor
    draws: bool


def _seeded(forward: Callable[[Tensor, PassMode], Tensor], x: Tensor, mode: PassMode) -> _Pass:
    """Make a pass whose random numbers begin at the same ones each time."""
    seed_generators(GENERATORS, 0)
    seeded = GlobalGenerators()
    outputs = forward(x.clone(), mode).detach()
    return _Pass(outputs, bool(seeded.drawn_from()))


def _same(own: Tensor, other: Tensor) -> bool:
    """Return whether outputs are the same but for rounding."""
    tolerance = SAME * float(own.abs().nan_to_num(0.0).max())
    return torch.allclose(own, other, SAME, tolerance, equal_nan=True)
