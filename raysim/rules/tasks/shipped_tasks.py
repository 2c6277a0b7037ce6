"""The shipped learning tasks: classification, multi-label, regression and next-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from raysim.rules.batch import Batch
from raysim.rules.tasks import task_metrics
from raysim.rules.tasks.learning_task import LearningTask, TaskData


@dataclass(frozen=True)
class Classification(LearningTask):
    """One of several classes for each example; cross-entropy.

    The net gives logits [B, classes]; y are labels from 0, [n].
    """

    config_name: ClassVar = "classification"
    default_metrics: ClassVar = ("accuracy",)
    metric_classes: ClassVar = {
        "accuracy": task_metrics.Accuracy,
        "top{k}": task_metrics.TopKAccuracy,
        "f1": task_metrics.MacroF1,
        "f1_micro": task_metrics.MicroF1,
        "auc": task_metrics.Auc,
    }
    class_labels: ClassVar = True

    def check(self, data: TaskData) -> None:
        """Check that the labels are integers from 0 below the number of classes.

        See `LearningTask.check`.
        """
        for half, _, y in data.halves():
            if y.ndim != 1 or y.dtype.kind not in "iu":
                raise ValueError(
                    f"the {half} examples have y of type {y.dtype} and shape {list(y.shape)}, "
                    "expected one integer label for each example, [n], as y.argmax(1) for one-hot "
                    "labels, y[:, 0] for a column and y.astype(int) for floats; see "
                    "task=multilabel, regression, next_token, or a loss function as task"
                )
        if not data.n_classes:
            _refuse_unnumbered(data)
        for half, _, y in data.halves():
            limit = "number of classes (`classes` of the data, else one more than y's largest)"
            _refuse_outside(y, self.outputs(data), f"{half} example", "label", limit)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of each example, [B]. See `LearningTask.loss`."""
        return F.cross_entropy(outputs, batch.y, reduction="none")


@dataclass(frozen=True)
class Multilabel(LearningTask):
    """Any number of labels for each example; binary cross-entropy, averaged over the labels.

    The net gives logits [B, labels]; y are zeros and ones, [n, labels], or [n] for one label.
    """

    config_name: ClassVar = "multilabel"
    default_metrics: ClassVar = ("subset_accuracy", "f1", "f1_micro", "auc")
    metric_classes: ClassVar = {
        "subset_accuracy": task_metrics.SubsetAccuracy,
        "f1": task_metrics.MultilabelMacroF1,
        "f1_micro": task_metrics.MultilabelMicroF1,
        "auc": task_metrics.MultilabelAuc,
    }

    def check(self, data: TaskData) -> None:
        """Check that the targets are zeros and ones, [n, labels] or [n].

        See `LearningTask.check`.
        """
        for half, _, y in data.halves():
            if y.ndim not in (1, 2) or y.shape[1:] != data.y.shape[1:]:
                raise ValueError(
                    f"the {half} examples have y of shape {list(y.shape)}, expected "
                    "zeros and ones of shape [n, labels] or [n]"
                )
            wrong = np.argwhere((y != 0) & (y != 1))
            if len(wrong):
                i, *label = wrong[0]
                of_label = f" for label {label[0]}" if label else ""
                raise ValueError(
                    f"y of {half} example {i} has the value {y[tuple(wrong[0])]}{of_label}, "
                    "expected 0 or 1"
                )

    def outputs(self, data: TaskData) -> int:
        """Return the number of labels. See `LearningTask.outputs`."""
        return _columns(data)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the binary cross-entropy of each example, averaged over the labels, [B].

        See `LearningTask.loss`.
        """
        y = batch.y.to(outputs.dtype).reshape(outputs.shape)
        losses = F.binary_cross_entropy_with_logits(outputs, y, reduction="none")
        return losses.reshape(len(y), -1).mean(1)


@dataclass(frozen=True)
class Regression(LearningTask):
    """One or several numbers for each example; squared error, averaged over the columns.

    The net gives [B, columns]; y are numbers, [n] or [n, columns].
    """

    config_name: ClassVar = "regression"
    default_metrics: ClassVar = ("mse", "mae", "r2")
    metric_classes: ClassVar = {
        "mse": task_metrics.MeanSquaredError,
        "mae": task_metrics.MeanAbsoluteError,
        "r2": task_metrics.R2,
    }

    def check(self, data: TaskData) -> None:
        """Check that the targets are finite numbers, [n] or [n, columns].

        See `LearningTask.check`.
        """
        for half, _, y in data.halves():
            if y.ndim not in (1, 2) or y.shape[1:] != data.y.shape[1:] or y.dtype.kind not in "iuf":
                raise ValueError(
                    f"the {half} examples have y of type {y.dtype} and shape {list(y.shape)}, "
                    "expected numbers of shape [n] or [n, columns]; for others give a loss "
                    "function as task, such as torch.nn.functional.mse_loss"
                )
            wrong = np.argwhere(~np.isfinite(y))
            if len(wrong):
                raise ValueError(
                    f"y of {half} example {wrong[0][0]} is {y[tuple(wrong[0])]}, "
                    "expected finite numbers"
                )

    def outputs(self, data: TaskData) -> int:
        """Return the number of columns. See `LearningTask.outputs`."""
        return _columns(data)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the squared error of each example, averaged over the columns, [B].

        See `LearningTask.loss`.
        """
        y = batch.y.to(outputs.dtype).reshape(outputs.shape)
        return (outputs - y).square().reshape(len(y), -1).mean(1)


