"""Images on disk: decoding, the cache of decoded images, and users' own folders of images."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from raysim.config.sections.data import Data
from raysim.data.dataset import Dataset, channels_first, normalise_by_imagenet, path_of_files
from raysim.errors import ConfigError, in_a_line
from raysim.system.files import whole
from raysim.system.torchvision_operators import import_declaring_operators

GREY_MODES = ("1", "L")
"""Modes of Pillow for grey images of at most 8 bits."""

COLOUR_MODES = ("P", "PA", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
"""Modes of Pillow that become RGB with 8 bits for each channel."""

Pictures = Mapping[str, Any]
"""Images of Pillow, by the words that name them in errors."""


def import_torchvision() -> ModuleType:
    """Import torchvision, also if its compiled operators do not load.

    Returns:
        The module torchvision.
    """
    return import_declaring_operators(lambda: importlib.import_module("torchvision"))


def torchvision_reason(error: BaseException) -> str:
    """Return in one line why torchvision cannot read the files of a data set.

    Args:
        error: the error that its class raised.
    """
    reason = re.sub(r" You (can|may) use download=True .*", "", in_a_line(error))
    if re.fullmatch(r"RuntimeError: Dataset .*not found( or corrupted)?\.", reason):
        return "files are missing or damaged"
    return reason


def decode_images(
    paths: Iterable[Path], side: int, mode: str, places: Iterable[str] | None = None
) -> np.ndarray:
    """Decode images to uint8 [n, C, side, side].

    The shorter side is resized to `side`, then the centre is cropped.

    Args:
        paths: the files of n images.
        side: height and width in pixels.
        mode: "L" (grey, one channel) or "RGB".
        places: for each file, the words that name it in errors; by default its path.

    Raises:
        ConfigError: a file is not an image, or it is damaged.
    """
    square = _square(side)
    paths = list(paths)
    images = []
    for path, place in zip(paths, places or map(str, paths), strict=True):
        with _opened(path, place) as image:
            images.append(np.asarray(square(_in_mode(image, mode, place))))
    return channels_first(np.stack(images), upright=False)


@contextlib.contextmanager
def _opened(path: Path, place: str) -> Iterator[Any]:
    """Open an image of at most twice the size for which Pillow warns.

    Whatever Pillow raises in the block is an error of `place`.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                yield image
    except ConfigError:
        raise
    except Image.DecompressionBombError:
        raise ConfigError(
            f"{place}: has more than {2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} million "
            "pixels; scale it down"
        ) from None
    except Exception as error:  # a damaged image may raise nearly anything
        raise ConfigError(f"{place}: cannot be read as an image: {in_a_line(error)}") from None


def is_picture(value: Any) -> bool:
    """Return whether an object is an image of Pillow.

    Args:
        value: any object.
    """
    return hasattr(value, "convert") and hasattr(value, "getbands")


def common_mode(images: Pictures) -> str:
    """Return the mode that images of Pillow get: "L" if all are grey, else "RGB".

    Args:
        images: the images.

    Raises:
        ConfigError: an image has pixels of more than 8 bits.
    """
    for place, image in images.items():
        _check_depth(image.mode, place)
    return "L" if {image.mode for image in images.values()} <= {*GREY_MODES} else "RGB"


def in_mode(images: Pictures, mode: str) -> list[Any]:
    """Return images of Pillow in one mode, converted as torchvision's loader does.

    Transparent pixels count as if they were opaque.

    Args:
        images: n images.
        mode: "L" (grey, one channel) or "RGB".

    Raises:
        ConfigError: an image has pixels of more than 8 bits.
    """
    return [_in_mode(image, mode, place) for place, image in images.items()]


def _check_depth(mode: str, place: str) -> None:
    """Refuse images of 16 or 32 bits, which Pillow would clip at 255, and other colour spaces."""
    if mode not in (*GREY_MODES, *COLOUR_MODES):
        raise ConfigError(
            f"{place}: is an image of Pillow's mode {mode}, which 8 bits for each of one or three "
            "channels cannot hold; scale it to 0..255 and save it as L or RGB, or give arrays of "
            "floats (data: path.py:function)"
        )


def _in_mode(image: Any, mode: str, place: str) -> Any:
    """Return an image in mode "L" or "RGB", as torchvision's loader converts it."""
    _check_depth(image.mode, place)
    with warnings.catch_warnings():
        # Pillow advises to keep the transparency of palettes, which has no place in RGB.
        warnings.filterwarnings("ignore", message="Palette images with Transparency")
        return image.convert(mode)


def common_side(images: Pictures, images_test: Pictures, size: int | None) -> int | None:
    """Return the side in pixels of the squares that images become; None: they have one size.

    Args:
        images: the training images; without `size` their median side is used.
        images_test: the test images.
        size: `data.size`, in pixels; None: not set.
    """
    both = (*images.values(), *images_test.values())
    if size is None and len({image.size for image in both}) > 1:
        return int(np.median([min(image.size) for image in images.values()]))
    return size


