"""The shipped metrics of evaluations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.rules.tasks.learning_task import TaskMetric


def predicted_classes(outputs: Tensor) -> Tensor:
    """Return the class of the largest logit of each example or token; -1 if one is NaN.

    Args:
        outputs: logits, [..., classes].
    """
    # argmax takes NaN for the largest.
    return torch.where(outputs.isnan().any(-1), -1, outputs.argmax(-1))


class Accuracy(TaskMetric):
    """Share of the examples whose largest logit is that of their label."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return hits, [B]. See `TaskMetric.rows`."""
        return predicted_classes(outputs) == y


class TopKAccuracy(TaskMetric):
    """Share of the examples whose label is among the k largest logits; ties go to lower labels."""

    @property
    def k(self) -> int:
        """The number in the metric's name."""
        return int(self.name.removeprefix("top"))

    def check(self) -> None:
        """Check that there are more than k classes. See `TaskMetric.check`."""
        if not 1 <= self.k < self.outputs:
            raise ValueError(f"there are {self.outputs} classes; use top1 to top{self.outputs - 1}")

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return hits, [B]. See `TaskMetric.rows`."""
        correct = outputs.gather(1, y[:, None])
        tied_before = (outputs == correct) & (
            torch.arange(self.outputs, device=y.device) < y[:, None]
        )
        is_hit = ((outputs > correct) | tied_before).sum(1) < self.k
        return is_hit & ~outputs.isnan().any(1)  # NaN compares as no larger logit


class MacroF1(TaskMetric):
    """Mean F1 over the classes that occur among labels or predictions."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return predicted class and label, [B, 2]. See `TaskMetric.rows`."""
        return torch.stack([predicted_classes(outputs), y], 1)

    def value(self, rows: np.ndarray) -> float:
        """Return the mean of 2 TP / (predictions + labels). See `TaskMetric.value`."""
        predicted, label = rows[:, 0], rows[:, 1]
        classes = (label[predicted == label], predicted[predicted >= 0], label)
        tp, p, t = (np.bincount(part, minlength=self.outputs) for part in classes)
        present = p + t > 0
        return float(np.mean(2 * tp[present] / (p + t)[present])) if present.any() else np.nan


class MicroF1(Accuracy):
    """F1 of all classes' counts together; for one label each it is the accuracy."""


class Auc(TaskMetric):
    """Area under the ROC curve of each class against all others, mean over the classes."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return probabilities and label, [B, classes + 1]. See `TaskMetric.rows`."""
        return torch.cat([torch.softmax(outputs.double(), 1), y[:, None].double()], 1)

    def value(self, rows: np.ndarray) -> float:
        """Return the mean over the classes that some, but not all examples have.

        See `TaskMetric.value`.
        """
        return mean_auc(rows[:, :-1], rows[:, -1:] == np.arange(self.outputs))


def mean_auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean area under the ROC curves of columns; NaN if no column has both kinds.

    Args:
        scores: [n, K]; a larger one means that the label is likelier.
        truth: bool [n, K], whether the example has the label.
    """
    from scipy.stats import rankdata

    areas = []
    for column, true in zip(scores.T, truth.T, strict=True):
        positive, negative = int(true.sum()), int((~true).sum())
        if positive and negative:
            ranks = rankdata(column)[true].sum()
            areas.append((ranks - positive * (positive + 1) / 2) / (positive * negative))
    return float(np.mean(areas)) if areas else float("nan")


def _columns(values: Tensor) -> Tensor:
    """Return outputs or targets as [B, columns]; those of one column may be [B]."""
    return values.reshape(len(values), -1)


def _predicted_labels(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true labels, bool [B, labels]; a NaN predicts the wrong one."""
    truth = _columns(y > 0)
    return torch.where(_columns(outputs.isnan()), ~truth, _columns(outputs > 0)), truth


class SubsetAccuracy(TaskMetric):
    """Share of the examples of which every label is right."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return hits, [B]. See `TaskMetric.rows`."""
        predicted, truth = _predicted_labels(outputs, y)
        return (predicted == truth).all(1)


