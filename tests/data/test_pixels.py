"""Images of every mode of Pillow, by every door: read as torchvision does, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset, StackDataset

from raysim.config.sections.data import Data, HuggingFace
from raysim.data import import_torchvision, load_dataset
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError

import_torchvision()  # datasets imports it, and its operators may not load
import datasets  # noqa: E402

datasets.disable_progress_bars()

RNG = np.random.default_rng(3)
N = 6
GREY = RNG.integers(0, 256, (N, 8, 8), dtype=np.uint8)


def palette(k: int) -> Image.Image:
    image = Image.fromarray(GREY[k] % 4, "P")
    image.putpalette([200, 10, 0, 0, 255, 0, 3, 2, 1, 90, 90, 90])
    return image


def with_transparency(image: Image.Image) -> Image.Image:
    image.info["transparency"] = 1
    return image


def colour(k: int) -> Image.Image:
    return Image.fromarray(np.stack([GREY[k], 255 - GREY[k], GREY[k] // 2], -1))


def alpha(k: int, value: int) -> Image.Image:
    return Image.new("L", (8, 8), value)


READ: dict[str, Callable[[int], Image.Image]] = {
    "1": lambda k: Image.fromarray(GREY[k] > 99),
    "L": lambda k: Image.fromarray(GREY[k]),
    "P": palette,
    "RGB": colour,
    "CMYK": lambda k: colour(k).convert("CMYK"),
    "LA": lambda k: Image.merge("LA", [Image.fromarray(GREY[k]), alpha(k, 255)]),
    "RGBA": lambda k: colour(k).convert("RGBA"),
    "L and RGB": lambda k: colour(k) if k == 4 else Image.fromarray(GREY[k]),
    "L and P": lambda k: palette(k) if k == 1 else Image.fromarray(GREY[k]),
    "transparent RGBA": lambda k: Image.merge("RGBA", [*colour(k).split(), alpha(k, 255 - 9 * k)]),
    "transparent LA": lambda k: Image.merge("LA", [Image.fromarray(GREY[k]), alpha(k, 50)]),
    "transparent P": lambda k: with_transparency(palette(k)) if k == 2 else palette(k),
}
REFUSED: dict[str, Callable[[int], Image.Image]] = {
    "I;16": lambda k: Image.fromarray(GREY[k].astype(np.uint16) * 257),
    "I": lambda k: Image.fromarray(GREY[k].astype(np.int32) * 70_000),
    "F": lambda k: Image.fromarray(GREY[k].astype(np.float32) / 255),
}


class Pictures(Dataset):
    """Images of Pillow, as data sets of torchvision without a transform give them."""

    def __init__(self, images: list[Image.Image]):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> Any:
        return self.images[k], k % 2


def table(images: list[Image.Image]) -> Any:
    features = datasets.Features({"x": datasets.Image(), "y": datasets.Value("int64")})
    columns = {"x": images, "y": [k % 2 for k in range(N)]}
    return datasets.Dataset.from_dict(columns, features=features)


def by_folder(images: list[Image.Image], tmp_path: Path) -> Any:
    for k, image in enumerate(images):
        suffix = "png" if image.mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16") else "tif"
        for split in ("train", "test"):
            (tmp_path / split / str(k)).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / split / str(k) / f"{k}.{suffix}")
    return load_dataset(Data(name="folder", path=str(tmp_path)))


def by_table(images: list[Image.Image], tmp_path: Path) -> Any:
    half = table(images)
    return make_dataset("mine", (half, half), "data")


def by_saved_table(images: list[Image.Image], tmp_path: Path) -> Any:
    half = table(images)
    datasets.DatasetDict(train=half, test=half).save_to_disk(str(tmp_path / "a"))
    return load_dataset(HuggingFace(name="hf", path=str(tmp_path / "a"), x="x", y="y"))


def by_torch(images: list[Image.Image], tmp_path: Path) -> Any:
    return make_dataset("mine", (Pictures(images), Pictures(images)), "data")


def by_list(images: list[Image.Image], tmp_path: Path) -> Any:
    half = (images, [k % 2 for k in range(N)])
    return make_dataset("mine", {"train": half, "test": half}, "data")


DOORS = [by_folder, by_table, by_saved_table, by_torch, by_list]


def pixels_of_torchvision(images: list[Image.Image]) -> np.ndarray:
    """torchvision's loader converts to RGB; grey images have one of these channels here."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    grey = all(image.mode in ("1", "L") for image in images)
    return pixels.transpose(0, 3, 1, 2)[:, : 1 if grey else 3]


