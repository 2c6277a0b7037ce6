"""Metrics of a model on a set of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from raysim.data import Examples
from raysim.errors import RaysimError, with_users_line
from raysim.models.default_device import tensors_on
from raysim.models.flat import BoundModel
from raysim.rules.batch import Batch
from raysim.rules.losses import Net
from raysim.rules.tasks.learning_task import TaskMetric
from raysim.rules.tasks.loss_task import LossTask
from raysim.rules.tasks.task_metrics import predicted_classes
from raysim.training.tasks.forward_pass import ForwardPass, of_bound

Predict = Callable[[Net], Tensor]
"""Returns the outputs [B, ...] for the examples of a forward pass."""


@torch.no_grad()
def measure(
    net: BoundModel,
    buffers: Tensor,
    examples: Examples,
    batch_size: int,
    metrics: Sequence[TaskMetric],
    classes: int = 0,
    positions: Tensor | None = None,
    predict: Predict | None = None,
) -> dict[str, float]:
    """Return the metrics and the mean loss of a net on examples, in mode "eval".

    Every figure is computed from the numbers of the examples (for the loss: of the batches) in
    their order. So its bits do not depend on where batches are evaluated.

    Args:
        net: the net with its parameters.
        buffers: [Q], the BatchNorm statistics.
        examples: the examples, on the device of the net.
        batch_size: number of examples in a pass.
        metrics: the metrics of the learning task to compute in addition to the loss.
        classes: number of classes for "accuracy/class_{c}"; 0: none.
        positions: [n], the positions of a client's examples, which alone count; None: all.
        predict: returns outputs from a forward pass; None: the net's own.

    Returns:
        The metrics by name, and "loss".

    Raises:
        RaysimError: a metric failed; the message names it.
    """
    of_client = positions is not None
    rows: list[list[Any]] = [[] for _ in metrics]
    of_class = torch.zeros(2, classes, dtype=torch.long, device=buffers.device)
    loss, task = _MeanLoss(net), net.model.learning_task
    if positions is None:
        positions = torch.arange(len(examples))
    with tensors_on(buffers.device):
        for part in positions.split(batch_size):
            x, y = examples.batch(part)
            outputs = _outputs(net, buffers, x, predict)
            # The loss has weights of its own for examples that do not count in the metrics.
            loss.add(outputs, x, y)
            if (counted := task.counted(y)) is not None:
                outputs, x, y = outputs[counted], x[counted], y[counted]
            for metric, parts in zip(metrics, rows, strict=True):
                with _named(metric, of_client):
                    own_outputs = outputs
                    if type(metric).inputs is not TaskMetric.inputs:
                        own_outputs = _outputs(net, buffers, metric.inputs(x.clone()), predict)
                    # A user's metric may change its arguments in place, which others still need.
                    of_metric = task.as_returned(own_outputs.clone(), type(metric))
                    parts.append(metric.rows(of_metric, y.clone()))
            if classes:
                hits = y[predicted_classes(outputs) == y]
                of_class += torch.stack([torch.bincount(p, minlength=classes) for p in (hits, y)])
        values = {}
        for metric, parts in zip(metrics, rows, strict=True):
            with _named(metric, of_client):
                values[metric.name] = float(metric.value(_whole(parts)))
        values["loss"] = loss.value()
    return {**values, **_accuracies(of_class)}


def _accuracies(of_class: Tensor) -> dict[str, float]:
    """Return the accuracy on each class from numbers of hits and examples, [2, classes]."""
    accuracies = {}
    for c, (hits, count) in enumerate(of_class.T.tolist()):
        if count:  # a class without examples has no accuracy
            accuracies[f"accuracy/class_{c}"] = hits / count
    return accuracies


@contextmanager
def _named(metric: TaskMetric, of_client: bool) -> Iterator[None]:
    """Name the metric in the message if it fails, for it may be a user's."""
    advice = "; if it is not defined for this client, return float('nan')" if of_client else ""
    try:
        yield
    except RaysimError:
        raise
    except Exception as error:
        failure = f"metric '{metric.name}' failed: {with_users_line(error)}"
        raise RaysimError(failure + advice) from error


def _outputs(net: BoundModel, buffers: Tensor, x: Tensor, predict: Predict | None) -> Tensor:
    """Return the outputs for inputs x [B, ...], in mode "eval"."""
    if net.model.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    if predict is None:
        return net.forward(x, "eval", buffers)
    return predict(ForwardPass(net.model, x, of_bound(net, "eval", buffers)))


def _whole(parts: list[Any]) -> Any:
    """Return the rows of all batches as one array, or as several ones."""
    if isinstance(parts[0], tuple):
        return tuple(_whole(list(columns)) for columns in zip(*parts, strict=True))
    return torch.cat([part.cpu() for part in parts]).numpy()


class _MeanLoss:
    """The learning task's loss of all examples, however they are divided into batches."""

    def __init__(self, net: BoundModel):
        self.net = net
        self.task = net.model.learning_task
        self.total = torch.zeros((), dtype=torch.float64, device=net.w.device)
        """Sum of the examples' losses."""
        self.denominator = 0.0
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []
        """Outputs, inputs and targets of all batches, for a loss that cannot be divided."""

    def add(self, outputs: Tensor, x: Tensor, y: Tensor) -> None:
        """Add the examples of a batch, without padding."""
        task = self.task
        weights = task.mean_weights(y)
        self.denominator += len(y) if weights is None else float(weights.sum())
        if self.net.model.is_classifier:
            self.total += F.cross_entropy(outputs.double(), y, reduction="sum")
        elif task.loss_reduction == "batch":
            self.parts.append((outputs, x, y))
        elif isinstance(task, LossTask):
            # A function of the user's may hold tensors of the run's dtype.
            self.total += task.loss(outputs, Batch(x, y)).double().sum()
        else:
            # A user's task may change its arguments in place, which the metrics still need.
            of_loss = outputs.to(torch.float64, copy=True)
            self.total += task.loss(of_loss, Batch(x, y.clone())).sum()

    def value(self) -> float:
        """Return the loss; by default NaN if all examples have weight 0."""
        if self.task.loss_reduction == "sum":
            return self.total.item()
        if self.parts:
            outputs, x, y = map(torch.cat, zip(*self.parts, strict=True))
            return float(self.task.loss(outputs, Batch(x, y))[0])
        return self.total.item() / (self.denominator or self.task.zero_denominator)
