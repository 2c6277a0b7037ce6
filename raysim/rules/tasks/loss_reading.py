"""How a user's loss function makes one number of a batch, found out by calling it.

The mean of a loss is the function's own. PyTorch divides by the number of examples, with weights of
classes by the sum of the targets' weights, with `ignore_index` by the number of the other targets,
and with reduction="sum" by nothing. `read_loss` calls the function on made-up outputs and finds the
losses of the examples and the denominator for which value and gradient are the function's, also on
parts of the batch. If there are none, the function couples the examples of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from raysim.randomness import generator
from raysim.rules.tasks.user_loss import LossReading, UserLoss

MIN_PROBES = 64
"""Number of made-up examples on which a function is read, at least."""

MAX_PROBE_NUMBERS = 1_000_000
"""Limit on the outputs of all made-up examples together; it bounds the time for large
vocabularies."""

MAX_TARGETS = 64
"""Number of the data's targets on which a loss of numbers is read."""

WIDE_OUTPUT = 16.0
"""Range of outputs around 0 at which a reading is compared too, if the function takes them."""

LARGE_OUTPUT = 100.0
"""Range of outputs at which a bounded cross-entropy differs from the plain one."""

TYPES = (torch.float64, torch.float32)
"""Types in which functions are read: a function may hold tensors that cannot be copied."""


