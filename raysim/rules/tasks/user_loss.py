"""A user's loss function as the loss of a batch, and as losses of its examples."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from raysim.rules.tasks.learning_task import LossReduction
from raysim.rules.tasks.several_outputs import OutputForms
from raysim.system.global_generators import generators_kept

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss(outputs, y), of a batch."""


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
    is_guarded: bool = False
    """True if a denominator of 0, as of ignored labels alone, counts as 1; else the loss is NaN."""
    is_cross_entropy: bool = False
    """True if the losses are the plain cross-entropies of the labels."""
    of_sequences: bool = False
    """True if the function of tokens gets a batch of one sequence, [1, n, vocabulary]."""
    keeps_shape: bool = False
    """True if the function gets targets [n] beside outputs [n, 1], as a plain loop gives them;
    else numbers have the shape of the outputs."""

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

    def __init__(
        self,
        function: LossFunction,
        of_sequences: bool = False,
        forms: OutputForms | None = None,
    ):
        """Keep the function.

        Args:
            function: the loss function, of outputs and targets.
            of_sequences: whether it gets tokens as a batch of one sequence.
            forms: the forms of several outputs, which it gets as forward returned them; None: it
                takes one tensor.
        """
        self.function = function
        self.of_sequences = of_sequences
        self.forms = forms
        self.takes_reduction = _takes_reduction(function) and not of_sequences
        self._copies: dict[tuple, Any] = {}
        self._changes_arguments: bool | None = None
        """True if the function changes outputs or targets in place; None before the first call."""

    def check_state(self, outputs: Tensor, y: Tensor) -> None:
        """Check that calls give the same loss after others, and change no tensor or number.

        Args:
            outputs: outputs that the function takes, [B, ...].
            y: the targets, [B, ...].

        Raises:
            ValueError: they do, so that the loss would depend on the order of all calls of a run,
                or the function draws random numbers.
        """
        function = self._copy(outputs, False)
        before = _state(function)
        with generators_kept():
            first, second = (self.of_batch(outputs, y) for _ in range(2))
        after = _state(function)
        changed = [key for key in before if not torch.equal(before[key], after[key])]
        if changed or not torch.allclose(first, second, 0, 0, equal_nan=True):
            what = " of ".join([*changed[:1], "the loss"])
            raise ValueError(
                f"{what} changes when it is called, so that it would depend on which clients a "
                "worker trains; use a loss without a state and random numbers"
            )
        self._check_memory(outputs[: len(y) // 3], y[: len(y) // 3])

    def _check_memory(self, outputs: Tensor, y: Tensor) -> None:
        """Check that a copy that has not been called gives the same loss of other examples."""
        fresh = UserLoss(self.function, self.of_sequences)
        try:
            used, unused = self.of_batch(outputs, y), fresh.of_batch(outputs, y)
        except Exception:  # the function may raise anything for few examples
            return
        if not torch.allclose(used, unused, 0, 0, equal_nan=True):
            raise ValueError(
                "the loss keeps something of the first batch with which it is called, so that it "
                "would depend on which clients a worker trains; compute it in each call"
            )

    def of_batch(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch as the function has it, a scalar.

        It is the mean of what the function returns, if that is more than one number.

        Args:
            outputs: the net's outputs, [B, ...].
            y: the targets, [B, ...].
        """
        function = self._copy(outputs, False)
        if self._changes_arguments is not None:
            return self._call(function, outputs, y).mean()
        copies = outputs.clone(), y.clone()
        value = _as_tensor(function(*copies))
        # Values too, since a change by `y.data` does not count as a version.
        are_same = torch.equal(copies[0], outputs) and torch.equal(copies[1], y)
        self._changes_arguments = not are_same or any(copy._version for copy in copies)
        return value.mean()

    def _call(self, function: Any, outputs: Tensor, y: Tensor) -> Tensor:
        """Return what the function returns, which gets copies if it may change its arguments."""
        if self._changes_arguments is False:
            return _as_tensor(function(outputs, y))
        return _as_tensor(function(outputs.clone(), y.clone()))

    def of_examples(self, reading: LossReading, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example, times its weight, [B].

        Args:
            reading: how the function makes one number of a batch.
            outputs: the net's outputs, [B, ...].
            y: the targets, [B, ...].
        """
        if reading.way == "none":
            values = self._call(self._copy(outputs, True), outputs, y)
            if values.ndim == 1:
                return values
            rows = values.flatten(1)
            return rows.mean(1) if reading.columns == "mean" else rows.sum(1)
        weights = reading.label_weights(y)
        if weights is not None:  # a label of weight 0 alone would be 0 / 0
            y = torch.where(weights > 0, y, reading.reference)
        function = self._copy(outputs, False)

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return self._call(function, output[None], target[None]).mean()

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
            if self.forms is not None:
                function = functools.partial(_on_returned, self.forms, function)
            self._copies[key] = function
        return self._copies[key]


def refuse_trainable(function: LossFunction) -> None:
    """Refuse a loss with parameters to train, which the clients' optimizer does not see.

    Args:
        function: the loss function.

    Raises:
        ValueError: it has one; the message names it.
    """
    while isinstance(function, functools.partial):
        function = function.func
    for name, parameter in function.named_parameters() if isinstance(function, nn.Module) else ():
        if parameter.requires_grad:
            raise ValueError(
                f"the loss has the parameter '{name}', and clients train the parameters of the net "
                "only; move it into the net, whose forward may return what the loss needs, or call "
                "requires_grad_(False) if it is a constant"
            )


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


def _on_returned(forms: OutputForms, function: Any, outputs: Tensor, y: Tensor) -> Tensor:
    return function(forms.unpacked(outputs, function), y)


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
