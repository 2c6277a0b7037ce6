"""Data sets, their arrays on a device, and pictures. Formats are tested on small files of the same
layout."""

from __future__ import annotations

import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
from types import ModuleType
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from support.idx_files import write_idx
from support.real_data import real_data_set
from torch import nn

import raysim
from raysim.config.sections.data import Arrays, Data, Dirichlet, Natural, Virtual
from raysim.data import (
    Dataset,
    Examples,
    dataset_names,
    dataset_summary,
    download_dataset,
    images,
    load_dataset,
    plot_partition,
    plot_samples,
    split_dataset,
)
from raysim.data.dataset import (
    IMAGENET_MEAN_STD,
    broadcastable,
    normalise,
    normalise_by_imagenet,
    normalise_each_pixel,
)
from raysim.data.loading import DESCRIPTIONS, USER_FORMATS
from raysim.data.sources import built_in_datasets
from raysim.errors import ConfigError
from raysim.randomness import generator

pytestmark = pytest.mark.usefixtures("pictures")

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset(Data(name="digits"))


@pytest.fixture(scope="module")
def colour() -> Dataset:
    """CIFAR-like: 3 x 32 x 32 with CIFAR-10's statistics and augmentation."""
    source = built_in_datasets.TORCHVISION_SOURCES["cifar10"]
    x, y = pixels(60, 3, 32, 32), np.arange(60) % 10
    norm = normalise(source.statistics)
    return Dataset(
        "colour", x, y, x[:9], y[:9], tuple("abcdefghij"), *norm, pad=source.pad, flip=source.flip
    )


# Loading


def check(
    dataset: Dataset, n: int, n_test: int, shape: tuple[int, int, int], n_classes: int
) -> None:
    assert (
        dataset.x.shape == (n, *shape)
        and dataset.x_test.shape == (n_test, *shape)
        and dataset.shape == shape
    )
    assert dataset.x.dtype == dataset.x_test.dtype == np.uint8
    assert dataset.y.dtype == dataset.y_test.dtype == np.int64
    assert dataset.scale.dtype == dataset.shift.dtype == np.float64
    assert dataset.scale.shape == dataset.shift.shape == shape[:1]
    assert dataset.n_classes == len(dataset.classes) == n_classes
    assert dataset.y.min() >= 0 and dataset.y.max() < n_classes
    assert all(a.flags.c_contiguous for a in (dataset.x, dataset.y, dataset.x_test, dataset.y_test))


