"""Test labels by the names of the training half's classes, and labels that are no numbering."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import raysim
from raysim.config.sections.data import Data, HuggingFace, TorchvisionData
from raysim.data import import_torchvision, load_dataset
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError

torchvision = import_torchvision()  # datasets imports it, and its operators may not load
import datasets  # noqa: E402

datasets.disable_progress_bars()

RNG = np.random.default_rng(9)
NAMES = ["cat", "dog", "owl"]
ORDERS = [["owl", "cat", "dog"], ["cat", "owl", "dog"], ["dog", "owl", "cat"]]
X, Y = RNG.normal(size=(30, 4)), np.arange(30) % 3


def made(content: Any) -> Any:
    return make_dataset("mine", content, "data")


def half(names: list[str], wanted: list[str]) -> datasets.Dataset:
    """Return a half of Hugging Face whose labels have the wanted names."""
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float64")), "y": datasets.ClassLabel(names=names)}
    )
    columns = {"x": X[: len(wanted)].tolist(), "y": [names.index(name) for name in wanted]}
    return datasets.Dataset.from_dict(columns, features=features)


ALL = [NAMES[k] for k in Y]


# -- Hugging Face ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_labels_of_another_order_have_the_numbers_of_the_training_half(order, tmp_path):
    splits = datasets.DatasetDict(train=half(NAMES, ALL), test=half(order, ALL))
    splits.save_to_disk(str(tmp_path / "a"))
    saved = HuggingFace(name="hf", path=str(tmp_path / "a"), x="x", y="y")
    for dataset in (made(splits), load_dataset(saved)):
        assert dataset.classes == tuple(NAMES)
        assert dataset.y.tolist() == dataset.y_test.tolist() == Y.tolist()


def test_parts_of_a_data_set_keep_its_names():
    test = ConcatDataset([Subset(half(ORDERS[0], ALL), range(9)), half(ORDERS[0], ALL)])  # pyright: ignore[reportArgumentType]
    dataset = made((half(NAMES, ALL), test))
    assert dataset.y_test.tolist() == [*Y[:9], *Y]


def test_a_class_that_the_test_half_lacks_shifts_no_label():
    wanted = [name for name in ALL if name != "cat"]
    train = datasets.Dataset.from_dict({"x": X.tolist(), "y": ALL})
    test = datasets.Dataset.from_dict({"x": X[: len(wanted)].tolist(), "y": wanted})
    encoded = datasets.DatasetDict(train=train, test=test).class_encode_column("y")
    assert encoded["test"].features["y"].names == ["dog", "owl"]
    assert made(encoded).y_test.tolist() == [NAMES.index(name) for name in wanted]


def test_labels_of_each_token_are_mapped_too():
    def tagged(names: list[str], rows: list[list[str]]) -> datasets.Dataset:
        columns = {"x": rows, "y": [[names.index(name) for name in row] for row in rows]}
        columns["x"] = [[1] * len(row) for row in rows]
        label = datasets.Sequence(datasets.ClassLabel(names=names))
        features = {"x": datasets.Sequence(datasets.Value("int64")), "y": label}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    rows = [["cat", "owl"], ["dog"], ["owl", "dog", "cat"]]
    dataset = made((tagged(NAMES, rows), tagged(ORDERS[0], rows)))
    assert dataset.y_test.tolist() == dataset.y.tolist()


@pytest.mark.parametrize("names", [["cat", "dog", "emu"], [*NAMES, "emu"], ["emu", *NAMES]])
def test_a_class_that_the_training_half_lacks_is_named(names):
    splits = (half(NAMES, ALL), half(names, ["cat", "emu"]))
    with pytest.raises(ConfigError, match=r"^data: the test half has the class 'emu', which the"):
        made(splits)
    known = (half(NAMES, ALL), half(names, ["dog", "cat"]))  # a name without examples
    assert made(known).y_test.tolist() == [1, 0]


def test_labels_that_are_none_stay():
    """The test half of many data sets has -1 everywhere."""
    test = half(ORDERS[0], ALL).map(lambda row: {"y": -1})
    assert made((half(NAMES, ALL), test)).y_test.tolist() == [-1] * 30


# -- torchvision -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of three classes, of which the test half lacks the first."""
    for split, names in (("train", NAMES), ("test", NAMES[1:])):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            pixels = np.full((4, 4, 3), NAMES.index(name), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / name / "a.png")
    return tmp_path


def test_folders_of_images_are_numbered_by_name(folder):
    opened = [
        torchvision.datasets.ImageFolder(str(folder / split), torchvision.transforms.PILToTensor())
        for split in ("train", "test")
    ]
    train, test = opened
    parts = (Subset(train, range(3)), ConcatDataset([test, Subset(test, [1])]))
    by_name = load_dataset(Data(name="folder", path=str(folder)))
    for dataset in (made((train, test)), by_name, made(parts)):
        assert dataset.classes == tuple(NAMES)
        assert dataset.y_test.tolist() == dataset.x_test[:, 0, 0, 0].tolist()
    with pytest.raises(ConfigError, match="the test half has the class 'cat'"):
        made((test, train))
    with pytest.raises(ConfigError, match="data sets that are joined number their classes diff"):
        made((ConcatDataset([train, test]), test))


