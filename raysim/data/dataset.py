"""A data set as NumPy arrays, and how its examples become inputs of a net."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from raysim.config.sections.data import Data
from raysim.data.several_inputs import LARGEST_INTEGER, Inputs, too_large
from raysim.errors import ConfigError

logger = logging.getLogger("raysim")

MIN_EXAMPLES_PER_LABEL = 10
"""Mean number of examples of a label above which no class lacks examples by chance: one of the same
frequency does with probability exp(-10)."""

IMAGENET_MEAN_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_GREY_MEAN_STD = (0.449,), (0.226,)
UNIT_MEAN_STD = (0.0,), (1.0,)
MAX_PIXEL_VALUES = {"digits": 16, "quadratics": 1}
"""The brightest pixel, where that is not 255."""
MANUAL_STEPS = {
    "covid_ct": "lay out COVID-CT/index.csv (columns file, label, split) and its images",
    "folder": "give the folder that holds train/ and test/ as data.path",
    "leaf": "give the folder that holds train/ and test/, each with .json files of user_data, as "
    "data.path",
    "pfllib": "give the folder that holds train/ and test/, each with a file N.npz for each client "
    "N, as data.path",
    "users": "give a CSV file, or the folder that holds train.csv and test.csv, as data.path",
}
"""Data sets that cannot be downloaded, and what to do instead."""


@dataclass(frozen=True)
class Dataset:
    """Training and test examples, and how they become inputs of a net.

    Pixels become `x * scale + shift`, by channel or by pixel. Where `scale` is None, floats become
    numbers of the run's dtype, and integers (tokens) stay integers.

    Attributes:
        name: as the user knows it: a data set of raysim, path.py:FUNCTION, a file or a folder.
        x, x_test: uint8 [n, C, H, W], or numbers of any other type and shape [n, ...].
        y, y_test: int64 [n], labels from 0; or targets of another type and shape [n, ...].
        classes: names of the labels; () if `y` are not labels.
        scale, shift: float64 [C] or [C, H, W]; None: the examples are inputs as they are.
        pad: augmentation by random crops after zero padding of `pad` pixels on each side; 0: none.
        flip: augmentation by mirroring left to right.
        groups: int32 [n], the natural user or source of each training example; -1: none.
        group_names: names of the groups.
        test_groups: int32 [n], the same of each test example; None: they have none.
        public_x: [m, ...], examples that no client owns, like those of `x`; None: none.
        public_y: [m, ...], their targets, like those of `y`; None: unlabelled.
        inputs: the inputs of the net that are packed in `x`; (): it has one.
        new_test_users: users of the test examples if none of them trains, for messages.
        classes_declared: whether the classes were given; else they are counted from the labels.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    pad: int = 0
    flip: bool = False
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    public_x: np.ndarray | None = None
    public_y: np.ndarray | None = None
    classes_declared: bool = True
    test_groups: np.ndarray | None = None
    new_test_users: tuple[str, ...] = ()
    inputs: Inputs = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example; (C, H, W) of an image."""
        return self.x.shape[1:]

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def are_images(self) -> bool:
        """Whether the examples are pixels [C, H, W]."""
        return self.x.dtype == np.uint8 and self.scale is not None

    @property
    def are_labelled(self) -> bool:
        """True if each target is one integer from 0, as the label of a class is.

        Labels outside of the classes, which a loss may ignore, are none.
        """
        if not self.classes or self.y.ndim != 1 or self.y.dtype.kind not in "iu":
            return False
        return bool(self.y.min(initial=0) >= 0 and self.y.max(initial=0) < self.n_classes)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the arrays, their types and shapes."""
        arrays = (self.x, self.y, self.x_test, self.y_test, self.groups)
        whole = hashlib.sha256()
        for array in (*arrays, self.public_x, self.public_y, self.test_groups):
            if array is not None:
                whole.update(f"{array.dtype}{array.shape}".encode())
                whole.update(np.ascontiguousarray(array).reshape(-1).data)
        if self.inputs:
            whole.update(repr(self.inputs).encode())
        return whole.hexdigest()

    def with_public(self, positions: np.ndarray) -> Dataset:
        """Return the data set with training examples as its public data.

        Args:
            positions: those of the examples, int64 [m]; [0] returns the data set as it is.

        Raises:
            ConfigError: it has public data of its own.
        """
        if not len(positions):
            return self
        if self.public_x is not None:
            raise ConfigError(
                f"partition.public_fraction: {self.name} has public data of its own; leave it out"
            )
        positions = np.sort(positions)
        return replace(self, public_x=self.x[positions], public_y=self.y[positions])

    def check_labels(self, key: str, reader: str) -> None:
        """Check that all targets are labels of classes.

        Args:
            key: the key of the configuration that needs labels.
            reader: the words before "needs" in the message.

        Raises:
            ConfigError: they are not; the message names the first wrong one.
        """
        n_classes = self.n_classes or int(self.y.max(initial=0)) + 1
        for name, y in (("y", self.y), ("y_test", self.y_test)):
            if y.ndim != 1 or y.dtype.kind not in "iu":
                shape = ", ".join(["n", *map(str, y.shape[1:])])
                raise ConfigError(
                    f"{key}: {reader} needs integer class labels [n], but {name} of {self.name} "
                    f"is {y.dtype} [{shape}]"
                )
            outside = np.flatnonzero((y < 0) | (y >= n_classes))
            if outside.size:
                k = int(outside[0])
                raise ConfigError(
                    f"{key}: {reader} needs labels from 0 to {n_classes - 1}, but {name}[{k}] of "
                    f"{self.name} is {y[k]}"
                )
        if not self.n_classes:
            raise ConfigError(
                f"{key}: {reader} needs classes, but the labels of {self.name} go up to "
                f"{n_classes - 1}; number them from 0, or give the number of classes"
            )

    def check_range(self, dtype: str) -> None:
        """Check that all floats are finite in the type of a run.

        Args:
            dtype: "float32" or "float64".

        Raises:
            ConfigError: a number is too large for it; the message names the first one.
        """
        for name in ("x", "x_test", "public_x"):
            array = getattr(self, name)
            if array is not None and (part := too_large(array, self.inputs, dtype)):
                raise ConfigError(
                    f"data.name: {name}[{part!r}] of {self.name} has integers that {dtype} has not "
                    f"beside floats, above {LARGEST_INTEGER[dtype]}; number them from 0, or set "
                    "dtype=float64"
                )
        largest = np.finfo(dtype).max
        for name in ("x", "y", "x_test", "y_test", "public_x", "public_y"):
            array = getattr(self, name)
            if array is None or array.dtype.kind != "f" or array.dtype.itemsize <= largest.itemsize:
                continue
            if not array.size or max(array.max(), -array.min()) <= largest:
                continue
            # Numbers above the largest one by less than half of its last bit are rounded down.
            with np.errstate(over="ignore"):
                position = np.argwhere(np.isinf(array.astype(dtype)))
            if len(position):
                k = position[0]
                raise ConfigError(
                    f"data.name: {name}[{k[0]}] of {self.name} holds {array[tuple(k)]}, which is "
                    f"infinite in {dtype}; scale the data, or set dtype=float64"
                )

    def check_numbering(self, key: str) -> None:
        """Check that labels from which the number of classes is counted are numbers from 0 on.

        A class may lack all examples by chance, where classes have few. This is only logged.

        Args:
            key: the key of the configuration that needs labels.

        Raises:
            ConfigError: the labels have gaps.
        """
        if self.classes_declared or not self.are_labelled:
            return
        counts = label_counts(self.y, self.n_classes) + label_counts(self.y_test, self.n_classes)
        n_labels = np.count_nonzero(counts)
        if n_labels == self.n_classes:
            return
        label = int(np.argmin(counts))
        gaps = (
            f"{key}: the labels of {self.name} go up to {self.n_classes - 1}, but only "
            f"{n_labels} of these {self.n_classes} classes have examples; class {label} has none"
        )
        fix = (
            "give the number of classes (classes), or number the labels from 0, alike in both "
            "halves: names = np.unique([*y, *y_test]), then np.searchsorted(names, y) and "
            "np.searchsorted(names, y_test)"
        )
        by_chance = counts.sum() < MIN_EXAMPLES_PER_LABEL * n_labels
        if by_chance and 2 * n_labels > self.n_classes:
            logger.warning("%s; if it does not exist, %s", gaps, fix)
            return
        raise ConfigError(f"{gaps}; {fix}")


