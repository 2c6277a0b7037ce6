"""Arrays of the numbers that a user gives: arrays, tensors, lists of both, and columns of tables.

Sequences of whole numbers may differ in length. They are padded at their ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raysim.data.images import common_mode, in_mode, is_picture
from raysim.errors import ConfigError
from raysim.system.signals import failing_as

PADDING_X = 0
"""Token that pads sequences of inputs."""

PADDING_Y = -100
"""Token that pads sequences of targets; the task `next_token` leaves it out (`ignore_index`)."""

ONE_SHAPE = "crop or pad them to one shape"
"""Fix in errors about rows of different shapes."""

NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
"""Types of torch that NumPy has."""

Sequences = list[np.ndarray]
"""Rows of whole numbers, int64 [T_k], of different lengths."""

InputsAndTargets = tuple[np.ndarray | Sequences, np.ndarray | Sequences | None]
"""Inputs and targets of a half."""


@dataclass(frozen=True)
class ArrayReader:
    """Reads arrays. Its errors begin with `place`, the key and the source."""

    place: str

    def error(self, text: str) -> ConfigError:
        """Return the error with this text.

        Args:
            text: what is wrong, and the fix.
        """
        return ConfigError(f"{self.place}: {text}")

    def array(self, values: Any, name: str, fix: str = ONE_SHAPE) -> np.ndarray | Sequences:
        """Return numbers as a contiguous array of a type that torch has, or sequences.

        Args:
            values: an array, a tensor, a list of numbers or of these, or a column of a table.
            name: name of the array in errors.
            fix: what to do about rows of different shapes.

        Raises:
            ConfigError: they are no numbers, or have rows of different shapes.
        """
        self.check_masked(values, name)
        if is_picture(values):
            return self.pictures([values], name)[0]
        if isinstance(values, list | tuple) and values and all(map(is_picture, values)):
            return self.pictures(values, name)
        array = self._read(values, name)
        if isinstance(array, list):
            return self.stacked(array, name, fix)
        self._check_numbers(array, values, name)
        kind, size = array.dtype.kind, array.dtype.itemsize
        if kind == "u" and size > 1:
            array = self._converted(array, np.int64, name)
        if kind == "f" and size > 8:
            array = self._converted(array, np.float64, name)
        return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")

    def _read(self, values: Any, name: str) -> np.ndarray | list[np.ndarray]:
        """Return values of any type as an array, or as rows of different shapes."""
        with failing_as(lambda why: self.error(f"{name} cannot be read as an array: {why}")):
            return _to_numpy(values) if isinstance(values, torch.Tensor) else _from_rows(values)

    def pictures(self, pictures: Sequence[Any], name: str) -> np.ndarray:
        """Return images of Pillow as uint8 [n, H, W] if all are grey, else [n, H, W, 3].

        Targets keep their values, such as the classes of pixels: those of a palette are its
        numbers, and those of one bit are true and false.

        Args:
            pictures: the images, of one size.
            name: name of the array in errors; that of targets begins with y.

        Raises:
            ConfigError: an image has another size, or inputs have pixels of more than 8 bits.
        """
        if name.startswith("y"):
            return self._of_one_shape(pictures, name)
        images = {f"{self.place}: {name}[{k}]": picture for k, picture in enumerate(pictures)}
        converted = in_mode(images, common_mode(images))
        return self._of_one_shape(converted, name)

    def _of_one_shape(self, pictures: Sequence[Any], name: str) -> np.ndarray:
        """Return the values of images as an array."""
        stacked = self.stacked(list(map(np.asarray, pictures)), name)
        assert isinstance(stacked, np.ndarray)  # sequences have one dimension
        return stacked

    def check_masked(self, values: Any, name: str) -> None:
        """Refuse masked arrays with missing values, which NumPy would read without the mask.

        Args:
            values: anything that may be read as an array.
            name: name of the array in errors.

        Raises:
            ConfigError: a value is masked; the message names the first one.
        """
        if np.ma.is_masked(values):
            position = np.argwhere(np.ma.getmaskarray(values))[0].tolist()
            place = f"{name}[{', '.join(map(str, position))}]" if position else name
            raise self.error(f"{place} is masked, a missing value; remove the example or fill it")

    def _check_numbers(self, array: np.ndarray, values: Any, name: str) -> None:
        """Refuse arrays of anything but numbers."""
        kind = array.dtype.kind
        if kind == "O" and not array.ndim:
            dense = ", as .toarray() makes them" if hasattr(values, "toarray") else ""
            raise self.error(f"{name} is a {type(values).__name__}; give numbers{dense}")
        if kind == "O":
            first = _first(array, getattr(values, "columns", ()))
            are_whole = all(isinstance(value, int | np.integer) for value in array.flat)
            dtype = "int" if name.startswith("y") and are_whole else "float"
            fix = _numbering(name, values) if first else f", as .astype({dtype}) makes of it"
            raise self.error(f"{name} is an array of Python objects{first}; give numbers{fix}")
        if kind not in "biuf":
            fix = _numbering(name, values) if kind in "US" else ""
            raise self.error(f"{name} is of type {array.dtype}; give numbers{fix}")

    def _converted(self, array: np.ndarray, dtype: type, name: str) -> np.ndarray:
        """Return an array in another type; refuse values that are too large for it."""
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        wrong = converted < 0 if array.dtype.kind == "u" else np.isinf(converted) & ~np.isinf(array)
        if wrong.any():
            position = np.argwhere(wrong)[0].tolist()
            value = array[tuple(position)] if position else array
            raise self.error(
                f"{name}{position[:1] or ''} holds {value!s}, which is too large for "
                f"{np.dtype(dtype)}; scale or remove it"
            )
        return converted

    def stacked(
        self, rows: Sequence[np.ndarray], name: str, fix: str = ONE_SHAPE
    ) -> np.ndarray | Sequences:
        """Return rows of one shape as an array, and sequences of different lengths as they are.

        Args:
            rows: one array for each example, of any shape.
            name: name of the array in errors.
            fix: what to do about rows of different shapes.

        Raises:
            ConfigError: the rows differ in shape and are no sequences of whole numbers.
        """
        if len({row.shape for row in rows}) < 2:
            return np.stack(rows) if rows else np.empty(0)
        if all(row.ndim == 1 and (row.dtype.kind in "iu" or not row.size) for row in rows):
            return [row.astype(np.int64) for row in rows]
        k = next(k for k, row in enumerate(rows) if row.shape != rows[0].shape)
        raise self.error(
            f"{name}: number {k} has shape {list(rows[k].shape)}, number 0 "
            f"{list(rows[0].shape)}; {fix}"
        )

    def padded(
        self, halves: Mapping[str, InputsAndTargets]
    ) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return x and y of all halves, with sequences of different lengths padded to one length.

        Inputs are padded with `PADDING_X`, targets with `PADDING_Y`.

        Args:
            halves: x and y by the suffix of their names in errors; y may be None.

        Raises:
            ConfigError: an example has more or fewer targets than tokens, or sequences occur in
                some halves only.
        """
        pads_x = any(isinstance(x, list) for x, _ in halves.values())
        pads_y = any(isinstance(y, list) for _, y in halves.values())
        if not pads_x and not pads_y:
            return dict(halves)  # pyright: ignore[reportReturnType]
        ragged = "x" if pads_x else "y"
        longest = 0
        for suffix, (x, y) in halves.items():
            longest = max(longest, self._longest(x, y if pads_y else None, suffix, ragged))
        padded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        for suffix, (x, y) in halves.items():
            if isinstance(x, list) and isinstance(y, np.ndarray):
                self._check_tails(x, y, suffix)
            if pads_x:
                x = _pad(x, longest, PADDING_X)
            if pads_y and y is not None:
                y = _pad(y, longest, PADDING_Y)
            # No part is a list any more: one that was has been padded.
            padded[suffix] = x, y  # pyright: ignore[reportArgumentType]
        return padded

    def _longest(
        self,
        x: np.ndarray | Sequences,
        y: np.ndarray | Sequences | None,
        suffix: str,
        ragged: str,
    ) -> int:
        """Return the length of a half's longest sequence; y is None if targets are not padded."""
        lengths_x = self._lengths(x, f"x{suffix}", ragged)
        if y is None:
            return max(lengths_x, default=0)
        lengths_y = self._lengths(y, f"y{suffix}", "y")
        for k, (of_x, of_y) in enumerate(zip(lengths_x, lengths_y, strict=True)):
            if of_x != of_y:
                raise self.error(
                    f"x{suffix}[{k}] has {of_x} tokens, y{suffix}[{k}] has {of_y}; give one target "
                    "for each token"
                )
        return max(lengths_x, default=0)

    def _check_tails(self, x: Sequences, y: np.ndarray, suffix: str) -> None:
        """Refuse targets as long as the longest inputs that have tokens where x has none."""
        if y.ndim != 2 or y.dtype.kind not in "iu" or y.shape[1] != max(map(len, x)):
            return  # not one target for each token
        for k, row in enumerate(x):
            if (y[k, len(row) :] >= 0).any():
                raise self.error(
                    f"x{suffix}[{k}] has {len(row)} tokens, y{suffix}[{k}] has {y.shape[1]}; give "
                    f"one target for each token, or pad y with {PADDING_Y}"
                )

    def _lengths(self, part: np.ndarray | Sequences, name: str, ragged: str) -> list[int]:
        """Return the length of each sequence."""
        if isinstance(part, list):
            return [len(row) for row in part]
        if part.ndim != 2 or part.dtype.kind not in "iu":
            raise self.error(
                f"{ragged} has sequences of different lengths, but {name} is {part.dtype} "
                f"{list(part.shape)}; give whole numbers, one sequence for each example"
            )
        return [part.shape[1]] * len(part)


