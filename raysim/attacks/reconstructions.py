"""Images that an attack has reconstructed, and how close they are to the client's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from raysim.attacks.attack_options import AttackOptions
from raysim.data import Dataset
from raysim.data.dataset import MAX_PIXEL_VALUES, broadcastable
from raysim.diagnostics.recorded_updates import Observation
from raysim.errors import ConfigError


@dataclass(frozen=True)
class Reconstruction:
    """Reconstruction from one client's update.

    Attributes:
        client: number of the client.
        labels: labels of its b images.
        cost: the distance of the gradients at the images found, without TV. May not be finite.
        psnr: PSNR of each image, in dB; inf for one found exactly, NaN if the cost is not finite.
        restart: number of the start that led to the lowest cost.
        original: [b, C, H, W] in [0, 1], the client's images.
        reconstructed: [b, C, H, W] in [0, 1]; images of one label in the order that matches.
    """

    client: int
    labels: tuple[int, ...]
    cost: float
    psnr: tuple[float, ...]
    restart: int
    original: Tensor
    reconstructed: Tensor


@dataclass(frozen=True)
class AttackResult:
    """Result of an attack on the clients observed in one round.

    Attributes:
        options: the options of the attack.
        round: the attacked round, from 0.
        clients: the reconstruction for each client.
        seconds: duration of the attack.
    """

    options: AttackOptions
    round: int
    clients: list[Reconstruction]
    seconds: float

    @property
    def psnr(self) -> float:
        """Mean PSNR over images in dB, without those found exactly; NaN if there are no others."""
        finite = list(filter(math.isfinite, self._of_images()))
        return statistics.fmean(finite) if finite else math.nan

    @property
    def median(self) -> float:
        """Median PSNR over images in dB, including those found exactly; NaN if there is none."""
        values = [p for p in self._of_images() if not math.isnan(p)]
        return statistics.median(values) if values else math.nan

    @property
    def exact(self) -> int:
        """Number of images that were found exactly."""
        return self._of_images().count(math.inf)

    def _of_images(self) -> list[float]:
        """Return the PSNR of each image of all clients."""
        return [p for client in self.clients for p in client.psnr]

    @property
    def failed(self) -> list[int]:
        """Clients whose cost is not finite."""
        return [client.client for client in self.clients if not math.isfinite(client.cost)]

    def as_object(self) -> dict[str, Any]:
        """Return the figures as one JSON object; non-finite figures are null."""

        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "round": self.round,
            "psnr": plain(self.psnr),
            "psnr_median": plain(self.median),
            "exact": self.exact,
            "failed": self.failed,
            "clients": [
                {
                    "client": c.client,
                    "labels": c.labels,
                    "cost": plain(c.cost),
                    "psnr": [plain(p) for p in c.psnr],
                }
                for c in self.clients
            ],
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class PixelRange:
    """Inputs that belong to a pixel of 0 and to the brightest, [C, 1, 1] or [C, H, W] each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, dataset: Dataset, dtype: torch.dtype, device: str = "cpu") -> PixelRange:
        """Return the range of a data set's pixels after normalisation.

        Args:
            dataset: the data set; its pixels are normalised as its `scale` and `shift` say.
            dtype: type of the bounds.
            device: a device of torch.

        Returns:
            Lowest and highest value, [C, 1, 1] or [C, H, W] each.

        Raises:
            ConfigError: the examples are not images.
        """
        if dataset.scale is None or dataset.shift is None:
            raise ConfigError(f"data.name: {dataset.name} has no images to reconstruct")
        top = MAX_PIXEL_VALUES.get(dataset.name, 255)
        scale, shift = (
            torch.tensor(broadcastable(a), dtype=dtype, device=device)
            for a in (dataset.scale, dataset.shift)
        )
        return cls(shift, top * scale + shift)

    def image(self, x: Tensor) -> Tensor:
        """Return net inputs [..., C, H, W] as images in [0, 1], float64 on the CPU.

        A pixel that is alike in all training images (`data.scaling=per_pixel`) is 0.

        Args:
            x: [..., C, H, W], inputs of the net.
        """
        low, high = self.low.double(), self.high.double()
        known = high > low
        return ((x.double() - low) / torch.where(known, high - low, 1) * known).cpu()


def psnr(original: Tensor, reconstructed: Tensor) -> list[float]:
    """Return 10 log10(1 / MSE) of b images [b, C, H, W] in [0, 1]; inf for equal images.

    Args:
        original: [b, C, H, W], the original images.
        reconstructed: [b, C, H, W], the reconstructed images.
    """
    errors = ((original - reconstructed) ** 2).flatten(1).mean(1).tolist()
    return [math.inf if e == 0 else -10 * math.log10(e) for e in errors]


def judged(
    observation: Observation, cost: float, restart: int, x: Tensor, pixels: PixelRange
) -> Reconstruction:
    """Return a reconstruction with its quality.

    Args:
        observation: what the attacker has seen of the client.
        cost: distance of the gradients at `x`; if it is not finite, the PSNR is NaN.
        restart: number of the start that led to `x`.
        x: the images found, as inputs of the net, [b, C, H, W].
        pixels: range of the data set's pixels as inputs.
    """
    original, reconstructed = pixels.image(observation.x.to(x.device)), pixels.image(x).clamp(0, 1)
    labels = tuple(int(label) for label in observation.y)
    if math.isfinite(cost) and torch.isfinite(reconstructed).all():
        reconstructed = reconstructed[matching(original, reconstructed, labels)]
        quality = tuple(psnr(original, reconstructed))
    else:
        cost, quality = cost if not math.isfinite(cost) else math.nan, (math.nan,) * len(labels)
    return Reconstruction(
        observation.client, labels, cost, quality, restart, original, reconstructed
    )


def matching(original: Tensor, reconstructed: Tensor, labels: Sequence[int]) -> list[int]:
    """Return the index of the found image that belongs to each original image.

    Images are matched within a label so that the sum of squared errors is smallest. Within a batch,
    images of one label leave the same gradient in any order.

    Args:
        original: images [b, C, H, W].
        reconstructed: images [b, C, H, W] in any order within a label.
        labels: [b], labels of the original images.
    """
    order = list(range(len(labels)))
    for label in set(labels):
        members = [k for k, other_label in enumerate(labels) if other_label == label]
        a, b = original[members].flatten(1), reconstructed[members].flatten(1)
        errors = ((a[:, None] - b[None]) ** 2).mean(2)
        for k, chosen in zip(members, linear_sum_assignment(errors.numpy())[1], strict=True):
            order[k] = members[chosen]
    return order
