"""Data sets of Hugging Face, from folders: what becomes of the columns, what is refused, and what
identifies a run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter

import raysim
from raysim.config.sections.base import named
from raysim.config.sections.data import AnyData
from raysim.data import import_torchvision, load_dataset
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

import_torchvision()  # datasets imports it, and its operators may not load
import datasets  # noqa: E402

datasets.disable_progress_bars()

N, N_TEST = 24, 9
USERS = [f"user{k % 3}" for k in range(N)]
TOKENS = np.random.default_rng(3).integers(0, 50, (N, 4))


def table(n: int) -> dict[str, list]:
    return {
        "text": [f"review {k}" for k in range(n)],
        "tokens": TOKENS[:n].tolist(),
        "features": (TOKENS[:n] / 8).tolist(),
        "target": [k / 2 for k in range(n)],
        "label": [k % 3 for k in range(n)],
        "who": USERS[:n],
        "ragged": [[0] * (k % 2 + 1) for k in range(n)],
        "gap": [None if k == 5 else k for k in range(n)],
    }


def saved(folder: Path, **splits: Any) -> str:
    splits = splits or {"train": N, "test": N_TEST}
    halves = {k: datasets.Dataset.from_dict(table(n)) for k, n in splits.items()}
    for key, half in halves.items():
        halves[key] = half.cast_column("label", datasets.ClassLabel(names=["ant", "bee", "cat"]))
    datasets.DatasetDict(halves).save_to_disk(str(folder))
    return str(folder)


def pictures(folder: Path, sizes: list[tuple[int, int]], mode: str = "RGB") -> str:
    """Save one training image of each (width, height), with its number as brightness, and one test
    image."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})

    def half(sizes: list[tuple[int, int]]) -> datasets.Dataset:
        images = [
            Image.new(mode, size, k if mode == "L" else (k, 7, 9)) for k, size in enumerate(sizes)
        ]
        columns = {"image": images, "label": [k % 2 for k in range(len(sizes))]}
        return datasets.Dataset.from_dict(columns, features=features)

    whole = datasets.DatasetDict({"train": half(sizes), "test": half(sizes[:1])})
    whole.save_to_disk(str(folder))
    return str(folder)


def section(path: str, **keys: Any) -> Any:
    keys = {"x": "tokens", "y": "label", **keys}
    return TypeAdapter(AnyData).validate_python(named({"name": "hf", "path": path, **keys}))


# -- what is read ----------------------------------------------------------------------------------


def test_columns_are_read_by_name(tmp_path):
    dataset = load_dataset(section(saved(tmp_path / "bugs"), user="who"))
    assert dataset.name == "bugs" and dataset.classes == ("ant", "bee", "cat")
    assert dataset.x.dtype == np.int64 and dataset.x.tolist() == TOKENS.tolist()
    assert dataset.y_test.tolist() == [k % 3 for k in range(N_TEST)]
    assert dataset.group_names == ("user0", "user1", "user2")
    assert dataset.groups is not None and dataset.groups.tolist() == [k % 3 for k in range(N)]


def test_numbers_and_lists_are_arrays(tmp_path):
    path = saved(tmp_path / "a")
    vectors = load_dataset(section(path, x="features", y="target"))
    np.testing.assert_array_equal(vectors.x, (TOKENS / 8).astype(np.float32))
    np.testing.assert_array_equal(vectors.y, np.arange(N) / 2)
    assert not vectors.are_labelled
    tokens = load_dataset(section(path, x="tokens", y="tokens"))
    assert tokens.y.shape == (N, 4)
    assert load_dataset(section(path, x="target")).shape == (1,)


def test_arrays_of_pixels_are_images(tmp_path):
    features = {"x": datasets.Array3D((8, 8, 3), "uint8"), "y": datasets.Value("int64")}
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    half = datasets.Dataset.from_dict(
        {"x": list(x), "y": [0, 1] * 3}, features=datasets.Features(features)
    )
    path = str(tmp_path / "a")
    datasets.DatasetDict({"train": half, "test": half}).save_to_disk(path)
    data = load_dataset(section(path, x="x", y="y"))
    assert data.are_images and np.array_equal(data.x, x.transpose(0, 3, 1, 2))


