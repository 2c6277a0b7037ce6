"""A shipped learning task with a user's loss function: `task: path.py:function`, or from Python.

The function gets outputs and targets of a batch, as those of torch.nn.functional do. An argument or
an attribute `reduction` is set to "none". A function without one is called for one example at a
time, so whatever it averages over, each example has a loss of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim.rules.batch import Batch
from raysim.rules.learning_task import LearningTask, TaskData
from raysim.rules.learning_tasks import TASKS

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss(outputs, y), of a batch."""


class LossTask(LearningTask):
    """Base of the tasks that `with_loss` makes."""

    function: ClassVar[LossFunction]
    """The user's loss function."""
    like: ClassVar[str]
    """Name of the shipped task whose data, outputs and metrics it has."""

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self).function, self.like, type(self).__name__, dict(vars(self)))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each example, averaged over its numbers, [B].

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        y = batch.y
        if not self.class_labels:
            y = y.to(outputs.dtype).reshape(outputs.shape)
        return _per_example(type(self).function, outputs, y)


class _TokenLoss(LossTask):
    """A loss of the next token at each position."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over the real positions of each sequence, [B]."""
        return TASKS["next_token"].loss(self, outputs, batch)  # pyright: ignore[reportArgumentType]

    def token_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each position, [B, T]; 0 for padding.

        Args:
            outputs: the logits, [B, T, vocabulary].
            y: the next tokens, [B, T].
        """
        real = self.real(y)  # pyright: ignore[reportAttributeAccessIssue]  # of NextToken
        target = torch.where(real, y, torch.zeros_like(y))
        values = _per_example(type(self).function, outputs.flatten(0, 1), target.flatten())
        return values.view(y.shape) * real


def with_loss(function: LossFunction, like: str, name: str) -> type[LossTask]:
    """Return the class of a shipped task with another loss.

    Args:
        function: the loss function, of outputs and targets.
        like: name of the shipped task whose data, outputs and metrics the new one has.
        name: name of the new task in messages.
    """
    base = _TokenLoss if like == "next_token" else LossTask
    attributes = {"function": staticmethod(function), "like": like, "__module__": __name__}
    task_class: Any = type(name, (base, TASKS[like]), attributes)
    return dataclass(frozen=True)(task_class)


def _rebuild(function: LossFunction, like: str, name: str, fields: dict[str, Any]) -> LearningTask:
    return with_loss(function, like, name)(**fields)


def task_like(function: LossFunction, data: TaskData) -> str:
    """Return the name of the shipped task whose data these are, for a loss function.

    Integer labels are those of `classification` if the function takes them beside one output for
    each class, else numbers for `regression`.

    Args:
        function: the loss function, of outputs and targets.
        data: the examples.
    """
    x, y = data.x, data.y
    if y.ndim == 2 and {x.dtype.kind, y.dtype.kind} <= {*"iu"} and x.shape == y.shape:
        return "next_token"
    if y.ndim == 1 and y.dtype.kind in "iu" and data.n_classes:
        n = data.n_classes + 1  # so that no shape fits by chance
        outputs, labels = torch.zeros(n, data.n_classes), torch.arange(n) % data.n_classes
        try:
            function(outputs, labels)
            values = _per_example(function, outputs, labels)
        except Exception:  # the function may raise anything for what it is not made for
            return "regression"
        return "classification" if values.shape == (n,) else "regression"
    return "multilabel" if y.ndim == 2 and np.isin(y, (0, 1)).all() else "regression"


def _per_example(function: Any, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each example, [B]; the mean over what else the function returns."""
    function = _beside(function, outputs)
    if isinstance(function, nn.Module) and hasattr(function, "reduction"):
        function.reduction = "none"  # pyright: ignore[reportArgumentType]
        values = function(outputs, y)
    elif _has_reduction(function):
        values = function(outputs, y, reduction="none")
    else:

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return function(output[None], target[None]).mean()

        values = torch.func.vmap(alone)(outputs, y)
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _beside(function: Any, outputs: Tensor) -> Any:
    """Return a copy of a loss whose tensors, such as class weights, have the outputs' device."""
    if isinstance(function, nn.Module):
        return copy.deepcopy(function).to(outputs.device, outputs.dtype)
    if isinstance(function, functools.partial):
        moved = {
            key: value.to(outputs.device, outputs.dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for key, value in function.keywords.items()
        }
        return functools.partial(function.func, *function.args, **moved)
    return function


def _has_reduction(function: Any) -> bool:
    """Return whether a function has an argument `reduction`."""
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a signature
        return False
