"""Any classification data set of torchvision (`data.name: torchvision`)."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config.sections.data import TorchvisionData, data_root
from raysim.data.class_names import class_names, in_names_order
from raysim.data.dataset import Dataset
from raysim.data.images import (
    Pictures,
    as_squares,
    common_mode,
    common_side,
    import_torchvision,
    torchvision_reason,
)
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError, in_a_line
from raysim.spelling import did_you_mean, lacking
from raysim.system.signals import reraise_stop

TEST_SPLITS = ("test", "val", "valid")
"""Names of the test half, in the order in which they are tried."""


def from_torchvision(data: TorchvisionData) -> Dataset:
    """Load a classification data set of torchvision.

    Its class has an argument `train`, or an argument `split` with the values train and test (or
    val); or `train_arguments` and `test_arguments` select the halves. Images of different sizes
    become squares.

    Args:
        data: the section `data`.

    Raises:
        ConfigError: there is no such class, the files are missing, or the data set is not one of
            labelled images.
    """
    cls = _find_class(data)
    place = f"data.dataset: {data.dataset}"
    root = data_root(data.root)
    if data.download:
        root.mkdir(parents=True, exist_ok=True)
    train = _half(cls, data, root, True)
    test = _half(cls, data, root, False)
    images, y = _examples(train, place, "training")
    images_test, y_test = _examples(test, place, "test")
    side = common_side(images, images_test, data.size)
    mode = common_mode(images)
    x = as_squares(images, side, mode)
    x_test = as_squares(images_test, side, mode)
    content: dict[str, Any] = {"train": (x, y), "test": (x_test, y_test)}
    names = class_names(train, place)
    names_test = class_names(test, place)
    if names and len(names) > max(y, default=0):
        content["classes"] = names
        y_test = in_names_order(np.array(y_test), names, names_test, place)
        content["test"] = (x_test, y_test)
    return make_dataset(data.dataset, content, place)


def _find_class(data: TorchvisionData) -> Any:
    """Return torchvision's class; raise ConfigError if it has none of this name."""
    module = import_torchvision().datasets
    if data.dataset not in module.__all__:
        raise ConfigError(
            f"data.dataset: torchvision has no data set '{data.dataset}'"
            f"{did_you_mean(data.dataset, module.__all__)}"
        )
    cls = getattr(module, data.dataset)
    known = inspect.signature(cls).parameters
    if not {"train", "split"} & set(known) and data.train_arguments == data.test_arguments:
        raise ConfigError(
            f"data.dataset: {data.dataset} has neither an argument train nor split, so it has no "
            "training and test half; set data.train_arguments and data.test_arguments, which must "
            "differ, or write a function, data: path.py:function"
        )
    reserved = {"root", "train", "download", "transform", "target_transform"}
    usable = known.keys() - reserved
    for section in ("arguments", "train_arguments", "test_arguments"):
        for key in lacking(getattr(data, section), usable):
            raise ConfigError(
                f"data.{section}.{key}: unknown argument of {data.dataset}"
                f"{did_you_mean(key, usable)}"
            )
    return cls


def _half(cls: Any, data: TorchvisionData, root: Path, is_train: bool) -> Any:
    """Return the training or the test half as an object of torchvision."""
    known = inspect.signature(cls).parameters
    of_half = data.train_arguments if is_train else data.test_arguments
    ours = {"root": str(root), "download": data.download}
    arguments = {key: ours[key] for key in ours if key in known} | data.arguments | of_half
    errors: list[BaseException] = []
    for option in _options(known, of_half, is_train):
        try:
            return cls(**arguments, **option)
        except BaseException as error:
            reraise_stop(error)
            errors.append(error)
            if not isinstance(error, ValueError):  # ValueError: there is no such split
                break
    reason = torchvision_reason(errors[0])
    if "root" not in known:
        raise ConfigError(f"data.dataset: {data.dataset} cannot be read: {reason}")
    download = "data.download=true, or " if "download" in known else ""
    raise ConfigError(
        f"data.dataset: {data.dataset} cannot be read from {root}: {reason}; set {download}"
        "data.root (or $RAYSIM_DATA) to the folder that holds it"
    )


def _options(
    known: Collection[str], given: Collection[str], is_train: bool
) -> list[dict[str, Any]]:
    """Return the arguments to try that select a half, beside those that are given for it."""
    if "train" in known:
        return [{"train": is_train}]
    if "split" not in known or "split" in given:
        return [{}]
    return [{"split": split} for split in (("train",) if is_train else TEST_SPLITS)]


def _examples(half: Any, place: str, split: str) -> tuple[Pictures, list[int]]:
    """Return the images and the labels of one half."""
    images = {}
    labels = []
    try:
        pairs = [half[k] for k in range(len(half))]
    except Exception as error:  # such as arguments that the class does not check
        raise ConfigError(f"{place} cannot be read: {in_a_line(error)}") from None
    for k, (image, label) in enumerate(pairs):
        if not isinstance(label, int | np.integer):
            raise ConfigError(
                f"{place}: example {k} has a {type(label).__name__} as label; only data sets with "
                "one class for each image are read"
            )
        if not hasattr(image, "convert"):
            raise ConfigError(f"{place}: example {k} is not an image but a {type(image).__name__}")
        images[f"{place}: {split} example {k}"] = image
        labels.append(int(label))
    return images, labels
