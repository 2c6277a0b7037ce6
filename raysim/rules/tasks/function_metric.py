"""A user's function of outputs and targets as a metric of evaluations.

The function is called once for each set of examples, with the outputs and targets of all of them.
So its value does not depend on `evaluate.batch_size`, also where it is no mean over the examples.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.rules.tasks.learning_task import TaskMetric

TABLE_TOLERANCE = 1e-5
"""Relative difference up to which two values are one, computed in another order."""


@dataclass(frozen=True)
class FunctionMetric(TaskMetric):
    """The value of a function on all examples, or the mean of its values for each of them."""

    function: Callable[[Tensor, Tensor], Any]
    """Returns one number, or a number for each example, from outputs and targets [n, ...]."""

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function's attribute `unit`; "" without one."""
        return getattr(self.function, "unit", "")

    @property
    def larger_is_better(self) -> bool | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The function's attribute `larger_is_better`; None without one."""
        return getattr(self.function, "larger_is_better", None)

    def rows(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets, which the value needs. See `TaskMetric.rows`."""
        forms = self.task.forms
        return (outputs if forms is None else forms.pack(outputs, len(y))), y

    def value(self, rows: tuple[np.ndarray, np.ndarray]) -> float:
        """Return the function's value, NaN without examples. See `TaskMetric.value`.

        Args:
            rows: outputs and targets of all examples, [n, ...].

        Raises:
            TypeError: the function returns something else.
        """
        outputs, y = map(torch.from_numpy, rows)
        if not len(y):
            return float("nan")
        value = self._value(outputs, y)
        if y.shape != outputs.shape and y.numel() == outputs.numel() and len(y) > 1:
            return self._of_pairs(value, outputs, y)
        return value

    def _of_pairs(self, value: float, outputs: Tensor, y: Tensor) -> float:
        """Return a value for outputs and targets of two shapes, such as [n, 1] and [n].

        Most functions compute a table [n, n] of them here, of all outputs with all targets. Its
        mean does not depend on which target belongs to which output; then targets get the shape of
        the outputs.

        Args:
            value: the function's value for these shapes.
            outputs: [n, ...].
            y: the targets, as many numbers in another shape.
        """
        mixed = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
        if not np.isclose(value, self._value(outputs, mixed), TABLE_TOLERANCE):
            return value
        try:
            of_pairs = self._value(outputs, y.reshape(outputs.shape))
            of_mixed = self._value(outputs, mixed.reshape(outputs.shape))
        except (RuntimeError, TypeError, ValueError, IndexError):  # it needs targets as they are
            return value
        return value if np.isclose(of_pairs, of_mixed, TABLE_TOLERANCE) else of_pairs

    def _value(self, outputs: Tensor, y: Tensor) -> float:
        """Return the function's value for outputs and targets [n, ...]."""
        # A copy, since an object may count over its calls, which a worker makes for many sets.
        function = copy.deepcopy(self.function)
        values = function(self.task.as_returned(outputs, self.function), y)
        array = np.asarray(values)
        are_numbers = array.dtype.kind in "biuf"
        if are_numbers and (array.size == 1 or array.shape == (len(y),)):
            return float(array.astype(np.float64).mean())
        got = f"numbers of shape {list(array.shape)}" if are_numbers else type(values).__name__
        raise TypeError(
            f"it returns {got} for {len(y)} examples; return one number, or one for each example, "
            f"[{len(y)}]"
        )


def name_of_function(function: Any) -> str:
    """Return the name under which the values of a function are logged.

    Args:
        function: a function, a `functools.partial`, or an object that can be called.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__.lower())
