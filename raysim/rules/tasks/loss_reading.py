"""How a user's loss function makes one number of a batch, found out by calling it.

The mean of a loss is the function's own. PyTorch divides by the number of examples, with weights of
classes by the sum of the targets' weights, with `ignore_index` by the number of the other targets,
and with reduction="sum" by nothing. `read_loss` calls the function on made-up outputs and finds the
losses of the examples and the denominator for which value and gradient are the function's, also on
parts of the batch. If there are none, the function couples the examples of a batch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raysim.randomness import generator
from raysim.rules.tasks.learning_task import LossReduction, TaskData

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss(outputs, y), of a batch."""

MIN_PROBES = 64
"""Number of made-up examples on which a function is read, at least."""

MAX_PROBE_NUMBERS = 1_000_000
"""Limit on the outputs of all made-up examples together; it bounds the time for large
vocabularies."""

MAX_TARGETS = 64
"""Number of the data's targets on which a loss of numbers is read."""

MAX_CLASSES = 1_000_000
"""Largest number of classes for which labels outside of them are looked for."""

MAX_OUTSIDE_LABELS = 16
"""Largest number of different labels outside of the classes that a loss may ignore."""


@dataclass(frozen=True)
class LossReading:
    """How a function's value for a batch follows from its examples."""

    way: Literal["none", "alone"]
    """Source of the loss of each example: reduction="none", or a batch of this example."""
    reduction: LossReduction = "mean"
    """How the losses become one value. See `LearningTask.loss_reduction`."""
    columns: Literal["mean", "sum"] = "mean"
    """How the numbers that reduction="none" gives for one example become its loss."""
    weights: tuple[float, ...] | None = None
    """Weight of each label in the mean, 0 for a label that is ignored; None: all have weight 1."""
    reference: int = 0
    """A label whose weight is not 0."""
    classes: int = 0
    """Number of classes; 0: that of the data set."""
    ignored: tuple[int, ...] = ()
    """Labels outside of the classes that occur in the data and that the function ignores."""
    is_cross_entropy: bool = False
    """True if the losses are the plain cross-entropies of the labels."""
    of_sequences: bool = False
    """True if the function of tokens gets a batch of one sequence, [1, n, vocabulary]."""

    @classmethod
    def plain(cls, function: LossFunction) -> LossReading:
        """Return the reading of a function whose value is the plain mean over the examples.

        Args:
            function: the loss function.
        """
        return cls("none" if _takes_reduction(function) else "alone")

    @property
    def mean_weight(self) -> float:
        """Mean weight of the labels that have one."""
        weights = [weight for weight in self.weights or (1.0,) if weight]
        return sum(weights) / len(weights)

    def label_weights(self, y: Tensor) -> Tensor | None:
        """Return the weight of each label, in the shape of y; None if all have weight 1.

        Args:
            y: labels, or probabilities of classes, which have weight 1.
        """
        if self.weights is None or y.is_floating_point():  # probabilities of classes
            return None
        table = _table(self.weights, y.device)
        is_class = (y >= 0) & (y < len(table))
        return torch.where(is_class, table[y.clamp(0, len(table) - 1)], 0.0)


