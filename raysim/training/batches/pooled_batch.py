"""Batches of several clients in one tensor, one client after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

MAX_EXAMPLES_PER_PASS = 1024
"""Limit on the examples in one forward pass of a pooled batch."""


@dataclass
class PooledBatch:
    """Examples of several clients, one client after the other."""

    x: Tensor
    """[n, ...], the inputs of all clients."""
    y: Tensor
    """[n, ...], the targets."""
    sizes: Sequence[int]
    """Number of examples of each client."""
    weights: Sequence[float]
    """Weight of each client in the mean of the round."""
    drop: tuple[Tensor, ...] = ()
    """Dropout masks [n, ...], one for each layer."""

    def parts(self) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...], slice]]:
        """Yield x, y, dropout masks and span of parts of at most `MAX_EXAMPLES_PER_PASS`."""
        for start in range(0, len(self.y), MAX_EXAMPLES_PER_PASS):
            span = slice(start, start + MAX_EXAMPLES_PER_PASS)
            yield self.x[span], self.y[span], tuple(mask[span] for mask in self.drop), span
