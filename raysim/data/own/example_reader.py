"""Checks of users' own examples, and their arrays in the types of a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from raysim.data.dataset import channels_first
from raysim.data.own.forms import FormReader, by_position
from raysim.data.own.natural_users import Numbered, number_users
from raysim.data.several_inputs import Inputs, pack

MAX_VALUES_CHECKED_AT_ONCE = 10_000_000
"""Numbers that are looked through for NaN in one pass; it bounds the memory that this takes."""

MAX_INFERRED_CLASSES = 100_000
"""Largest number of classes that is taken from integer targets; larger ones are quantities, such as
prices and times, unless the user gives the number of classes."""

MAX_CLASSES = 1_000_000
"""Largest number of classes that a user can give; each has a name."""


class ExampleReader(FormReader):
    """Reads and checks the examples of one user of raysim.

    All methods raise ConfigError, which names the array and the fix, for examples that cannot be
    used.
    """

    def check_finite(self, array: np.ndarray, name: str) -> None:
        """Refuse NaN and infinite numbers; the error names the first example with one.

        Args:
            array: numbers of any shape, the first axis being the examples.
            name: name of the array in errors.
        """
        if array.dtype.kind != "f" or not array.size:
            return
        rows = max(1, MAX_VALUES_CHECKED_AT_ONCE * len(array) // array.size)
        for start in range(0, len(array), rows):
            part = array[start : start + rows]
            bad = ~np.isfinite(part).reshape(len(part), -1).all(axis=1)
            if bad.any():
                k = int(np.argmax(bad))
                value = part[k][~np.isfinite(part[k])].reshape(-1)[0]
                fix = "remove or replace it"
                if name.startswith("y"):
                    fix += ", such as by -1 where the loss leaves missing targets out"
                raise self.error(f"{name}[{start + k}] holds {value}; {fix}")

    def packed(
        self, x: Any, name: str, n: int | None, like: Inputs | None = None
    ) -> tuple[Any, Inputs]:
        """Return several inputs as one array [n, D]; other x as they are.

        Args:
            x: the inputs of a half.
            name: name of x in errors.
            n: number of targets, which tells several inputs in a row from rows; None: unknown.
            like: the inputs of the training half, () if it has one; None if this is it.

        Returns:
            The array, and where each input is in it; () for one input.
        """
        names = [entry.name for entry in like or ()]
        x = by_position(x, n, len(names))
        if not isinstance(x, Mapping):
            if like:
                raise self.error(f"{name} is one array, and x has the inputs {', '.join(names)}")
            return x, ()
        values = {str(key): value for key, value in x.items()}
        if values.keys() == set(names):
            values = {key: values[key] for key in names}
        array, inputs = self._pack(values, name)
        if like is not None and inputs != like:
            of_training = f"has {_inputs_text(like)}" if like else "is one array"
            raise self.error(f"{name} has the inputs {_inputs_text(inputs)}, and x {of_training}")
        return array, inputs

    def _pack(self, values: Mapping[str, Any], name: str) -> tuple[np.ndarray, Inputs]:
        """Return inputs by name as one array, and where they are in it."""
        arrays = {key: self._one_input(value, f"{name}[{key!r}]") for key, value in values.items()}
        lengths = {key: len(array) for key, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise self.error(f"{name} has inputs with different numbers of examples: {lengths}")
        try:
            return pack(arrays)
        except ValueError as error:
            raise self.error(f"{name}: {error}; number them from 0") from None

    def _one_input(self, values: Any, name: str) -> np.ndarray:
        """Return one of several inputs as an array."""
        array = self.array(values, name)
        if isinstance(array, list):
            raise self.error(f"{name} has rows of different lengths; pad them to one length")
        if not array.ndim:
            raise self.error(f"{name} is a single number; give one entry for each example")
        self.check_finite(array, name)
        return array

    def arrays(self, x: Any, y: Any, suffix: str, y_may_lack: bool = False) -> tuple[Any, Any]:
        """Return x and y of one half as arrays, or as lists of rows of different lengths.

        Args:
            x: inputs of the half, [n, ...].
            y: its targets, [n, ...].
            suffix: what follows "x" and "y" in the names of the two in errors.
            y_may_lack: whether y may be None.
        """
        x_name, y_name = f"x{suffix}", f"y{suffix}"
        x = self.array(x, x_name)
        y = None if y is None and y_may_lack else self.array(y, y_name)
        for name, array in ((x_name, x), (y_name, y)):
            if isinstance(array, np.ndarray) and array.ndim == 0:
                raise self.error(f"{name} is a single number; give one entry for each example")
        if y is not None and len(x) != len(y):
            raise self.error(
                f"{x_name} has {len(x)} examples, {y_name} has {len(y)}; give one target for each "
                "example"
            )
        if not len(x):
            raise self.error(f"{x_name} has no examples; give at least one")
        return x, y

    def examples(
        self, x: np.ndarray, y: np.ndarray | None, suffix: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return x and y of one half in the types of a data set; pixels are [n, C, H, W].

        Args:
            x: inputs of the half, [n, ...].
            y: its targets, [n, ...]; None if it has none.
            suffix: what follows "x" and "y" in the names of the two in errors.
        """
        if x.ndim == 1:
            x = x[:, None]
        if x.dtype == bool:
            x = x.astype(np.float32)
        self.check_finite(x, f"x{suffix}")
        if y is not None:
            if y.dtype.kind in "biu" and y.ndim == 1:
                y = y.astype(np.int64)
            self.check_finite(y, f"y{suffix}")
        if x.dtype == np.uint8 and x.ndim == 4 and not {1, 3} & {x.shape[1], x.shape[3]}:
            self._refuse_alpha(x, f"x{suffix}")
        return _as_images(x), y

    def _refuse_alpha(self, x: np.ndarray, name: str) -> None:
        """Refuse images with a channel of transparency; other arrays are integers."""
        for axis, part in ((3, "[..., :{}]"), (1, "[:, :{}]")):
            if (channels := x.shape[axis]) in (2, 4):
                colours = name + part.format(channels - 1)
                raise self.error(
                    f"{name} is uint8 {list(x.shape)}, images with {channels} channels, and images "
                    f"have one or three; give {colours} without transparency, or "
                    f"{name}.astype('float32') / 255 as numbers"
                )

    def check_alike(self, train: np.ndarray, other: np.ndarray, name: str, other_name: str) -> None:
        """Refuse halves whose examples have different shapes or kinds of numbers.

        Args:
            train: examples of the training half, [n, ...].
            other: those of another half.
            name: name of the first in errors.
            other_name: name of the other.
        """
        if train.shape[1:] != other.shape[1:]:
            raise self.error(
                f"{name} has examples of shape {list(train.shape[1:])}, {other_name} of shape "
                f"{list(other.shape[1:])}; give both one shape"
            )
        if (train.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise self.error(
                f"{name} is {train.dtype}, {other_name} is {other.dtype}; give both whole numbers, "
                "or both floats"
            )

    def check_columns(self, train: Any, other: Any, name: str, other_name: str) -> None:
        """Refuse tables of pandas or Polars whose columns are others or in another order.

        Args:
            train: a table of the training half; anything else has no columns.
            other: one of another half.
            name: name of the first in errors.
            other_name: name of the other.
        """
        columns = list(map(str, getattr(train, "columns", ())))
        other_columns = list(map(str, getattr(other, "columns", ())))
        if not columns or not other_columns:
            return
        for k, (column, other_column) in enumerate(zip_longest(columns, other_columns)):
            if column != other_column:
                raise self.error(
                    f"column {k} of {name} is {column!r}, that of {other_name} {other_column!r}; "
                    "give both the same columns in the same order, for example test[train.columns]"
                )

    def one_of(self, users: Any, split: str, others: Mapping[str, Any], key: str) -> Any:
        """Return the users of a half, its own or those of the mapping around it; refuse both.

        Args:
            users: the users in the half itself; None if it has none.
            split: name of the half.
            others: the other entries of the mapping.
            key: key of the half's users in it.
        """
        if others.get(key) is None:
            return users
        if users is not None:
            raise self.error(
                f"the mapping has {key}, and its {split} half has user; leave one of them out"
            )
        return others[key]

    def users(self, users: Any, n: int, split: str) -> np.ndarray:
        """Return the user of each example of a half, integers or texts [n].

        Args:
            users: the users as they were given.
            n: number of examples.
            split: "training" or "test".
        """
        key = "users" if split == "training" else "users_test"
        self.check_masked(users, key)
        users = users.numpy() if isinstance(users, torch.Tensor) else users
        wanted = f"give one integer or text for each {split} example"
        try:
            # NumPy would turn a missing word of a list into the word "nan".
            users = np.asarray(users, dtype=object if isinstance(users, list | tuple) else None)
        except ValueError:
            raise self.error(f"{key} has rows of different shapes; {wanted}") from None
        if users.dtype.kind == "O" and users.ndim == 1:  # a column of a table
            for k, user in enumerate(users):
                if not isinstance(user, str | int | np.integer):
                    raise self.error(f"{key}[{k}] is {user!r}, a {type(user).__name__}; {wanted}")
            if len({isinstance(user, str) for user in users}) > 1:
                raise self.error(f"{key} mixes integers and texts; {wanted}, all of one kind")
            users = np.array(users.tolist())
        if users.dtype.kind not in "biuUS" or users.ndim != 1:
            raise self.error(f"{key} is {users.dtype} {list(users.shape)}; {wanted}")
        if len(users) != n:
            raise self.error(
                f"{key} has {len(users)} entries for {n} {split} examples; give one for each of "
                "them"
            )
        return users

    def groups(self, users: Any, users_test: Any, n: int, n_test: int) -> Numbered | None:
        """Return the number of each example's user in both halves, and names; None: no users.

        Args:
            users: users of the training examples; None: there are none.
            users_test: those of the test examples; None: there are none.
            n: number of training examples.
            n_test: number of test examples.
        """
        if users is None and users_test is None:
            return None
        if users is None:
            raise self.error(
                "the test examples have users, but the training examples have none; give users"
            )
        of_training = self.users(users, n, "training")
        of_test = None if users_test is None else self.users(users_test, n_test, "test")
        return number_users(
            of_training,
            of_test,
            self.place,
            lambda k: f"{self.place}: test example {k}",
        )

    def classes(self, declared: Any, y: np.ndarray, y_test: np.ndarray) -> tuple[str, ...]:
        """Return the names of the classes; () if the targets are not labels from 0.

        Args:
            declared: their names or their number; None: the labels tell it.
            y: training targets, [n, ...].
            y_test: test targets.
        """
        if hasattr(declared, "tolist"):  # of NumPy
            declared = declared.tolist()
        if isinstance(declared, Sequence) and not isinstance(declared, str):
            return tuple(map(str, declared))
        if declared is None:
            declared = number_of_labels(y, y_test)
        elif type(declared) is not int or declared < 1:
            raise self.error(f"classes is {declared!r}; give their number or their names")
        elif declared > MAX_CLASSES:
            raise self.error(f"classes is {declared}; at most {MAX_CLASSES} are possible")
        return tuple(map(str, range(declared)))


def _inputs_text(inputs: Inputs) -> str:
    """Return inputs with their kinds and shapes, for messages."""
    return ", ".join(f"{entry.name} ({entry.kind} {list(entry.shape)})" for entry in inputs)


def number_of_labels(y: np.ndarray, y_test: np.ndarray) -> int:
    """Return one more than the largest label; 0 if the targets are not labels from 0.

    Args:
        y: training targets, [n, ...].
        y_test: test targets.
    """
    if any(half.ndim != 1 or half.dtype.kind != "i" or half.min() < 0 for half in (y, y_test)):
        return 0
    n = int(y.max()) + 1
    return n if n <= MAX_INFERRED_CLASSES else 0


def _as_images(x: np.ndarray) -> np.ndarray:
    """Return pixels as uint8 [n, C, H, W]; other arrays are returned unchanged."""
    if x.dtype != np.uint8:
        return x
    channels_last = x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3)
    return channels_first(x, upright=False) if x.ndim == 3 or channels_last else x