@functools.lru_cache
def _table(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """Return weights of labels on a device, float64 [classes]."""
    # torch.tensor would belong to the torch.func transform that is running now.
    return torch.from_numpy(np.array(weights)).to(device)


class UserLoss:
    """A user's loss function, with copies of it on other devices and in other types.

    The copies' tensors, such as weights of classes, have the device and the type of the outputs.
    The user's object is never changed.
    """

    def __init__(self, function: LossFunction, of_sequences: bool = False):
        """Keep the function.

        Args:
            function: the loss function, of outputs and targets.
            of_sequences: whether it gets tokens as a batch of one sequence.
        """
        self.function = function
        self.of_sequences = of_sequences
        self.takes_reduction = _takes_reduction(function) and not of_sequences
        self._copies: dict[tuple, Any] = {}

    def check_state(self, outputs: Tensor, y: Tensor) -> None:
        """Check that a second call gives the same loss, and that calls change no tensor or number.

        Args:
            outputs: outputs that the function takes, [B, ...].
            y: the targets, [B, ...].

        Raises:
            ValueError: they do, so that the loss would depend on the order of all calls of a run,
                or the function draws random numbers.
        """
        function, random = self._copy(outputs, False), torch.get_rng_state()
        before = _state(function)
        first, second = (self.of_batch(outputs, y) for _ in range(2))
        after = _state(function)
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        is_random = not torch.equal(random, torch.get_rng_state())
        torch.set_rng_state(random)
        if is_random:
            raise ValueError(
                "the loss draws from torch's global generator, so a run could not be repeated; use "
                "a loss without random numbers"
            )
        if not changed and torch.allclose(first, second, 0, 0, equal_nan=True):
            return
        what = f"{changed[0]} of the loss changes" if changed else "the loss changes"
        raise ValueError(
            f"{what} when it is called, so that it would depend on which clients a worker trains; "
            "use a loss without a state"
        )

    def of_batch(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch as the function has it, a scalar.

        It is the mean of what the function returns, if that is more than one number.

        Args:
            outputs: the net's outputs, [B, ...].
            y: the targets, [B, ...].
        """
        return _as_tensor(self._copy(outputs, False)(outputs, y)).mean()

    def of_examples(self, reading: LossReading, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, times its weight, [B].

        Args:
            reading: how the function makes one number of a batch.
            outputs: the net's outputs, [B, ...].
            y: the targets, [B, ...].
        """
        if reading.way == "none":
            values = _as_tensor(self._copy(outputs, True)(outputs, y))
            if values.ndim == 1:
                return values
            rows = values.flatten(1)
            return rows.mean(1) if reading.columns == "mean" else rows.sum(1)
        weights = reading.label_weights(y)
        if weights is not None:  # a label of weight 0 alone would be 0 / 0
            y = torch.where(weights > 0, y, reading.reference)
        function = self._copy(outputs, False)

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return _as_tensor(function(output[None], target[None])).mean()

        values = torch.func.vmap(alone)(outputs, y)
        return values if weights is None else values * weights.to(values.dtype)

    def _copy(self, outputs: Tensor, unreduced: bool) -> Any:
        """Return the function with tensors like the outputs, on request with reduction="none"."""
        key = outputs.device, outputs.dtype, unreduced
        if key not in self._copies:
            function = _like(self.function, outputs.device, outputs.dtype)
            if unreduced:
                function = _unreduced(function)
            elif self.of_sequences:
                function = functools.partial(_on_one_sequence, function)
            self._copies[key] = function
        return self._copies[key]


def _state(function: Any) -> dict[str, Tensor]:
    """Return copies of a module's tensors and numbers, by their names; {} for other functions."""
    if not isinstance(function, nn.Module):
        return {}
    state = {key: value.clone() for key, value in function.state_dict().items()}
    for name, module in function.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor | int | float):
                state[f"{name}.{key}".lstrip(".")] = torch.as_tensor(value).clone()
    return state


def _like(function: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a function whose own tensors are on a device and, if floating, of a type."""
    if isinstance(function, nn.Module):
        return copy.deepcopy(function).to(device, dtype).requires_grad_(False)
    if isinstance(function, functools.partial):
        args = [_like(value, device, dtype) for value in function.args]
        keywords = {key: _like(value, device, dtype) for key, value in function.keywords.items()}
        return functools.partial(_like(function.func, device, dtype), *args, **keywords)
    if isinstance(function, Tensor):
        return function.detach().to(device, dtype if function.is_floating_point() else None)
    return function


def _as_tensor(value: Any) -> Tensor:
    """Return what a loss function returned if it is a tensor.

    Raises:
        TypeError: it is something else, such as a number without a gradient.
    """
    if isinstance(value, Tensor):
        return value
    raise TypeError(
        f"it returns {type(value).__name__}, and not a tensor, of which training needs the "
        "gradient; return a tensor computed from the outputs, without .item(), float() or .numpy()"
    )


def _on_one_sequence(function: LossFunction, outputs: Tensor, y: Tensor) -> Tensor:
    return function(outputs[None], y[None])


def _unreduced(function: Any) -> Any:
    """Return a function with reduction="none"."""
    if _has_reduction(function):
        function = copy.copy(function)
        function.reduction = "none"
        return function
    return functools.partial(function, reduction="none")


def _has_reduction(function: Any) -> bool:
    """Return whether a function is an object whose attribute `reduction` is a text."""
    return isinstance(getattr(function, "reduction", None), str)


def _takes_reduction(function: Any) -> bool:
    """Return whether a function has an attribute or an argument `reduction`."""
    if _has_reduction(function):
        return True
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return "reduction" in inspect.signature(called).parameters
    except (TypeError, ValueError):  # a function without a signature
        return False


# -- labels ----------------------------------------------------------------------------------------


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
    inside = labels[(labels >= 0) & (labels < classes)]
    outside = labels[(labels < 0) | (labels >= classes)]
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
    ignored = [int(label) for label in outside if _ignores(loss, int(label), inside, classes)]
    return classes, tuple(ignored)


def _classes_beside_negative(labels: np.ndarray) -> int:
    """Return the number of classes of sorted labels; 0 unless some are negative and some not."""
    if not len(labels) or labels[0] >= 0 or labels[-1] < 0:
        return 0
    return int(labels[-1]) + 1


def _is_marker(loss: UserLoss, labels: np.ndarray, classes: int) -> bool:
    """Return whether the last of the sorted labels is no class, but marks what is ignored.

    The number of classes may follow from such a label, for example from 255.
    """
    if len(labels) == 1:
        return False
    last, classes_below = int(labels[-1]), int(labels[-2]) + 1
    if last != classes - 1 or last == classes_below:
        return False
    return _ignores(loss, last, labels[:-1], classes_below)


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


def _takes_labels(loss: UserLoss, labels: np.ndarray, classes: int) -> bool:
    """Return whether a function takes labels [B] beside outputs [B, classes]."""
    n = classes + 1  # so that no shape fits by chance
    if n * classes > MAX_PROBE_NUMBERS:
        n = max(2, MAX_PROBE_NUMBERS // classes)
    y = torch.from_numpy(np.resize(labels, n).astype(np.int64))
    return any(_value(loss, _made_up((n, classes), dtype), y) is not None for dtype in _TYPES)


def _ignores(loss: UserLoss, label: int, others: np.ndarray, classes: int) -> bool:
    """Return whether the loss of a batch does not depend on an example with this label."""
    chosen = others[np.linspace(0, len(others) - 1, min(len(others), MIN_PROBES)).astype(int)]
    y = torch.from_numpy(chosen.astype(np.int64))
    longer = torch.cat([y, torch.tensor([label])])
    for dtype in _TYPES:
        outputs = _made_up((len(longer), classes), dtype)
        without, beside = _value(loss, outputs[:-1], y), _value(loss, outputs, longer)
        if without is not None and beside is not None:
            return bool(torch.allclose(without, beside, _tolerance(dtype), 0.0))
    return False


def takes_numbers(loss: UserLoss) -> bool:
    """Return whether a function takes numbers [B, 1] beside outputs [B, 1].

    Args:
        loss: the loss function.
    """
    return any(
        _value(loss, _made_up((3, 1), dtype), torch.ones(3, 1, dtype=dtype)) is not None
        for dtype in _TYPES
    )


WIDE_OUTPUT = 16.0
"""Range of outputs around 0 at which a reading is compared too, if the function takes them."""

LARGE_OUTPUT = 100.0
"""Range of outputs at which a bounded cross-entropy differs from the plain one."""

_TYPES = (torch.float64, torch.float32)
"""Types in which functions are read: a function may hold tensors that cannot be copied."""


def _value(loss: UserLoss, outputs: Tensor, y: Tensor) -> Tensor | None:
    """Return the loss of a batch; None if the function fails."""
    try:
        return loss.of_batch(outputs, y)
    except Exception:  # the function may raise anything for what it is not made for
        return None


# -- reading ---------------------------------------------------------------------------------------


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
        outputs = (_made_up((len(y), classes), torch.float32) - 0.5) * scale
        outputs.requires_grad_()
        values = loss.of_examples(reading, outputs, y)
        expected = nn.functional.cross_entropy(outputs, y, reduction="none")
        pairs = [(values, expected)]
        if values.requires_grad:
            gradients = [torch.autograd.grad(v.sum(), outputs)[0] for v in (values, expected)]
            pairs.append((gradients[0], gradients[1]))
        if not all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in pairs):
            return False
    return True


def read_numbers(loss: UserLoss, y: np.ndarray) -> LossReading:
    """Return how a loss function of numbers makes one number of a batch.

    Args:
        loss: the loss function.
        y: targets of the data, [n, columns] in the shape of the outputs.
    """
    chosen = np.linspace(0, len(y) - 1, min(len(y), MAX_TARGETS)).astype(int)
    return _read(loss, y.shape[1:], torch.from_numpy(y[chosen].astype(np.float64)), 0)


def _read(loss: UserLoss, shape: tuple[int, ...], y: Tensor, classes: int) -> LossReading:
    """Return the first reading that explains the function on made-up outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch.func.vmap would call the function for one example after the other.
        warnings.filterwarnings("error", "There is a performance drop")
        for dtype in _TYPES:
            outputs = _made_up((len(y), *shape), dtype)
            targets = y.to(dtype) if y.is_floating_point() else y
            if _value(loss, outputs, targets) is None:
                continue
            loss.check_state(outputs, targets)
            # Some losses couple the examples for outputs far from their targets only.
            wide = (outputs - 0.5) * WIDE_OUTPUT
            value = _value(loss, wide, targets)
            has_wide = value is not None and bool(torch.isfinite(value))
            for reading in _readings(loss, outputs, classes):
                if not _explains(loss, reading, outputs, targets):
                    continue
                if not has_wide or _explains(loss, reading, wide, targets):
                    return reading
            break
    return LossReading("alone", "batch")


def _made_up(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return keyed outputs between 0.1 and 0.9: logits, probabilities and numbers alike."""
    return torch.from_numpy(generator(0, "loss outputs").uniform(0.1, 0.9, shape)).to(dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-9 if dtype == torch.float64 else 1e-4


def _readings(loss: UserLoss, outputs: Tensor, classes: int) -> Iterator[LossReading]:
    """Yield readings that may explain a function, the usual ones first."""
    ways: list[Literal["none", "alone"]] = ["alone"]
    if loss.takes_reduction:
        ways.insert(0, "none")
    for way in ways:
        yield LossReading(way)
        yield LossReading(way, "sum", "sum")
        yield LossReading(way, "mean", "sum")
        if classes:
            weighted = _weighted(loss, way, outputs[0], classes)
            if weighted is not None:
                yield weighted


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
    value = _value(loss, outputs, y)
    if value is None or not value.requires_grad:
        return value, torch.zeros_like(outputs)
    return value.detach(), torch.autograd.grad(value, outputs)[0]


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
    order = torch.from_numpy(generator(0, "loss parts").permutation(len(y)))
    for size in sorted({len(y), (len(y) + 1) // 2, min(3, len(y)), 1}):
        part = order[:size].sort().values.to(y.device)
        if not _same(loss, reading, (read_at, values), y, part, _tolerance(outputs.dtype)):
            return False
    return True


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
    total = values[part].sum()
    if reading.reduction == "mean":
        denominator = float(len(part) if weights is None else weights.sum())
        if denominator == 0:  # torch divides 0 by 0
            return True
        total = total / denominator
    own, own_gradient = _with_gradient(loss, outputs.detach()[part], y[part])
    if own is None:
        return False
    gradient = torch.autograd.grad(total, outputs, retain_graph=True)[0]
    expected = torch.zeros_like(gradient).index_copy(0, part, own_gradient)
    scale = float(expected.abs().nan_to_num(0.0).max())
    scale = max(scale if scale < torch.inf else 0.0, 1e-12)
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
