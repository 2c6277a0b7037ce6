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

FEW, ORDERS = 64, 8
"""Number of examples, and of their orders, in which it is found out what a function pairs."""


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
        differ = y.shape != outputs.shape and y.numel() == outputs.numel()
        if differ and self._is_of_table(outputs, y):
            y = y.reshape(outputs.shape)
        return self._value(outputs, y)

    def _is_of_table(self, outputs: Tensor, y: Tensor) -> bool:
        """Return whether the value for two shapes, such as [n, 1] and [n], is that of a table.

        Most functions compute a table [n, n] here, of all outputs with all targets. Its mean does
        not depend on which target belongs to which output, and the value for equal shapes does.
        That is tried on a few examples, with different targets, with their outputs and with others.

        Args:
            outputs: [n, ...].
            y: the targets, as many numbers in another shape.
        """
        rng = np.random.default_rng(0)
        order = np.argsort(y.reshape(len(y), -1)[:, 0].numpy(), kind="stable")
        few = order[np.linspace(0, len(y) - 1, min(len(y), FEW)).astype(int)]
        y = y[few]
        others = torch.from_numpy(rng.standard_normal((len(few), *outputs.shape[1:])))
        orders = [rng.permutation(len(few)) for _ in range(ORDERS)]
        for at in (outputs[few], others.to(outputs.dtype)):
            as_given = self._depends_on_pairs(at, y, orders)
            in_pairs = self._depends_on_pairs(at, y.reshape(at.shape), orders)
            if as_given or in_pairs is None:
                return False
            if in_pairs or as_given is None:
                return True
        return False

    def _depends_on_pairs(
        self, outputs: Tensor, y: Tensor, orders: list[np.ndarray]
    ) -> bool | None:
        """Return whether other orders of the targets give other values; None if it fails."""
        try:
            values = [self._value(outputs, targets) for targets in (y, *(y[o] for o in orders))]
        except Exception:  # the function may raise anything for these shapes
            return None
        return not np.allclose(values, values[0], TABLE_TOLERANCE, equal_nan=True)

    def _value(self, outputs: Tensor, y: Tensor) -> float:
        """Return the function's value for outputs and targets [n, ...]."""
        # A copy, since an object may count over its calls, which a worker makes for many sets.
        function = copy.deepcopy(self.function)
        values = function(self.task.as_returned(outputs, self.function), y)
        array = np.asarray(values)
        are_numbers = array.dtype.kind in "biuf"
        if are_numbers and array.size in (1, len(y)):
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