@dataclass(frozen=True)
class NextToken(LearningTask):
    """The next token at each position of a sequence; cross-entropy over the vocabulary.

    The net gives logits [B, T, vocabulary]; x and y are tokens, [n, T]. Positions whose y is
    `ignore_index` are padding. A sequence's loss is the mean over its other positions.
    """

    vocabulary: Annotated[int, Field(ge=1)] | None = None
    """Number of tokens; null: the data set's classes, or the largest token of the data plus 1."""
    ignore_index: int = -100
    """The y of a position that does not count: padding at a sequence's end. The x there may be any
    token."""

    config_name: ClassVar = "next_token"
    default_metrics: ClassVar = ("accuracy", "perplexity")
    metric_classes: ClassVar = {
        "accuracy": task_metrics.TokenAccuracy,
        "perplexity": task_metrics.Perplexity,
    }

    def check(self, data: TaskData) -> None:
        """Check that x and y are tokens of the vocabulary, of the same shape [n, T].

        See `LearningTask.check`.
        """
        size = self.outputs(data)
        for half, x, y in data.halves():
            if x.ndim != 2 or x.shape != y.shape or {x.dtype.kind, y.dtype.kind} - {*"iu"}:
                raise ValueError(
                    f"the {half} examples have x of type {x.dtype} and shape {list(x.shape)} and "
                    f"y of type {y.dtype} and shape {list(y.shape)}, expected integer tokens of "
                    "one shape [n, T]"
                )
            if x.shape[1:] != data.x.shape[1:]:
                raise ValueError(
                    f"training sequences have {data.x.shape[1]} positions and test sequences "
                    f"{x.shape[1]}; pad them to one length (y = {self.ignore_index} there)"
                )
            vocabulary = "task.vocabulary" if self.vocabulary else "vocabulary"
            _refuse_outside(x, size, f"x of {half} example", "token", vocabulary)
            kept = np.where(y == self.ignore_index, 0, y)
            _refuse_outside(kept, size, f"y of {half} example", "token", vocabulary)
        for half, _, y in data.halves():
            self._refuse_empty(half, y)

    def _refuse_empty(self, half: str, y: np.ndarray) -> None:
        """Refuse sequences without a token to predict, which would count as a loss of 0."""
        is_empty = (y == self.ignore_index).all(1)
        # A mean over all tokens of a batch leaves them out.
        if is_empty.any() and self.mean_weights(torch.from_numpy(y[:1])) is None:
            raise ValueError(
                f"y of {half} example {int(is_empty.argmax())} has no token to predict, as "
                f"{int(is_empty.sum())} of {len(y)} sequences; leave them out of the data"
            )

    def outputs(self, data: TaskData) -> int:
        """Return the size of the vocabulary. See `LearningTask.outputs`."""
        y, y_test = (of_half[of_half != self.ignore_index] for of_half in (data.y, data.y_test))
        arrays = (data.x, y, data.x_test, y_test)
        largest = max((int(array.max()) for array in arrays if array.size), default=0)
        return self.vocabulary or data.n_classes or largest + 1

    def output_shape(self, x_shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
        """Return (T, vocabulary). See `LearningTask.output_shape`."""
        return (*x_shape, outputs)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over the real positions of each sequence, [B].

        See `LearningTask.loss`.
        """
        values = self.token_losses(outputs, batch.y)
        return values.sum(1) / self.real(batch.y).sum(1).clamp(min=1)

    def token_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each position, [B, T]; 0 for padding.

        Args:
            outputs: the logits, [B, T, vocabulary].
            y: the next tokens, [B, T].
        """
        real = self.real(y)
        target = torch.where(real, y, torch.zeros_like(y))
        values = self.losses_of_tokens(outputs.flatten(0, 1), target.flatten())
        return values.view(y.shape) * real

    def losses_of_tokens(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each token, [N].

        Args:
            outputs: the logits, [N, vocabulary].
            y: the next tokens, [N].
        """
        return F.cross_entropy(outputs, y, reduction="none")

    def token_weights(self, y: Tensor) -> Tensor:
        """Return the weight of each position in a mean over tokens, [B, T]; 0 for padding.

        Args:
            y: the next tokens, [B, T].
        """
        return self.real(y)

    def real(self, y: Tensor) -> Tensor:
        """Return which positions are no padding, bool [B, T].

        Args:
            y: the next tokens, [B, T].
        """
        return y != self.ignore_index


TASKS: dict[str, type[LearningTask]] = {
    task.config_name: task for task in (Classification, Multilabel, Regression, NextToken)
}
"""The shipped learning tasks by name."""


RENUMBER = (
    "number the labels from 0, alike in both halves: names = np.unique([*y, *y_test]), then "
    "np.searchsorted(names, y) and np.searchsorted(names, y_test)"
)
"""The fix for labels that are no numbers of classes."""


def _columns(data: TaskData) -> int:
    """Return the number of columns of targets [n, columns]; 1 for targets [n]."""
    return data.y.shape[1] if data.y.ndim == 2 else 1


def _refuse_unnumbered(data: TaskData) -> None:
    """Raise ValueError for labels from which no number of classes follows."""
    for half, _, y in data.halves():
        if (negative := np.flatnonzero(y < 0)).size:
            k = negative[0]
            raise ValueError(
                f"{half} example {k} has the label {y[k]}; {RENUMBER}, give a loss that ignores "
                f"it, in its denominator too, such as nn.CrossEntropyLoss(ignore_index={y[k]}), "
                "or, for numbers to predict, set task, or its key like, to regression"
            )
    k = int(data.y.argmax())
    raise ValueError(
        f"training example {k} has the label {data.y[k]}, so that the net would need "
        f"{int(data.y[k]) + 1} outputs; {RENUMBER}, give the number of classes, or set "
        "task=regression"
    )


def _refuse_outside(values: np.ndarray, size: int, whose: str, kind: str, limit: str) -> None:
    """Raise ValueError if a value is not in 0..size-1; it names the first example and its value."""
    outside = (values < 0) | (values >= size)
    if not outside.any():
        return
    example, *position = np.argwhere(outside)[0].tolist()
    place = f" at position {position[0]}" if position else ""
    value = values[(example, *position)]
    raise ValueError(
        f"{whose} {example} has the {kind} {value}{place}, but the {limit} is {size}: "
        f"{kind}s go from 0 to {size - 1}"
    )