def _pad(part: np.ndarray | Sequences, length: int, padding: int) -> np.ndarray:
    """Return sequences as an array [n, length]."""
    padded = np.full((len(part), length), padding, np.int64)
    for row, values in zip(padded, part, strict=True):
        row[: len(values)] = values
    return padded


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of any layout and type as an array."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS:  # bfloat16 and smaller
        tensor = tensor.float()
    return tensor.cpu().resolve_conj().resolve_neg().numpy()


def _from_rows(values: Any) -> np.ndarray | list[np.ndarray]:
    """Return anything but a tensor as an array, or as rows of different shapes."""
    if isinstance(values, list | tuple) and any(isinstance(v, torch.Tensor) for v in values):
        values = [_to_numpy(v) if isinstance(v, torch.Tensor) else v for v in values]
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O" and array.ndim and np.ndim(array.flat[0]):  # of rows
            array = np.asarray(array.tolist())
    except ValueError:  # rows of different lengths
        return list(map(np.asarray, values))
    return array


def _first(array: np.ndarray, columns: Sequence[Any]) -> str:
    """Return " (number 3 is a str)" for the first object that is no number, in which column."""
    for position, value in np.ndenumerate(array):
        place = f"number {position[0]}"
        if array.ndim == 2 and len(columns):
            place += f" of the column {columns[position[1]]!r}"
        if not isinstance(value, int | float | np.number):
            return f" ({place} is a {type(value).__name__})"
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f" ({place} is {value}, which has more than 64 bits)"
    return ""


def _numbering(name: str, values: Any) -> str:
    """Return how texts of categories or targets become numbers, for errors about them."""
    kinds = np.ravel(np.asarray(getattr(values, "dtypes", ()), dtype=object))  # of pandas
    if "category" in map(str, kinds):
        return ", as .cat.codes of the same categories in both halves"
    if not name.startswith("y"):
        return ""
    return (
        ", the same in both halves: names = np.unique(y), then np.searchsorted(names, y) and "
        "np.searchsorted(names, y_test)"
    )
