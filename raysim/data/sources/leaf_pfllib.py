"""Files of other benchmarks with training and test examples for each client: LEAF and PFLlib.

Both have a folder `train` and a folder `test`. LEAF (Caldas 2018) writes JSON files with several
users each: {"users": [name, ...], "num_samples": [n, ...], "user_data": {name: {"x": [...],
"y": [...]}}}. PFLlib (Zhang 2023) writes an .npz file for each client, named by its number, whose
only entry `data` is a pickled mapping of x and y; arrays x and y are read as well. Its config.json
has the number of classes.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysim.config.sections.data import Data
from raysim.data.dataset import MANUAL_STEPS, Dataset, path_of_files
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError, in_a_line, unreadable
from raysim.spelling import lacking

logger = logging.getLogger("raysim")

LEAF_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare in the order of their numbers; others share one more."""

NUMPY_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}
"""Functions and classes that a pickle of arrays may use, with their modules in NumPy 1."""


class Client(NamedTuple):
    """Examples of one client in one half."""

    user: str | int
    """Name or number of the client."""
    x: np.ndarray
    """Inputs, [n, ...]."""
    y: np.ndarray
    """Targets, [n]."""


Read = Callable[[Path], Iterator[Client]]
"""Yields the clients of a file."""


def load_leaf(data: Data) -> Dataset:
    """Load the files of LEAF, with numbers or, as Shakespeare has, strings as inputs.

    Strings become token numbers [n, T] and the next character a label. With `data.size`, inputs of
    size² numbers become images [1, size, size], as FEMNIST needs with 28.

    Args:
        data: the section `data`.

    Raises:
        ConfigError: the path is missing, or its files cannot be used.
    """
    return _load(data, "*.json", _leaf_clients)


def load_pfllib(data: Data) -> Dataset:
    """Load the files of PFLlib, a training and a test file for each client.

    Args:
        data: the section `data`.

    Raises:
        ConfigError: the path is missing, or the files cannot be used.
    """
    return _load(data, "*.npz", _pfllib_clients)


def _load(data: Data, pattern: str, read: Read) -> Dataset:
    """Load the files of both halves; each client is a natural user with its own test examples."""
    folder = path_of_files(data)
    for needed in (folder, folder / "train", folder / "test"):
        if not needed.is_dir():
            raise ConfigError(f"data.path: there is no folder {needed}; {MANUAL_STEPS[data.name]}")
    train = _clients(folder / "train", pattern, read)
    test = _clients(folder / "test", pattern, read)
    content: dict[str, Any] = {
        "train": _half(train, folder / "train", data.size),
        "test": _half(test, folder / "test", data.size),
    }
    if without := lacking(_users(train), _users(test)):
        logger.warning(
            "data.path: in %s, %d of %d clients have no test examples, such as client %s",
            folder / "test",
            len(without),
            len(train),
            without[0],
        )
    if is_text(content["train"]["y"]):
        content["classes"] = _letters_as_numbers(content)
    elif (n_classes := _declared_classes(folder / "config.json")) is not None:
        content["classes"] = n_classes
    return make_dataset(folder.resolve().name, content, f"data.path: {folder}")


def _half(clients: list[Client], folder: Path, size: int | None) -> dict[str, np.ndarray]:
    """Return the examples of the clients of one half, with the user of each."""
    users, x, y = zip(*clients, strict=True)
    return {
        "x": _sized(_joined(x, "x", folder), size),
        "y": _joined(y, "y", folder),
        "user": np.repeat(users, list(map(len, y))),
    }


def _users(clients: list[Client]) -> dict[str | int, None]:
    """Return the clients' names or numbers in order."""
    return {client.user: None for client in clients}


def _clients(folder: Path, pattern: str, read: Read) -> list[Client]:
    """Return the clients of all files in a folder, without those that have no examples."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ConfigError(f"data.path: {folder} has no {pattern[1:]} files")
    clients: dict[str | int, Client] = {}
    for file in files:
        with unreadable(f"data.path: {file}"):
            for client in read(file):
                place = f"data.path: {file}: client '{client.user}'"
                if client.user in clients:
                    raise ConfigError(f"{place} occurs twice in {folder.name}/")
                _check_shapes(client, place)
                clients[client.user] = client
    with_examples = [client for client in clients.values() if len(client.y)]
    if not with_examples:
        raise ConfigError(f"data.path: the files in {folder} have no examples")
    return with_examples


def _check_shapes(client: Client, place: str) -> None:
    """Refuse a client with another number of targets than of inputs."""
    if client.x.shape[:1] != client.y.shape[:1] or client.y.ndim < 1:
        raise ConfigError(
            f"{place} has x of shape {list(client.x.shape)} and y of shape "
            f"{list(client.y.shape)}; give as many targets as inputs"
        )


def _joined(parts: Sequence[np.ndarray], name: str, folder: Path) -> np.ndarray:
    """Return the arrays of all clients as one; they have to be of one shape and kind."""
    kinds = {(part.shape[1:], is_text(part)) for part in parts}
    if len(kinds) > 1:
        shapes = " and ".join(sorted(str(list(shape)) for shape, _ in kinds)[:2])
        raise ConfigError(
            f"data.path: in {folder} {name} differs between clients: shapes {shapes}, or text and "
            "numbers"
        )
    return np.concatenate(parts)


def _sized(x: np.ndarray, size: int | None) -> np.ndarray:
    """Return rows of size² numbers as images [n, 1, size, size]; without a size, x as it is."""
    if size is None:
        return x
    if x.shape[1:] != (size * size,):
        raise ConfigError(
            f"data.size: {size} is for inputs of {size * size} numbers, these are "
            f"{list(x.shape[1:])}; leave it out"
        )
    return x.reshape(-1, 1, size, size)


def _declared_classes(file: Path) -> int | None:
    """Return the number of classes that a config.json names; None without it."""
    if not file.is_file():
        return None
    content = _read_json(file)
    n_classes = content.get("num_classes") if isinstance(content, Mapping) else None
    return n_classes if type(n_classes) is int and n_classes > 0 else None


def _read_json(file: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"data.path: {file} is not JSON: {in_a_line(error)}") from None


# -- LEAF -----------------------------------------------------------------------------------------


def _leaf_clients(file: Path) -> Iterator[Client]:
    """Yield the users of one of LEAF's files."""
    content = _read_json(file)
    users = content.get("user_data") if isinstance(content, Mapping) else None
    if not isinstance(users, Mapping):
        raise ConfigError(
            f"data.path: {file} is no file of LEAF; expected a mapping with user_data"
        )
    for user, examples in users.items():
        place = f"data.path: {file}: client '{user}'"
        x, y = map(_compact, _inputs_and_targets(examples, place, "lengths"))
        if is_text(x) and not (x.ndim == y.ndim == 1 and is_text(y) and _are_letters(y)):
            raise ConfigError(
                f"{place} has texts as x; those of Shakespeare, with the next character as y, are "
                "read; for others give a function that turns them into numbers, as "
                "data=path.py:FUNCTION"
            )
        yield Client(user, x, y)


