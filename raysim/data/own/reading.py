"""Users' own examples: from a function, an .npz file, or objects in Python.

`forms` takes them apart, `arrays` makes arrays of them, and `make_dataset` checks these.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.config.sections.data import Arrays, OwnData
from raysim.config.users_function import call_function
from raysim.data.class_names import in_names_order
from raysim.data.dataset import Dataset, channels_first, normalise_by_imagenet
from raysim.data.own.forms import REQUIRED_ARRAYS, USER_KEYS, FormReader
from raysim.data.own.natural_users import Numbered, number_users
from raysim.data.own.npz import read_arrays
from raysim.data.own.stored import stored_arrays
from raysim.data.several_inputs import Inputs, pack, unpacked
from raysim.errors import ConfigError
from raysim.system.global_generators import generators_kept

TEST_USER_KEYS = ("user_test", "users_test")
"""Names of the array of the test examples' users in a file, which are the same."""

OPTIONAL_ARRAYS = (*USER_KEYS, *TEST_USER_KEYS, "public_x", "public_y")
"""Arrays that an .npz file may have."""

MAX_VALUES_CHECKED_AT_ONCE = 10_000_000
"""Numbers that are looked through for NaN in one pass; it bounds the memory that this takes."""

MAX_SECONDS_TO_CALL_AGAIN = 0.3
"""Longest time that a user's function may take to be called a second time for comparison."""

MAX_INFERRED_CLASSES = 100_000
"""Largest number of classes that is taken from integer targets; larger ones are quantities, such as
prices and times, unless the user gives the number of classes."""

MAX_CLASSES = 1_000_000
"""Largest number of classes that a user can give; each has a name."""

MAX_COLUMNS_SHOWN = 5
"""Number of columns of a table that a message names."""

INTEGER = re.compile("0|-?[1-9][0-9]{0,17}")
"""An integer of 64 bits as Python writes it."""


def from_function(data: OwnData, function: str) -> Dataset:
    """Call the user's function and make a data set of what it returns.

    A fast function is called twice, and must return the same examples.

    Args:
        data: the section `data`, which holds the function's arguments.
        function: path.py:FUNCTION, or module:FUNCTION of an installed package.

    Raises:
        ConfigError: the function is missing or fails, an argument is wrong, or what it returns
            cannot be used or differs the second time.
    """

    def load() -> Dataset:
        content = call_function("data", function, data.parameters)
        return make_dataset(data.name, content, f"data.name: {data.name}")

    start = time.perf_counter()
    dataset = load()
    if time.perf_counter() - start < MAX_SECONDS_TO_CALL_AGAIN:
        with generators_kept():
            again = load()
        if (again.digest, again.group_names) != (dataset.digest, dataset.group_names):
            raise ConfigError(
                f"data.name: {data.name} returns other examples when it is called again; seed its "
                "generators inside of it, as np.random.default_rng(0) does"
            )
    return dataset


def from_npz(data: Arrays) -> Dataset:
    """Make a data set of the arrays in an .npz file.

    Args:
        data: the section `data`, which names the file.

    Raises:
        ConfigError: the file cannot be read, lacks an array, or its arrays cannot be used.
    """
    path = Path(data.path).expanduser()
    advice = (
        "save x, y, x_test and y_test with np.savez, or give a function that reads the file, as "
        "data=path.py:FUNCTION"
    )
    arrays = read_arrays(path, "data.path", REQUIRED_ARRAYS, OPTIONAL_ARRAYS, advice)
    content: dict[str, Any] = {name: arrays[name] for name in REQUIRED_ARRAYS}
    for entry, keys in (("users", USER_KEYS), ("users_test", TEST_USER_KEYS)):
        if arrays.keys() >= set(keys):
            raise ConfigError(
                f"data.path: {path} has both an array {keys[0]} and {keys[1]}; leave one out"
            )
        content[entry] = arrays.get(keys[0], arrays.get(keys[1]))
    if "public_x" in arrays:
        content["public"] = (arrays["public_x"], arrays.get("public_y"))
    if data.classes is not None:
        content["classes"] = data.classes
    return make_dataset(path.name, content, f"data.path: {path}")


