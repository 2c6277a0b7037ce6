"""Users' own examples: from a function, an .npz file, or objects in Python.

Whatever they come as, `make_dataset` turns them into arrays and checks them. These forms are read:

- x, y, x_test, y_test in a row, or in a mapping with these keys;
- (x, y) and (x_test, y_test) in a row, or in a mapping with the keys train and test;
- two map-style torch data sets, or two Hugging Face data sets with the columns x and y, likewise.

A mapping may also have `users`, `public` and `classes`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim import files
from raysim.config.sections.data import Arrays, OwnData
from raysim.data.dataset import (
    IMAGENET_GREY_MEAN_STD,
    IMAGENET_MEAN_STD,
    Dataset,
    channels_first,
    data_root,
    normalise,
)
from raysim.data.users_function import call_function
from raysim.errors import ConfigError, did_you_mean, in_a_line

REQUIRED_ARRAYS = ("x", "y", "x_test", "y_test")
OPTIONAL_ARRAYS = ("user", "public_x", "public_y")
"""Arrays of an .npz file."""

MAPPING_KEYS = (*REQUIRED_ARRAYS, "train", "test", "users", "public", "classes")
"""Keys of a mapping."""

MAX_VALUES_CHECKED_AT_ONCE = 10_000_000
"""Numbers that are looked through for NaN in one pass; it bounds the memory that this takes."""

MAX_INFERRED_CLASSES = 100_000
"""Largest number of classes that is taken from integer targets; larger ones are quantities, such as
prices and times, unless the user gives the number of classes."""

MAX_CLASSES = 1_000_000
"""Largest number of classes that a user can give; each has a name."""


def from_function(data: OwnData) -> Dataset:
    """Call the user's function and make a data set of what it returns.

    Args:
        data: the section `data`, which names the function and holds its arguments.

    Raises:
        ConfigError: the function is missing or fails, an argument is wrong, or what it returns
            cannot be used.
    """
    content = call_function("data", data.name, data.parameters)
    return make_dataset(data.name.rpartition(":")[2], content, f"data.name: {data.name}")


def from_npz(data: Arrays) -> Dataset:
    """Make a data set of the arrays in an .npz file.

    Args:
        data: the section `data`, which names the file.

    Raises:
        ConfigError: the file cannot be read, lacks an array, or its arrays cannot be used.
    """
    path = Path(data.path).expanduser()
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file)
            known = (*REQUIRED_ARRAYS, *OPTIONAL_ARRAYS)
            if missing := [name for name in REQUIRED_ARRAYS if name not in names]:
                raise ConfigError(
                    f"data.path: {path} has no array {' and no '.join(missing)}; it has "
                    f"{', '.join(names) or 'none'}"
                )
            if unknown := [name for name in names if name not in known]:
                raise ConfigError(
                    f"data.path: {path}: unknown array {unknown[0]}"
                    f"{did_you_mean(unknown[0], known)}"
                )
            arrays = {name: file[name] for name in names}
    except OSError as error:
        reason = error.strerror or in_a_line(error)
        raise ConfigError(f"data.path: {path} cannot be read: {reason}") from None
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        if "Object arrays" in str(error):
            raise ConfigError(
                f"data.path: {path} holds an array of Python objects; save arrays of numbers"
            ) from None
        raise ConfigError(f"data.path: {path} is not an .npz file: {in_a_line(error)}") from None
    content = {name: arrays[name] for name in REQUIRED_ARRAYS}
    if "user" in arrays:
        content["users"] = arrays["user"]
    if "public_x" in arrays:
        content["public"] = (arrays["public_x"], arrays.get("public_y"))
    if data.classes is not None:
        content["classes"] = data.classes
    return make_dataset(path.stem, content, f"data.path: {path}")


# -- the forms in which examples come ----------------------------------------------------------


@dataclass
class _Reader:
    """Reads one user's examples. Its errors begin with `place`, the key and the source."""

    place: str

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.place}: {text}")

    def halves(self, content: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Return the training examples, the test examples, and the other entries."""
        if isinstance(content, Mapping):
            if unknown := [key for key in content if key not in MAPPING_KEYS]:
                raise self.error(
                    f"unknown key {unknown[0]!r}{did_you_mean(str(unknown[0]), MAPPING_KEYS)}"
                )
            others = {k: content[k] for k in ("users", "public", "classes") if k in content}
            wanted = ("train", "test") if "train" in content else REQUIRED_ARRAYS
            if missing := [key for key in wanted if key not in content]:
                raise self.error(f"the mapping has no {' and no '.join(missing)}")
            if surplus := [key for key in content if key not in (*wanted, *others)]:
                raise self.error(f"give either {surplus[0]} or {wanted[0]}")
            if wanted == REQUIRED_ARRAYS:
                x, y, x_test, y_test = (content[key] for key in wanted)
                return (x, y), (x_test, y_test), others
            return content["train"], content["test"], others
        if isinstance(content, tuple | list) and len(content) == len(REQUIRED_ARRAYS):
            return tuple(content[:2]), tuple(content[2:]), {}
        if isinstance(content, tuple | list) and len(content) == 2:
            return content[0], content[1], {}
        found = type(content).__name__
        if isinstance(content, tuple | list):
            found += f" of {len(content)}"
        raise self.error(
            f"expected x, y, x_test, y_test, or a mapping of them, or a train and a test set; got "
            f"a {found}"
        )

    def pair(self, half: Any, what: str) -> tuple[Any, Any, Any]:
        """Return x, y and users (None if there are none) of one half."""
        if isinstance(half, torch.utils.data.Dataset):
            return (*self.torch_examples(half, what), None)
        if hasattr(half, "column_names") and hasattr(half, "with_format"):
            return self.columns(half, what)
        if isinstance(half, tuple | list) and len(half) == 2:
            return half[0], half[1], None
        raise self.error(
            f"the {what} examples are a {type(half).__name__}; expected (x, y), a torch Dataset or "
            "a Hugging Face dataset"
        )

    def torch_examples(self, half: Any, what: str) -> tuple[Any, Any]:
        """Return the stacked examples of a map-style torch data set."""
        if isinstance(half, torch.utils.data.IterableDataset):
            raise self.error(
                f"the {what} examples are an IterableDataset, which has no length; give a "
                "map-style Dataset"
            )
        if type(half) is torch.utils.data.TensorDataset and len(half.tensors) == 2:
            return half.tensors
        x, y = [], []
        for k in range(len(half)):
            example = half[k]
            if not isinstance(example, tuple | list) or len(example) != 2:
                raise self.error(
                    f"{what} example {k} is a {type(example).__name__}; expected a pair (x, y)"
                )
            x.append(np.asarray(example[0]))
            y.append(np.asarray(example[1]))
        return self.stacked(x, f"x of the {what} examples"), self.stacked(
            y, f"y of the {what} examples"
        )

    def stacked(self, rows: list[np.ndarray], what: str) -> np.ndarray:
        """Return rows of one shape as an array."""
        for k, row in enumerate(rows):
            if row.shape != rows[0].shape:
                raise self.error(
                    f"{what}: number {k} has shape {list(row.shape)}, number 0 "
                    f"{list(rows[0].shape)}; crop or pad them to one shape"
                )
        return np.stack(rows) if rows else np.empty(0)

    def columns(self, half: Any, what: str) -> tuple[Any, Any, Any]:
        """Return the columns x, y and user (None without it) of a Hugging Face data set."""
        names = list(half.column_names)
        if missing := [name for name in ("x", "y") if name not in names]:
            raise self.error(
                f"the {what} examples have no column {' and no '.join(missing)} but "
                f"{', '.join(names)}; rename them with rename_column"
            )
        table = half.with_format("numpy")
        user = table["user"][:] if "user" in names else None
        return table["x"][:], table["y"][:], user

    def array(self, values: Any, what: str) -> np.ndarray:
        """Return numbers as a contiguous array of a type that torch has."""
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu().numpy()
        try:
            array = np.asarray(values)
        except ValueError:  # rows of different lengths
            array = np.empty(0, dtype=object)
        if array.dtype.kind == "O":
            raise self.error(
                f"{what} is an array of Python objects, or has rows of different lengths; give an "
                "array of numbers"
            )
        if array.dtype.kind not in "biuf":
            raise self.error(f"{what} is of type {array.dtype}; give numbers")
        kind, size = array.dtype.kind, array.dtype.itemsize
        if kind == "u" and size > 1:
            array = array.astype(np.int64)
        if kind == "f" and size > 8:
            array = array.astype(np.float64)
        return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")

    def check_finite(self, array: np.ndarray, what: str) -> None:
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
                raise self.error(f"{what}[{start + k}] holds {value}; remove or replace it")

    def examples(self, x: Any, y: Any, suffix: str) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of one half as checked arrays."""
        x_name, y_name = f"x{suffix}", f"y{suffix}"
        x, y = self.array(x, x_name), self.array(y, y_name)
        for name, array in ((x_name, x), (y_name, y)):
            if array.ndim == 0:
                raise self.error(f"{name} is a single number; give one entry for each example")
        if len(x) != len(y):
            raise self.error(f"{x_name} has {len(x)} examples, {y_name} has {len(y)}")
        if not len(x):
            raise self.error(f"{x_name} has no examples")
        if x.ndim == 1:
            x = x[:, None]
        if x.dtype == bool:
            x = x.astype(np.float32)
        if y.dtype.kind in "biu" and y.ndim == 1:
            y = y.astype(np.int64)
        self.check_finite(x, x_name)
        self.check_finite(y, y_name)
        return _as_images(x), y

    def check_alike(self, train: np.ndarray, other: np.ndarray, name: str, other_name: str) -> None:
        """Refuse halves whose examples have different shapes or kinds of numbers."""
        if train.shape[1:] != other.shape[1:]:
            raise self.error(
                f"{name} has examples of shape {list(train.shape[1:])}, {other_name} of shape "
                f"{list(other.shape[1:])}"
            )
        if (train.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise self.error(f"{name} is {train.dtype}, {other_name} is {other.dtype}")

    def groups(self, users: Any, n: int) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the number of each example's user, and the users' names."""
        users = users.numpy() if isinstance(users, torch.Tensor) else np.asarray(users)
        if users.dtype.kind not in "biuUS" or users.ndim != 1:
            raise self.error(
                f"users is {users.dtype} {list(users.shape)}; give one integer or text for each "
                "training example"
            )
        if len(users) != n:
            raise self.error(f"users has {len(users)} entries for {n} training examples")
        names, groups = np.unique(users, return_inverse=True)
        return groups.astype(np.int32), tuple(map(str, names))

    def public(self, content: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the public examples and their targets, if there are any."""
        x, y = (
            content if isinstance(content, tuple | list) and len(content) == 2 else (content, None)
        )
        if y is None:
            x = self.array(x, "public x")
            return self.examples(x, np.zeros(len(x), np.int64), " of public")[0], None
        return self.examples(x, y, " of public")

    def classes(self, given: Any, y: np.ndarray, y_test: np.ndarray) -> tuple[str, ...]:
        """Return the names of the classes; () if the targets are not labels from 0."""
        if isinstance(given, Sequence) and not isinstance(given, str):
            return tuple(map(str, given))
        if given is not None and (type(given) is not int or given < 1):
            raise self.error(f"classes is {given!r}; give their number or their names")
        if given is not None and given > MAX_CLASSES:
            raise self.error(f"classes is {given}; at most {MAX_CLASSES} are possible")
        n = given if given is not None else _number_of_labels(y, y_test)
        return tuple(str(c) for c in range(n))


def make_dataset(name: str, content: Any, place: str) -> Dataset:
    """Make a data set of a user's examples.

    uint8 [n, H, W], [n, C, H, W] and [n, H, W, C] with one or three channels are images, which are
    normalised with ImageNet's statistics. Other integers stay integers, and floats become numbers
    of the run's dtype.

    Args:
        name: name of the data set.
        content: the examples, see the module.
        place: key and source, with which errors begin.

    Raises:
        ConfigError: the examples cannot be used; the message names the array and the example.
    """
    reader = _Reader(place)
    train, test, others = reader.halves(content)
    x, y, users = reader.pair(train, "training")
    x_test, y_test, _ = reader.pair(test, "test")
    x, y = reader.examples(x, y, "")
    x_test, y_test = reader.examples(x_test, y_test, "_test")
    reader.check_alike(x, x_test, "x", "x_test")
    reader.check_alike(y, y_test, "y", "y_test")
    public_x = public_y = groups = None
    if others.get("public") is not None:
        public_x, public_y = reader.public(others["public"])
        reader.check_alike(x, public_x, "x", "public x")
        if public_y is not None:
            reader.check_alike(y, public_y, "y", "public y")
    if others.get("users") is not None:
        users = others["users"]
    names: tuple[str, ...] = ()
    if users is not None:
        groups, names = reader.groups(users, len(y))
    scale = shift = None
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3):
        statistics = IMAGENET_GREY_MEAN_STD if x.shape[1] == 1 else IMAGENET_MEAN_STD
        scale, shift = normalise(statistics)
    return Dataset(
        name,
        x,
        y,
        x_test,
        y_test,
        reader.classes(others.get("classes"), y, y_test),
        scale,
        shift,
        groups=groups,
        group_names=names,
        public_x=public_x,
        public_y=public_y,
    )


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

STORED_FOLDER = "from_python"
"""Folder of the examples that were given from Python, in that of the data sets."""


def is_content(value: Any) -> bool:
    """Return whether a mapping holds examples, and not the keys of a configuration.

    Args:
        value: the mapping.
    """
    return "name" not in value and bool({"x", "y", "train", "test"} & set(value))


def stored(content: Any) -> dict[str, Any]:
    """Write examples that were given from Python to a file that is named after their content.

    The file lies in the folder of the data sets, where `raysim resume` finds it.

    Args:
        content: the examples, see the module.

    Returns:
        The section `data` that reads them.

    Raises:
        ConfigError: the examples cannot be used, or the file cannot be written.
    """
    dataset = make_dataset("python", content, "data")
    arrays = {name: getattr(dataset, name) for name in REQUIRED_ARRAYS}
    if dataset.groups is not None:
        arrays["user"] = np.array(dataset.group_names)[dataset.groups]
    if dataset.public_x is not None:
        arrays["public_x"] = dataset.public_x
    if dataset.public_y is not None:
        arrays["public_y"] = dataset.public_y
    whole = hashlib.sha256(f"{dataset.digest} {dataset.group_names}".encode()).hexdigest()
    path = data_root().absolute() / STORED_FOLDER / f"python-{whole[:16]}.npz"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.whole(path) as partial:
                np.savez(partial, **arrays)
        except OSError as error:
            raise ConfigError(
                f"data: {path} cannot be written: {error.strerror}; set $RAYSIM_DATA to a folder "
                "for data sets"
            ) from None
    classes = dataset.n_classes or None
    return {"name": "arrays", "path": str(path), "classes": classes}
