"""Copies from the host to a device that no GPU waits for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor on a device.

    On a GPU the copy goes through pinned memory, and takes place when the stream comes to it.

    Args:
        array: the array; on a CPU the tensor shares its memory, unless the type changes.
        device: the device.
        dtype: the type; None: that of the array.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, dtype, non_blocking=device.type == "cuda")