# -- checks ---------------------------------------------------------------------------------------


class _Reader(FormReader):
    """Reads and checks one user's examples."""

    def check_finite(self, array: np.ndarray, name: str) -> None:
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

    def packed(self, x: Any, name: str, n: int | None, like: Inputs = ()) -> tuple[Any, Inputs]:
        """Return several inputs as one array [n, D]; other x as they are.

        Args:
            x: the inputs of a half.
            name: name of x in errors.
            n: number of targets, which tells several inputs in a row from rows; None: unknown.
            like: the inputs of the training half; () if it has one, or if this is it.

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
                f"{name} has the inputs {_inputs_text(inputs)}, and x has {_inputs_text(like)}"
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
        if not array.ndim:
            raise self.error(f"{name} is a single number; give one entry for each example")
        self.check_finite(array, name)
        return array

    def arrays(self, x: Any, y: Any, suffix: str, y_may_lack: bool = False) -> tuple[Any, Any]:
        """Return x and y of one half as arrays or sequences of one number of examples."""
        x_name, y_name = f"x{suffix}", f"y{suffix}"
        x = self.array(x, x_name)
        y = None if y is None and y_may_lack else self.array(y, y_name)
        for name, array in ((x_name, x), (y_name, y)):
            if isinstance(array, np.ndarray) and array.ndim == 0:
                raise self.error(f"{name} is a single number; give one entry for each example")
        if y is not None and len(x) != len(y):
            raise self.error(f"{x_name} has {len(x)} examples, {y_name} has {len(y)}")
        if not len(x):
            raise self.error(f"{x_name} has no examples")
        return x, y

    def examples(
        self, x: np.ndarray, y: np.ndarray | None, suffix: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return x and y of one half in the types of a data set."""
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
        """Refuse halves whose examples have different shapes or kinds of numbers."""
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
        """Refuse tables of pandas or Polars whose columns are others or in another order."""
        columns = list(map(str, getattr(train, "columns", ())))
        other_columns = list(map(str, getattr(other, "columns", ())))
        if not columns or not other_columns or columns == other_columns:
            return
        what = f"{other_name} has the columns of {name} in another order"
        if Counter(columns) != Counter(other_columns):
            what = " and ".join(
                [
                    *_missing_columns(other_name, other_columns, columns),
                    *_missing_columns(name, columns, other_columns),
                ]
            )
        raise self.error(
            f"{what}; give both the same columns in the same order, for example test[train.columns]"
        )

    def one_of(self, users: Any, split: str, others: Mapping[str, Any], key: str) -> Any:
        """Return the users of a half, its own or those of a mapping; refuse both."""
        if others.get(key) is None:
            return users
        if users is not None:
            raise self.error(
                f"the mapping has {key}, and its {split} half has user; leave one of them out"
            )
        return others[key]

    def users(self, users: Any, n: int, split: str) -> np.ndarray:
        """Return the user of each example of a half, integers or texts [n]."""
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
            users = np.array(users.tolist())
        if users.dtype.kind not in "biuUS" or users.ndim != 1:
            raise self.error(f"{key} is {users.dtype} {list(users.shape)}; {wanted}")
        if len(users) != n:
            raise self.error(f"{key} has {len(users)} entries for {n} {split} examples")
        return users

    def groups(self, users: Any, users_test: Any, n: int, n_test: int) -> Numbered | None:
        """Return the number of each example's user in both halves, and names; None: no users."""
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
        """Return the names of the classes; () if the targets are not labels from 0."""
        if isinstance(declared, Sequence) and not isinstance(declared, str):
            return tuple(map(str, declared))
        if declared is None:
            declared = _number_of_labels(y, y_test)
        elif type(declared) is not int or declared < 1:
            raise self.error(f"classes is {declared!r}; give their number or their names")
        elif declared > MAX_CLASSES:
            raise self.error(f"classes is {declared}; at most {MAX_CLASSES} are possible")
        return tuple(map(str, range(declared)))


