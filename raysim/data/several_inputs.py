"""Nets with several inputs: their numbers lie in one row for each example.

Data whose x has several arrays, a mapping or a tuple of them, are packed into one array [n, D]
where they are read. A hook takes each batch apart again, right before the net's forward. Everything
in between handles one tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

LARGEST_INTEGER = {"float32": 2**24, "float64": 2**53}
"""Largest integer up to which a type of numbers has all of them."""


@dataclass(frozen=True)
class Input:
    """One of several inputs of a net."""

    name: str
    """Name of the argument of forward; of inputs without names their position, such as "0"."""
    shape: tuple[int, ...]
    """Shape for one example; () for a number, of which the net gets [B]."""
    kind: Literal["float", "integer", "bool"]
    """The net gets numbers of the run's dtype, int64, or bool."""

    @property
    def size(self) -> int:
        """Number of columns of the packed array."""
        return math.prod(self.shape)


Inputs = tuple[Input, ...]
"""The inputs of a net, in the order of the packed array; () for a net of one input."""


def are_named(inputs: Inputs) -> bool:
    """Return whether inputs are arguments with names; else they are given by position.

    Args:
        inputs: the inputs.
    """
    return not all(entry.name.isdecimal() for entry in inputs)


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Inputs]:
    """Return several arrays as one, int64 or float [n, D], and where they are in it.

    Args:
        arrays: the arrays by the names of the inputs, [n, ...], of finite numbers.

    Raises:
        ValueError: beside floats there is an integer that none of their types has.
    """
    inputs, columns = [], []
    for name, array in arrays.items():
        kind = {"b": "bool", "f": "float"}.get(array.dtype.kind, "integer")
        inputs.append(Input(name, array.shape[1:], kind))  # pyright: ignore[reportArgumentType]
        columns.append(array.reshape(len(array), -1))
    types = {column.dtype for column in columns if column.dtype.kind == "f"}
    if not types:
        return np.concatenate(columns, axis=1, dtype=np.int64), tuple(inputs)
    dtype = np.result_type(np.float32, *types)
    largest = max(_largest(column) for column in columns)
    if largest > LARGEST_INTEGER["float64"]:
        raise ValueError(f"integers beside floats go up to {LARGEST_INTEGER['float64']}")
    if largest > LARGEST_INTEGER["float32"]:
        dtype = np.float64
    return np.concatenate(columns, axis=1, dtype=dtype), tuple(inputs)


def _largest(column: np.ndarray) -> int:
    """Return the largest absolute value of integers; 0 for floats."""
    if column.dtype.kind not in "iu" or not column.size:
        return 0
    return max(abs(int(column.max())), abs(int(column.min())))


def parts(x: Any, inputs: Inputs) -> dict[str, Any]:
    """Return the columns of the inputs by name, [..., size].

    Args:
        x: packed examples, [..., D], an array or a tensor.
        inputs: the inputs.
    """
    columns, start = {}, 0
    for entry in inputs:
        columns[entry.name] = x[..., start : start + entry.size]
        start += entry.size
    return columns


def unpacked(x: np.ndarray, inputs: Inputs) -> dict[str, np.ndarray]:
    """Return the arrays of packed examples by the names of the inputs, in their types.

    Args:
        x: packed examples, [n, D].
        inputs: the inputs.
    """
    types = {"bool": np.bool_, "integer": np.int64, "float": x.dtype}
    columns = parts(x, inputs)
    return {
        entry.name: columns[entry.name].reshape(-1, *entry.shape).astype(types[entry.kind])
        for entry in inputs
    }


def too_large(x: np.ndarray, inputs: Inputs, dtype: str) -> str | None:
    """Return the first input with an integer that a run's dtype lacks; None if there is none.

    Args:
        x: packed examples, [n, D].
        inputs: the inputs.
        dtype: "float32" or "float64".
    """
    if x.dtype.kind != "f":
        return None
    columns = parts(x, inputs)
    for entry in inputs:
        column = columns[entry.name]
        is_integer = entry.kind == "integer" and column.size > 0
        if is_integer and np.abs(column).max() > LARGEST_INTEGER[dtype]:
            return entry.name
    return None


class Unpack:
    """A hook that gives a net its inputs, from packed ones; a call with inputs stays as it is."""

    def __init__(self, inputs: Inputs, as_one: bool):
        """Keep the inputs, and whether forward gets them as one mapping or tuple."""
        self.inputs = inputs
        self.as_one = as_one

    def __call__(
        self, net: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of forward. See `torch.nn.Module.register_forward_pre_hook`."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return None
        values = {}
        for entry, x in zip(self.inputs, parts(args[0], self.inputs).values(), strict=True):
            values[entry.name] = _as_given(x.reshape(*x.shape[:-1], *entry.shape), entry)
        in_order = tuple(values.values())
        if self.as_one:
            whole = values if are_named(self.inputs) else in_order
            return (whole,), {}
        return ((), values) if are_named(self.inputs) else (in_order, {})


def _as_given(x: Tensor, entry: Input) -> Tensor:
    """Return an input in its type."""
    if entry.kind == "bool":
        return x != 0
    return x.long() if entry.kind == "integer" else x


def set_inputs(net: nn.Module, inputs: Inputs) -> None:
    """Let a net take packed examples.

    Args:
        net: the net; it gets a hook.
        inputs: its inputs.
    """
    unpack = Unpack(inputs, _takes_all_as_one(net, inputs))
    net.register_forward_pre_hook(unpack, prepend=True, with_kwargs=True)


def _takes_all_as_one(net: nn.Module, inputs: Inputs) -> bool:
    """Return whether forward takes all inputs as one mapping or tuple, by its parameters."""
    parameters = inspect.signature(net.forward).parameters.values()
    usual = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not are_named(inputs):
        return len(inputs) > 1 and len(usual) == len(parameters) == 1
    required = [p for p in usual if p.default is p.empty]
    own_names = {p.name for p in parameters} & {entry.name for entry in inputs}
    return len(required) == 1 and not own_names


def inputs_of(net: nn.Module) -> Inputs:
    """Return the inputs of a net that takes packed examples; () for other nets.

    Args:
        net: the net.
    """
    for hook in net._forward_pre_hooks.values():
        if isinstance(hook, Unpack):
            return hook.inputs
    return ()


def shapes_of(inputs: Inputs) -> Any:
    """Return the shapes of inputs, by name or in their order.

    Args:
        inputs: the inputs.
    """
    shapes = {entry.name: entry.shape for entry in inputs}
    return shapes if are_named(inputs) else tuple(shapes.values())
