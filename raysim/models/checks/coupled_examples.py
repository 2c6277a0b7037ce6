"""Nets in which the examples of a batch meet, so that pooling would change them.

They meet in a forward pass, or in a backward pass: where a gradient is divided by its norm, clipped
or replaced by its sign inside of the net, the gradient of a sum is not the sum of gradients.
"""

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


def couples_examples(model: Model) -> bool:
    """Return whether outputs or gradient of an example depend on the other examples of its batch.

    Args:
        model: the net.
    """
    if not model.masks_are_of_examples:
        return True
    bound, buffers = BoundModel.at_start(model)
    # Initial zeros would hide a dependence.
    noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
    bound.w += 0.1 * torch.from_numpy(noise).to(bound.w)
    tolerance = 1e-8 if model.dtype is torch.float64 else 1e-4

    def outputs(x: Tensor) -> Tensor:
        return bound.forward(x, "frozen", buffers.clone())

    # Some nets couple the examples of large batches only, or those of large inputs.
    for x in _trials(model):
        try:
            together = outputs(x)
        except Exception:  # a net need not take so many examples, or such large inputs
            continue
        parts = list(x[:FEW].split(1))
        if len(x) > FEW:
            parts += x[FEW:].split(len(x) // 2)
        try:
            alone = [outputs(part) for part in parts]
            if not close(torch.cat(alone).detach(), together.detach(), tolerance):
                return True
            pooled, summed = _gradients(bound, together, alone)
        except Exception:
            # Batch norm fails on one example, and a backward pass fails if a later pass has changed
            # what it needs. Examples that cannot be computed alone count as coupled.
            return True
        # Sums over many examples, whose terms may cancel.
        if not close(pooled, summed, 10 * tolerance):
            return True
    return False


@torch.no_grad()
def couples_in_evaluation(model: Model) -> bool:
    """Return whether outputs in evaluation mode depend on the other examples of a batch.

    Args:
        model: the net.
    """
    bound, buffers = BoundModel.at_start(model)
    x, _ = model.examples(2 * FEW)
    try:
        together = bound.forward(x.clone(), "eval", buffers)
        apart = torch.cat([bound.forward(part.clone(), "eval", buffers) for part in x.split(FEW)])
    except Exception:  # a net need not take so few examples
        return False
    return not close(apart, together, 1e-8 if model.dtype is torch.float64 else 1e-3)


def _gradients(bound: BoundModel, together: Tensor, alone: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradient [P] of outputs that were computed together, and that of their parts.

    The parts are clients of different weights, and the gradient of the loss by the outputs is made
    up. The weights are inside of the gradient of the outputs together, and factors of the others.
    """
    rng = generator(0, "dry run")
    of_outputs, total = [], torch.zeros_like(bound.w)
    for k, outputs in enumerate(alone):
        numbers = rng.standard_normal(tuple(outputs.shape), dtype="float32")
        of_part, weight = torch.from_numpy(numbers).to(outputs), 2.0**-k
        of_outputs.append(weight * of_part)
        total += weight * _gradient(bound, outputs, of_part)
    return _gradient(bound, together, torch.cat(of_outputs)), total


def _gradient(bound: BoundModel, outputs: Tensor, of_outputs: Tensor) -> Tensor:
    """Return the gradient [P] of outputs [B, ...], from that of a loss by them."""
    if not outputs.requires_grad:
        return torch.zeros_like(bound.w)
    parts = torch.autograd.grad(outputs, bound.parameters, of_outputs, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def _trials(model: Model) -> list[Tensor]:
    """Return batches of inputs on which examples are looked at together and apart, [B, ...]."""
    x, _ = model.trial(MANY)
    trials = [x[:FEW], x]
    return [*trials, x * LARGE_INPUTS] if x.is_floating_point() else trials