def value_or_none(loss: UserLoss, outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return the loss of a batch; None if the function fails."""
    try:
        return loss.of_batch(outputs, y)
    except Exception:  # the function may raise anything for what it is not made for
        return None


def read_labels(loss: UserLoss, classes: int, ignored: tuple[int, ...] = ()) -> LossReading:
    """Return how a loss function of class labels makes one number of a batch.

    Args:
        loss: the loss function.
        classes: number of classes.
        ignored: labels outside of the classes that the function ignores.
    """
    n = max(MIN_PROBES, 2 * classes)
    n = max(MIN_PROBES, min(n, MAX_PROBE_NUMBERS // classes))
    y = np.append(np.arange(n) * max(1, classes // n) % classes, ignored)
    y = torch.from_numpy(generator(0, "loss").permutation(y).astype(np.int64))
    reading = _read(loss, (classes,), y, classes)
    return replace(
        reading,
        classes=classes if ignored else 0,
        ignored=ignored,
        is_cross_entropy=_is_cross_entropy(loss, reading, classes),
    )


def _is_cross_entropy(loss: UserLoss, reading: LossReading, classes: int) -> bool:
    """Return whether the losses of examples are their plain cross-entropies."""
    if reading.reduction != "mean" or reading.weights is not None:
        return False
    y = torch.arange(min(classes, MIN_PROBES))
    # Large outputs show a bound of the loss or of the outputs.
    for scale in (1.0, LARGE_OUTPUT):
        outputs = (made_up((len(y), classes), torch.float32) - 0.5) * scale
        outputs.requires_grad_()
        if value_or_none(loss, outputs, y) is None:  # a function of float64 only
            return False
        values = loss.of_examples(reading, outputs, y)
        expected = nn.functional.cross_entropy(outputs, y, reduction="none")
        pairs = [(values, expected)]
        if values.requires_grad:
            gradients = [torch.autograd.grad(v.sum(), outputs)[0] for v in (values, expected)]
            pairs.append((gradients[0], gradients[1]))
        if not all(torch.allclose(a.float(), b, 1e-4, 1e-6) for a, b in pairs):
            return False
    return True


def read_numbers(loss: UserLoss, y: np.ndarray) -> LossReading:
    """Return how a loss function of numbers makes one number of a batch.

    Targets [n] get the shape of outputs [n, 1] if the loss is then one of single examples, as that
    of `torch.nn.MSELoss`. Else they stay as they are, for a function that reshapes one of the two.

    Args:
        loss: the loss function.
        y: targets of the data, [n] or [n, columns].
    """
    # Sorted, so that different targets are among the chosen ones: equal ones broadcast unseen.
    order = np.argsort(y.reshape(len(y), -1)[:, 0], kind="stable")
    chosen = order[np.linspace(0, len(y) - 1, min(len(y), MAX_TARGETS)).astype(int)]
    targets = torch.from_numpy(y[chosen].astype(np.float64))
    columns = targets.reshape(len(chosen), -1)
    reading = _read(loss, tuple(columns.shape[1:]), columns, 0)
    if y.ndim == 2 or reading.reduction != "batch":
        return reading
    as_given = _read(loss, (1,), targets, 0)
    taken = [value_or_none(loss, made_up((len(chosen), 1), t), targets.to(t)) for t in TYPES]
    if all(value is None for value in taken):
        return reading
    return replace(as_given, keeps_shape=True)


def _read(loss: UserLoss, shape: tuple[int, ...], y: Tensor, classes: int) -> LossReading:
    """Return the first reading that explains the function on made-up outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch.func.vmap would call the function for one example after the other.
        warnings.filterwarnings("error", "There is a performance drop")
        for dtype in TYPES:
            outputs = made_up((len(y), *shape), dtype)
            targets = y.to(dtype) if y.is_floating_point() else y
            if value_or_none(loss, outputs, targets) is None:
                continue
            loss.check_state(outputs, targets)
            # Some losses couple the examples for outputs far from their targets only.
            wide = (outputs - 0.5) * WIDE_OUTPUT
            value = value_or_none(loss, wide, targets)
            has_wide = value is not None and bool(torch.isfinite(value))
            compared = (outputs, wide) if has_wide else (outputs,)
            for reading in _readings(loss, outputs, targets, classes):
                if all(_explains(loss, reading, at, targets) for at in compared):
                    return reading
            break
    return LossReading("alone", "batch")


def made_up(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return keyed outputs between 0.1 and 0.9: logits, probabilities and numbers alike."""
    return torch.from_numpy(generator(0, "loss outputs").uniform(0.1, 0.9, shape)).to(dtype)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative tolerance of comparisons in a type.

    Args:
        dtype: the type.
    """
    return 1e-9 if dtype == torch.float64 else 1e-4


def _readings(loss: UserLoss, outputs: Tensor, y: Tensor, classes: int) -> Iterator[LossReading]:
    """Yield readings that may explain a function, the usual ones first."""
    ways: tuple[Literal["none", "alone"], ...] = ("none", "alone")
    for way in ways if loss.takes_reduction else ways[1:]:
        yield LossReading(way)
        yield LossReading(way, "sum", "sum")
        yield LossReading(way, "mean", "sum")
        if classes and (weighted := _weighted(loss, way, outputs[0], classes)) is not None:
            labels = torch.arange(classes)[torch.tensor(weighted.weights) == 0]
            uncounted = torch.cat([labels[:MIN_PROBES], y[(y < 0) | (y >= classes)]])
            yield replace(weighted, is_guarded=is_guarded(loss, uncounted, classes))


def is_guarded(loss: UserLoss, uncounted: Tensor, classes: int) -> bool:
    """Return whether a function has a finite loss of targets that do not count, and not 0 / 0.

    Args:
        loss: the loss function.
        uncounted: labels of weight 0, and labels that the function ignores, [n].
        classes: number of classes.
    """
    for dtype in TYPES if len(uncounted) else ():
        value = value_or_none(loss, made_up((len(uncounted), classes), dtype), uncounted)
        if value is not None:
            return bool(value.isfinite())
    return False


def _weighted(
    loss: UserLoss, way: Literal["none", "alone"], output: Tensor, classes: int
) -> LossReading | None:
    """Return the reading with the weight of each label; None if it has none."""
    find = _weights_of_values if way == "none" else _weights_beside
    try:
        weights = find(loss, output, torch.arange(classes))
    except Exception:  # the function does not work for single examples
        return None
    weights = torch.where(weights.isfinite() & (weights > 0), weights, 0.0).double()
    if not weights.any():
        return None
    return LossReading(way, weights=tuple(weights.tolist()), reference=int(weights.argmax()))


def _in_chunks(find: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    """Return what `find` returns for labels, a few at a time, which bounds the memory."""
    return torch.cat(
        [find(part) for part in labels.split(max(1, MAX_PROBE_NUMBERS // len(labels)))]
    )


def _weights_of_values(loss: UserLoss, output: Tensor, labels: Tensor) -> Tensor:
    """Return the weight of each label: its loss with reduction="none", over its mean loss."""

    def mean_loss(label: Tensor) -> Tensor:
        return loss.of_batch(output[None], label[None])

    def find(part: Tensor) -> Tensor:
        outputs = output.expand(len(part), -1)
        values = loss.of_examples(LossReading("none"), outputs, part)
        try:
            return values / torch.func.vmap(mean_loss)(part)
        except Exception:  # torch has no rule for vmap
            return values / torch.stack([mean_loss(label) for label in part])

    return _in_chunks(find, labels)


def _weights_beside(loss: UserLoss, output: Tensor, labels: Tensor) -> Tensor:
    """Return the weight of each label, relative to a label that has one.

    The gradient of an example in a batch of two, over that of the example alone, is its share of
    the denominator.
    """

    def alone(at: Tensor, label: Tensor) -> Tensor:
        return loss.of_batch(at[None], label[None])

    def gradients(value: Callable[[Tensor, Tensor], Tensor], part: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(value), in_dims=(None, 0))(output, part)

    def size(part: Tensor) -> Tensor:
        return gradients(alone, part).square().sum(1)

    sizes = _in_chunks(size, labels)
    reference = labels[sizes.isfinite() & (sizes > 0)][0]

    def beside(at: Tensor, label: Tensor) -> Tensor:
        return loss.of_batch(torch.stack([at, output]), torch.stack([label, reference]))

    def overlap(part: Tensor) -> Tensor:
        return (gradients(beside, part) * gradients(alone, part)).sum(1)

    shares = _in_chunks(overlap, labels) / sizes
    return shares / (1 - shares)


def _with_gradient(loss: UserLoss, outputs: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return the loss of a batch, None if the function fails, and its gradient by the outputs."""
    outputs = outputs.clone().requires_grad_()
    value = value_or_none(loss, outputs, y)
    if value is None or not value.requires_grad:
        return value, torch.zeros_like(outputs)
    try:
        return value.detach(), torch.autograd.grad(value, outputs)[0]
    except RuntimeError:  # the function changed what its own backward pass needs
        return None, torch.zeros_like(outputs)


def _explains(loss: UserLoss, reading: LossReading, outputs: Tensor, y: Tensor) -> bool:
    """Return whether a reading gives the function's own values and gradients.

    They are compared for the batch and for parts of it; the examples' losses are those in the whole
    batch, so that they must not depend on the others.
    """
    read_at = outputs.clone().requires_grad_()
    try:
        values = loss.of_examples(reading, read_at, y)
    except Exception:  # the function has no value for each example
        return False
    if values.shape != (len(y),) or not values.requires_grad:
        return False
    tolerance = tolerance_of(outputs.dtype)
    return all(_same(loss, reading, (read_at, values), y, p, tolerance) for p in _parts(reading, y))


def _parts(reading: LossReading, y: Tensor) -> Iterator[Tensor]:
    """Yield positions of parts of a batch, also those whose denominators are the smallest."""
    order = torch.from_numpy(generator(0, "loss parts").permutation(len(y)))
    for size in sorted({len(y), (len(y) + 1) // 2, min(3, len(y)), 1}):
        yield order[:size].sort().values.to(y.device)
    if (weights := reading.label_weights(y)) is not None:
        if (weights == 0).any():
            yield (weights == 0).nonzero()[:, 0]
        yield torch.where(weights > 0, weights, torch.inf).argmin()[None]


def _same(
    loss: UserLoss,
    reading: LossReading,
    read: tuple[Tensor, Tensor],
    y: Tensor,
    part: Tensor,
    tolerance: float,
) -> bool:
    """Return whether value and gradient of a part of a batch are the function's own.

    Args:
        loss: the loss function.
        reading: the reading to check.
        read: outputs [B, ...], and the examples' losses at them [B].
        y: the targets, [B, ...].
        part: positions of the part.
        tolerance: relative tolerance.
    """
    outputs, values = read
    weights = reading.label_weights(y[part])
    total, is_unguarded = values[part].sum(), False
    if reading.reduction == "mean":
        denominator = float(len(part) if weights is None else weights.sum())
        is_unguarded = denominator == 0 and not reading.is_guarded
        total = total / (denominator or 1.0)
    own, own_gradient = _with_gradient(loss, outputs.detach()[part], y[part])
    if is_unguarded:  # torch divides 0 by 0; some functions fail
        return own is None or bool(own.isnan())
    if own is None:
        return False
    gradient = torch.autograd.grad(total, outputs, retain_graph=True)[0]
    expected = torch.zeros_like(gradient).index_copy(0, part, own_gradient)
    scale = float(expected.abs().nan_to_num(0.0).max())
    scale = max(scale if scale < torch.inf else 0.0, 1e-12)
    own = own.to(total)  # the function may compute in another type
    return torch.allclose(total, own, tolerance, tolerance, equal_nan=True) and torch.allclose(
        gradient, expected, tolerance, tolerance * scale, equal_nan=True
    )


def agrees(loss: UserLoss, reading: LossReading, outputs: Tensor, y: Tensor) -> bool:
    """Return whether a reading gives value and gradient of the function on a net's outputs.

    Args:
        loss: the loss function.
        reading: how the function makes one number of a batch.
        outputs: outputs of a net, [B, ...].
        y: the targets, [B, ...].
    """
    if reading.reduction == "batch" or not len(y):
        return True
    with torch.enable_grad():
        read_at = outputs.clone().requires_grad_()
        values = loss.of_examples(reading, read_at, y)
        everything = torch.arange(len(y), device=y.device)
        is_low = outputs.dtype not in (torch.float32, torch.float64)
        tolerance = 3e-2 if is_low else 1e-3
        return not values.requires_grad or _same(
            loss, reading, (read_at, values), y, everything, tolerance
        )
