"""Data sets whose files the tests do not bring along."""

from __future__ import annotations

import os

import pytest

from raysim.config.sections.data import Data
from raysim.data import Dataset, load_dataset
from raysim.errors import ConfigError


def real_data_set(name: str) -> Dataset:
    """Load a data set from the folder in the variable TESTS_DATA; skip the test where it is missing."""
    root = os.environ.get("TESTS_DATA")
    if root is None:
        pytest.skip("set TESTS_DATA to a folder with the data sets, such as ~/.cache/raysim")
    try:
        return load_dataset(Data(name=name, root=root))
    except ConfigError as error:
        pytest.skip(str(error))