class _MultilabelCounts(TaskMetric):
    """A figure from the predicted and the true labels; a logit above 0 predicts a label."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return predictions and truth, bool [B, 2, labels]."""
        return torch.stack(_predicted_labels(outputs, y), 1)

    def _counts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the true positives of each label, and predictions plus true labels."""
        return rows.all(1).sum(0), rows.sum((0, 1))


class MultilabelMacroF1(_MultilabelCounts):
    """Mean F1 over the labels; 0 for a label that is neither predicted nor true."""

    def value(self, rows: np.ndarray) -> float:
        """Return the mean of 2 TP / (predictions + true labels). See `TaskMetric.value`."""
        tp, total = self._counts(rows)
        return float(np.mean(2 * tp / np.maximum(total, 1)))


class MultilabelMicroF1(_MultilabelCounts):
    """F1 of all labels' counts together."""

    def value(self, rows: np.ndarray) -> float:
        """Return 2 Σ TP / Σ (predictions + true labels). See `TaskMetric.value`."""
        tp, total = self._counts(rows)
        return float(2 * tp.sum() / max(total.sum(), 1))


class MultilabelAuc(TaskMetric):
    """Area under the ROC curve of each label, mean over the labels that have both kinds."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return logits and truth, [B, 2, labels]. See `TaskMetric.rows`."""
        return torch.stack([_columns(outputs), _columns(y > 0).to(outputs.dtype)], 1)

    def value(self, rows: np.ndarray) -> float:
        """Return the mean area. See `TaskMetric.value`."""
        return mean_auc(rows[:, 0], rows[:, 1] > 0)


class _Errors(TaskMetric):
    """A figure from prediction and target."""

    larger_is_better = False

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return predictions and targets, float64 [B, 2, columns]."""
        return torch.stack([_columns(outputs.double()), _columns(y.double())], 1)


class MeanSquaredError(_Errors):
    """Mean squared error over examples and columns."""

    def value(self, rows: np.ndarray) -> float:
        """Return the mean of (prediction - target)². See `TaskMetric.value`."""
        return float(np.mean((rows[:, 0] - rows[:, 1]) ** 2))


class MeanAbsoluteError(_Errors):
    """Mean absolute error over examples and columns."""

    def value(self, rows: np.ndarray) -> float:
        """Return the mean of |prediction - target|. See `TaskMetric.value`."""
        return float(np.mean(np.abs(rows[:, 0] - rows[:, 1])))


class R2(_Errors):
    """Coefficient of determination 1 - Σ(y - ŷ)² / Σ(y - ȳ)², mean over the columns."""

    larger_is_better = True

    def value(self, rows: np.ndarray) -> float:
        """Return the mean over the columns; NaN if all targets of a column are equal.

        See `TaskMetric.value`.
        """
        predicted, y = rows[:, 0], rows[:, 1]
        residual = ((y - predicted) ** 2).sum(0)
        total = ((y - y.mean(0)) ** 2).sum(0)
        # Rounding of the mean may leave a total of equal targets above 0.
        total[(y == y[:1]).all(0)] = np.nan
        return float(np.mean(1 - residual / total))


class _OverTokens(TaskMetric):
    """A figure over the real positions of all sequences."""

    task: Any

    def _mean(self, rows: np.ndarray) -> float:
        """Return Σ sums / Σ counts of rows [n, 2]; NaN without real positions."""
        total, count = rows.sum(0)
        return float(total / count) if count else float("nan")


class TokenAccuracy(_OverTokens):
    """Share of the positions whose largest logit is that of the next token."""

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return hits and real positions of each sequence, [B, 2]. See `TaskMetric.rows`."""
        real = self.task.real(y)
        return torch.stack([((predicted_classes(outputs) == y) & real).sum(1), real.sum(1)], 1)

    def value(self, rows: np.ndarray) -> float:
        """Return the share of hits. See `TaskMetric.value`."""
        return self._mean(rows)


class Perplexity(_OverTokens):
    """exp of the mean loss over all real positions."""

    larger_is_better = False

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the summed loss and the real positions of each sequence, [B, 2].

        See `TaskMetric.rows`.
        """
        losses = self.task.token_losses(outputs.double(), y).sum(1)
        return torch.stack([losses, self.task.token_weights(y).sum(1).double()], 1)

    def value(self, rows: np.ndarray) -> float:
        """Return the perplexity. See `TaskMetric.value`."""
        with np.errstate(over="ignore"):
            return float(np.exp(self._mean(rows)))