def test_digits_have_a_fixed_stratified_split(digits):
    check(digits, 1438, 359, (1, 8, 8), 10)
    assert digits.x.max() == 16
    for c in range(10):
        n, n_test = np.count_nonzero(digits.y == c), np.count_nonzero(digits.y_test == c)
        assert n_test == round((n + n_test) / 5)
    together = np.concatenate([digits.x, digits.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    assert sorted(map(tuple, together)) == sorted(map(tuple, load_digits().data.astype(np.uint8)))
    assert digits.digest == "f6a36cae35107c38a08e2bf82e0d19c5ecfa6aef20e2c70be7d9af4f9eef22d7"
    x, _ = Examples.of(digits, "train").batch(np.arange(1438))
    assert (x.min(), x.max()) == (0, 1)


@pytest.mark.parametrize(
    ("name", "shape", "n"),
    [
        ("mnist", (1, 28, 28), 60_000),
        ("fashionmnist", (1, 28, 28), 60_000),
        ("cifar10", (3, 32, 32), 50_000),
    ],
)
def test_real_files_have_the_known_statistics(name, shape, n):
    """Mean 0 and standard deviation 1 after normalisation; CIFAR's published deviations are means
    of those within an image, which leaves 1.25."""
    dataset = real_data_set(name)
    check(dataset, n, 10_000, shape, 10)
    x, _ = Examples.of(dataset, "train").batch(np.arange(0, n, 5))
    assert x.mean().abs() < 0.02
    assert abs(x.std() - (1.247 if name == "cifar10" else 1)) < 0.02
    assert_described(dataset)


def assert_described(dataset: Dataset) -> None:
    channels, height, width = dataset.x.shape[1:]
    colour = "grey" if channels == 1 else "colour"
    said = DESCRIPTIONS[dataset.name]
    assert said.startswith(f"{len(dataset.x) + len(dataset.x_test):,} {colour} "), said
    assert said.endswith(f", {height} x {width}"), said


def test_every_named_data_set_is_described():
    assert sorted(DESCRIPTIONS) == list(dataset_names())
    assert_described(load_dataset(Data(name="digits")))


@pytest.mark.parametrize("name", ["mnist", "fashionmnist"])
def test_mnist_format(name, tmp_path):
    folder = tmp_path / built_in_datasets.TORCHVISION_SOURCES[name].cls / "raw"
    images, labels = pixels(12, 28, 28), np.arange(12) % 10
    for half in ("train", "t10k"):
        write_idx(folder / f"{half}-images-idx3-ubyte", images)
        write_idx(folder / f"{half}-labels-idx1-ubyte", labels)
    dataset = load_dataset(Data(name=name, root=str(tmp_path)))
    check(dataset, 12, 12, (1, 28, 28), 10)
    assert np.array_equal(dataset.x[:, 0], images) and np.array_equal(dataset.y, labels)
    (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    with pytest.raises(ConfigError, match=f"the files of {name} in .* are damaged"):
        load_dataset(Data(name=name, root=str(tmp_path)))


@pytest.mark.parametrize(
    ("part", "first", "classes"), [("digits", 0, 10), ("letters", 1, 26), ("balanced", 0, 47)]
)
def test_emnist_is_upright_and_counts_from_0(part, first, classes, tmp_path):
    images, labels = pixels(60, 28, 28), np.arange(60) % classes + first
    for half in ("train", "test"):
        write_idx(tmp_path / "EMNIST" / "raw" / f"emnist-{part}-{half}-images-idx3-ubyte", images)
        write_idx(tmp_path / "EMNIST" / "raw" / f"emnist-{part}-{half}-labels-idx1-ubyte", labels)
    dataset = load_dataset(Data(name=f"emnist_{part}", root=str(tmp_path)))
    check(dataset, 60, 60, (1, 28, 28), classes)
    assert np.array_equal(dataset.x[:, 0], images.transpose(0, 2, 1)), (
        "the files hold images transposed"
    )
    assert np.array_equal(dataset.y, labels - first)
    assert dataset.classes[0] == {"digits": "0", "letters": "a", "balanced": "0"}[part]
    x, _ = Examples.of(dataset, "train").batch(np.arange(60))
    np.testing.assert_allclose(x[:, 0], images.transpose(0, 2, 1) / 255, rtol=1e-6)


def test_cifar100_format(tmp_path, monkeypatch):
    cifar = images.import_torchvision().datasets.CIFAR100
    folder = tmp_path / cifar.base_folder
    folder.mkdir()
    flat, labels = pixels(10, 3072), list(range(90, 100))
    for half in ("train", "test"):
        (folder / half).write_bytes(pickle.dumps({"data": flat, "fine_labels": labels}))
    (folder / "meta").write_bytes(
        pickle.dumps({"fine_label_names": [f"class {k}" for k in range(100)]})
    )
    with pytest.raises(
        ConfigError, match=rf"cifar100 .*: files are missing or damaged \({folder}\);"
    ):
        load_dataset(Data(name="cifar100", root=str(tmp_path)))
    monkeypatch.setattr(cifar, "train_list", [["train", None]])
    monkeypatch.setattr(cifar, "test_list", [["test", None]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": None})
    dataset = load_dataset(Data(name="cifar100", root=str(tmp_path)))
    check(dataset, 10, 10, (3, 32, 32), 100)
    assert np.array_equal(dataset.x, flat.reshape(10, 3, 32, 32))
    assert dataset.y.tolist() == labels and dataset.classes[7] == "class 7"
    assert (dataset.pad, dataset.flip) == (4, True)


def save(path, array: np.ndarray) -> np.ndarray:
    """Writes [H, W] or [H, W, 3] losslessly, whatever the name ends in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, format="PNG")
    return array


def test_tiny_imagenet_format(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    wnids = ["n02", "n01"]
    first = save(folder / "train/n01/images/n01_0.JPEG", pixels(64, 64, 3))
    grey = save(folder / "train/n01/images/n01_1.JPEG", pixels(64, 64))
    second = save(folder / "train/n02/images/n02_0.JPEG", pixels(64, 64, 3))
    test = save(folder / "val/images/val_0.JPEG", pixels(64, 64, 3))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t32\t44\t62\n")
    data = Data(name="tiny_imagenet", root=str(tmp_path))
    dataset = load_dataset(data)
    check(dataset, 3, 1, (3, 64, 64), 2)
    assert (
        dataset.classes == ("n01", "n02")
        and dataset.y.tolist() == [0, 0, 1]
        and dataset.y_test.tolist() == [1]
    )
    expected = np.stack([first, np.repeat(grey[..., None], 3, axis=2), second]).transpose(
        0, 3, 1, 2
    )
    assert np.array_equal(dataset.x, expected)
    assert np.array_equal(dataset.x_test[0], test.transpose(2, 0, 1))
    assert [path.name for path in folder.glob("raysim*")] == ["raysim-64.npz"]
    assert load_dataset(data).digest == dataset.digest
    (folder / "val/val_annotations.txt").unlink()
    with pytest.raises(
        ConfigError, match=r"tiny_imagenet is not in .*val_annotations\.txt.*raysim data fetch"
    ):
        load_dataset(data)


def test_decoded_images_are_kept_only_where_possible(tmp_path, capsys):
    arrays, counts = [pixels(2, 3, 4, 4), pixels(1, 3, 4, 4)], (2, 1)
    again = images.cached(tmp_path / "nowhere" / "a.npz", counts, lambda: arrays)
    assert again is arrays and "decoded again next time" in capsys.readouterr().err
    images.cached(tmp_path / "a.npz", counts, lambda: arrays)
    kept = images.cached(tmp_path / "a.npz", counts, lambda: pytest.fail("decoded twice"))
    assert all(np.array_equal(a, b) for a, b in zip(kept, arrays, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_covid_ct_format(tmp_path):
    folder = tmp_path / "COVID-CT"
    rows = [
        ("CT_COVID/2020.01.24.919183-p27-132.png", "COVID", "train", (128, 128)),
        ("CT_NonCOVID/7.png", "NonCOVID", "train", (128, 200)),
        ("CT_COVID/2020.02.10.20021584-p6-52%0.png", "COVID", "train", (140, 128)),
        ("CT_COVID/2020.01.24.919183-p27-133.png", "COVID", "train", (64, 64)),
        ("CT_COVID/other-page3-1.png", "COVID", "test", (128, 128)),
        ("CT_NonCOVID/8.png", "NonCOVID", "val", (128, 128)),
    ]
    images = [save(folder / file, pixels(*size)) for file, _, _, size in rows]
    with open(folder / "index.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "split", "width"])
        writer.writerows([*row[:3], 1] for row in rows)
    dataset = load_dataset(Data(name="covid_ct", root=str(tmp_path)))
    check(dataset, 4, 2, (1, 128, 128), 2)
    assert dataset.classes == ("NonCOVID", "COVID")
    assert dataset.y.tolist() == [1, 0, 1, 1] and dataset.y_test.tolist() == [1, 0]
    assert dataset.group_names == ("2020.01.24.919183", "2020.02.10.20021584")
    assert dataset.groups is not None and dataset.groups.dtype == np.int32
    assert dataset.groups.tolist() == [0, -1, 1, 0]
    assert np.array_equal(dataset.x[0, 0], images[0])
    assert np.array_equal(dataset.x[1, 0], images[1][:, 36:164]), "the centre of a wide image"
    assert np.array_equal(dataset.x[2, 0], images[2][6:134]), "the centre of a high image"
    (folder / "index.csv").write_text("file,label\n")
    with pytest.raises(ConfigError, match="expected a row for each image"):
        load_dataset(Data(name="covid_ct", root=str(tmp_path)))


def test_real_covid_ct():
    dataset = real_data_set("covid_ct")
    check(dataset, 425, 321, (1, 128, 128), 2)
    assert (dataset.y.sum(), dataset.y_test.sum()) == (191, 158)
    assert len(dataset.group_names) == 32
    assert dataset.groups is not None and np.array_equal(dataset.groups >= 0, dataset.y == 1)


def test_folder(tmp_path):
    """Squares of the median shorter side; labels follow the training classes even where the test
    half lacks one."""
    middle = save(tmp_path / "train/cat/1.png", pixels(20, 30, 3))
    save(tmp_path / "train/ant/1.png", pixels(10, 12))
    save(tmp_path / "train/dog/1.png", pixels(50, 40, 3))
    save(tmp_path / "val/dog/1.png", pixels(20, 20, 3))
    data = Data(name="folder", path=str(tmp_path))
    dataset = load_dataset(data)
    check(dataset, 3, 1, (3, 20, 20), 3)
    assert dataset.name == tmp_path.name and dataset.classes == ("ant", "cat", "dog")
    assert dataset.y.tolist() == [0, 1, 2] and dataset.y_test.tolist() == [2]
    assert np.array_equal(dataset.x[1], middle[:, 5:25].transpose(2, 0, 1))
    assert (dataset.pad, dataset.flip) == (0, False)
    augmented = load_dataset(data.model_copy(update={"augment": True}))
    assert (augmented.pad, augmented.flip) == (2, True)

    (tmp_path / "val/emu").mkdir()
    with pytest.raises(ConfigError, match=r"val has classes that .*train lacks: emu"):
        load_dataset(data)
    (tmp_path / "val/emu").rmdir()
    (tmp_path / "train/dog/1.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"dog/1\.png: cannot be read as an image"):
        load_dataset(data)


def test_folder_of_grey_images_is_grey(tmp_path):
    for half in ("train", "test"):
        save(tmp_path / half / "a/1.png", pixels(9, 9))
    assert load_dataset(Data(name="folder", path=str(tmp_path))).shape == (1, 9, 9)


def test_folder_mistakes(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path: missing"):
        load_dataset(Data(name="folder"))
    data = Data(name="folder", path=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"data\.path: .*train must hold one folder of images for each class"
    ):
        load_dataset(data)
    for half in ("train", "test"):
        (tmp_path / half / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"data\.path: no images in .*train/<class>/"):
        load_dataset(data)
    with pytest.raises(
        ConfigError,
        match=r"data\.path: is a key of folder, leaf, pfllib, users only; leave it out for dig",
    ):
        load_dataset(Data(name="digits", path=str(tmp_path)))


def test_a_folders_images_in_a_given_size(tmp_path):
    for half in ("train", "test"):
        save(tmp_path / half / "a/1.png", np.kron(pixels(4, 5), np.ones((2, 2), dtype=np.uint8)))
    assert load_dataset(Data(name="folder", path=str(tmp_path), size=4)).shape == (1, 4, 4)
    assert load_dataset(Data(name="folder", path=str(tmp_path))).shape == (1, 8, 8)
    with pytest.raises(ConfigError, match=r"data\.size: .* users only; leave it out for digits"):
        load_dataset(Data(name="digits", size=8))


USERS = {
    "train.csv": "user,image,class\nzoe,a/1.png,tower\nadam,2.png,bridge\nzoe,3.png,bridge\n",
    "test.csv": "image,class,comment\n4.png,tower,misty\n",
}


@pytest.fixture
def users(tmp_path):
    """A folder of four images that two files name, three of them two users' own."""
    images = [
        save(tmp_path / name, pixels(12, 10, 3)) for name in ("a/1.png", "2.png", "3.png", "4.png")
    ]
    for name, text in USERS.items():
        (tmp_path / name).write_text(text)
    return tmp_path, images


def test_users(users):
    path, images = users
    dataset = load_dataset(Data(name="users", path=str(path)))
    check(dataset, 3, 1, (3, 10, 10), 2)
    assert dataset.name == path.name and dataset.classes == ("bridge", "tower")
    assert dataset.y.tolist() == [1, 0, 0] and dataset.y_test.tolist() == [1]
    assert dataset.group_names == ("adam", "zoe") and dataset.groups is not None
    assert dataset.groups.tolist() == [1, 0, 1] and dataset.groups.dtype == np.int32
    for found, image in zip([*dataset.x, *dataset.x_test], images, strict=True):
        assert np.array_equal(found, image[1:11].transpose(2, 0, 1)), "the centre"
    clients = split_dataset(Natural(name="natural"), dataset, 0)
    assert [clients.client(i).tolist() for i in range(2)] == [[1], [0, 2]]
    assert load_dataset(Data(name="users", path=str(path), size=5)).shape == (3, 5, 5)
    assert (dataset.pad, dataset.flip) == (0, False)


def test_users_are_decoded_once_while_nothing_changes(users, monkeypatch):
    path, _ = users
    data = Data(name="users", path=str(path), size=10)
    first = load_dataset(data)
    with monkeypatch.context() as patch:
        patch.setattr(images, "decode_images", lambda *_: pytest.fail("decoded twice"))
        assert load_dataset(data).digest == first.digest
    save(path / "3.png", pixels(12, 11, 3))
    assert load_dataset(data).digest != first.digest
    assert len(list(path.glob("raysim-10-*.npz"))) == 2


def torn(cache, other):
    os.truncate(cache, cache.stat().st_size // 2)


def flipped(cache, other):
    content = bytearray(cache.read_bytes())
    content[len(content) // 4] ^= 1  # in the pixels
    cache.write_bytes(content)


def fewer(cache, other):
    with np.load(cache) as file:
        arrays = dict(file)
    np.savez(cache, **{**arrays, "arr_0": arrays["arr_0"][:1]})


DAMAGES = {
    "torn": torn,
    "flipped": flipped,
    "empty": lambda cache, other: cache.write_bytes(b""),
    "zeros": lambda cache, other: cache.write_bytes(bytes(cache.stat().st_size)),
    "of another size": lambda cache, other: shutil.copy(other, cache),
    "of fewer images": fewer,
    "without a name": lambda cache, other: np.savez(cache, pixels(3, 3, 9, 9), pixels(1, 3, 9, 9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_users_whose_cache_is_damaged_are_decoded_again(users, capsys, damage):
    """It is said, and the damaged file is replaced."""
    path, _ = users
    data, other = (Data(name="users", path=str(path), size=size) for size in (10, 5))
    whole = load_dataset(data).digest
    load_dataset(other)
    (cache,), (wrong,) = path.glob("raysim-10-*.npz"), path.glob("raysim-5-*.npz")
    DAMAGES[damage](cache, wrong)
    assert load_dataset(data).digest == whole
    assert f"{cache} cannot be used" in capsys.readouterr().err
    assert load_dataset(data).digest == whole and not capsys.readouterr().err


@pytest.mark.parametrize("name", ["2.png", "4.png"])
def test_an_image_that_is_far_too_large_is_named(users, name):
    """Its pixels would fill the memory."""
    path, _ = users
    Image.new("1", (20000, 20000)).save(path / name)
    with pytest.raises(
        ConfigError, match=r"t\w+\.csv:\d: has more than \d+ million pixels; scale it down"
    ):
        load_dataset(Data(name="users", path=str(path)))


def test_a_damaged_image_is_named(users):
    path, _ = users
    content = (path / "3.png").read_bytes()
    for end in (content[:60], content[:40] + bytes(20) + content[60:]):
        (path / "3.png").write_bytes(end)
        with pytest.raises(ConfigError, match=r"train\.csv:\d: cannot be read as an image"):
            load_dataset(Data(name="users", path=str(path)))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("train.csv", None, r"data\.path: .*train\.csv cannot be read: No such file"),
        ("test.csv", None, r"data\.path: .*test\.csv cannot be read: No such file"),
        (
            "train.csv",
            "",
            r"train\.csv:1: no column user, image, class; expected one CSV file with the columns "
            "user,image,class,split",
        ),
        (
            "train.csv",
            "user,image\na,2.png\n",
            r"train\.csv:1: no column class; expected one CSV file",
        ),
        ("train.csv", "user,image,class\n", r"train\.csv: names no images"),
        ("train.csv", "user,image,class\na,2.png,x\n ,3.png,x\n", r"train\.csv:3: no user"),
        ("train.csv", "user,image,class\na,2.png,tower\na,3.png\n", r"train\.csv:3: no class"),
        ("train.csv", "user,image,class\na,2.png,tower\na,,x\n", r"train\.csv:3: no image"),
        (
            "train.csv",
            "user,image,class\na,9.png,tower\n",
            r"train\.csv:2: image .*9\.png cannot be read: No such",
        ),
        (
            "train.csv",
            "user,image,class\na,test.csv,tower\n",
            r"train\.csv:2: cannot be read as an image",
        ),
        (
            "test.csv",
            "image,class\n4.png,tower\n4.png,moon\n",
            r"test\.csv:3: class 'moon' has no training image",
        ),
        (
            "test.csv",
            "image,class\n4.png,tower\ntrain.csv,tower\n",
            r"test\.csv:3: cannot be read as an image",
        ),
        ("test.csv", "image\n4.png\n", r"test\.csv:1: no column class; expected one"),
        ("train.csv", "user,image,class\na,\xe9.png,x\n", r"train\.csv is not a CSV file in UTF-8"),
    ],
)
def test_users_mistakes_name_file_and_line(file, text, said, users):
    path, _ = users
    (path / file).unlink()
    if text is not None:
        (path / file).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=said) as caught:
        load_dataset(Data(name="users", path=str(path)))
    assert "\n" not in str(caught.value)


def test_users_need_a_folder():
    with pytest.raises(
        ConfigError,
        match=r"data\.path: missing; give a CSV file, or the folder that holds train\.csv and",
    ):
        load_dataset(Data(name="users"))
    with pytest.raises(ConfigError, match=r"users cannot be downloaded: give a CSV file"):
        download_dataset("users")


# Missing files and downloads


@pytest.mark.parametrize(
    "name",
    [n for n in dataset_names() if n not in ("digits", "quadratics", "covid_ct", *USER_FORMATS)],
)
def test_missing_files_say_what_to_do(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_dataset(Data(name=name, root=str(tmp_path)))
    message = str(caught.value)
    assert caught.value.exit_code == 2 and caught.value.__cause__ is None
    assert message.startswith(f"data.name: {name} is not in {tmp_path}")
    for remedy in (
        f"`raysim data fetch {name}`",
        "data.download=true",
        "data.root",
        "$RAYSIM_DATA",
    ):
        assert remedy in message
    assert "there is no file" in message or "there are no files" in message
    assert "found" not in message


def test_missing_covid_ct_is_laid_out_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"covid_ct is not in {tmp_path}: .*index\.csv \(columns"
    ):
        load_dataset(Data(name="covid_ct", download=True))
    with pytest.raises(ConfigError, match="covid_ct cannot be downloaded: lay out"):
        download_dataset("covid_ct")


def test_unknown_names_are_explained():
    with pytest.raises(
        ConfigError, match=r"data\.name: unknown name 'mnits'; did you mean 'mnist'\?"
    ):
        load_dataset(Data(name="mnits"))
    with pytest.raises(
        ConfigError, match=r"'my\.npz'.* as path\.py:FUNCTION, .*{name: arrays, path: FILE\.npz}"
    ):
        load_dataset(Data(name="my.npz"))
    with pytest.raises(ConfigError, match="unknown data set 'cifar'; did you mean 'cifar10'"):
        download_dataset("cifar")


@pytest.mark.parametrize("name", ["mnist", "emnist_letters", "cifar100", "tiny_imagenet"])
def test_a_failed_download_gives_the_reason(name, tmp_path, monkeypatch):
    tv = images.import_torchvision().datasets

    def offline(*args, **kwargs):
        raise URLError("no network")

    for module in (tv.mnist, tv.cifar, tv.utils):
        monkeypatch.setattr(module, "download_and_extract_archive", offline)
    with pytest.raises(
        ConfigError, match=f"{name} could not be downloaded to {tmp_path}/new: .*no network"
    ) as caught:
        load_dataset(Data(name=name, root=str(tmp_path / "new"), download=True))
    assert "\n" not in str(caught.value)


def test_what_is_there_is_not_fetched_again(tmp_path):
    download_dataset("digits")
    for half in ("train", "t10k"):
        write_idx(tmp_path / "MNIST" / "raw" / f"{half}-images-idx3-ubyte", pixels(2, 28, 28))
        write_idx(tmp_path / "MNIST" / "raw" / f"{half}-labels-idx1-ubyte", np.arange(2))
    assert len(load_dataset(Data(name="mnist", root=str(tmp_path), download=True)).y) == 2


def test_targets_that_lie_on_images_do_not_move_with_them(base):
    x = np.zeros((8, 8, 8), np.uint8)
    data = {"x": x, "y": x.astype(np.int64), "x_test": x, "y_test": x.astype(np.int64)}
    config = {**base, "data": data, "task": nn.CrossEntropyLoss(), "model": nn.Conv2d(1, 2, 1)}
    config |= {"algorithm": "fedavg"}
    with pytest.raises(ConfigError, match=r"^data\.augment: .* has targets of shape \[8, 8\]"):
        raysim.run(config, {"data.augment": True, "rounds": 1}, tracking=False)


def test_augment_overrides_what_is_usual(digits):
    for augment, expected in ((None, (0, False)), (False, (0, False)), (True, (1, True))):
        dataset = load_dataset(Data(name="digits", augment=augment))
        assert (dataset.pad, dataset.flip) == expected


def test_unit_scaling_leaves_pixels_in_0_to_1(digits, users):
    for data, top in ((Data(name="digits"), 16), (Data(name="users", path=str(users[0])), 255)):
        unit, plain = load_dataset(data.model_copy(update={"scaling": "unit"})), load_dataset(data)
        x, _ = Examples.of(unit, "train").batch(np.arange(3))
        np.testing.assert_allclose(x, plain.x[:3] / top, rtol=1e-6)
        assert unit.digest == plain.digest
    assert load_dataset(Data(name="digits", scaling="unit", augment=True)).pad == 1


def test_per_pixel_scaling_standardises_each_pixel_over_the_training_images(digits, users):
    for data in (Data(name="digits"), Data(name="users", path=str(users[0]))):
        dataset = load_dataset(data.model_copy(update={"scaling": "per_pixel"}))
        raw, raw_test = dataset.x.astype(np.float64), dataset.x_test.astype(np.float64)
        std = raw.std(0)
        expected = np.where(std > 0, (raw_test - raw.mean(0)) / np.where(std > 0, std, 1), 0)
        x, _ = Examples.of(dataset, "test").batch(np.arange(len(raw_test)))
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
        x, _ = Examples.of(dataset, "train").batch(np.arange(len(raw)))
        np.testing.assert_allclose(x.double().std(0, correction=0), std > 0, atol=1e-5)


@pytest.mark.parametrize("scaling", ["unit", "per_pixel"])
def test_scaling_of_pixels_needs_images(tmp_path, scaling):
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "plain.npz", x=x, y=y, x_test=x, y_test=y)
    data = Arrays(name="arrays", path=str(tmp_path / "plain.npz"), scaling=scaling)
    with pytest.raises(
        ConfigError, match=rf"data\.scaling: {scaling} is for images.* float32 \[4, 2\]"
    ):
        load_dataset(data)


def test_importing_raysim_data_is_light():
    heavy = ("torchvision", "ray", "mlflow", "matplotlib", "sklearn", "PIL")
    code = f"import sys, raysim, raysim.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_intact_torchvision_is_imported_as_it_is(monkeypatch):
    intact = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", intact)
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("declared an operator"))
    assert images.import_torchvision() is intact


def test_digest_sees_every_array(digits):
    from dataclasses import replace

    other = digits.y.copy()
    other[5] += 1
    variants = [
        digits,
        replace(digits, y=other),
        replace(digits, y=digits.y.astype(np.int32)),
        replace(digits, groups=np.zeros(len(other), dtype=np.int32)),
    ]
    assert len({variant.digest for variant in variants}) == 4
    assert replace(digits, y=digits.y.copy(), name="other").digest == digits.digest


# Arrays


def test_normalisation_is_torchvisions(colour):
    transforms = images.import_torchvision().transforms
    mean, std = built_in_datasets.TORCHVISION_SOURCES["cifar10"].statistics
    reference = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    indices = np.array([5, 0, 59, 5])
    x, y = Examples.of(colour, "train").batch(indices)
    expected = torch.stack(
        [reference(Image.fromarray(colour.x[k].transpose(1, 2, 0))) for k in indices]
    )
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert y.tolist() == colour.y[indices].tolist()
    assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.is_contiguous()


@pytest.mark.parametrize("each_pixel", [False, True])
def test_pixels_are_scaled_in_the_dtype_of_the_run(each_pixel):
    """In float32 by constants that are rounded to it once; in float64 without their rounding."""
    x, y = pixels(20, 3, 5, 7), np.arange(20)
    mean, std = (np.reshape(values, (3, 1, 1)) for values in IMAGENET_MEAN_STD)
    scale, shift = normalise_by_imagenet(x)
    expected = (x / 255 - mean) / std
    if each_pixel:
        scale, shift = normalise_each_pixel(x)
        expected = (x - x.mean(0)) / x.std(0)
    exact, _ = Examples(x, y, scale, shift, dtype=torch.float64).batch(y)
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-13)
    rounded = [broadcastable(v).astype(np.float32) for v in (scale, shift)]
    found, _ = Examples(x, y, scale, shift).batch(y)
    assert np.array_equal(found.numpy(), x.astype(np.float32) * rounded[0] + rounded[1])


@pytest.mark.parametrize(("pad", "flip"), [(2, False), (0, True), (3, True)])
def test_augmentation_is_the_literal_one_to_the_bit(pad, flip):
    x, y = pixels(20, 2, 5, 7), np.arange(20)
    scale, shift = np.array([0.5, 0.25], dtype=np.float32), np.array([1, -2], dtype=np.float32)
    examples = Examples(x, y, scale, shift, pad, flip)
    found, _ = examples.batch(y, generator(1, "augment"))
    draws = generator(1, "augment").random((20, 3))
    for k in range(20):
        padded = np.zeros((2, 5 + 2 * pad, 7 + 2 * pad), dtype=np.uint8)
        padded[:, pad : pad + 5, pad : pad + 7] = x[k]
        top, left = (int(u * (2 * pad + 1)) for u in draws[k, :2])
        crop = padded[:, top : top + 5, left : left + 7]
        if flip and draws[k, 2] < 0.5:
            crop = crop[:, :, ::-1]
        literal = crop.astype(np.float32) * scale[:, None, None] + shift[:, None, None]
        assert np.array_equal(found[k].numpy(), literal)


def test_a_sample_does_not_depend_on_how_batches_are_cut(colour):
    """To the bit, with and without augmentation: same draws, same rounding, whatever the batch."""
    examples, order = Examples.of(colour, "train"), RNG.permutation(60)
    for augment in (lambda: None, lambda: generator(0, "augment", 3)):
        whole, _ = examples.batch(order, augment())
        for sizes in ([1] * 60, [7] * 8 + [4], [59, 1]):
            rng = augment()
            parts = [
                examples.batch(part, rng)[0] for part in np.split(order, np.cumsum(sizes)[:-1])
            ]
            assert torch.equal(torch.cat(parts), whole)
    draws = generator(0, "augment", 3).random((60, 3))
    assert torch.equal(examples.batch(order, draws)[0], whole)


def test_without_augmentation_nothing_is_drawn(colour, digits):
    for examples in (Examples.of(colour, "test"), Examples.of(digits, "train")):
        rng = generator(0, "augment")
        augmented, _ = examples.batch(np.arange(9), rng)
        assert torch.equal(augmented, examples.batch(np.arange(9))[0])
        assert rng.random() == generator(0, "augment").random()


def test_arrays_are_shared_not_copied_even_when_read_only():
    x, y = pixels(6, 1, 4, 4), np.arange(6)
    one = np.ones(1, dtype=np.float32)
    for array in (x, y, one):
        array.flags.writeable = False
    examples = Examples(x, y, one, one)
    assert examples.x.data_ptr() == x.ctypes.data and examples.y.data_ptr() == y.ctypes.data
    batch, labels = examples.batch(y)
    batch.zero_(), labels.zero_()
    assert np.array_equal(y, np.arange(6)) and x.any()
    assert len(examples) == 6


def test_indices_may_be_tensors_and_inputs_double(colour):
    single, double = (
        Examples.of(colour, "train", dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    indices = torch.tensor([3, 1])
    assert torch.equal(single.batch(indices)[0], single.batch(indices.numpy())[0])
    x, _ = double.batch(indices)
    assert x.dtype == torch.float64
    torch.testing.assert_close(x.float(), single.batch(indices)[0], rtol=1e-6, atol=1e-6)
    empty, labels = single.batch(np.empty(0, dtype=np.int64), generator(0, "augment"))
    assert empty.shape == (0, 3, 32, 32) and labels.shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_batches(colour):
    order = RNG.permutation(60)
    here, there = (
        Examples.of(colour, "train", device).batch(order, generator(0, "a"))
        for device in ("cpu", "cuda")
    )
    assert there[0].is_cuda and there[1].is_cuda
    assert torch.equal(here[0], there[0].cpu()) and torch.equal(here[1], there[1].cpu())


# Pictures


def test_partition_plot(digits, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    seen = {}
    monkeypatch.setattr(Axes, "set_title", lambda self, text: seen.update(title=text))
    scatter = Axes.scatter
    monkeypatch.setattr(
        Axes, "scatter", lambda *a, **k: seen.update(x=a[1], y=a[2], s=k["s"]) or scatter(*a, **k)
    )
    few = split_dataset(Dirichlet(name="dirichlet", clients=5, alpha=0.1), digits, 0)
    plot_partition(few, digits.y, 10, tmp_path / "few.png")
    assert seen["title"].startswith("5 clients")
    counts = [
        np.count_nonzero(digits.y[few.client(i)] == c)
        for i, c in zip(seen["x"], seen["y"], strict=True)
    ]
    assert sum(counts) == len(digits.y)
    np.testing.assert_allclose(seen["s"] / max(seen["s"]), np.array(counts) / max(counts))

    many = split_dataset(Virtual(name="virtual", clients=10**6), digits, 0)
    plot_partition(many, digits.y, 10, tmp_path / "many.svg")
    assert seen["title"].startswith("first 100 of 1000000 clients")
    assert max(seen["x"]) == 99
    with Image.open(tmp_path / "few.png") as picture:
        assert min(picture.size) > 100
    assert "<svg" in (tmp_path / "many.svg").read_text()[:500]


def test_sample_grid(digits, colour, tmp_path):
    for dataset in (digits, colour):
        path = tmp_path / f"{dataset.name}.png"
        plot_samples(dataset, path)
        with Image.open(path) as picture:
            shown = np.asarray(picture.convert("RGB"), dtype=int)
        assert shown.std() > 20
        assert bool(np.ptp(shown, axis=2).any()) == (dataset is colour)


def test_summary(digits, colour):
    found = dataset_summary(digits)
    assert json.loads(json.dumps(found)) == found
    assert (found["train"], found["test"], found["shape"], found["classes"]) == (
        1438,
        359,
        [1, 8, 8],
        10,
    )
    assert found["counts"]["0"] == [142, 36]
    assert sum(train for train, _ in found["counts"].values()) == 1438
    assert (
        found["augmentation"] == "none"
        and found["groups"] is None
        and found["digest"] == digits.digest
    )
    assert dataset_summary(colour)["augmentation"] == "crop 32x32 after padding by 4, mirror"
