"""Users' own examples: from a function, an .npz file, or objects in Python.

`forms` takes them apart, `arrays` makes arrays of them, and `example_reader` checks these.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.config.sections.data import Arrays, OwnData
from raysim.config.users_function import users_function
from raysim.data.class_names import in_names_order
from raysim.data.dataset import Dataset, normalise_by_imagenet
from raysim.data.own.arrays import PADDING_X
from raysim.data.own.example_reader import ExampleReader, number_of_labels
from raysim.data.own.forms import REQUIRED_ARRAYS, USER_KEYS
from raysim.data.own.npz import read_arrays
from raysim.data.own.stored import stored_arrays
from raysim.data.several_inputs import unpacked
from raysim.errors import ConfigError
from raysim.system.global_generators import generators_kept

TEST_USER_KEYS = ("user_test", "users_test")
"""Names of the array of the test examples' users in a file, which are the same."""

OPTIONAL_ARRAYS = (*USER_KEYS, *TEST_USER_KEYS, "public_x", "public_y")
"""Arrays that an .npz file may have."""

MAX_SECONDS_TO_CALL_AGAIN = 0.3
"""Longest time that a user's function may take to be called a second time for comparison."""

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
        content = users_function("data", function, data.parameters, 0)()
        return make_dataset(data.name, content, f"data.name: {data.name}")

    start = time.perf_counter()
    dataset = load()
    if time.perf_counter() - start < MAX_SECONDS_TO_CALL_AGAIN:
        # Before the second call, which may change arrays that the first one returned.
        first = (dataset.digest, dataset.group_names)
        with generators_kept():
            again = load()
        if (again.digest, again.group_names) != first:
            raise ConfigError(
                f"data.name: {data.name} returns other examples when it is called again; seed its "
                "generators inside of it, as np.random.default_rng(0) does, and change arrays of "
                "its file in copies, such as x / 255 for x /= 255"
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
    reader = ExampleReader(place)
    train, test, others = reader.halves(content)
    class_names = reader.names(train)
    x, y, users = reader.half(train, "training")
    x_test, y_test, users_test = reader.half(test, "test")
    x, inputs = reader.packed(x, "x", _length(y))
    x_test, _ = reader.packed(x_test, "x_test", _length(y_test), inputs)
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
    if declared is None and len(class_names) >= number_of_labels(y, y_test) > 0:
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


def _padded_like(
    array: np.ndarray | list[np.ndarray], dataset: Dataset, reader: ExampleReader
) -> np.ndarray | list[np.ndarray]:
    """Return rows of whole numbers with the padding that a data set's sequences have."""
    if not isinstance(array, list):
        # Rows of one length may lack columns, unless the data set's own rows end in padding.
        is_padded = bool((dataset.x[:, -1:] == PADDING_X).any())
        if not is_padded or array.ndim != 2 or array.dtype.kind not in "iu":
            return array
    # One example of the data set has the length to which all of them were padded.
    halves = {"": ([*array], None), f" of {dataset.name}": (dataset.x[:1], None)}
    return reader.padded(halves)[""][0]


def inputs_like(x: Any, dataset: Dataset) -> np.ndarray:
    """Return a user's inputs in the form of a data set's examples.

    Args:
        x: inputs as the data set was given them: arrays, tensors, lists or images, [n, ...].
        dataset: the data set.

    Raises:
        ConfigError: they have another shape or kind of numbers than the data set's.
    """
    reader = ExampleReader("predict")
    array = reader.array(reader.packed(x, "x", None, dataset.inputs)[0], "x")
    if dataset.x.ndim == 2 and dataset.x.dtype == np.int64 and not dataset.inputs:
        array = _padded_like(array, dataset, reader)
    if isinstance(array, list):
        raise reader.error("x has rows of different lengths; pad them as those of the data set")
    if not array.ndim or not len(array):
        raise reader.error("x has no examples")
    # One grey image without its channel is [1, H, W], too, and one number [1].
    is_unclear = dataset.shape == (1,) or (dataset.are_images and dataset.shape[0] == 1)
    if array.shape == dataset.shape and not is_unclear:
        raise reader.error("x is a single example; give x[None], one of one")
    inputs, _ = reader.examples(array, None, "")
    if dataset.are_images and inputs.dtype != np.uint8:
        raise reader.error(f"x is {inputs.dtype}; {dataset.name} has images of uint8 pixels")
    reader.check_alike(dataset.x, inputs, dataset.name, "x")
    return inputs


def _length(y: Any) -> int | None:
    """Return the number of targets; None if they have none."""
    return len(y) if hasattr(y, "__len__") and getattr(y, "ndim", 1) else None


# -- examples that are given from Python -----------------------------------------------------------


def is_content(value: Any) -> bool:
    """Return whether a mapping holds examples, and not the keys of a configuration.

    Args:
        value: a mapping that was given as `data`.
    """
    if "name" in value:
        return False
    objects = tuple | np.ndarray | torch.Tensor | torch.utils.data.Dataset
    for key, part in value.items():
        is_examples = key in ("x", "y", "train", "test") and not isinstance(part, str)
        if is_examples or isinstance(part, objects):
            return True
        if isinstance(part, Mapping) and is_content(part):  # of a client
            return True
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