def as_squares(images: Pictures, side: int | None, mode: str) -> np.ndarray:
    """Return images as uint8 [n, H, W] or [n, H, W, C], resized and cropped to squares.

    Args:
        images: n images of Pillow.
        side: height and width in pixels; None: they stay as they are.
        mode: "L" (grey, one channel) or "RGB".

    Raises:
        ConfigError: an image has pixels of more than 8 bits.
    """
    converted = in_mode(images, mode)
    if side is not None:
        converted = map(_square(side), converted)
    return np.stack(list(map(np.asarray, converted)))


def _square(side: int) -> Callable[[Any], Any]:
    """Return the function that resizes an image's shorter side and crops its centre."""
    transforms = import_torchvision().transforms
    return transforms.Compose([transforms.Resize(side), transforms.CenterCrop(side)])


def cached(
    path: Path, counts: Sequence[int], decode: Callable[[], list[np.ndarray]]
) -> list[np.ndarray]:
    """Decode both halves once and cache the arrays beside the images if that folder is writable.

    A cache file that is damaged or belongs to other images is reported and replaced.

    Args:
        path: the cache file; its name and its content identify the images.
        counts: number of images of each half.
        decode: returns the halves, uint8 [n, C, side, side].

    Returns:
        The halves.
    """
    if path.exists():
        try:
            return _read_cache(path, counts)
        except Exception as error:  # a damaged file may raise nearly anything
            print(f"{path} cannot be used ({error}); the images are decoded again", file=sys.stderr)
    arrays = decode()
    # Processes that decode at one time write each a file of its own.
    own = path.with_name(f"{platform.node()}-{os.getpid()}-{path.name}")
    try:
        with whole(own) as part:
            np.savez(part, *arrays, name=np.array(path.stem))
        own.replace(path)
    except OSError as error:
        own.unlink(missing_ok=True)
        print(
            f"{path} could not be kept, the images will be decoded again next time: {error}",
            file=sys.stderr,
        )
    return arrays


def _read_cache(path: Path, counts: Sequence[int]) -> list[np.ndarray]:
    """Read a cache file; raise any error if it is damaged, ValueError if it has other content."""
    with open(path, "rb") as content, np.load(content) as file:
        if "name" not in file or str(file["name"]) != path.stem:
            raise ValueError("it was made of other images, or by another version")
        arrays = [file[f"arr_{half}"] for half in range(len(counts))]
    if [len(array) for array in arrays] != list(counts):
        raise ValueError("it has another number of images")
    return arrays


def load_folder(data: Data) -> Dataset:
    """Load images from `<path>/train/<class>/<image>` and `<path>/test/…` (or `val`).

    This is the layout of torchvision's ImageFolder. All images become squares: the shorter side is
    resized to `data.size` (null: the median shorter side of the training images), then the centre
    is cropped. They are grey if all training images are, else RGB. The normalisation uses
    ImageNet's statistics. There is no augmentation unless data.augment=true.

    Args:
        data: the section `data`.

    Raises:
        ConfigError: the path is missing, or its folders or images cannot be used.
    """
    path = path_of_files(data)
    folder, folder_test = path / "train", path / "test"
    if not folder_test.is_dir() and (path / "val").is_dir():
        folder_test = path / "val"
    train = _listing(folder)
    test = _listing(folder_test)
    if unknown := set(test.classes) - set(train.classes):
        raise ConfigError(
            f"data.path: {folder_test} has classes that {folder} lacks: "
            f"{', '.join(sorted(unknown))}"
        )
    paths = [Path(file) for file, _ in train.samples]
    side, mode = common_form(paths, data.size)
    x = decode_images(paths, side, mode)
    x_test = decode_images((Path(file) for file, _ in test.samples), side, mode)
    y = np.array(train.targets, dtype=np.int64)
    y_test = np.array([train.class_to_idx[test.classes[k]] for k in test.targets], dtype=np.int64)
    norm = normalise_by_imagenet(x)
    return Dataset(path.resolve().name, x, y, x_test, y_test, tuple(train.classes), *norm)


def _listing(folder: Path) -> Any:
    """Return the images of a half as torchvision lists them, with their classes."""
    try:
        listing = import_torchvision().datasets.ImageFolder(str(folder), allow_empty=True)
    except OSError as error:
        raise ConfigError(
            f"data.path: {folder} must hold one folder of images for each class: {error}"
        ) from None
    if not listing.samples:
        raise ConfigError(f"data.path: no images in {folder}/<class>/")
    return listing


def common_form(
    paths: Sequence[Path], size: int | None, places: Iterable[str] | None = None
) -> tuple[int, str]:
    """Return the side of the squares and the mode, L or RGB, of a user's images."""
    sides, modes = [], set()
    for path, place in zip(paths, places or map(str, paths), strict=True):
        with _opened(path, place) as image:
            _check_depth(image.mode, place)
            sides.append(min(image.size))
            modes.add(image.mode)
    return size or round(statistics.median(sides)), "L" if modes <= {*GREY_MODES} else "RGB"