def test_splits_are_read_by_name(tmp_path):
    path = saved(tmp_path / "a", small=5, train=12, validation=4)
    dataset = load_dataset(section(path, train="small", test="validation"))
    assert (len(dataset.y), len(dataset.y_test)) == (5, 4)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_images_are_pixels(tmp_path, mode, channels):
    path = pictures(tmp_path / "a", [(4, 5)] * 6, mode)
    dataset = load_dataset(section(path, x="image"))
    assert dataset.x.shape == (6, channels, 5, 4) and dataset.are_images
    assert dataset.x[:, 0, 2, 1].tolist() == list(range(6))
    if mode == "RGB":
        assert (dataset.x[:, 1] == 7).all() and (dataset.x[:, 2] == 9).all()


def test_images_of_different_sizes_become_squares(tmp_path):
    path = pictures(tmp_path / "a", [(4, 8), (6, 6), (9, 7), (20, 9), (10, 11)])
    assert load_dataset(section(path, x="image")).shape == (3, 7, 7)  # the median of 4 6 7 9 10
    assert load_dataset(section(path, x="image", size=5)).shape == (3, 5, 5)


def test_a_folder_of_parquet_files_is_read_as_load_dataset_does(tmp_path, monkeypatch):
    """The same call reads data sets of the hub, which needs a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, n in (("train", N), ("test", N_TEST)):
        (tmp_path / "a").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(table(n)).to_parquet(str(tmp_path / "a" / f"{split}.parquet"))
    dataset = load_dataset(section(str(tmp_path / "a")))
    assert dataset.x.tolist() == TOKENS.tolist() and dataset.classes == ("0", "1", "2")
    with pytest.raises(ConfigError, match=r"^data.config: .*/a: .*german"):
        load_dataset(section(str(tmp_path / "a"), config="german"))


def test_a_column_of_users_that_only_the_training_file_has(tmp_path, monkeypatch):
    """load_dataset gives it to the test split, too, without values."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a").mkdir()
    half = {"f": [0.5, 1.5, 2.5], "label": [0, 1, 1]}
    pd.DataFrame({**half, "who": [3, 4, 3]}).to_parquet(tmp_path / "a" / "train.parquet")
    pd.DataFrame(half).to_parquet(tmp_path / "a" / "test.parquet")
    dataset = load_dataset(section(str(tmp_path / "a"), x="f", y="label", user="who"))
    assert dataset.group_names == ("3", "4") and dataset.test_groups is None


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"x": "token"}, r"x: the split train of .*/a has no column 'token'; did you mean 'tokens"),
        ({"y": "class"}, r"y: .* has no column 'class'.*\(known: features, gap, label, .*, who\)"),
        ({"user": "id"}, r"user: .* has no column 'id' \(known: feat"),
        ({"train": "trian"}, "train: .* has no split 'trian'; did you mean 'train'"),
        ({"test": "validation"}, r"test: .*/a has no split 'validation' \(known: test, train\)"),
        ({"x": "text"}, "x: .* has texts in its column 'text'; turn it into lists of token numb"),
        ({"y": "text"}, "y: .* has texts in its column 'text'; use class_encode_column"),
        ({"y": "gap"}, r"path: .*: y\[5\] holds nan"),
        ({"user": "gap"}, "path: .*: users is float"),
        ({"size": 4}, "size: the column 'tokens' of .* holds no images"),
        ({"config": "de"}, "config: .* is a folder made by save_to_disk, which has no"),
    ],
)
def test_what_is_missing_or_cannot_be_used_is_named_by_its_key(tmp_path, keys, message):
    path = saved(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"^data.{message}"):
        load_dataset(section(path, **keys))


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^data.path: \./none is neither a folder nor a name"):
        load_dataset(section("./none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^data.path: .*/empty cannot be read: "):
        load_dataset(section(str(tmp_path / "empty")))
    datasets.Dataset.from_dict(table(4)).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"^data.path: .*/one holds one data set without splits"):
        load_dataset(section(str(tmp_path / "one")))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "train.csv").write_text("a\n1\n2,3\n")
    with pytest.raises(
        ConfigError, match=r"/torn cannot be read: .*caused by ParserError: .* saw 2"
    ):
        load_dataset(section(str(tmp_path / "torn")))
    path = saved(tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "test")
    with pytest.raises(ConfigError, match=r"^data.path: .*/broken cannot be read: "):
        load_dataset(section(path))


def test_a_damaged_image_is_named(tmp_path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    Image.new("L", (4, 4)).save(tmp_path / "good.png")
    content = [(tmp_path / "good.png").read_bytes(), b"no image"]
    columns = {"image": [{"bytes": c, "path": None} for c in content], "label": [0, 1]}
    half = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": half, "test": half}).save_to_disk(str(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"^data.x: example 1 of the split train of .* cannot be"):
        load_dataset(section(str(tmp_path / "a"), x="image"))


@pytest.mark.parametrize("module", [None, type(sys)("datasets")])  # missing; a folder of this name
def test_a_missing_package_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ConfigError, match=r"^data.name: 'hf' needs .*pip install 'raysim\[hf\]'"):
        load_dataset(section("mnist"))


