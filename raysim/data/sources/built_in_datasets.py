"""The data sets that raysim knows by name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysim.config.sections.data import Data, Quadratics, data_root
from raysim.data import quadratics
from raysim.data.dataset import (
    IMAGENET_GREY_MEAN_STD,
    IMAGENET_MEAN_STD,
    MAX_PIXEL_VALUES,
    UNIT_MEAN_STD,
    Dataset,
    channels_first,
    missing_files_error,
    normalise,
)
from raysim.data.images import (
    cached,
    decode_images,
    import_torchvision,
    torchvision_reason,
)
from raysim.errors import ConfigError
from raysim.randomness import generator


class TorchvisionSource(NamedTuple):
    """A data set that torchvision reads: its class, arguments, pixel statistics, augmentation."""

    cls: str
    arguments: dict[str, Any]
    statistics: tuple[Sequence[float], Sequence[float]]
    pad: int = 0
    flip: bool = False


TORCHVISION_SOURCES = {
    "mnist": TorchvisionSource("MNIST", {}, ((0.1307,), (0.3081,))),
    "fashionmnist": TorchvisionSource("FashionMNIST", {}, ((0.2860,), (0.3530,))),
    "emnist_digits": TorchvisionSource("EMNIST", {"split": "digits"}, UNIT_MEAN_STD),
    "emnist_letters": TorchvisionSource("EMNIST", {"split": "letters"}, UNIT_MEAN_STD),
    "emnist_balanced": TorchvisionSource("EMNIST", {"split": "balanced"}, UNIT_MEAN_STD),
    "cifar10": TorchvisionSource(
        "CIFAR10", {}, ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)), pad=4, flip=True
    ),
    "cifar100": TorchvisionSource(
        "CIFAR100", {}, ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), pad=4, flip=True
    ),
}


def torchvision_files(name: str, root: Path) -> tuple[Path, str]:
    """Return the folder and the pattern of the files of a data set that torchvision reads.

    Args:
        name: a key of `TORCHVISION_SOURCES`.
        root: the folder of the data sets.
    """
    source = TORCHVISION_SOURCES[name]
    folders = {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python"}
    folder = root / folders.get(source.cls, f"{source.cls}/raw")
    return folder, f"*{source.arguments['split']}*" if "split" in source.arguments else "*"


def torchvision_half(name: str, root: Path, **arguments: Any) -> Any:
    """Return one half of a data set as an object of torchvision.

    Args:
        name: a key of `TORCHVISION_SOURCES`.
        root: the folder of the data sets.
        **arguments: further arguments of torchvision's class, such as `train` and `download`.

    Raises:
        RuntimeError, OSError: the files are missing, or the download failed.
    """
    source = TORCHVISION_SOURCES[name]
    return getattr(import_torchvision().datasets, source.cls)(
        root=str(root), **source.arguments, **arguments
    )


def load_torchvision(name: str, root: Path) -> Dataset:
    """Load a data set that torchvision reads.

    Args:
        name: a key of `TORCHVISION_SOURCES`.
        root: the folder of the data sets.

    Raises:
        ConfigError: files are missing or damaged.
    """
    source = TORCHVISION_SOURCES[name]
    try:
        train, test = (torchvision_half(name, root, train=half) for half in (True, False))
    except (RuntimeError, OSError) as error:
        folder, pattern = torchvision_files(name, root)
        if any(folder.glob(pattern)):
            detail = f"{torchvision_reason(error)} ({folder})"
        else:
            detail = f"there are no files {folder / pattern}"
        raise missing_files_error(name, root, detail) from None
    except (ValueError, AssertionError, EOFError) as error:
        raise ConfigError(
            f"data.name: the files of {name} in {root} are damaged: {error}"
        ) from None
    # EMNIST letters: labels from 1, and a name for 0
    first = int("N/A" in train.classes)
    x, x_test = (
        channels_first(np.asarray(half.data), upright=source.cls == "EMNIST")
        for half in (train, test)
    )
    y, y_test = (np.asarray(half.targets, dtype=np.int64) - first for half in (train, test))
    classes = tuple(train.classes[first:])
    norm = normalise(source.statistics)
    return Dataset(name, x, y, x_test, y_test, classes, *norm, pad=source.pad, flip=source.flip)


def load_digits(data: Data) -> Dataset:
    """Load scikit-learn's embedded handwritten digits: 8 x 8 pixels, values 0 to 16.

    A fixed fifth of each class is the test set.

    Args:
        data: section of the configuration; the data set is part of scikit-learn and has no options.
    """
    table = _digits_table()
    x, y = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    order = generator(0, "digits").permutation(len(y))
    test = np.zeros(len(y), dtype=bool)
    for c in range(10):
        members = order[y[order] == c]
        test[members[: round(len(members) / 5)]] = True
    norm = normalise(UNIT_MEAN_STD, MAX_PIXEL_VALUES["digits"])
    return Dataset("digits", x[~test], y[~test], x[test], y[test], tuple("0123456789"), *norm)


@cache
def _digits_table() -> np.ndarray:
    """Read scikit-learn's file of digits, once in a process: 64 pixels and the label in each row.

    `load_digits` copies the rows that it uses.
    """
    spec = find_spec("sklearn")  # the package itself takes a second to import
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(path, delimiter=",").astype(np.uint8)


def load_quadratics(data: Data) -> Dataset:
    """Load quadratics as least squares: examples [1, 1, P + 1] with labels 0.

    The test set is the training set.

    Args:
        data: section with the `problem`; without it that of `Quadratics()`.
    """
    rows, owner = quadratics.examples(data.problem or Quadratics())
    x, y = rows[:, None, None], np.zeros(len(rows), dtype=np.int64)
    clients = tuple(f"client {i}" for i in range(int(owner[-1]) + 1))
    norm = normalise(UNIT_MEAN_STD, MAX_PIXEL_VALUES["quadratics"])
    return Dataset("quadratics", x, y, x, y, ("f", "-"), *norm, groups=owner, group_names=clients)


def load_tiny_imagenet(data: Data) -> Dataset:
    """Load Tiny-ImageNet-200, 64 x 64.

    The test set is the official validation half, because the official test half has no labels.

    Args:
        data: section with the `root`, in which the folder tiny-imagenet-200 is.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    root = data_root(data.root)
    folder = root / "tiny-imagenet-200"
    try:
        classes = sorted((folder / "wnids.txt").read_text().split())
        lines = (folder / "val" / "val_annotations.txt").read_text().splitlines()
        files = {wnid: sorted((folder / "train" / wnid / "images").iterdir()) for wnid in classes}
    except OSError as error:
        raise missing_files_error(
            "tiny_imagenet", root, f"there is no file {error.filename}"
        ) from None
    train = [(file, label) for label, wnid in enumerate(classes) for file in files[wnid]]
    test = []
    for line in lines:
        file, wnid = line.split("\t")[:2]
        test.append((folder / "val" / "images" / file, classes.index(wnid)))
    x, x_test = cached(
        folder / "raysim-64.npz",
        [len(train), len(test)],
        lambda: [decode_images((file for file, _ in half), 64, "RGB") for half in (train, test)],
    )
    y, y_test = (np.array([k for _, k in half], dtype=np.int64) for half in (train, test))
    norm = normalise(IMAGENET_MEAN_STD)
    return Dataset("tiny_imagenet", x, y, x_test, y_test, tuple(classes), *norm, pad=4, flip=True)