def make_dataset(name: str, content: Any, place: str) -> Dataset:
    """Make a data set of a user's examples.

    uint8 [n, H, W], [n, C, H, W] and [n, H, W, C] with one or three channels are images, which are
    normalised with ImageNet's statistics. Other integers stay integers, and floats become numbers
    of the run's dtype.

    Args:
        name: name of the data set.
        content: the examples, see `forms`.
        place: key and source, with which errors begin.

    Raises:
        ConfigError: the examples cannot be used; the message names the array and the example.
    """
    reader = _Reader(place)
    train, test, others = reader.halves(content)
    class_names = reader.names(train)
    x, y, users = reader.half(train, "training")
    x_test, y_test, users_test = reader.half(test, "test")
    x, inputs = reader.packed(x, "x", _length(y))
    x_test, inputs_test = reader.packed(x_test, "x_test", _length(y_test), inputs)
    if inputs_test != inputs:
        raise reader.error(f"x_test has the inputs {_inputs_text(inputs_test)}, and x is one array")
    halves = {"": reader.arrays(x, y, ""), "_test": reader.arrays(x_test, y_test, "_test")}
    if (public := others.get("public")) is not None:
        is_pair = isinstance(public, tuple | list) and len(public) == 2
        public_x, public_y = public if is_pair else (public, None)
        public_x, _ = reader.packed(public_x, "public x", _length(public_y), inputs)
        halves[" of public"] = reader.arrays(public_x, public_y, " of public", y_may_lack=True)
        reader.check_columns(x, public_x, "x", "public x")
    reader.check_columns(x, x_test, "x", "x_test")
    reader.check_columns(y, y_test, "y", "y_test")
    arrays = reader.padded(halves)
    x, y = reader.examples(*arrays[""], "")
    x_test, y_test = reader.examples(*arrays["_test"], "_test")
    assert y is not None and y_test is not None
    y_test = in_names_order(y_test, class_names, reader.names(test), place)
    reader.check_alike(x, x_test, "x", "x_test")
    reader.check_alike(y, y_test, "y", "y_test")
    public_x = public_y = None
    if " of public" in arrays:
        public_x, public_y = reader.examples(*arrays[" of public"], " of public")
        reader.check_alike(x, public_x, "x", "public x")
        if public_y is not None:
            reader.check_alike(y, public_y, "y", "public y")
    users = reader.one_of(users, "training", others, "users")
    users_test = reader.one_of(users_test, "test", others, "users_test")
    numbered = reader.groups(users, users_test, len(y), len(y_test))
    scale, shift = _normalisation(x)
    declared = others.get("classes")
    if declared is None and len(class_names) >= _number_of_labels(y, y_test) > 0:
        declared = class_names
    return Dataset(
        name,
        x,
        y,
        x_test,
        y_test,
        reader.classes(declared, y, y_test),
        scale,
        shift,
        classes_declared=declared is not None,
        public_x=public_x,
        public_y=public_y,
        inputs=inputs,
        **(numbered._asdict() if numbered else {}),
    )


