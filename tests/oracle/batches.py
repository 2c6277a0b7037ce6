"""Sizes of the mini-batches of one pass: those of PyTorch's DataLoader.

Batches of B, and a last one of what is left. A net with BatchNorm needs two examples in a batch:
there a single example that is left joins the batch before.
"""


def batch_sizes(n: int, batch_size: int, batch_norm: bool = False) -> list[int]:
    """Sizes, in order, of the batches of one pass over n samples; [] for an empty client."""
    sizes = [min(batch_size, n - start) for start in range(0, n, batch_size or 1)]
    if batch_norm and batch_size > 1 and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [batch_size + 1]
    return sizes
