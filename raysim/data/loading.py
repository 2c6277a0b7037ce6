"""Load a data set: one that raysim knows by name, or the user's own.

A `Dataset` is everything a run needs to know about its examples: both halves as NumPy arrays (which
Ray's object store shares between processes without copying), how they become inputs, and the
augmentation that is usual. Nothing here is random but the embedded digits' split, and that is the
same for every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysim.config import entry_points
from raysim.config.references import read_code
from raysim.config.sections.data import (
    AnyData,
    Arrays,
    Data,
    HuggingFace,
    OwnData,
    TorchvisionData,
    data_root,
)
from raysim.data.dataset import (
    MANUAL_STEPS,
    MAX_PIXEL_VALUES,
    Dataset,
    normalise,
    normalise_each_pixel,
)
from raysim.data.images import load_folder
from raysim.data.own import reading
from raysim.data.sources import built_in_datasets
from raysim.data.sources.built_in_datasets import TORCHVISION_SOURCES
from raysim.data.sources.hugging_face import from_hugging_face
from raysim.data.sources.image_tables import load_users
from raysim.data.sources.leaf_pfllib import load_leaf, load_pfllib
from raysim.data.sources.torchvision_data import from_torchvision
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean
from raysim.system import startup_stages

BUILT_IN_DATASETS = ("digits", "quadratics")
"""Data sets that need no file."""

USER_FORMATS = {
    "folder": load_folder,
    "leaf": load_leaf,
    "pfllib": load_pfllib,
    "users": load_users,
}
"""Layouts of a user's own files, with their loaders."""

KEYS_OF_DATA_SETS = {
    "path": tuple(USER_FORMATS),
    "size": ("folder", "leaf", "users"),
    "problem": ("quadratics",),
}
"""Keys of `data` that only some data sets have, with these."""

DESCRIPTIONS = {
    "cifar10": "60,000 colour images of 10 things and animals, 32 x 32",
    "cifar100": "60,000 colour images of 100 things and animals, 32 x 32",
    "covid_ct": "746 grey images of lungs with and without COVID, 128 x 128",
    "digits": "1,797 grey handwritten digits of scikit-learn, 8 x 8",
    "emnist_balanced": "131,600 grey handwritten digits and letters in 47 classes, 28 x 28",
    "emnist_digits": "280,000 grey handwritten digits, 28 x 28",
    "emnist_letters": "145,600 grey handwritten letters in 26 classes, 28 x 28",
    "fashionmnist": "70,000 grey images of 10 kinds of clothes, 28 x 28",
    "folder": "your own images, in a folder for each class",
    "leaf": "the JSON files of LEAF's benchmarks, with a test set for each user",
    "mnist": "70,000 grey handwritten digits, 28 x 28",
    "pfllib": "the .npz files of PFLlib, with a test set for each client",
    "quadratics": "drawn least-squares problems, one for each client; no images",
    "tiny_imagenet": "110,000 colour images of 200 classes, 64 x 64",
    "users": "your own images of natural users, named by one table or two",
}
"""Description of each named data set; the counts include training and test examples."""

OTHER_KINDS = ("arrays", "torchvision", "hf")
"""Names that need further keys."""


def dataset_names() -> tuple[str, ...]:
    """Return the names of the data sets that need no code, file or further key of the user's."""
    return tuple(sorted((*TORCHVISION_SOURCES, *built_in_datasets.LOADERS, *USER_FORMATS)))


def catalogue() -> Iterator[tuple[str, str]]:
    """Yield name and distribution of every data set that has a name."""
    for name in dataset_names():
        yield name, "raysim"
    taken = (*dataset_names(), *OTHER_KINDS)
    for name, _, origin in entry_points.offered(entry_points.DATA, "data.name", taken):
        yield name, origin


def files_pattern(name: str) -> str:
    """Return the pattern of the files of a data set, relative to the folder of the data sets.

    Args:
        name: name of the data set.

    Returns:
        A pattern of `Path.glob`; "" for a data set without files in that folder.
    """
    if name in TORCHVISION_SOURCES:
        files, pattern = built_in_datasets.torchvision_files(name, Path())
        return (files / pattern).as_posix()
    return {"tiny_imagenet": "tiny-imagenet-200", "covid_ct": "COVID-CT"}.get(name, "")


def is_present(name: str) -> bool:
    """Return whether the files of a data set are in its folder; they may be incomplete.

    Args:
        name: name of the data set.
    """
    pattern = files_pattern(name)
    return name in BUILT_IN_DATASETS or (pattern != "" and any(data_root().glob(pattern)))


def load_dataset(data: AnyData) -> Dataset:
    """Load a data set.

    `data.augment` decides on crops and mirroring: null as usual for the data set, false none, true
    also where it is not usual (then crops after padding by an eighth of the height).
    `data.scaling=unit` leaves pixels in [0, 1], `per_pixel` standardises each of them.

    Args:
        data: the section `data` of the configuration.

    Returns:
        The examples as arrays.

    Raises:
        ConfigError: the name is unknown, the files are missing or damaged, the download failed, or
            the examples cannot be used; the message names the file or the function.
    """
    if isinstance(data, Data):
        _check_name(data.name)
    startup_stages.begin(f"loading {data.name}")
    load = LOADERS[type(data)]
    return _augmented(data, _scaled(data, load(data)))


