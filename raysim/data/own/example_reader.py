"""Checks of a user's examples: inputs, targets and users of each half, and whether halves fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raysim.data.dataset import channels_first
from raysim.data.own.forms import FormReader
from raysim.data.own.natural_users import Numbered, number_users
from raysim.data.several_inputs import Inputs, pack

MAX_VALUES_CHECKED_AT_ONCE = 10_000_000
"""Numbers that are looked through for NaN in one pass; it bounds the memory that this takes."""

MAX_INFERRED_CLASSES = 100_000
"""Largest number of classes that is taken from integer targets; larger ones are quantities, such as
prices and times, unless the user gives the number of classes."""

MAX_CLASSES = 1_000_000
"""Largest number of classes that a user can give; each has a name."""

MAX_COLUMNS_SHOWN = 5
"""Number of columns of a table that a message names."""


class ExampleReader(FormReader):
    """Reads one user's examples, and checks them.

    A name such as "x_test" is that of an array in errors. The suffix of a half, as "_test", is what
    its arrays' names have in addition to "x" and "y".
    """

    def packed(self, x: Any, name: str, n: int | None, like: Inputs = ()) -> tuple[Any, Inputs]:
        """Return several inputs as one array [n, D]; other x as they are.

        Args:
            x: the inputs of a half.
            name: name of x.
            n: number of targets, which tells several inputs in a row from rows; None: unknown.
            like: the inputs of the training half; () if it has one, or if this is it.

        Returns:
            The array, and the place of each input in it; () of one input.

        Raises:
            ConfigError: they have different numbers of examples, or others than the training half.
        """
        x = _by_position(x, n, like)
        names = [entry.name for entry in like]
        if not isinstance(x, Mapping):
            if like:
                raise self.error(f"{name} is one array, and x has the inputs {', '.join(names)}")
            return x, ()
        values = {str(key): value for key, value in x.items()}
        if values.keys() == set(names):
            values = {key: values[key] for key in names}
        array, inputs = self._pack(values, name)
        if like and inputs != like:
            raise self.error(
                f"{name} has the inputs {inputs_text(inputs)}, and x has {inputs_text(like)}"
            )
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
        self._refuse_number(array, name)
        self._check_finite(array, name)
        return array

    def arrays(self, x: Any, y: Any, suffix: str, y_may_lack: bool = False) -> tuple[Any, Any]:
        """Return inputs and targets of one half as arrays, or as sequences of different lengths.

        Args:
            x: the inputs.
            y: the targets.
            suffix: suffix of the half.
            y_may_lack: whether the half may have no targets, None.

        Raises:
            ConfigError: they are no arrays, or have different numbers of examples, or none.
        """
        x_name, y_name = f"x{suffix}", f"y{suffix}"
        x = self.array(x, x_name)
        self._refuse_number(x, x_name)
        if y is not None or not y_may_lack:
            y = self.array(y, y_name)
            self._refuse_number(y, y_name)
            if len(x) != len(y):
                raise self.error(f"{x_name} has {len(x)} examples, {y_name} has {len(y)}")
        if not len(x):
            raise self.error(f"{x_name} has no examples")
        return x, y

    def _refuse_number(self, array: Any, name: str) -> None:
        """Refuse an array without dimensions; sequences have one."""
        if isinstance(array, np.ndarray) and array.ndim == 0:
            raise self.error(f"{name} is a single number; give one entry for each example")

    def examples(
        self, x: np.ndarray, y: np.ndarray | None, suffix: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return inputs and targets of one half in the types of a data set.

        Args:
            x: [n, ...], the inputs.
            y: [n, ...], the targets; None: there are none.
            suffix: suffix of the half.

        Returns:
            Inputs of at least two dimensions, pixels as uint8 [n, C, H, W]; and targets, labels as
            int64.

        Raises:
            ConfigError: a number is not finite, or images have a channel of transparency.
        """
        if x.ndim == 1:
            x = x[:, None]
        if x.dtype == bool:
            x = x.astype(np.float32)
        self._check_finite(x, f"x{suffix}")
        if y is not None:
            if y.dtype.kind in "biu" and y.ndim == 1:
                y = y.astype(np.int64)
            self._check_finite(y, f"y{suffix}")
        if x.dtype == np.uint8:
            x = self._as_images(x, f"x{suffix}")
        return x, y

    def _check_finite(self, array: np.ndarray, name: str) -> None:
        """Refuse NaN and infinite numbers, and name the first example with one."""
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

    def _as_images(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return pixels as uint8 [n, C, H, W]; other integers are returned unchanged."""
        if x.ndim == 3:
            return channels_first(x, upright=False)
        if x.ndim != 4 or x.shape[1] in (1, 3):
            return x
        if x.shape[3] in (1, 3):
            return channels_first(x, upright=False)
        for axis, part in ((3, "[..., :{}]"), (1, "[:, :{}]")):
            channels = x.shape[axis]
            if channels in (2, 4):
                colours = name + part.format(channels - 1)
                raise self.error(
                    f"{name} is uint8 {list(x.shape)}, images with {channels} channels, and images "
                    f"have one or three; give {colours} without transparency, or "
                    f"{name}.astype('float32') / 255 as numbers"
                )
        return x

    def check_alike(self, train: np.ndarray, other: np.ndarray, name: str, other_name: str) -> None:
        """Check that the examples of two halves have the same shape and kind of numbers.

        Args:
            train: [n, ...], the array of the training half.
            other: [m, ...], that of the other half.
            name: name of the first array.
            other_name: name of the second one.

        Raises:
            ConfigError: they differ.
        """
        if train.shape[1:] != other.shape[1:]:
            raise self.error(
                f"{name} has examples of shape {list(train.shape[1:])}, {other_name} of shape "
                f"{list(other.shape[1:])}"
            )
        if (train.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise self.error(
                f"{name} is {train.dtype}, {other_name} is {other.dtype}; give both whole numbers, "
                "or both floats"
            )

    def check_columns(self, train: Any, other: Any, name: str, other_name: str) -> None:
        """Check that two tables of pandas or Polars have the same columns in the same order.

        Args:
            train: x or y of the training half; anything else than a table passes.
            other: that of the other half.
            name: name of the first table.
            other_name: name of the second one.

        Raises:
            ConfigError: they differ.
        """
        columns = list(map(str, getattr(train, "columns", ())))
        other_columns = list(map(str, getattr(other, "columns", ())))
        if not columns or not other_columns or columns == other_columns:
            return
        difference = f"{other_name} has the columns of {name} in another order"
        lacking = [
            *_missing_columns(other_name, other_columns, columns),
            *_missing_columns(name, columns, other_columns),
        ]
        if lacking:
            difference = " and ".join(lacking)
        raise self.error(
            f"{difference}; give both the same columns in the same order, for example "
            "test[train.columns]"
        )

    def one_of(self, users: Any, split: str, others: Mapping[str, Any], key: str) -> Any:
        """Return the users of a half, its own or those of the mapping around the halves.

        Args:
            users: the half's own; None: it has none.
            split: "training" or "test".
            others: the mapping's entries besides the halves.
            key: key of the users of this half in it.

        Raises:
            ConfigError: both have some.
        """
        if others.get(key) is None:
            return users
        if users is not None:
            raise self.error(
                f"the mapping has {key}, and its {split} half has user; leave one of them out"
            )
        return others[key]

    def groups(self, users: Any, users_test: Any, n: int, n_test: int) -> Numbered | None:
        """Number the users of both halves.

        Args:
            users: the user of each training example; None: there are none.
            users_test: the user of each test example; None: there are none.
            n: number of training examples.
            n_test: number of test examples.

        Returns:
            The number of each example's user and the users' names; None without users.

        Raises:
            ConfigError: users are no integers or texts, one for each example, or only the test
                examples have some.
        """
        if users is None and users_test is None:
            return None
        if users is None:
            raise self.error(
                "the test examples have users, but the training examples have none; give users"
            )
        of_training = self._checked_users(users, n, "training", "users")
        of_test = None
        if users_test is not None:
            of_test = self._checked_users(users_test, n_test, "test", "users_test")
        return number_users(
            of_training, of_test, self.place, lambda k: f"{self.place}: test example {k}"
        )

    def _checked_users(self, users: Any, n: int, split: str, key: str) -> np.ndarray:
        """Return the user of each example of a half, integers or texts [n]."""
        wanted = f"give one integer or text for each {split} example"
        self.check_masked(users, key)
        if isinstance(users, torch.Tensor):
            users = users.numpy()
        try:
            # NumPy would turn a missing word of a list into the word "nan".
            users = np.asarray(users, dtype=object if isinstance(users, list | tuple) else None)
        except ValueError:
            raise self.error(f"{key} has rows of different shapes; {wanted}") from None
        if users.dtype.kind == "O" and users.ndim == 1:  # a column of a table
            for k, user in enumerate(users):
                if not isinstance(user, str | int | np.integer):
                    raise self.error(f"{key}[{k}] is {user!r}, a {type(user).__name__}; {wanted}")
            users = np.array(users.tolist())
        if users.dtype.kind not in "biuUS" or users.ndim != 1:
            raise self.error(f"{key} is {users.dtype} {list(users.shape)}; {wanted}")
        if len(users) != n:
            raise self.error(f"{key} has {len(users)} entries for {n} {split} examples")
        return users

    def classes(self, declared: Any, y: np.ndarray, y_test: np.ndarray) -> tuple[str, ...]:
        """Return the names of the classes.

        Args:
            declared: their names or their number, as the user gives them; None: as many as labels.
            y: the targets of the training half.
            y_test: those of the test half.

        Returns:
            The names; () if none are declared and the targets are not labels from 0.

        Raises:
            ConfigError: what is declared is neither, or too large.
        """
        if isinstance(declared, Sequence) and not isinstance(declared, str):
            return tuple(map(str, declared))
        if declared is None:
            declared = number_of_labels(y, y_test)
        elif type(declared) is not int or declared < 1:
            raise self.error(f"classes is {declared!r}; give their number or their names")
        elif declared > MAX_CLASSES:
            raise self.error(f"classes is {declared}; at most {MAX_CLASSES} are possible")
        return tuple(map(str, range(declared)))


def number_of_labels(y: np.ndarray, y_test: np.ndarray) -> int:
    """Return one more than the largest label; 0 if the targets are not labels from 0.

    Args:
        y: the targets of the training half.
        y_test: those of the test half.
    """
    for half in (y, y_test):
        if half.ndim != 1 or half.dtype.kind != "i" or half.min() < 0:
            return 0
    n = int(y.max()) + 1
    return n if n <= MAX_INFERRED_CLASSES else 0


def inputs_text(inputs: Inputs) -> str:
    """Return several inputs with their kinds and shapes, for messages.

    Args:
        inputs: the inputs.
    """
    return ", ".join(f"{entry.name} ({entry.kind} {list(entry.shape)})" for entry in inputs)


def _by_position(x: Any, n: int | None, like: Inputs) -> Any:
    """Return several inputs in a row by their positions; other x, such as rows, as they are."""
    if not isinstance(x, tuple | list) or len(x) == n:
        return x
    if n is None:
        is_several = 0 < len(x) == len(like)
    else:
        lengths = {len(v) if hasattr(v, "__array__") and v.ndim else None for v in x}
        is_several = lengths == {n}
    return {str(k): value for k, value in enumerate(x)} if is_several else x


def _missing_columns(name: str, columns: list[str], wanted: list[str]) -> list[str]:
    """Return in words which columns a table lacks, and how many more than a few; [] for none."""
    missing = list((Counter(wanted) - Counter(columns)).elements())
    if not missing:
        return []
    more = f" and {len(missing) - MAX_COLUMNS_SHOWN} more" if missing[MAX_COLUMNS_SHOWN:] else ""
    return [f"{name} has no column {', '.join(missing[:MAX_COLUMNS_SHOWN])}{more}"]
