"""TF32, which a GPU has: whether products of float32 may use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def allow_tf32(allowed: bool) -> Callable[[], None]:
    """Let products and convolutions of float32 on a GPU use TF32, or forbid it.

    Args:
        allowed: whether they may.

    Returns:
        A function that restores what was set before.
    """
    matmul = torch.backends.cuda.matmul.allow_tf32
    convolutions = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed

    def restore() -> None:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = convolutions

    return restore


@contextmanager
def tf32() -> Iterator[None]:
    """Allow TF32 inside. A kernel that is captured there keeps it."""
    restore = allow_tf32(True)
    try:
        yield
    finally:
        restore()
