"""Nets with several outputs: their numbers lie in one row for each example.

A net may return a tuple, a list, a mapping, a dataclass or a ModelOutput of transformers. Right
after forward its tensors are packed into one [B, D]. A user's loss function and metrics get them as
forward returned them. Everything in between handles one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Form:
    """Structure and shapes of a net's outputs, without their values."""

    structure: pytree.TreeSpec
    """The tuples, mappings and classes around the tensors."""
    shapes: tuple[tuple[int, ...] | None, ...]
    """Shape of each tensor for one example; None stands for the value None."""

    @property
    def sizes(self) -> list[int]:
        """Number of columns of each tensor in a row."""
        return [0 if shape is None else math.prod(shape) for shape in self.shapes]


class OutputForms:
    """The forms of what a net returned so far; those of training and evaluation may differ."""

    def __init__(self):
        """Begin without any."""
        self._of_width: dict[int, Form] = {}

    def __deepcopy__(self, memo: dict) -> OutputForms:
        """Return the same forms, which all copies of a net share."""
        return self

    def pack(self, outputs: Any, n: int) -> Tensor:
        """Return outputs as one tensor [n, D], and note their form; one tensor stays as it is.

        Args:
            outputs: what forward returned.
            n: number of examples.

        Raises:
            ValueError: there is something else than numbers for each example, or two forms have
                rows of one size.
        """
        is_tensor = isinstance(outputs, Tensor)
        if is_tensor and outputs.shape[1:] not in [(width,) for width in self._of_width]:
            return outputs
        leaves, structure = _flatten(outputs)
        rows = [_row(value, n, place) for place, value in leaves if value is not None]
        if not rows:
            raise ValueError("forward returns no tensor")
        shapes = tuple(None if value is None else tuple(value.shape[1:]) for _, value in leaves)
        packed, form = torch.cat(rows, 1), Form(structure, shapes)
        if self._of_width.setdefault(packed.shape[1], form) != form:
            raise ValueError(
                "forward returns outputs of two forms with as many numbers for each example, which "
                "cannot be told apart; return the same form in training and evaluation mode"
            )
        return packed

    def unpacked(self, outputs: Tensor, user: Any = None) -> Any:
        """Return outputs as forward returned them.

        Args:
            outputs: packed outputs [B, D], or one tensor.
            user: the function or class that uses them.

        Raises:
            ValueError: its module has another copy of a class of the net's outputs.
        """
        form = self._of_width.get(outputs.shape[-1]) if outputs.ndim == 2 else None
        if form is None:
            return outputs
        _refuse_copies(form.structure, getattr(user, "__module__", ""))
        parts = zip(outputs.split(form.sizes, 1), form.shapes, strict=True)
        values = [None if s is None else part.reshape(-1, *s) for part, s in parts]
        return pytree.tree_unflatten(values, form.structure)


def _flatten(outputs: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Return the values inside of outputs with their places, and the structure around them."""
    pairs, structure = pytree.tree_flatten_with_path(outputs)
    classes = {type(value) for _, value in pairs if dataclasses.is_dataclass(value)}
    for cls in classes:
        pytree.register_dataclass(cls)
    if classes:  # their fields may hold others
        return _flatten(outputs)
    return [(pytree.keystr(path), value) for path, value in pairs], structure


def _refuse_copies(structure: pytree.TreeSpec, module: str) -> None:
    """Refuse a class of outputs of which a user's module, loaded from its file, has a copy.

    `isinstance` would say there that the outputs are of another class.
    """
    kinds = [structure.type, structure.context]  # that of a named tuple is its context
    for kind in kinds:
        if isinstance(kind, type) and _has_copy(kind, module):
            raise ValueError(
                f"forward returns the class {kind.__name__} of a net that was given as an object, "
                "and its file was loaded again for the loss or metric, with another class of this "
                "name; give the net as a class or function, or return a mapping"
            )
    for child in structure.children():
        _refuse_copies(child, module)


@functools.lru_cache
def _has_copy(kind: type, module: str) -> bool:
    """Return whether a module, or one that was loaded with it, is of a class's file."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    package = module.partition(".")[0]
    for name, other in list(sys.modules.items()):
        is_beside = file is not None and name.partition(".")[0] == package
        if is_beside and getattr(other, "__file__", None) == file:
            return getattr(other, kind.__name__, kind) is not kind
    return False


def _row(value: Any, n: int, place: str) -> Tensor:
    """Return a tensor of outputs as [n, size]."""
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.shape[:1] == (n,) or (n == 1 and value.ndim == 0):
            return value.reshape(n, -1)
        got = f"of shape {list(value.shape)}"
    else:
        got = str(value.dtype) if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        if got.endswith("Cache"):  # of language models
            got += " (net.config.use_cache = False leaves out that of transformers)"
    raise ValueError(
        f"outputs{place} is {got}, and the tensors that forward returns have to be floats with one "
        f"row for each example, [{n}, ...]; leave it out, or give a number of the whole batch to "
        "each example, number.expand(len(x))"
    )
