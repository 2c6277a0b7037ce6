"""Images of natural users that CSV files name (`data.name: users`)."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raysim.config.sections.data import Data
from raysim.data.dataset import Dataset, normalise_by_imagenet, path_of_files
from raysim.data.images import cached, common_form, decode_images
from raysim.data.own.natural_users import number_users
from raysim.errors import ConfigError, unreadable
from raysim.spelling import lacking

FORMAT = (
    "one CSV file with the columns user,image,class,split (split is train or test), or a folder "
    "with train.csv (user,image,class) and test.csv (image,class, and user for each user's own "
    "test); images are paths from the CSV file's folder"
)
"""The tables that are read, for errors."""

COLUMNS = ("image", "class", "user", "split")
"""Columns that are read, if a table has them."""


class ImageRow(NamedTuple):
    """An image that a CSV file names, and where it does."""

    path: Path
    label: str
    user: str
    split: str
    place: str


def load_users(data: Data) -> Dataset:
    """Load images of natural users; two tables have the format of Landmarks-User-160k (Hsu 2020).

    Args:
        data: the section `data`.

    Raises:
        ConfigError: the path is missing, or its tables or images cannot be used.
    """
    path = path_of_files(data)
    is_file = path.is_file()
    folder = path.parent if is_file else path
    train, test = _rows_of_file(path) if is_file else _rows_of_folder(path)
    classes, y = np.unique([row.label for row in train], return_inverse=True)
    known = set(classes.tolist())
    for row in test:
        if row.label not in known:
            raise ConfigError(f"{row.place}: class '{row.label}' has no training image")
    users_test = _users_of_test(test)
    x, x_test = _images(train, test, data.size, folder)
    y_test = np.searchsorted(classes, [row.label for row in test])
    numbered = number_users(
        np.array([row.user for row in train]),
        users_test,
        f"data.path: {data.path}",
        lambda k: f"{test[k].place}: the image",
    )
    name = path.stem if is_file else path.resolve().name
    norm = normalise_by_imagenet(x)
    labels = tuple(classes.tolist())
    return Dataset(name, x, y, x_test, y_test, labels, *norm, **numbered._asdict())


def _users_of_test(test: Sequence[ImageRow]) -> np.ndarray | None:
    """Return the user of each test image; None if no image has one. All or none must have one."""
    users = [row.user for row in test]
    if not any(users):
        return None
    if "" in users:
        place = test[users.index("")].place
        raise ConfigError(f"{place}: no user, but other test images have one")
    return np.array(users)


def _images(
    train: Sequence[ImageRow], test: Sequence[ImageRow], size: int | None, folder: Path
) -> list[np.ndarray]:
    """Return the images of both halves, from the cache in their folder if they are there."""

    def decode() -> list[np.ndarray]:
        side, mode = common_form([row.path for row in train], size, (row.place for row in train))
        return [
            decode_images((row.path for row in half), side, mode, (row.place for row in half))
            for half in (train, test)
        ]

    version = _version_of_images((*train, *test), folder)
    kept = folder / f"raysim-{size or 'median'}-{version}.npz"
    return cached(kept, [len(train), len(test)], decode)


def _version_of_images(rows: Sequence[ImageRow], folder: Path) -> str:
    """Return a text that changes with the images' places, sizes and times; all must exist."""
    listed = hashlib.sha256()
    for row in rows:
        with unreadable(f"{row.place}: image {row.path}"):
            status = row.path.stat()
        listed.update(
            f"{os.path.relpath(row.path, folder)} {status.st_size} {status.st_mtime_ns}\n".encode()
        )
    return listed.hexdigest()[:12]


Halves = tuple[list[ImageRow], list[ImageRow]]
"""The rows of the training and of the test images."""


def _rows_of_folder(folder: Path) -> Halves:
    """Return the rows of train.csv and test.csv, or of the only CSV file of a folder."""
    tables = sorted(folder.glob("*.csv"))
    if len(tables) == 1 and tables[0].name not in ("train.csv", "test.csv"):
        return _rows_of_file(tables[0])
    train = _read_rows(folder / "train.csv", ("user", "image", "class"))
    return train, _read_rows(folder / "test.csv", ("image", "class"))


def _rows_of_file(file: Path) -> Halves:
    """Return the rows of a CSV file with a column split."""
    halves: dict[str, list[ImageRow]] = {"train": [], "test": []}
    for row in _read_rows(file, ("image", "class", "split")):
        if row.split not in halves:
            raise ConfigError(f"{row.place}: split is '{row.split}'; it is train or test")
        if row.split == "train" and not row.user:
            raise ConfigError(f"{row.place}: no user")
        halves[row.split].append(row)
    for split, rows in halves.items():
        if not rows:
            raise ConfigError(f"{file}: names no images of the split {split}")
    return halves["train"], halves["test"]


def _image_row(
    row: dict[str, str | None], file: Path, line: int, columns: Sequence[str]
) -> ImageRow:
    """Return a row of a CSV file; refuse one with empty cells in the needed columns."""
    place = f"{file}:{line}"
    values = {key: (row.get(key) or "").strip() for key in COLUMNS}
    for column in columns:
        if not values[column]:
            raise ConfigError(f"{place}: no {column}")
    image = file.parent / values["image"]
    return ImageRow(image, values["class"], values["user"], values["split"], place)


def _read_rows(file: Path, columns: Sequence[str]) -> list[ImageRow]:
    """Return the rows of a CSV file; refuse missing columns and empty cells."""
    rows = []
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            if missing := lacking(columns, reader.fieldnames or ()):
                raise ConfigError(f"{file}:1: no column {', '.join(missing)}; expected {FORMAT}")
            for row in reader:
                rows.append(_image_row(row, file, reader.line_num, columns))
    except OSError as error:
        raise ConfigError(
            f"data.path: {file} cannot be read: {error.strerror}; expected {FORMAT}"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"data.path: {file} is not a CSV file in UTF-8: {error}") from None
    if not rows:
        raise ConfigError(f"{file}: names no images")
    return rows