class Named(Dataset):
    """Labels with names; `target_transform` may give others."""

    def __init__(self, train: bool = True, target_transform: Any = None):
        self.classes = NAMES if train else ORDERS[0]
        self.target_transform = target_transform

    def __len__(self) -> int:
        return 30

    def __getitem__(self, k: int) -> Any:
        label = self.classes.index(ALL[k])
        x = Image.fromarray(np.full((4, 4), k, np.uint8))
        return x, self.target_transform(label) if self.target_transform else label


def test_a_class_of_torchvision_is_numbered_by_name(monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "Named", Named, raising=False)
    monkeypatch.setattr(torchvision.datasets, "__all__", ["Named"])
    for dataset in (
        load_dataset(TorchvisionData(name="torchvision", dataset="Named")),
        made((Named(), Named(train=False))),
    ):
        assert dataset.classes == tuple(NAMES)
        assert dataset.y_test.tolist() == dataset.y.tolist() == Y.tolist()


def test_transformed_labels_are_left_as_they_are():
    def reversed_(label: int) -> int:
        return 2 - label

    dataset = made((Named(), Named(train=False, target_transform=reversed_)))
    assert dataset.y_test.tolist() == [2 - ORDERS[0].index(name) for name in ALL]


# -- labels that are no numbering ------------------------------------------------------------------


def config(base: dict[str, Any], data: Any, **changes: Any) -> dict[str, Any]:
    keys = {"model": "logistic", "algorithm": "fedavg", "rounds": 1, "schedule": {"cohort": 2}}
    return {**base, **keys, "partition": {"clients": 3}, "data": data, **changes}


def labels(*numbers: int) -> tuple[Any, ...]:
    y = np.array(numbers)[np.arange(60) % len(numbers)]
    return np.ones((60, 4)), y, np.ones((60, 4)), y


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 10, 20), "go up to 20, but only 3 of these 21 classes have examples; class 1 has"),
        ((1, 2, 3), "go up to 3, but only 3 of these 4 classes have examples; class 0 has none"),
        ((0, 2), "go up to 2, but only 2 of these 3"),
        ((3, 8), "go up to 8, but only 2 of these 9"),
        ((0, 99_999), "go up to 99999, but only 2 of these 100000"),
    ],
)
@pytest.mark.parametrize("door", ["python", "arrays"])
def test_labels_with_gaps_are_refused_unless_classes_are_given(
    tmp_path, base, door, numbers, message
):
    x, y, x_test, y_test = labels(*numbers)
    data: Any = (x, y, x_test, y_test)
    if door == "arrays":
        np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x_test, y_test=y_test)
        data = {"name": "arrays", "path": str(tmp_path / "a.npz")}
    with pytest.raises(ConfigError, match=rf"^data.classes: the labels of .*\.npz {message}"):
        raysim.run(config(base, data))
    names, whole = np.unique(y), max(numbers) + 1
    assert len(set(np.searchsorted(names, y))) == len(numbers)  # the advice
    if whole < 100:
        declared = {"train": (x, y), "test": (x_test, y_test), "classes": whole}
        data = {**data, "classes": whole} if door == "arrays" else declared
        assert raysim.run(config(base, data)).parameters.numel() == 5 * whole


def test_a_class_that_may_lack_examples_by_chance_is_logged(base, caplog):
    few = tuple(half[:8] for half in labels(0, 1, 2, 4))
    with caplog.at_level(logging.WARNING, "raysim"):
        assert raysim.run(config(base, few)).parameters.numel() == 5 * 5
    assert "only 4 of these 5 classes have examples; class 3 has none; if" in caplog.text


def test_quantities_and_names_may_have_gaps(base, tmp_path):
    regression = {"task": "regression"}
    assert raysim.run(config(base, labels(0, 10, 20), **regression)).parameters.numel() == 5
    gaps = [name for name in ALL if name != "dog"]
    dataset = {"train": half(NAMES, gaps), "test": half(NAMES, gaps)}
    other = {"run_dir": str(tmp_path / "names")}
    assert raysim.run(config(base, dataset, **other)).parameters.numel() == 5 * 3


@pytest.mark.parametrize(
    "y", [Y[:, None], Y[:, None].astype(float), Y.astype(float), np.eye(3)[Y], X[:, 0]]
)
@pytest.mark.parametrize("tensors", [False, True])
def test_targets_that_are_no_labels_are_refused(base, y, tensors):
    data = (X, torch.tensor(y), X, torch.tensor(y)) if tensors else (X, y, X, y)
    with pytest.raises(ConfigError, match=r"expected one integer label .* y\[:, 0\] for a column"):
        raysim.run(config(base, data))


def test_a_column_of_mappings_has_several_inputs():
    rows = [{"ids": [k, k + 1], "mask": [1, k % 2]} for k in range(6)]
    table = datasets.Dataset.from_dict({"x": rows, "y": [0, 1] * 3})
    x = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    plain = make_dataset("mine", ((x, [0, 1] * 3), (x, [0, 1] * 3)), "data")
    assert make_dataset("mine", (table, table), "data").digest == plain.digest