def _scaled(data: AnyData, dataset: Dataset) -> Dataset:
    """Return a data set whose pixels become inputs as `data.scaling` has it."""
    if data.scaling == "standard":
        return dataset
    if not dataset.are_images:
        raise ConfigError(
            f"data.scaling: {data.scaling} is for images, x as uint8 with one or three channels, "
            f"but {dataset.name} has {dataset.x.dtype} {list(dataset.x.shape)}; leave it out"
        )
    if data.scaling == "per_pixel":
        scale, shift = normalise_each_pixel(dataset.x)
    else:
        channels = dataset.shape[0]
        top = MAX_PIXEL_VALUES.get(data.name, 255)
        scale, shift = normalise(([0.0] * channels, [1.0] * channels), top)
    return replace(dataset, scale=scale, shift=shift)


def _augmented(data: AnyData, dataset: Dataset) -> Dataset:
    """Return a data set with the augmentation of `data.augment`."""
    if data.augment is None:
        return dataset
    if not data.augment:
        return replace(dataset, pad=0, flip=False)
    if not dataset.are_images:
        raise ConfigError(
            f"data.augment: {data.name} are not images to crop and mirror; leave it out"
        )
    if dataset.y.ndim > 2:
        shape = list(dataset.y.shape[1:])
        raise ConfigError(
            f"data.augment: {data.name} has targets of shape {shape}, which would not be cropped "
            "and mirrored with their images; leave it out"
        )
    return replace(dataset, pad=dataset.pad or dataset.shape[1] // 8, flip=True)


def loading_once() -> Callable[[AnyData], Dataset]:
    """Return a function like `load_dataset` that loads the data set of each section only once."""
    loaded: dict[str, Dataset] = {}

    def load(data: AnyData) -> Dataset:
        section = data.model_dump_json()
        if section not in loaded:
            loaded[section] = load_dataset(data)
        return loaded[section]

    return load


def _load_own(data: OwnData) -> Dataset:
    """Load what a user's function returns, or that of an installed package."""
    reference: str | None = data.name
    if ":" not in data.name:
        taken = (*dataset_names(), *OTHER_KINDS)
        reference = entry_points.offered_reference(
            entry_points.DATA, "data.name", data.name, data.name in taken
        )
    assert reference is not None  # the section is OwnData because there is an entry point
    return reading.from_function(data, reference)


def version_of(data: AnyData) -> str:
    """Return a text that changes with the files and the code that give a user's own examples.

    Args:
        data: the section `data` of the configuration.

    Raises:
        ConfigError: the file of the user's function does not exist.
    """
    paths: list[Path] = []
    code = ""
    match data:
        case Arrays():
            paths = [Path(data.path)]
        case HuggingFace():
            paths = sorted(Path(data.path).expanduser().rglob("*"))
        case OwnData():
            paths = [Path(text) for text in data.parameters.values() if isinstance(text, str)]
            file = data.name.rpartition(":")[0]
            code = read_code(file, "data.name").package if file.endswith(".py") else ""
    states = []
    for path in filter(Path.is_file, map(Path.expanduser, paths)):
        states.append((path.stat().st_size, path.stat().st_mtime_ns))
    return f"{code} {states}"


def _check_name(name: str) -> None:
    """Raise ConfigError if no data set has this name."""
    if name not in dataset_names():
        installed = (point.name for point in entry_points.entry_points(entry_points.DATA))
        known = (*dataset_names(), *OTHER_KINDS, *installed)
        raise ConfigError(
            f"data.name: unknown name '{name}'{did_you_mean(name, known)}; your own is given as "
            "path.py:FUNCTION, which returns (x, y, x_test, y_test), or as data={name: arrays, "
            "path: FILE.npz}"
        )


def _load_known(data: Data) -> Dataset:
    """Load a data set by its name."""
    for key, names in KEYS_OF_DATA_SETS.items():
        if getattr(data, key) is not None and data.name not in names:
            raise ConfigError(
                f"data.{key}: is a key of {', '.join(names)} only; leave it out for {data.name}"
            )
    if data.download and data.name not in MANUAL_STEPS:
        download_dataset(data.name, data.root)
    if data.name in TORCHVISION_SOURCES:
        return built_in_datasets.load_torchvision(data.name, data_root(data.root))
    return {**built_in_datasets.LOADERS, **USER_FORMATS}[data.name](data)


LOADERS: dict[type, Callable[[Any], Dataset]] = {
    OwnData: _load_own,
    Arrays: reading.from_npz,
    TorchvisionData: from_torchvision,
    HuggingFace: from_hugging_face,
    Data: _load_known,
}
"""The loader of each kind of section `data`."""


def download_dataset(name: str, root: str | Path | None = None) -> None:
    """Download a data set, unless it is there.

    Args:
        name: name of the data set.
        root: folder of the data sets; None: that of `data_root`.

    Raises:
        ConfigError: the name is unknown, the data set cannot be downloaded, or the download failed.
    """
    if name not in dataset_names():
        fetched = (*TORCHVISION_SOURCES, "tiny_imagenet")
        raise ConfigError(f"unknown data set '{name}'{did_you_mean(name, fetched)}")
    if name in MANUAL_STEPS:
        raise ConfigError(f"{name} cannot be downloaded: {MANUAL_STEPS[name]}")
    folder = data_root(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if name in TORCHVISION_SOURCES:
            for train in (True, False):
                built_in_datasets.torchvision_half(name, folder, train=train, download=True)
        elif name == "tiny_imagenet":
            built_in_datasets.download_tiny_imagenet(folder)
    except (RuntimeError, OSError) as error:  # URLError is an OSError
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name} could not be downloaded to {folder}: {reason}") from None
