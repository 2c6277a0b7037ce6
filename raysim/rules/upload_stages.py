"""Stages of `local.upload`: clip, compress or quantise what a client sends.

A stage changes a client's update on the client. The server receives the changed vector as it is
after decoding, so every server rule works with every stage. What the encoded update would take on
the wire is counted as `bytes_up`, by the `WireFormat` that each stage derives from the one before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raysim.config.sections.base import Positive
from raysim.rules.rule import SHIPPED_PACKAGE

INDEX_BITS = 32
"""Bits of the position of an entry."""

SEED_BITS = 64
"""Bits of a seed from which client and server draw the same positions."""

PositiveShare = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class WireFormat:
    """Size of an encoded update.

    It is n (value_bits + index_bits) + other_bits bits, rounded up to bytes, for n values.
    """

    values: int
    """Entries that are sent."""
    value_bits: int
    """Bits of each value."""
    index_bits: int = 0
    """Bits of the position of each value; 0 if the server knows the positions."""
    other_bits: int = 0
    """Bits that are sent once, such as a norm."""

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded update."""
        return -(-(self.values * (self.value_bits + self.index_bits) + self.other_bits) // 8)


STAGES: dict[str, type[UploadStage]] = {}
"""The shipped stages by name."""


@dataclass(frozen=True)
class UploadStage:
    """Base of stages (`local.upload: path.py:Class`).

    A subclass is a frozen dataclass; its fields are set from the item of `local.upload`. It
    defines `encode` and, if it changes the size, `wire_format`. The engine calls it after `finish`,
    for one client at a time, and keeps the memory of `error_feedback` in the client's state.
    """

    of: str | None = None
    """Key of the upload that the stage changes; null: the first of the model's size that the
    client rule sends."""
    error_feedback: bool = False
    """Whether the client keeps what the stage removed, and adds it to its next update."""

    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ()
    """Shapes of the model's tensors in the order of an update [P], set by the engine. They leave
    out personal parameters."""

    def __init_subclass__(cls) -> None:
        """Register a shipped stage by the name of its class in lower case."""
        if cls.__module__ == __name__ or cls.__module__.startswith(f"{SHIPPED_PACKAGE}."):
            STAGES[cls.__name__.lower()] = cls

    def at_shapes(self, shapes: Iterable[tuple[int, ...]]) -> Self:
        """Return this stage for a model whose tensors have these shapes.

        Args:
            shapes: the shapes, in the order of an update [P].
        """
        stage = replace(self)
        object.__setattr__(stage, "shapes", tuple(shapes))  # the instance is frozen
        return stage

    @property
    def contracts(self) -> bool:
        """Whether error feedback converges: E ‖v - C(v)‖² < ‖v‖² for what the server decodes, C(v).

        If the ratio of both stays below a number less than 1 for all v, the memory of
        `error_feedback` is bounded (Stich 2018). If C(v) can be further from v than 0 is, error
        feedback is refused.
        """
        return True

    @abstractmethod
    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the update as the server decodes it.

        Args:
            update: [P], finite; not to be changed in place.
            rng: a generator that is keyed by seed, round, client and position of the stage.

        Returns:
            A new tensor of the same shape and type.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no encode")

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of the encoded update; by default as before this stage.

        Args:
            before: the size without this stage.
            encoded: [P], the result of `encode`.
        """
        return before


@dataclass(frozen=True)
class Clip(UploadStage):
    """Scale the update down to a largest norm.

    What it removes has no bound, so with error feedback (U-Clip, Elesedy 2023) the memory grows
    unless `norm` is larger than the norm of the client's mean update.
    """

    norm: Positive = 1.0
    """Largest L2 norm of the update."""

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the update times min(1, norm / ‖update‖). See `UploadStage.encode`."""
        return clipped(update, self.norm)


@dataclass(frozen=True)
class TopK(UploadStage):
    """Send the k entries of largest magnitude (with error feedback: Stich 2018)."""

    share: PositiveShare = 0.01
    """k as a share of P; k is rounded, and at least 1."""

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the update with all other entries 0; of equal magnitudes the first are kept.

        See `UploadStage.encode`.
        """
        k = kept_entries(self.share, update.numel())
        magnitudes = update.abs()
        threshold = torch.topk(magnitudes, k).values.min()
        keep = magnitudes > threshold
        ties = (magnitudes == threshold).nonzero()[: k - int(keep.sum()), 0]
        keep[ties] = True
        return torch.where(keep, update, 0.0)

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of k values, each with its position. See `UploadStage.wire_format`."""
        k = min(before.values, kept_entries(self.share, encoded.numel()))
        return replace(before, values=k, index_bits=INDEX_BITS)


@dataclass(frozen=True)
class RandK(UploadStage):
    """Send k entries at random positions, which follow from a seed."""

    share: PositiveShare = 0.01
    """k as a share of P; k is rounded, and at least 1."""
    unbiased: bool | None = None
    """Whether the entries are multiplied by P/k, so that the expected value is the update; null:
    unless error_feedback."""

    @property
    def contracts(self) -> bool:
        """False if the entries are multiplied by P/k."""
        return self.unbiased is not True

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the update with all other entries 0. See `UploadStage.encode`."""
        P = update.numel()
        k = kept_entries(self.share, P)
        positions = torch.from_numpy(rng.choice(P, k, replace=False)).to(update.device)
        unbiased = not self.error_feedback if self.unbiased is None else self.unbiased
        encoded = torch.zeros_like(update)
        encoded[positions] = update[positions] * (P / k if unbiased else 1.0)
        return encoded

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of k values and a seed. See `UploadStage.wire_format`."""
        k = min(before.values, kept_entries(self.share, encoded.numel()))
        return replace(before, values=k, other_bits=before.other_bits + SEED_BITS)


@dataclass(frozen=True)
class QSGD(UploadStage):
    """Round each entry at random to one of s levels of the norm (Alistarh 2017).

    The rounded vector Q(v) has the expected value v and the variance E ‖Q(v) - v‖² <= ω ‖v‖², with
    ω = min(n / s², √n / s) for the n entries of v that are not 0 (lemma 3.1). With error feedback,
    Q(v) / (1 + ω) is sent, as Beznosikov 2020 does. It contracts for every ω, because
    E ‖v - c Q(v)‖² <= (1 - 2 c + c² (1 + ω)) ‖v‖², which is ω / (1 + ω) ‖v‖² for c = 1 / (1 + ω).
    """

    bits: Annotated[int, Field(ge=2, le=16)] = 8
    """Bits of an entry: its sign, and one of s = 2^(bits - 1) - 1 levels or zero."""
    unbiased: bool | None = None
    """Whether the entries are not divided by 1 + ω, so that the expected value is the update; null:
    unless error_feedback."""

    @property
    def contracts(self) -> bool:
        """False if the entries are not divided by 1 + ω, and ω can be 1 or more."""
        return self.unbiased is not True or self.variance(sum(map(math.prod, self.shapes))) < 1

    def variance(self, n: int) -> float:
        """Return ω, the largest variance of Q(v) in units of ‖v‖².

        Args:
            n: number of entries that are not 0.
        """
        levels = self._levels
        return min(n / levels**2, math.sqrt(n) / levels)

    @property
    def _levels(self) -> int:
        """The number of levels s."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return ‖v‖ sign(v_i) ξ_i, where ξ_i is one of the two levels around |v_i| / ‖v‖.

        It is divided by 1 + ω for error feedback; ‖v‖ / (1 + ω) is then sent in place of ‖v‖.

        See `UploadStage.encode`.
        """
        levels = self._levels
        exact = update.double()
        norm = (exact * exact).sum().sqrt()
        if norm == 0:
            return torch.zeros_like(update)
        draws = torch.from_numpy(rng.random(update.numel())).to(update.device)
        chosen = (exact.abs() * (levels / norm) + draws).floor_().clamp_(max=levels)
        unbiased = not self.error_feedback if self.unbiased is None else self.unbiased
        if not unbiased:
            norm = norm / (1 + self.variance(int(torch.count_nonzero(update))))
        return (exact.sign() * chosen * (norm / levels)).to(update.dtype)

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of `bits` for each value, and the norm. See `UploadStage.wire_format`."""
        norm_bits = 8 * encoded.element_size()
        return replace(before, value_bits=self.bits, other_bits=before.other_bits + norm_bits)


@dataclass(frozen=True)
class SignSGD(UploadStage):
    """Send the sign of each entry (Bernstein 2018)."""

    scaled: bool = True
    """Whether the signs are multiplied by the mean magnitude of the entries that are not 0 (after
    Karimireddy 2019, who divides by all P entries); false: plain signs."""

    @property
    def contracts(self) -> bool:
        """False for plain signs, which are far from an update of small entries."""
        return self.scaled

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the signs, scaled if configured; a zero stays zero. See `UploadStage.encode`."""
        signs = update.sign()
        if not self.scaled:
            return signs
        count = max(int(torch.count_nonzero(update)), 1)
        return signs * (update.double().abs().sum() / count).to(update.dtype)

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of one bit for each value, two if there are zeros, and the scale.

        See `UploadStage.wire_format`.
        """
        scale_bits = 8 * encoded.element_size() if self.scaled else 0
        has_zeros = int(torch.count_nonzero(encoded)) < before.values
        return replace(
            before, value_bits=2 if has_zeros else 1, other_bits=before.other_bits + scale_bits
        )


@dataclass(frozen=True)
class Cast(UploadStage):
    """Round each entry to a shorter floating-point type."""

    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """The type."""

    def encode(self, update: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the rounded update. See `UploadStage.encode`."""
        return update.to(getattr(torch, self.dtype)).to(update.dtype)

    def wire_format(self, before: WireFormat, encoded: Tensor) -> WireFormat:
        """Return the size of 16 bits for each value. See `UploadStage.wire_format`."""
        return replace(before, value_bits=min(before.value_bits, 16))


def clipped(update: Tensor, norm: float) -> Tensor:
    """Return an update scaled down to a largest L2 norm.

    Args:
        update: the update, [P].
        norm: the largest L2 norm.
    """
    length = (update.double() * update.double()).sum().sqrt()
    return update if length <= norm else update * (norm / length).to(update.dtype)


def kept_entries(share: float, size: int) -> int:
    """Return the number of entries that a share means: rounded half up, at least 1.

    Args:
        share: above 0, at most 1.
        size: P, the number of all entries.
    """
    return max(1, int(share * size + 0.5))
