"""Nets in which the examples of a batch meet, so that pooling would change them."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.models.comparison import close
from raysim.models.flat import BoundModel, Model
from raysim.randomness import generator

FEW = 3
"""Examples that pass a net one by one, to see whether examples meet in a batch."""

MANY = 67
"""Examples of the batch that they pass together."""

LARGE_INPUTS = 8.0
"""Factor of inputs in a second batch."""


@torch.no_grad()
def couples_examples(model: Model) -> bool:
    """Return whether the outputs for an example depend on the other examples of its batch.

    Args:
        model: the net.
    """
    bound = BoundModel(model)
    w, buffers = model.initial()
    # Initial zeros would hide a dependence.
    noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
    bound.w.copy_(w + 0.1 * torch.from_numpy(noise).to(w))
    tolerance = 1e-8 if model.dtype is torch.float64 else 1e-4

    def outputs(x: Tensor) -> Tensor:
        return bound.forward(x, "frozen", buffers.clone())

    # Some nets couple the examples of large batches only, or those of large inputs.
    for x in _trials(model):
        try:
            together = outputs(x)
        except Exception:  # a net need not take so many examples, or such large inputs
            continue
        parts = [*x[:FEW].split(1), *x[FEW:].split(max(len(x) // 2, 1))]
        try:
            alone = torch.cat([outputs(part) for part in parts])
        except Exception:  # such as PyTorch's batch norm, which needs more than one value
            return True
        if not close(alone, together, tolerance):
            return True
    return False


def _trials(model: Model) -> list[Tensor]:
    """Return batches of inputs on which examples are looked at together and apart, [B, ...]."""
    x, _ = model.trial(MANY)
    trials = [x[:FEW], x]
    return [*trials, x * LARGE_INPUTS] if x.is_floating_point() else trials
