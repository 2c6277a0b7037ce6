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
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    of_operations = products, cudnn.conv, cudnn.rnn
    # `allow_tf32` cannot be read after a program has set `fp32_precision`, which PyTorch advises.
    before = [str(operations.fp32_precision) for operations in of_operations]

    def choose(of_products: str, *of_cudnn: str) -> None:
        # PyTorch has an old and a new setting, which raise errors if they disagree.
        torch.backends.cuda.matmul.allow_tf32 = of_products == "tf32"
        torch.backends.cudnn.allow_tf32 = "tf32" in of_cudnn
        for operations, precision in zip(of_operations, (of_products, *of_cudnn), strict=True):
            operations.fp32_precision = precision

    choose(*["tf32" if allowed else "ieee"] * len(of_operations))
    return lambda: choose(*before)


@contextmanager
def tf32() -> Iterator[None]:
    """Allow TF32 inside. A kernel that is captured there keeps it."""
    restore = allow_tf32(True)
    try:
        yield
    finally:
        restore()
