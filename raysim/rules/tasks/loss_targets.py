"""Targets that a user's loss function takes: labels, numbers, and labels that it ignores."""

from __future__ import annotations

import numpy as np
import torch

from raysim.rules.tasks.learning_task import TaskData
from raysim.rules.tasks.loss_reading import (
    MAX_PROBE_NUMBERS,
    MIN_PROBES,
    TYPES,
    made_up,
    tolerance_of,
    value_or_none,
)
from raysim.rules.tasks.user_loss import UserLoss

MAX_CLASSES = 1_000_000
"""Largest number of classes for which labels outside of them are looked for."""

CERTAIN = 40.0
"""A logit at which a label is certain."""

NOTHING = 1e-6
"""A loss below it is none."""

MAX_PROBE_TOKENS = 4
"""Largest number of tokens of a sequence on which a loss is tried."""

MAX_OUTSIDE_LABELS = 16
"""Largest number of different labels outside of the classes that a loss may ignore."""


def class_labels(loss: UserLoss, data: TaskData) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of classes of a loss function's labels, and the labels that it ignores.

    Ignored labels are those outside of the classes, such as -100 or 255, on which the loss of a
    batch does not depend.

    Args:
        loss: the loss function.
        data: the examples.

    Returns:
        The number of classes, and the ignored labels that occur; None if the targets are no labels
        for this function.
    """
    if any(y.ndim != 1 or y.dtype.kind not in "iu" for y in (data.y, data.y_test)):
        return None
    labels = np.union1d(data.y, data.y_test)
    classes = data.n_classes or _classes_beside_negative(labels)
    is_inside = (labels >= 0) & (labels < classes)
    inside = labels[is_inside]
    outside = labels[~is_inside]
    if classes > MAX_CLASSES or not len(inside):
        return None
    if _is_marker(loss, inside, classes):
        outside = np.append(outside, inside[-1])
        inside = inside[:-1]
        classes = int(inside[-1]) + 1
    if not _takes_labels(loss, inside, classes):
        return None
    if len(outside) > MAX_OUTSIDE_LABELS:
        return classes, ()
    return classes, tuple(k for k in outside.tolist() if _ignores(loss, k, inside, classes))


def _classes_beside_negative(labels: np.ndarray) -> int:
    """Return the number of classes of sorted labels; 0 unless some are negative and some not."""
    has_both = len(labels) and labels[0] < 0 <= labels[-1]
    return int(labels[-1]) + 1 if has_both else 0


def _is_marker(loss: UserLoss, labels: np.ndarray, classes: int) -> bool:
    """Return whether the last of the sorted labels is no class, but marks what is ignored.

    The number of classes may follow from such a label, for example from 255.
    """
    if len(labels) == 1:
        return False
    last, classes_below = int(labels[-1]), int(labels[-2]) + 1
    is_apart = last == classes - 1 and last != classes_below
    return is_apart and _ignores(loss, last, labels[:-1], classes_below)


def ignored_token(loss: UserLoss, data: TaskData) -> int | None:
    """Return the only negative token of y, if the function ignores it; else None.

    Args:
        loss: the loss function.
        data: the examples.
    """
    tokens = np.union1d(data.y, data.y_test)
    negative = tokens[tokens < 0]
    if len(negative) != 1 or len(negative) == len(tokens):
        return None
    ignored = _ignores(loss, int(negative[0]), tokens[1:], int(tokens[-1]) + 1)
    return int(negative[0]) if ignored else None


def may_take_tokens(loss: UserLoss, y: np.ndarray) -> bool:
    """Return False for a function that takes integers [n, T] as numbers, and not as labels.

    Args:
        loss: the loss function.
        y: integers of the data, [n, T].
    """
    tokens = np.unique(y[y >= 0])
    if not len(tokens) or not takes_numbers(loss, y):
        return True
    classes = int(tokens[-1]) + 1
    return _takes_labels(loss, tokens, classes) or _takes_sequences(loss, y, classes)


def _takes_sequences(loss: UserLoss, y: np.ndarray, classes: int) -> bool:
    """Return whether a function takes tokens [B, T] beside outputs [B, T, classes]."""
    few = torch.from_numpy(y[:2, :MAX_PROBE_TOKENS].astype(np.int64))
    # So many classes that no shape fits by chance.
    shape = (*few.shape, max(classes, MAX_PROBE_TOKENS + 1))
    return any(value_or_none(loss, made_up(shape, dtype), few) is not None for dtype in TYPES)


def _takes_labels(loss: UserLoss, labels: np.ndarray, classes: int) -> bool:
    """Return whether a function takes labels [B] beside outputs [B, classes]."""
    # One more than classes, so that no shape fits by chance.
    n = min(classes + 1, max(2, MAX_PROBE_NUMBERS // classes))
    y = torch.from_numpy(np.resize(labels, n).astype(np.int64))
    return any(value_or_none(loss, made_up((n, classes), dtype), y) is not None for dtype in TYPES)


def _ignores(loss: UserLoss, label: int, others: np.ndarray, classes: int) -> bool:
    """Return whether the loss of a batch does not depend on an example with this label."""
    chosen = others[np.linspace(0, len(others) - 1, min(len(others), MIN_PROBES)).astype(int)]
    y = torch.from_numpy(chosen.astype(np.int64))
    longer = torch.cat([y, torch.tensor([label])])
    for dtype in TYPES:
        outputs = made_up((len(longer), classes), dtype)
        without, beside = value_or_none(loss, outputs[:-1], y), value_or_none(loss, outputs, longer)
        if without is not None and beside is not None:
            return bool(torch.allclose(without, beside, tolerance_of(dtype), 0.0))
    return False


def takes_logits(loss: UserLoss, y: np.ndarray) -> bool:
    """Return whether a function takes logits of labels that are 0 or 1, such as BCEWithLogitsLoss.

    The loss of such a function is 0 at a large logit of the right sign, and large at one of the
    wrong sign. A squared error is large at both.

    Args:
        loss: the loss function.
        y: targets of the data, [n].
    """
    if not len(y) or not np.isin(y, (0, 1)).all():
        return False
    for dtype in TYPES:
        logits = torch.tensor([[CERTAIN], [-CERTAIN]], dtype=dtype)
        labels = (logits > 0).to(dtype)
        for targets in (labels, labels[:, 0]):
            right, wrong = (value_or_none(loss, sign * logits, targets) for sign in (1, -1))
            if right is not None and wrong is not None:
                return bool(right.abs().max() < NOTHING and wrong.min() > 1)
    return False


def takes_numbers(loss: UserLoss, y: np.ndarray) -> bool:
    """Return whether a function takes numbers beside outputs [B, columns].

    Args:
        loss: the loss function.
        y: targets of the data, [n] or [n, columns].
    """
    columns = y.shape[1] if y.ndim == 2 else 1
    shapes = [(3, columns), (3, *y.shape[1:])]
    return any(
        value_or_none(loss, made_up((3, columns), dtype), torch.ones(shape, dtype=dtype))
        is not None
        for dtype in TYPES
        for shape in shapes
    )
