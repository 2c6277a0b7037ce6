"""Data sets of Hugging Face (`data.name: hf`): of the hub, or of a folder."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from raysim.config.sections.data import HuggingFace
from raysim.data.class_names import column_names, in_names_order
from raysim.data.dataset import Dataset
from raysim.data.images import as_squares, common_mode, common_side, import_torchvision
from raysim.data.own.forms import read_column
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError, in_a_line, with_cause
from raysim.spelling import did_you_mean
from raysim.system.signals import reraise_stop

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""A name on the hub, with or without its owner."""

SAVED_FILES = ("dataset_dict.json", "state.json")
"""Files that tell a folder made by `save_to_disk`."""


def from_hugging_face(data: HuggingFace) -> Dataset:
    """Load a data set of Hugging Face.

    Images become squares if they differ in size or `data.size` is set.

    Args:
        data: the section `data`, which names the data set, its splits and its columns.

    Raises:
        ConfigError: the package is missing, the data set cannot be read, there is no such split or
            column, or the examples cannot be used.
    """
    splits = _load_splits(data)
    train = _pick(splits, data, "train")
    test = _pick(splits, data, "test")
    for half, split in ((train, data.train), (test, data.test)):
        for column in [data.x] if isinstance(data.x, str) else data.x:
            _check_column(half, data, "x", column, split)
        _check_column(half, data, "y", data.y, split)
    if data.user:
        _check_column(train, data, "user", data.user, data.train)
    place = f"data.path: {data.path}"
    y = read_column(train, data.y)
    names = column_names(train, data.y)
    names_test = column_names(test, data.y)
    y_test = in_names_order(read_column(test, data.y), names, names_test, place)
    x, x_test = _inputs(train, test, data)
    content: dict[str, Any] = {"train": (x, y), "test": (x_test, y_test)}
    if data.user:
        content["users"] = read_column(train, data.user)
        # A column that only the training file has is empty in the test split.
        if data.user in test.column_names and set(test[data.user]) != {None}:
            content["users_test"] = read_column(test, data.user)
    if names and np.ndim(y[0]) == 0 and min(y) >= 0:
        content["classes"] = names
    return make_dataset(Path(data.path).name, content, place)


def _package() -> ModuleType:
    """Return the package datasets; raise ConfigError if it is missing."""
    import_torchvision()  # datasets imports it, and its operators may not load
    try:
        package = importlib.import_module("datasets")
    except ImportError:
        package = None
    if package is None or not hasattr(package, "load_from_disk"):  # a user's folder of this name
        raise ConfigError(
            "data.name: 'hf' needs the package datasets, which is not installed; run pip install "
            "'raysim[hf]'"
        )
    return package


def _load_splits(data: HuggingFace) -> dict[str, Any]:
    """Return the splits by name."""
    datasets = _package()
    folder = Path(data.path).expanduser()
    is_saved = any((folder / name).is_file() for name in SAVED_FILES)
    _check_path(data, folder, is_saved)
    try:
        if is_saved:
            splits = datasets.load_from_disk(str(folder))
        else:
            path = str(folder) if folder.is_dir() else data.path
            splits = datasets.load_dataset(path, data.config)
    except BaseException as error:
        reraise_stop(error)
        raise _unreadable(error, data) from None
    if not isinstance(splits, dict):
        raise ConfigError(
            f"data.path: {data.path} holds one data set without splits; save a DatasetDict with "
            f"the splits {data.train} and {data.test} (train_test_split makes one)"
        )
    return splits


def _check_path(data: HuggingFace, folder: Path, is_saved: bool) -> None:
    """Refuse a path that cannot be loaded, and `config` for a saved folder, which has none."""
    place = f"data.path: {data.path}"
    if folder.is_file():
        raise ConfigError(f"{place} is a file; give the folder that holds it")
    if not folder.is_dir() and not HUB_NAME.fullmatch(data.path):
        raise ConfigError(f"{place} is neither a folder nor a name on the Hugging Face hub")
    if is_saved and data.config is not None:
        raise ConfigError(
            f"data.config: {data.path} is a folder made by save_to_disk, which has no "
            "configurations; leave it out"
        )


def _unreadable(error: BaseException, data: HuggingFace) -> ConfigError:
    reason = with_cause(error)
    if isinstance(error, ValueError) and re.search(r"\bconfig|BuilderConfig", reason):
        return ConfigError(f"data.config: {data.path}: {reason}")
    return ConfigError(f"data.path: {data.path} cannot be read: {reason}")


def _pick(splits: dict[str, Any], data: HuggingFace, key: str) -> Any:
    """Return the split that data.train or data.test names."""
    name = getattr(data, key)
    if name not in splits:
        raise ConfigError(
            f"data.{key}: {data.path} has no split '{name}'{did_you_mean(name, splits)}"
        )
    return splits[name]


def _check_column(half: Any, data: HuggingFace, key: str, column: str, split: str) -> None:
    """Raise ConfigError if a split lacks a column, or if x or y is a text."""
    names = half.column_names
    place = f"data.{key}: the split {split} of {data.path}"
    if column not in names:
        raise ConfigError(f"{place} has no column '{column}'{did_you_mean(column, names)}")
    if key != "user" and getattr(half.features[column], "dtype", "") in ("string", "large_string"):
        fix = "turn it into lists of token numbers" if key == "x" else "use class_encode_column"
        raise ConfigError(f"{place} has texts in its column '{column}'; {fix} and save_to_disk")


def _inputs(train: Any, test: Any, data: HuggingFace) -> tuple[Any, Any]:
    """Return the inputs of both halves; images are uint8 [n, H, W] or [n, H, W, C]."""
    columns = data.x
    if not isinstance(columns, str):
        if data.size is not None:
            raise ConfigError("data.size: several inputs are not resized; leave it out")
        train_x, test_x = ({c: read_column(half, c) for c in columns} for half in (train, test))
        return train_x, test_x
    if not hasattr(train[0][columns] if len(train) else None, "convert"):
        if data.size is not None:
            raise ConfigError(f"data.size: the column '{columns}' of {data.path} holds no images")
        return read_column(train, columns), read_column(test, columns)
    images = _images(train, data, data.train)
    images_test = _images(test, data, data.test)
    side = common_side(images, images_test, data.size)
    mode = common_mode({**images, **images_test})
    return as_squares(images, side, mode), as_squares(images_test, side, mode)


def _images(half: Any, data: HuggingFace, split: str) -> dict[str, Any]:
    """Return the decoded images of a split, by the words that name them in errors."""
    images = {}
    for k in range(len(half)):
        place = f"data.x: example {k} of the split {split} of {data.path}"
        try:
            image = half[k][data.x]
            image.load()
        except Exception as error:  # a damaged image may raise nearly anything
            raise ConfigError(f"{place} cannot be read as an image: {in_a_line(error)}") from None
        images[place] = image
    return images
