"""A shipped learning task with a user's loss function: `task: path.py:function`, or from Python.

The function gets outputs and targets of a batch, as those of torch.nn.functional do. What it
returns is the loss of the batch. `loss_reading` finds out how that is made of the examples' losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raysim.rules.batch import Batch
from raysim.rules.tasks.learning_task import LearningTask, LossReduction, TaskData
from raysim.rules.tasks.loss_reading import (
    agrees,
    is_guarded,
    read_labels,
    read_numbers,
    value_or_none,
)
from raysim.rules.tasks.loss_targets import (
    class_labels,
    ignored_token,
    may_take_tokens,
    takes_logits,
    takes_numbers,
)
from raysim.rules.tasks.several_outputs import OutputForms
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.rules.tasks.user_loss import (
    LossFunction,
    LossReading,
    UserLoss,
    refuse_trainable,
)

ANY = "any"
"""The `task.like` of a loss function whose outputs and targets no shipped task has."""


@dataclass(frozen=True)
class AnyShapes(LearningTask):
    """Outputs and targets of any shape, which the loss function gets as they are."""

    def outputs(self, data: TaskData) -> int:
        """Return the number of classes of the data; 0, which is unknown, without classes."""
        return data.n_classes

    def output_shape(self, x_shape: tuple[int, ...], outputs: int) -> None:
        """Return None, since any shape will do. See `LearningTask.output_shape`."""


LIKE: dict[str, type[LearningTask]] = {**TASKS, ANY: AnyShapes}
"""The values of `task.like`, with the tasks that they stand for."""


class LossTask(LearningTask):
    """Base of the tasks that `with_loss` makes."""

    function: ClassVar[LossFunction]
    """The user's loss function."""
    user_loss: ClassVar[UserLoss]
    """The same, on the device and in the type of the outputs."""
    like: ClassVar[str]
    """Name of the task whose data, outputs and metrics it has, see `LIKE`."""
    reading: ClassVar[LossReading]
    """How the function makes one number of a batch."""

    def __reduce__(self) -> tuple:
        cls = type(self)
        return _rebuild, (cls.function, self.like, cls.__name__, cls.reading, dict(vars(self)))

    @property
    def forms(self) -> OutputForms | None:
        """The forms of a net's outputs. See `LearningTask.forms`."""
        return self.user_loss.forms

    @property
    def loss_reduction(self) -> LossReduction:
        """How the losses of examples become the loss of a batch. See `LearningTask`."""
        return self.reading.reduction

    def check(self, data: TaskData) -> None:
        """Check the examples whose labels the loss does not ignore. See `LearningTask.check`."""
        reading = self.reading
        if reading.ignored:
            data = dataclasses.replace(
                data,
                y=np.where(np.isin(data.y, reading.ignored), 0, data.y),
                y_test=np.where(np.isin(data.y_test, reading.ignored), 0, data.y_test),
                n_classes=reading.classes,
            )
        super().check(data)

    def outputs(self, data: TaskData) -> int:
        """Return the number of outputs. See `LearningTask.outputs`."""
        return self.reading.classes or super().outputs(data)

    def counted(self, y: Tensor) -> Tensor | None:
        """Return which examples have a label of a class. See `LearningTask.counted`."""
        ignored = self.reading.ignored
        return ~torch.isin(y, torch.tensor(ignored, device=y.device)) if ignored else None

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each example, [B]. See `LearningTask.loss`.

        If the loss cannot be divided over the examples, each of them has that of the batch.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        y = self._targets(outputs, batch.y)
        if self.loss_reduction == "batch":
            return self.user_loss.of_batch(outputs, y).expand(len(y))
        return self.user_loss.of_examples(self.reading, outputs, y)

    def mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what the function returns for a batch. See `LearningTask.mean_loss`.

        With weights of labels it may divide by 0, where a step has no gradient. Sequences of
        tokens have padding.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        if self.reading.weights is None and self.like != "next_token":
            return self.user_loss.of_batch(outputs, self._targets(outputs, batch.y))
        return super().mean_loss(outputs, batch)

    def mean_weights(self, y: Tensor) -> Tensor | None:
        """Return each example's weight in the mean, [B]. See `LearningTask.mean_weights`."""
        return self.reading.label_weights(y)

    @property
    def zero_denominator(self) -> float:
        """The number that stands for a denominator of 0. See `LearningTask.zero_denominator`."""
        return 1.0 if self.reading.is_guarded else super().zero_denominator

    def single_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return each example's loss by itself, [B]. See `LearningTask.single_losses`.

        Weights of classes are relative to their mean over the classes that have one.
        """
        return self.loss(outputs, batch) / self.reading.mean_weight

    def confirm(self, outputs: Tensor, y: Tensor, may_fail: bool = False) -> None:
        """Compare the reading of the function with the function itself.

        If they differ, the function is called for whole batches from now on.

        Args:
            outputs: outputs of a net, or made-up ones, [B, ...].
            y: the targets, [B, ...].
            may_fail: whether the function may refuse so many examples; a pass with as many says so.

        Raises:
            ValueError: they differ, and the function gets tokens.
        """
        pairs = self._pairs(outputs.detach(), y)
        if may_fail and value_or_none(self.user_loss, *pairs) is None:
            return
        if not agrees(self.user_loss, self.reading, *pairs):
            type(self).reading = self._as_batch()

    def _as_batch(self) -> LossReading:
        """Return the reading of a loss that is one of whole batches."""
        return dataclasses.replace(
            self.reading, reduction="batch", weights=None, is_cross_entropy=False
        )

    def _pairs(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as the function gets them."""
        return outputs, self._targets(outputs, y)

    def _targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the targets as the function gets them."""
        if self.class_labels or self.like == ANY:
            return y
        y = y.to(outputs.dtype)
        return y if self.reading.keeps_shape else y.reshape(outputs.shape)


class _TokenLoss(LossTask):
    """A loss of the next token at each position: the mean is one over all tokens of a batch."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sum of each sequence's losses, [B]. See `LearningTask.loss`."""
        losses = self.token_losses(outputs, batch.y)  # pyright: ignore[reportAttributeAccessIssue]  # of NextToken
        return losses.sum(1)

    def mean_weights(self, y: Tensor) -> Tensor | None:
        """Return the sum of each sequence's weights, [B]. See `LearningTask.mean_weights`."""
        return self.token_weights(y).sum(1)

    def single_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the function's value for each sequence, [B]. See `LearningTask.single_losses`."""
        totals = self.loss(outputs, batch)
        if self.loss_reduction == "sum":
            return totals
        weights = self.token_weights(batch.y).sum(1)
        return totals / torch.where(weights > 0, weights, 1).to(totals.dtype)

    def losses_of_tokens(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each token, times its weight, [N]. See `NextToken`."""
        return self.user_loss.of_examples(self.reading, outputs, y)

    def token_weights(self, y: Tensor) -> Tensor:
        """Return the weight of each position in the mean, [B, T]; 0 for padding.

        Args:
            y: the next tokens, [B, T].
        """
        real = self.real(y)  # pyright: ignore[reportAttributeAccessIssue]  # of NextToken
        weights = self.reading.label_weights(y)
        return real if weights is None else weights * real

    def _as_batch(self) -> LossReading:
        raise ValueError(
            "it is not the mean or the sum of the tokens' losses; give a function of outputs [n, "
            "vocabulary] and tokens [n] that is one"
        )

    def _pairs(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and tokens of all real positions, one after the other."""
        real = self.real(y)  # pyright: ignore[reportAttributeAccessIssue]  # of NextToken
        return outputs[real], y[real]


def task_like(function: LossFunction, data: TaskData) -> str:
    """Return the name of the shipped task whose data these are, for a loss function.

    Integer labels are those of `classification` if the function takes them beside one output for
    each class, else numbers for `regression`. Zeros and ones are one label of `multilabel` if the
    function takes its logits. What fits no shipped task is `ANY`.

    Args:
        function: the loss function, of outputs and targets.
        data: the examples.
    """
    x, y = data.x, data.y
    loss = UserLoss(function)
    are_like_tokens = y.ndim == 2 and {x.dtype.kind, y.dtype.kind} <= {*"iu"} and x.min() >= 0
    if are_like_tokens and x.shape == y.shape and may_take_tokens(loss, y):
        return "next_token"
    if y.ndim == 1 and takes_logits(loss, y):
        return "multilabel"
    if class_labels(loss, data) is not None:
        return "classification"
    if y.ndim > 2:
        return ANY
    if not takes_numbers(loss, y):
        # The check of the loss names an error in a function of labels.
        is_labels = y.ndim == 1 and y.dtype.kind in "iu" and data.n_classes
        return "classification" if is_labels else ANY
    return "multilabel" if y.ndim == 2 and np.isin(y, (0, 1)).all() else "regression"


def make_loss_task(
    function: LossFunction,
    like: str,
    name: str,
    data: TaskData,
    build: Callable[[type[LossTask]], LossTask],
) -> LossTask:
    """Return the learning task of a loss function, which is called to find out how it is read.

    Args:
        function: the loss function, of outputs and targets.
        like: name of the shipped task whose data, outputs and metrics it has.
        name: name of the task in messages.
        data: the examples.
        build: returns the task of a class, with the parameters of the configuration.

    Raises:
        ValueError: the function's value depends on earlier calls, it has parameters to train, or
            tokens cannot be separated.
    """
    refuse_trainable(function)
    task: Any = build(with_loss(function, like, name))
    loss = task.user_loss
    if task.class_labels:
        classes, ignored = class_labels(loss, data) or (data.n_classes, ())
        reading = read_labels(loss, classes, ignored) if classes else task.reading
    elif like == "next_token":
        reading = _of_tokens(loss, name, task.outputs(data))
        ignored = ignored_token(UserLoss(function, reading.of_sequences), data)
        if ignored is not None and task.ignore_index not in data.y:
            task = dataclasses.replace(task, ignore_index=ignored)
        reading = _guarded_padding(reading, function, ignored, task.outputs(data))
    elif like == ANY:
        reading = LossReading("alone", "batch")
    elif data.y.dtype.kind in "biuf" and data.y.ndim in (1, 2) and len(data.y):
        reading = read_numbers(loss, data.y)
    else:
        reading = task.reading
    return with_loss(function, like, name, reading)(**vars(task))


def _of_tokens(loss: UserLoss, name: str, vocabulary: int) -> LossReading:
    """Return how a loss function of tokens is read; it may need a batch of sequences."""
    reading = read_labels(loss, vocabulary)
    if reading.reduction == "batch":
        sequences = UserLoss(loss.function, of_sequences=True)
        reading = dataclasses.replace(read_labels(sequences, vocabulary), of_sequences=True)
    if reading.reduction == "batch":
        raise ValueError(
            f"the loss '{name}' is neither the mean nor the sum of losses of single tokens; give a "
            "function of outputs [n, vocabulary] and tokens [n] that is one"
        )
    return reading


def _guarded_padding(
    reading: LossReading, function: LossFunction, ignored: int | None, vocabulary: int
) -> LossReading:
    """Return a reading of tokens that knows whether a batch of padding alone has a loss."""
    if reading.is_guarded or ignored is None:
        return reading
    loss = UserLoss(function, reading.of_sequences)
    return dataclasses.replace(
        reading, is_guarded=is_guarded(loss, torch.tensor([ignored]), vocabulary)
    )


def with_loss(
    function: LossFunction, like: str, name: str, reading: LossReading | None = None
) -> type[LossTask]:
    """Return the class of a shipped task with another loss.

    Args:
        function: the loss function, of outputs and targets.
        like: name of the shipped task whose data, outputs and metrics the new one has.
        name: name of the new task in messages.
        reading: how the function makes one number of a batch, see `make_loss_task`; None: it is
            the plain mean over the examples.
    """
    base = _TokenLoss if like == "next_token" else LossTask
    reading = reading or LossReading.plain(function)
    attributes = {
        "function": staticmethod(function),
        "user_loss": UserLoss(
            function, reading.of_sequences, OutputForms() if like == ANY else None
        ),
        "like": like,
        "reading": reading,
        "__module__": __name__,
    }
    task_class: Any = type(name, (base, LIKE[like]), attributes)
    return dataclass(frozen=True)(task_class)


def _rebuild(
    function: LossFunction, like: str, name: str, reading: LossReading, fields: dict[str, Any]
) -> LearningTask:
    return with_loss(function, like, name, reading)(**fields)
