"""Mini-batches of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from raysim.rules.unknown_attributes import SuggestsAttributes


@dataclass(frozen=True)
class Batch(SuggestsAttributes):
    """One mini-batch of one client."""

    x: Tensor
    """Images, `[B, C, H, W]`, or inputs of another shape. Tokens are integers, `[B, T]`."""
    y: Tensor
    """Labels, `[B]`, or probabilities, `[B, classes]`; other tasks have targets, `[B, ...]`."""
    drops: tuple[tuple[Tensor, ...], ...] = ()
    """Independent sets of dropout masks, as many as the rule's `dropout_masks`.

    The last entry of a set is the seed of a net that draws from global generators, if it does."""
    chosen: int = 0
    """Number of the set in use; see `masked`."""
    prepared: tuple[Batch, ...] = ()
    """The batches that the rule's `prepare` returned to go with this step."""
    noise: Mapping[str, Tensor] = field(default_factory=dict)
    """Random numbers of this step by name, as the rule's `noise` declares them."""
    private_noise: Tensor | None = None
    """Standard normal numbers, `[P]`; for private steps only."""

    @property
    def drop(self) -> tuple[Tensor, ...]:
        """The dropout masks in use, one for each dropout call, [B, ...] each; see `drops`."""
        return self.drops[self.chosen] if self.drops else ()

    @property
    def size(self) -> int:
        """Number of examples, B."""
        return len(self.y)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the examples, [...].

        Args:
            values: one for each example, [B, ...].
        """
        return values.mean(0)

    def class_sums(self, values: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Return sums over the examples of each class, [C, F], and their numbers, [C, 1].

        Args:
            values: features or logits of the examples, [B, F].
            classes: number of classes, C.
        """
        of_class = torch.eye(classes, dtype=values.dtype, device=values.device)[self.y]
        return of_class.T @ values, of_class.sum(0)[:, None]

    def masked(self, k: int) -> Batch:
        """Return the same batch with the k-th set of dropout masks.

        Args:
            k: from 0, below the rule's `dropout_masks`.
        """
        return replace(self, chosen=k)
