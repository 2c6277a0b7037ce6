"""Whether the clients of a net can train side by side: padded batches are compared with others."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from raysim.errors import in_a_line
from raysim.models.flat import Model
from raysim.randomness import generator
from raysim.rules.batch import Batch
from raysim.system.signals import reraise_stop
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.vmap_task import VmapTask


def why_not_vmap(model: Model) -> str | None:
    """Return why clients cannot train side by side under vmap; None if they can.

    Gradients and statistics of two clients, of which one has fewer examples and is padded, are
    compared with those of each client alone.

    Args:
        model: the net.
    """
    if model.learning_task.loss_reduction == "batch":
        return f"the loss '{model.learning_task.name}' is one of all examples of a batch together"
    for larger, smaller, factor in PADDED_TRIALS:
        if larger > SMALL_TRIAL and model.size > MAX_PARAMETERS_OF_LARGE_TRIALS:
            continue
        if why := _why_not_padded(model, larger, smaller, factor):
            return why
    return None


PADDED_TRIALS = ((3, 2, 1.0), (3, 2, 8.0), (40, 9, 1.0), (40, 9, 8.0))
"""Numbers of examples of two clients, and a factor of their inputs: some nets couple the examples
of large batches only, or of large inputs."""

SMALL_TRIAL = 3
"""Number of examples of the larger client in a trial that every net can afford."""

MAX_PARAMETERS_OF_LARGE_TRIALS = 1_000_000
"""Larger nets make small trials only, since the others would take seconds."""


class _PaddedTrial:
    """Two clients with random examples, of which the smaller one is padded.

    Args:
        model: the net.
        larger: number of examples of the first client.
        smaller: number of examples of the second client.
        factor: factor of the inputs, if these are floats.
    """

    def __init__(self, model: Model, larger: int, smaller: int, factor: float):
        self.model = model
        x, y = model.trial(larger + smaller)
        if x.is_floating_point():
            x = x * factor
        self.examples = [(x[:larger], y[:larger]), (x[larger:], y[larger:])]
        w, self.buffers = model.initial()
        # Initial zeros would hide a difference.
        noise = generator(0, "dry run").standard_normal(model.size, dtype="float32")
        self.w = w + 0.02 * torch.from_numpy(noise).to(w)
        self.padded = [
            _stacked_with_last(first, second) for first, second in zip(*self.examples, strict=True)
        ]
        self.mask = w.new_ones(2, larger)
        self.mask[1, smaller:] = 0
        self.drops = tuple(w.new_ones(2, larger, *shape) for shape, _ in model.dropouts)

    def alone(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the gradient [P] and the statistics [Q] of a client without padding."""
        task = LoopTask(self.model, LocalSettings())
        task.buffers = self.buffers.clone()
        x, y = self.examples[client]
        drop = tuple(masks[client, : len(y)] for masks in self.drops)
        gradient = task.grad(self.w, Batch(x, y, None, (drop,)))
        if task.unreached:
            name = self.model.names[task.unreached[0]].removeprefix("0.")
            raise ValueError(f"'{name}' has no gradient, which vmap takes for a gradient of 0")
        return gradient, task.buffers

    def side_by_side(self) -> tuple[Tensor, Tensor]:
        """Return the gradients [2, P] and the statistics [2, Q] of both clients under vmap."""

        def of_client(x: Tensor, y: Tensor, mask: Tensor, *drop: Tensor) -> tuple[Tensor, Tensor]:
            task = VmapTask(self.model, LocalSettings(), self.buffers)
            return task.grad(self.w, Batch(x, y, mask, (drop,))), task.buffers

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns if it would fall back to a slow loop
            return torch.func.vmap(of_client)(*self.padded, self.mask, *self.drops)


def _stacked_with_last(larger: Tensor, smaller: Tensor) -> Tensor:
    """Return the rows of two clients as one tensor, the smaller one padded with its last row."""
    padding = [smaller[-1:]] * (len(larger) - len(smaller))
    return torch.stack([larger, torch.cat([smaller, *padding])])


def _why_not_padded(model: Model, larger: int, smaller: int, factor: float) -> str | None:
    """Return why two clients cannot train side by side; None if they can."""
    trial = _PaddedTrial(model, larger, smaller, factor)
    # A net need not take so many examples, or such large inputs; then a trial shows nothing.
    is_optional = larger > SMALL_TRIAL or factor != 1
    try:
        each = [torch.stack(parts) for parts in zip(trial.alone(0), trial.alone(1), strict=True)]
    except BaseException as error:
        reraise_stop(error)
        return None if is_optional else in_a_line(error)
    try:
        many = trial.side_by_side()
    except BaseException as error:
        reraise_stop(error)
        return in_a_line(error)
    for name, under_vmap, expected in zip(("gradients", "statistics"), many, each, strict=True):
        if not (torch.isfinite(under_vmap).all() and torch.isfinite(expected).all()):
            if is_optional:
                return None
            return f"its {name} on random inputs are not finite, so the two ways cannot be compared"
        if not _is_close(under_vmap, expected):
            return (
                f"it computes other {name} for a padded batch under vmap than for the batch alone; "
                "examples may meet in the net"
            )
    return None


def _is_close(values: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-8 if values.dtype is torch.float64 else 1e-3
    return float((values - expected).norm()) <= tolerance * float(expected.norm())