def _normalisation(x: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return `scale` and `shift` of images; None for other arrays."""
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3):
        return normalise_by_imagenet(x)
    return None, None


def inputs_like(x: Any, dataset: Dataset) -> np.ndarray:
    """Return a user's inputs in the form of a data set's examples.

    Args:
        x: inputs as the data set was given them: arrays, tensors, lists or images, [n, ...].
        dataset: the data set.

    Raises:
        ConfigError: they have another shape or kind of numbers than the data set's.
    """
    reader = _Reader("predict")
    array = reader.array(reader.packed(x, "x", None, dataset.inputs)[0], "x")
    if isinstance(array, list):
        raise reader.error("x has rows of different lengths; pad them as those of the data set")
    if not array.ndim or not len(array):
        raise reader.error("x has no examples")
    if array.shape == dataset.shape:
        raise reader.error("x is a single example; give x[None], one of one")
    inputs, _ = reader.examples(array, None, "")
    if dataset.are_images and inputs.dtype != np.uint8:
        raise reader.error(f"x is {inputs.dtype}; {dataset.name} has images of uint8 pixels")
    reader.check_alike(dataset.x, inputs, dataset.name, "x")
    return inputs


def _length(y: Any) -> int | None:
    """Return the number of targets; None if they have none."""
    return len(y) if hasattr(y, "__len__") and getattr(y, "ndim", 1) else None


def _by_position(x: Any, n: int | None, like: Inputs) -> Any:
    """Return several inputs in a row by their positions; other x, such as rows, as they are."""
    if not isinstance(x, tuple | list) or len(x) == n:
        return x
    lengths = [len(v) if hasattr(v, "__array__") and v.ndim else None for v in x]
    is_several = 0 < len(x) == len(like) if n is None else set(lengths) == {n}
    return {str(k): value for k, value in enumerate(x)} if is_several else x


def _inputs_text(inputs: Inputs) -> str:
    """Return inputs with their kinds and shapes, for messages."""
    return ", ".join(f"{entry.name} ({entry.kind} {list(entry.shape)})" for entry in inputs)


def _number_of_labels(y: np.ndarray, y_test: np.ndarray) -> int:
    """Return one more than the largest label; 0 if the targets are not labels from 0."""
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


# -- examples that are given from Python -----------------------------------------------------------


def is_content(value: Any) -> bool:
    """Return whether a mapping holds examples, and not the keys of a configuration.

    Args:
        value: a mapping that was given as `data`.
    """
    # Those of each client by itself are refused where they are read.
    objects = tuple | np.ndarray | torch.Tensor | torch.utils.data.Dataset
    for key, part in value.items():
        is_examples = key in ("x", "y", "train", "test") and not isinstance(part, str)
        if is_examples or isinstance(part, objects):
            return "name" not in value
    return False


def _users_in_order(names: tuple[str, ...]) -> np.ndarray:
    """Return users, as numbers or text, so that sorting them keeps their order: 2 is before 10."""
    numbers = list(map(int, filter(INTEGER.fullmatch, names)))
    in_order = len(numbers) == len(names) and numbers == sorted(numbers)
    return np.array(numbers if in_order else names)


def store_examples(content: Any) -> dict[str, Any]:
    """Write examples that were given from Python to a file that is named after their content.

    The file lies in the folder of the data sets, where `raysim resume` finds it.

    Args:
        content: the examples, see `forms`.

    Returns:
        The section `data` that reads them.

    Raises:
        ConfigError: the examples cannot be used, or the file cannot be written.
    """
    dataset = make_dataset("python", content, "data")
    arrays: dict[str, np.ndarray] = {}
    for name in (*REQUIRED_ARRAYS, "public_x", "public_y"):
        array = getattr(dataset, name)
        if array is not None and dataset.inputs and "x" in name:
            for key, part in unpacked(array, dataset.inputs).items():
                arrays[f"{name}.{key}"] = part
        elif array is not None:
            arrays[name] = array
    users = _users_in_order(dataset.group_names)
    for key, numbers in (("user", dataset.groups), ("user_test", dataset.test_groups)):
        if numbers is not None:
            arrays[key] = users[numbers]
    identity = f"{dataset.digest} {dataset.group_names}"
    path = stored_arrays("data", arrays, identity)
    classes = dataset.n_classes if dataset.classes_declared else None
    return {"name": "arrays", "path": str(path), "classes": classes}


def _missing_columns(name: str, columns: list[str], wanted: list[str]) -> list[str]:
    """Return in words which columns a table lacks, and how many more than a few; [] for none."""
    missing = list((Counter(wanted) - Counter(columns)).elements())
    if not missing:
        return []
    more = f" and {len(missing) - MAX_COLUMNS_SHOWN} more" if missing[MAX_COLUMNS_SHOWN:] else ""
    return [f"{name} has no column {', '.join(missing[:MAX_COLUMNS_SHOWN])}{more}"]