def _inputs_and_targets(content: Any, place: str, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a client; `what` of its rows has to be the same for all of them."""
    if not isinstance(content, Mapping) or not {"x", "y"} <= set(content):
        raise ConfigError(f"{place} has no x and y; give each client both")
    try:
        return np.asarray(content["x"]), np.asarray(content["y"])
    except ValueError:
        raise ConfigError(
            f"{place} has rows of different {what}; give a function that pads them, as "
            "data=path.py:FUNCTION"
        ) from None


def _compact(array: np.ndarray) -> np.ndarray:
    """Return the float64 of JSON as float32, as LEAF's models get them."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def is_text(array: np.ndarray) -> bool:
    """Return whether an array has texts.

    Args:
        array: any array.
    """
    return array.dtype.kind == "U"


def _are_letters(y: np.ndarray) -> bool:
    """Return whether all texts are of one character."""
    return bool((np.char.str_len(y) == 1).all())


def _letters_as_numbers(content: dict[str, Any]) -> int:
    """Turn texts into numbers of characters, in both halves, and return how many there are.

    Characters that LEAF does not know have one number together, if there are any.
    """
    number = {letter: k for k, letter in enumerate(LEAF_LETTERS)}
    other = len(LEAF_LETTERS)
    classes = other
    for half in content.values():
        for key in ("x", "y"):
            texts = half[key].tolist()
            lengths = {len(text) for text in texts}
            if len(lengths) > 1:
                raise ConfigError(
                    f"data.path: the texts have {min(lengths)} to {max(lengths)} characters; give "
                    "texts of one length"
                )
            numbers = [[number.get(letter, other) for letter in text] for text in texts]
            half[key] = np.array(numbers, dtype=np.int64)
            classes = max(classes, int(half[key].max()) + 1)
        half["y"] = half["y"][:, 0]
    return classes


# -- PFLlib ---------------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled arrays, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a function of NumPy that a pickled array needs."""
        before_2 = module.replace("numpy._core", "numpy.core")
        if (before_2, name) not in NUMPY_ARRAYS:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, and only arrays are read")
        return super().find_class(before_2.replace("numpy.core", "numpy._core"), name)


def _number(file: Path) -> int:
    """Return the number of the client by which a file is named."""
    number = re.search(r"\d+$", file.stem)
    if number is None:
        raise ConfigError(f"data.path: {file} is not named by a client's number, as 0.npz")
    return int(number[0])


def _pfllib_clients(file: Path) -> Iterator[Client]:
    """Yield the client of one of PFLlib's files."""
    number = _number(file)
    try:
        if not zipfile.is_zipfile(file):  # NumPy would take it for another kind of file
            raise zipfile.BadZipFile("it is no zip archive, or a part of one")
        with open(file, "rb") as archive, np.load(archive, allow_pickle=False) as arrays:
            if {"x", "y"} <= set(arrays.files):
                content: Any = {key: arrays[key] for key in ("x", "y")}
            else:
                content = _pickled(file)
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ConfigError(f"data.path: {file} is no file of PFLlib: {in_a_line(error)}") from None
    yield Client(number, *_inputs_and_targets(content, f"data.path: {file}", "shapes"))


def _pickled(file: Path) -> Any:
    """Return the object in the entry `data` of an .npz file, made of arrays only."""
    with zipfile.ZipFile(file) as archive, archive.open("data.npy") as member:
        version = np.lib.format.read_magic(member)
        read_header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        *_, dtype = read_header(member)
        if not dtype.hasobject:
            raise ValueError("its entry data is one array, and not a mapping of x and y")
        array = _ArraysOnly(member).load()
    return array.item() if isinstance(array, np.ndarray) and array.ndim == 0 else array
