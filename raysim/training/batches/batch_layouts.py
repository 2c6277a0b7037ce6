"""Batches of several clients in one tensor: side by side for vmap, or one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raysim.rules.batch import Batch

MAX_EXAMPLES_PER_PASS = 1024
"""Limit on the examples in one forward pass of a pooled batch."""


@dataclass
class PaddedBatch:
    """Batches of K clients in one step, padded to a common size; clients are the first axis."""

    x: Tensor
    """[K, B, ...], the inputs."""
    y: Tensor
    """[K, B, ...], the targets."""
    mask: Tensor | None
    """[K, B], 1 for real examples; None if nothing is padded."""
    drops: tuple[tuple[Tensor, ...], ...]
    """Dropout masks, [K, B, ...] each; see `Batch.drops`."""
    private_noise: Tensor | None
    """[K, P], noise of private steps; None without noise."""
    prepared: tuple[tuple[Tensor, Tensor], ...]
    """The x and y of each batch that the rules prepared for this step."""
    prepared_mask: Tensor | None
    """[K, B], mask of the prepared batches; None if nothing is padded."""
    noise: dict[str, Tensor] | None = None
    """Random numbers that the rule declares, [K, ...] each; None without them."""

    def tensors(self) -> dict[str, Any]:
        """Return the fields that are not None: the tree that `torch.func.vmap` maps over."""
        return {key: value for key, value in vars(self).items() if value is not None}

    @staticmethod
    def of_one(tensors: Mapping[str, Any]) -> Batch:
        """Return the batch of one client, from its part of `tensors` inside `torch.func.vmap`.

        Args:
            tensors: the tensors of a `PaddedBatch` without their dimension of clients.
        """
        prepared = tuple(Batch(x, y, tensors.get("prepared_mask")) for x, y in tensors["prepared"])
        return Batch(
            tensors["x"],
            tensors["y"],
            tensors.get("mask"),
            tensors["drops"],
            prepared=prepared,
            noise=tensors.get("noise", {}),
            private_noise=tensors.get("private_noise"),
        )


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