@pytest.mark.parametrize("mode", READ)
@pytest.mark.parametrize("door", DOORS)
def test_images_of_8_bits_are_read_as_torchvision_does(tmp_path, door, mode):
    images = [READ[mode](k) for k in range(N)]
    dataset = door(images, tmp_path)
    assert dataset.are_images
    np.testing.assert_array_equal(dataset.x, pixels_of_torchvision(images))
    np.testing.assert_array_equal(dataset.x_test, dataset.x)


@pytest.mark.parametrize("mode", REFUSED)
@pytest.mark.parametrize("door", DOORS)
def test_deeper_images_are_refused_and_the_first_is_named(tmp_path, door, mode):
    images = [REFUSED[mode](k) if k == 3 else Image.fromarray(GREY[k]) for k in range(N)]
    place = {
        by_folder: rf"{tmp_path}/train/3/3\.(png|tif)",
        by_table: r"data: x\[3\]",
        by_saved_table: "data.x: example 3 of the split train of .*",
        by_torch: r"data: x of the training examples\[3\]",
        by_list: r"data: x\[3\]",
    }[door]
    with pytest.raises(ConfigError, match=f"^{place}: is an image of Pillow's mode {mode}, which"):
        door(images, tmp_path)


def test_a_deeper_image_of_the_test_half_is_named(tmp_path):
    images = [Image.fromarray(grey) for grey in GREY]
    by_folder(images, tmp_path)
    (tmp_path / "test" / "5" / "5.png").unlink()
    REFUSED["I;16"](5).save(tmp_path / "test" / "5" / "5.png")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/test/5/5.png: is an image of Pillow's"):
        load_dataset(Data(name="folder", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((N, 8, 8, 4), r"x\[\.\.\., :3\]"),
        ((N, 4, 8, 8), r"x\[:, :3\]"),
        ((N, 8, 8, 2), r"x\[\.\.\., :1\]"),
    ],
)
def test_arrays_with_a_channel_of_transparency_are_refused_with_the_way_out(shape, advice):
    x, y = RNG.integers(0, 256, shape, dtype=np.uint8), np.arange(N) % 2
    with pytest.raises(ConfigError, match=rf"^data: x is uint8 .* channels, .*; give {advice} wi"):
        make_dataset("mine", (x, y, x, y), "data")
    floats = make_dataset("mine", (x.astype("float32") / 255, y, x.astype("float32") / 255, y), "")
    np.testing.assert_array_equal(floats.x, x.astype("float32") / 255)
    axis = shape.index(4 if 4 in shape else 2)
    colours = x.take(range(shape[axis] - 1), axis)
    assert make_dataset("mine", (colours, y, colours, y), "data").are_images


def test_arrays_with_other_channels_stay_integers():
    x, y = RNG.integers(0, 256, (N, 12, 8, 8), dtype=np.uint8), np.arange(N) % 2
    assert make_dataset("mine", (x, y, x, y), "data").x.shape == x.shape


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "I"])
@pytest.mark.parametrize("door", ["torch", "list", "table"])
def test_images_as_targets_keep_their_values(mode, door):
    """As np.asarray and torchvision's PILToTensor read the classes of pixels."""
    classes = RNG.integers(0, 2 if mode == "1" else 3, (N, 8, 8))
    masks = []
    for values in classes:
        mask = Image.new(mode, (8, 8))
        mask.putdata(values.flatten().tolist())
        if mode == "P":
            mask.putpalette([9, 70, 200, 80, 90, 100, 7, 6, 5])
        masks.append(mask)
    pictures = list(map(Image.fromarray, GREY))
    half: Any = (pictures, masks)
    if door == "torch":
        half = StackDataset(pictures, masks)
    elif door == "table":
        features = datasets.Features({"x": datasets.Image(), "y": datasets.Image()})
        if mode == "1":  # whose files have another mode
            pytest.skip("a column of images holds files")
        half = datasets.Dataset.from_dict({"x": pictures, "y": masks}, features=features)
    dataset = make_dataset("mine", {"train": half, "test": half}, "data")
    np.testing.assert_array_equal(dataset.y, classes)
    assert dataset.are_images


@pytest.mark.parametrize("as_mapping", [False, True])
def test_images_of_one_example_are_several_inputs(as_mapping):
    """Three grey ones are not the colours of one image."""
    pixels = RNG.integers(0, 256, (N, 3, 8, 8), dtype=np.uint8)
    images = [tuple(map(Image.fromarray, three)) for three in pixels]
    x = [dict(zip("abc", three, strict=True)) for three in images] if as_mapping else images
    half = StackDataset(x, list(range(N)))
    dataset = make_dataset("mine", {"train": half, "test": half}, "data")
    assert [entry.shape for entry in dataset.inputs] == [(8, 8)] * 3
    np.testing.assert_array_equal(dataset.x, pixels.reshape(N, -1))