def download_tiny_imagenet(root: Path) -> None:
    """Download and extract Tiny-ImageNet-200, unless it is there.

    Args:
        root: the folder of the data sets.

    Raises:
        RuntimeError, OSError: the download failed.
    """
    if not (root / "tiny-imagenet-200" / "wnids.txt").exists():
        import_torchvision().datasets.utils.download_and_extract_archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            str(root),
            md5="90528d7ca1a48142e341f4ef8d21d0de",
        )


def load_covid_ct(data: Data) -> Dataset:
    """Load COVID-CT (Zhao 2020, arXiv 2003.13865), grey, 128 x 128, from `COVID-CT/index.csv`.

    Training is the official training list, test the official validation and test lists together (as
    Xu 2022's logs show). Groups are the papers the COVID images were taken from, 32 in training,
    named by the part of the file name before the page; the other images have none.

    Args:
        data: section with the `root`, in which the folder COVID-CT is.

    Raises:
        ConfigError: the index is missing or lacks a column, or an image cannot be read.
    """
    root = data_root(data.root)
    folder = root / "COVID-CT"
    rows = _covid_index(folder / "index.csv", root)
    classes = ("NonCOVID", "COVID")
    train = [row for row in rows if row["split"] == "train"]
    test = [row for row in rows if row["split"] != "train"]
    y, y_test = (
        np.array([classes.index(row["label"]) for row in half], dtype=np.int64)
        for half in (train, test)
    )
    x, x_test = (
        decode_images((folder / row["file"] for row in half), 128, "L") for half in (train, test)
    )
    # The images without a paper, "", come first and get -1.
    names, numbers = np.unique(["", *map(_covid_paper, train)], return_inverse=True)
    groups = (numbers[1:] - 1).astype(np.int32)
    papers = tuple(names[1:].tolist())
    norm = normalise(IMAGENET_GREY_MEAN_STD)
    images = Dataset("covid_ct", x, y, x_test, y_test, classes, *norm, pad=16, flip=True)
    return replace(images, groups=groups, group_names=papers)


def _covid_index(path: Path, root: Path) -> list[dict[str, str]]:
    """Return the rows of the index of COVID-CT, one for each image."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise missing_files_error("covid_ct", root, f"there is no file {error.filename}") from None
    if not rows or not rows[0].keys() >= {"file", "label", "split"}:
        raise ConfigError(
            f"{path}: expected a row for each image, with columns file, label and split"
        )
    return rows


def _covid_paper(row: dict[str, str]) -> str:
    """Return the paper that a COVID image was taken from; "" for the other images."""
    if row["label"] != "COVID":
        return ""
    return re.sub(r"-p(age)?\d.*", "", Path(row["file"]).stem)


LOADERS: dict[str, Callable[[Data], Dataset]] = {
    "digits": load_digits,
    "quadratics": load_quadratics,
    "tiny_imagenet": load_tiny_imagenet,
    "covid_ct": load_covid_ct,
}
"""The data sets that are not torchvision's."""
