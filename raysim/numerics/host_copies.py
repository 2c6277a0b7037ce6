"""Copies of a GPU's tensors in the host's memory, for which the host waits once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the host's memory. The host waits once for all copies.

    Args:
        tensors: tensors of any shapes and types, without gradients.

    Returns:
        A copy of each tensor that is on a GPU, in pinned memory; the others as they are.
    """
    copies = []
    on_gpu = False
    for tensor in tensors:
        if tensor.is_cuda:
            on_gpu = True
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = pinned.copy_(tensor, non_blocking=True)
        copies.append(tensor)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return copies
