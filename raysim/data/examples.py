"""Examples on a device: gather, augment, normalise.

Pixels are stored as uint8 and normalised after a batch is gathered. This takes a quarter of the
memory of normalised floats, and is as fast (MNIST) or faster (CIFAR). Floats are converted to the
run's dtype once, and integers (tokens) to int64 in each batch.
"""

from __future__ import annotations

import logging
import warnings
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raysim.data.dataset import Dataset, broadcastable

logger = logging.getLogger("raysim")

MAX_SHARE_OF_MEMORY = 0.5
"""Share of a GPU's free memory that examples may take; nets and lanes need the rest."""

NUMBERS_PER_AUGMENTATION = 3
"""Uniform numbers that augmentation uses for each sample: for row, column and mirroring."""


class Examples:
    """One half of a data set as tensors on one device.

    The arrays are moved to the device once. On a CPU the tensors share their memory. The arrays may
    be read-only, as those from Ray's object store are. Arrays that are too large for a GPU stay in
    the host's memory; then each batch is gathered there, and copied through pinned memory. The
    bits of batches are the same.

    Args:
        x: uint8 [n, C, H, W], or numbers of any other type and shape [n, ...].
        y: int64 [n], the labels; or targets of another type and shape [n, ...].
        scale: float64 [C]; the input of a model is `x * scale + shift`, both rounded to `dtype`.
            None: it is `x`.
        shift: float64 [C]; None without `scale`.
        pad: zero pixels on each side before a random crop, see `Dataset`.
        flip: whether augmentation mirrors images, see `Dataset`.
        device: the device of the tensors.
        dtype: the dtype of the inputs.
        gpus: share of the GPU that this process has, for the choice of the memory.

    Attributes:
        stored_on: the device of `x` and `y`.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        scale: np.ndarray | None = None,
        shift: np.ndarray | None = None,
        pad: int = 0,
        flip: bool = False,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        gpus: float = 1.0,
    ):
        self.device = torch.device(device)
        self.stored_on = _place_of_examples(x.nbytes + y.nbytes, self.device, gpus)
        self.dtype = dtype
        self.pad = pad
        self.flip = flip
        self.x = shared_tensor(x).to(self.stored_on)
        self.y = _typed(shared_tensor(y).to(self.stored_on), dtype)
        self.scale = self.shift = None
        if scale is not None and shift is not None:
            self.scale = shared_tensor(broadcastable(scale)).to(self.device, dtype)
            self.shift = shared_tensor(broadcastable(shift)).to(self.device, dtype)
        elif self.x.is_floating_point():
            self.x = self.x.to(dtype)

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        half: Literal["train", "test"],
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        gpus: float = 1.0,
    ) -> Examples:
        """Return one half of a data set.

        The training half has the augmentation of the data set. The test half is never augmented.

        Args:
            dataset: the data set.
            half: "train" or "test".
            device: the device of the tensors.
            dtype: the dtype of the inputs.
            gpus: share of the GPU that this process has.
        """
        x, y, pad, flip = dataset.x, dataset.y, dataset.pad, dataset.flip
        if half == "test":
            x, y, pad, flip = dataset.x_test, dataset.y_test, 0, False
        return cls(x, y, dataset.scale, dataset.shift, pad, flip, device, dtype, gpus)

    def __len__(self) -> int:
        return len(self.y)

    def batch(
        self, indices: Tensor | np.ndarray, augment: np.random.Generator | np.ndarray | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the examples at `indices` as inputs of a model.

        Args:
            indices: positions of the examples, int64 [B].
            augment: None returns the images without augmentation. A keyed generator draws three
                uniform numbers for each sample in turn, so that the crop of a sample does not
                depend on the batch size. An array float64 [B, 3] in [0, 1) holds those numbers.

        Returns:
            x, [B, ...] of `dtype`, or int64 for tokens; and y [B, ...], int64 or of `dtype`. Both
            are copies.
        """
        if isinstance(indices, np.ndarray):
            indices = torch.from_numpy(indices if indices.flags.writeable else indices.copy())
        positions = moved(indices, self.stored_on)
        x = self._gathered(self.x, positions)
        if augment is not None and (self.pad or self.flip):
            draws = (
                augment.random((len(positions), NUMBERS_PER_AUGMENTATION))
                if isinstance(augment, np.random.Generator)
                else augment
            )
            x = self._augment(x, draws)
        y = self._gathered(self.y, positions)
        if self.scale is None or self.shift is None:
            return _typed(x, self.dtype), y
        # A fused multiply-add rounds differently in its vectorised part and in its tail.
        return x.to(self.dtype).mul_(self.scale).add_(self.shift), y

    def _gathered(self, values: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of x or y at `positions`, on the device of the batches."""
        return moved(values.index_select(0, positions), self.device)

    def _augment(self, x: Tensor, draws: np.ndarray) -> Tensor:
        """Crop raw pixels after zero padding, as torchvision does, and mirror where u < 1/2."""
        b, c, h, w = x.shape
        u = on_device(draws, self.device)
        offsets = (u[:, :2] * (2 * self.pad + 1)).to(torch.int64)
        rows = offsets[:, :1] + torch.arange(h, device=self.device)
        columns = offsets[:, 1:] + torch.arange(w, device=self.device)
        if self.flip:
            columns = torch.where(u[:, 2:] < 0.5, columns.flip(1), columns)
        places = rows[:, :, None] * (w + 2 * self.pad) + columns[:, None, :]
        places = places.view(b, 1, h * w).expand(b, c, h * w)
        padded = torch.nn.functional.pad(x, (self.pad,) * 4)
        return padded.flatten(2).gather(2, places).view(b, c, h, w)


def _typed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats as `dtype`, and integers as int64, the type of an index."""
    return values.to(dtype if values.is_floating_point() else torch.int64)


def shared_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor that shares the memory of an array.

    The memory may be read-only, so callers must not write to the tensor.

    Args:
        array: the array; it may be read-only.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def own_copy(kept: np.ndarray | Tensor, like: Tensor) -> Tensor:
    """Return a copy of what a client kept as a tensor of the device and the type of another one.

    Args:
        kept: an array, which may be read-only, or a tensor.
        like: the other tensor.
    """
    if isinstance(kept, Tensor):
        return kept.to(like.device, like.dtype, copy=True)
    return on_device(np.array(kept), like.device, like.dtype)


def on_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor on a device.

    On a GPU the copy goes through pinned memory, and takes place when the stream comes to it.

    Args:
        array: the array; on a CPU the tensor shares its memory, unless the type changes.
        device: the device.
        dtype: the type; None: that of the array.
    """
    return moved(torch.from_numpy(array), device, dtype)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device; itself if it is there.

    From the CPU to a GPU the copy goes through pinned memory, and takes place when the stream comes
    to it.

    Args:
        tensor: the tensor.
        device: the device.
        dtype: the type; None: that of the tensor.
    """
    if tensor.is_cpu and device.type == "cuda":
        # Converted here, because a copy that converts would not go through pinned memory.
        return tensor.to(dtype=dtype).pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def _place_of_examples(nbytes: int, device: torch.device, gpus: float) -> torch.device:
    """Return where to store examples of so many bytes whose batches are on `device`."""
    if device.type != "cuda":
        return device
    free = free_bytes(gpus)
    if nbytes <= MAX_SHARE_OF_MEMORY * free:
        return device
    logger.info(
        "examples of %.2f GB stay in the host's memory, because the GPU has %.2f GB left for this "
        "process; their batches are copied as they are needed, with the same bits",
        nbytes / 1e9,
        free / 1e9,
    )
    return torch.device("cpu")


def free_bytes(gpus: float) -> int:
    """Return the bytes of the current GPU that this process can still take.

    Args:
        gpus: share of the GPU that the process has; 0, for none of its own, counts as the whole.
    """
    free, total = torch.cuda.mem_get_info()
    return min(free, int((gpus or 1.0) * total) - torch.cuda.memory_reserved())
