"""Names of classes that data sets carry, and test labels that are numbered as the training half's.

A data set of torchvision has `classes`; a column of Hugging Face has a feature with `names`. Each
half numbers the names by itself, so that a class that one half lacks shifts the numbers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from raysim.errors import ConfigError

Names = tuple[str, ...]
"""Names of the classes, by number; () if they are not known."""


def class_names(half: Any, place: str) -> Names:
    """Return the names of a data set's labels, also of a part of it or of several.

    Args:
        half: a data set of torch, which may give other labels if it has a `target_transform`, or of
            Hugging Face with the column y.
        place: key and source, with which errors begin.

    Raises:
        ConfigError: the parts of a ConcatDataset number their classes differently.
    """
    if hasattr(half, "column_names"):
        return column_names(half, "y")
    if isinstance(half, Subset):
        return class_names(half.dataset, place)
    if isinstance(half, ConcatDataset):
        of_parts = sorted({class_names(part, place) for part in half.datasets}, key=len)
        for names, more in pairwise(of_parts):
            if names != more[: len(names)]:
                raise ConfigError(
                    f"{place}: data sets that are joined number their classes differently, "
                    f"{', '.join(names)} and {', '.join(more)}; give all of them the same classes"
                )
        return of_parts[-1]
    names = getattr(half, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    return () if getattr(half, "target_transform", None) is not None else tuple(names)


def column_names(half: Any, column: str) -> Names:
    """Return the names of the labels in a column of a Hugging Face data set.

    Args:
        half: the data set.
        column: the column, of labels or of lists of labels.
    """
    feature: Any = (half.features or {}).get(column)
    while hasattr(feature, "feature"):  # of a list
        feature = feature.feature
    return tuple(getattr(feature, "names", None) or ())


def in_names_order(y_test: Any, names: Names, names_test: Names, place: str) -> Any:
    """Return test labels in the numbers that the training half gives their names.

    Args:
        y_test: labels of the test half, of any shape; negative ones are none and stay.
        names: names of the training half's classes.
        names_test: names of the test half's classes.
        place: key and source, with which errors begin.

    Raises:
        ConfigError: a test label has a name that the training half lacks.
    """
    if not names or names[: len(names_test)] == names_test:  # also without names of the test half
        return y_test
    if isinstance(y_test, list) or y_test.dtype.kind == "O":
        return [in_names_order(np.asarray(row), names, names_test, place) for row in y_test]
    if y_test.dtype.kind not in "iu":
        return y_test
    known = {name: number for number, name in enumerate(names)}
    is_label = (y_test >= 0) & (y_test < len(names_test))
    numbers = np.array([known.get(name, -1) for name in names_test])[np.where(is_label, y_test, 0)]
    unknown = is_label & (numbers < 0)
    if unknown.any():
        name = names_test[int(y_test[unknown].flat[0])]
        raise ConfigError(
            f"{place}: the test half has the class '{name}', which the training half lacks "
            f"({', '.join(names)}); give both halves the same classes"
        )
    return np.where(is_label, numbers, y_test)