# -- runs, and what identifies them ----------------------------------------------------------------


def test_the_content_is_part_of_the_identity_and_not_its_place(tmp_path, base):
    config = {
        **base,
        "rounds": 2,
        "data": {
            "name": "hf",
            "path": saved(tmp_path / "a"),
            "x": "features",
            "y": "label",
            "user": "who",
        },
        "partition": {"name": "natural", "test": "natural"},
        "model": {"name": "logistic"},
        "algorithm": "fedavg",
        "local": {"steps": 2, "batch_size": 4, "lr": 0.1},
        "schedule": {"cohort": 2},
    }
    whole = raysim.run(config)
    first = raysim.run(config, {"rounds": 1, "run_dir": str(tmp_path / "first")})
    elsewhere = {"data.path": saved(tmp_path / "b")}
    assert prepare(config, elsewhere).config.fingerprint == whole.config.fingerprint
    assert (
        prepare(config, {"data.y": "target", "task": "regression"}).config.fingerprint
        != whole.config.fingerprint
    )
    assert raysim.resume(first.run_dir, {"rounds": 2}).digest == whole.digest
    shutil.rmtree(tmp_path / "a")
    saved(tmp_path / "a", train=N - 1, test=N_TEST)
    assert prepare(config).config.fingerprint != whole.config.fingerprint
    with pytest.raises(ConfigError, match=r"data.path: .*/a has changed since this run began"):
        raysim.resume(whole.run_dir, {"rounds": 3})


@pytest.mark.ray
@pytest.mark.usefixtures("recycled_actors")
def test_tokens_of_users_give_the_same_bits_on_two_actors_and_after_resume(tmp_path, base):
    path = saved(tmp_path / "a")
    config = {
        **base,
        "rounds": 2,
        "data": {"name": "hf", "path": path, "x": "tokens", "y": "tokens", "user": "who"},
        "partition": {"name": "natural", "test": "natural"},
        "task": "next_token",
        "model": {"name": "lstm", "embedding": 4, "hidden": 6, "layers": 1},
        "algorithm": "fedavg",
        "local": {"steps": 2, "batch_size": 4, "lr": 0.5},
        "schedule": {"cohort": 2},
    }
    inline = raysim.run(config)
    on_actors = {"resources": {"executor": "ray", "actors": 2, "threads": 1}}
    stopped = raysim.run(config, {**on_actors, "rounds": 1, "run_dir": str(tmp_path / "ray")})
    assert raysim.resume(stopped.run_dir, {"rounds": 2}).digest == inline.digest


def test_a_list_of_columns_is_several_inputs(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = torch.nn.Embedding(50, 3), torch.nn.Linear(7, 3)

        def forward(self, tokens, features):
            assert tokens.dtype == torch.int64
            return self.head(torch.cat([self.words(tokens).mean(1), features], 1))

    section = {"name": "hf", "path": saved(tmp_path / "two"), "y": "label"}
    config = {
        "model": Net(),
        "partition": {"clients": 3},
        "algorithm": "fedavg",
        "rounds": 1,
        "seed": 0,
        "local": {"steps": 2, "batch_size": "full", "lr": 0.1},
        "schedule": {"cohort": 3},
        "resources": {"executor": "inline"},
    }
    data = {**section, "x": ["features", "tokens"]}
    result = raysim.run({**config, "data": data}, tracking=False)
    x = {"tokens": TOKENS, "features": (TOKENS / 8).astype("float32")}
    test = {key: value[:N_TEST] for key, value in x.items()}
    same = (x, np.arange(N) % 3, test, np.arange(N_TEST) % 3)
    expected = raysim.run({**config, "data": same}, tracking=False)
    for key, value in result.state_dict.items():
        torch.testing.assert_close(value, expected.state_dict[key], rtol=0, atol=0)
    # The order of columns is not that of the arguments, which are found by name.
    torch.testing.assert_close(result.predict(test), expected.predict(test))
    with pytest.raises(ConfigError, match=r"data\.x: the split train .* has no column 'token'"):
        raysim.run({**config, "data": {**section, "x": ["features", "token"]}}, tracking=False)
    with pytest.raises(ConfigError, match=r"x\['ragged'\] has rows of different lengths; pad them"):
        raysim.run({**config, "data": {**section, "x": ["tokens", "ragged"]}}, tracking=False)