def label_counts(labels: np.ndarray, n_classes: int) -> np.ndarray:
    """Return how many labels there are of each class, int64 [n_classes].

    Args:
        labels: int [n]; those that are no class, such as -100 for a loss to ignore, do not count.
        n_classes: number of classes.
    """
    return np.bincount(labels[(labels >= 0) & (labels < n_classes)], minlength=n_classes)


def normalise(
    statistics: tuple[Sequence[float], Sequence[float]], top: float = 255
) -> tuple[np.ndarray, np.ndarray]:
    """Return `scale` and `shift` that map pixels in 0..top to [0, 1], then to (x - mean) / std.

    Args:
        statistics: mean and standard deviation of each channel, of pixels in [0, 1].
        top: value of the brightest pixel.
    """
    mean, std = (np.array(values, dtype=np.float64) for values in statistics)
    return 1 / (top * std), 0 - mean / std


def normalise_by_imagenet(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `scale` and `shift` by the statistics of ImageNet, of its grey images for one channel.

    Args:
        images: uint8 [n, C, H, W] with one or three channels.
    """
    return normalise(IMAGENET_GREY_MEAN_STD if images.shape[1] == 1 else IMAGENET_MEAN_STD)


def normalise_each_pixel(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `scale` and `shift`, [C, H, W], so that each pixel has mean 0 and deviation 1.

    A pixel that is alike in all of these images becomes 0, also in other images where it differs.
    One that is lit in few of them becomes large there: in MNIST inputs reach some hundreds.

    Args:
        images: uint8 [n, C, H, W].
    """
    n = len(images)
    total = images.sum(0, dtype=np.int64)
    squares = np.square(images, dtype=np.uint16).sum(0, dtype=np.int64)
    deviation = np.sqrt(n * squares - total**2) / n  # of integers, so exactly 0 where all are alike
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return scale, 0 - total / n * scale


def broadcastable(values: np.ndarray) -> np.ndarray:
    """Return a `scale` or `shift` [C] or [C, H, W] in a shape that broadcasts with images."""
    return values[:, None, None] if values.ndim == 1 else values


def channels_first(images: np.ndarray, upright: bool) -> np.ndarray:
    """Return images [n, H, W] or [n, H, W, C] as [n, C, H, W].

    Args:
        images: the images, of any type.
        upright: whether to transpose each one, as EMNIST's files need.
    """
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images.swapaxes(2, 3) if upright else images)


def path_of_files(data: Data) -> Path:
    """Return `data.path`, the place of a user's own files.

    Args:
        data: the section `data`.

    Raises:
        ConfigError: it is missing.
    """
    if data.path is None:
        raise ConfigError(f"data.path: missing; {MANUAL_STEPS[data.name]}")
    return Path(data.path).expanduser()


def missing_files_error(name: str, root: Path, detail: str) -> ConfigError:
    """Return the error for a data set whose files are missing, with the remedy.

    Args:
        name: name of the data set.
        root: the folder of the data sets.
        detail: what is missing or wrong, for the message.
    """
    remedy = MANUAL_STEPS.get(name) or f"run `raysim data fetch {name}`, or set data.download=true"
    return ConfigError(
        f"data.name: {name} is not in {root}: {detail}; {remedy}, or set data.root (or "
        "$RAYSIM_DATA) to the folder that holds it"
    )
