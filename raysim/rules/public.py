"""Public data: examples that no client owns, for client rules and server rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from raysim.rules.batch import Batch

PublicNeed = Literal["", "inputs", "labels"]
"""Public data that a rule needs: none, their x, or their x and y."""


class PublicData:
    """The public examples of a run, on the device of a worker or of the server.

    They are the same for all clients and for the server, in the same order.

    Args:
        n: number of examples.
        has_labels: whether they have targets.
        at: returns x and y of the examples at int64 positions [B].
    """

    def __init__(self, n: int, has_labels: bool, at: Callable[[Tensor], tuple[Tensor, Tensor]]):
        self.n = n
        """Number of examples."""
        self.has_labels = has_labels
        """Whether they have targets."""
        self._at = at

    def __len__(self) -> int:
        return self.n

    @property
    def examples(self) -> Batch:
        """All examples as one batch, in their order."""
        return self.batch(range(self.n))

    def batch(self, positions: Tensor | np.ndarray | list[int] | range) -> Batch:
        """Return the examples at some positions, without augmentation.

        Args:
            positions: numbers from 0 to n - 1, [B].

        Returns:
            The batch. Without targets its y is empty, [B, 0].

        Raises:
            ValueError: they are no whole numbers, such as a mask.
        """
        if not isinstance(positions, Tensor):
            array = np.asarray(positions)
            positions = torch.from_numpy(array.astype(np.int64) if not array.size else array.copy())
        if positions.is_floating_point() or positions.dtype is torch.bool:
            raise ValueError(
                f"public.batch: the positions are {positions.dtype}; give whole numbers from 0 to "
                "n - 1, such as np.flatnonzero(mask)"
            )
        return Batch(*self._at(positions.long()))

    def batches(self, size: int | None = None, rng: Generator | None = None) -> Iterator[Batch]:
        """Make one pass over the examples.

        Args:
            size: examples in a batch; None: all in one batch.
            rng: shuffles the examples, such as `reports.rng("root")`; None: in their order.

        Yields:
            The batches; the last one may be smaller.

        Raises:
            ValueError: the size is less than 1.
        """
        size = self.n if size is None else size
        if size < 1:
            raise ValueError(f"public.batches: the size is {size}; give at least 1")
        order = np.arange(self.n) if rng is None else rng.permutation(self.n)
        for start in range(0, self.n, size):
            yield self.batch(order[start : start + size])
