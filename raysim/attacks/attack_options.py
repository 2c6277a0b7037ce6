"""Options of gradient inversion."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raysim.config.sections.base import Section

DEFAULT_TV_WEIGHTS = {"l2": 1e-8, "cosine": 1e-6}
"""Weights of TV in Xu 2022: EMNIST and CT with l2, CIFAR-10 with cosine."""


class AttackOptions(Section):
    """Options of the attack. Except for the iterations, the defaults are those of Xu 2022."""

    cost: Literal["l2", "cosine"] = "cosine"
    """Distance of gradients that the attack minimizes. Xu 2022: l2 on EMNIST and CT, cosine on
    CIFAR-10."""
    tv: Annotated[float, Field(ge=0)] | None = None
    """Weight of the total variation (TV). Default: 1e-8 with l2, 1e-6 with cosine (Xu 2022). Zhu
    2019 has none."""
    attacker: Literal["oblivious", "adaptive"] = "oblivious"
    """`oblivious` assumes a plain gradient step, `adaptive` simulates the client's rule."""
    iterations: int = Field(default=2000, ge=1)
    """Steps of the attack. Xu 2022: 32 000; Geiping 2020: 4800. 2000 show the ranking on nets of
    LeNet's size."""
    lr: float = Field(default=1.0, gt=0)
    """Initial step size of Adam. Xu 2022: 1; Geiping 2020: 0.1."""
    signed: bool = False
    """Whether Adam sees only the sign of the image gradient (an option of Geiping 2020)."""
    box: bool = False
    """Whether images are clipped to the range of valid pixels after each step (Geiping 2020)."""
    restarts: int = Field(default=1, ge=1)
    """Number of starts from different random images. The result with the lowest cost is kept (an
    option of Geiping 2020)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random images from which the attack starts."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the attack, independent of the run's."""
    round: Annotated[int, Field(ge=0)] | None = None
    """Recorded round to attack. Default: the first."""

    @property
    def weight(self) -> float:
        """Weight of the TV term."""
        return DEFAULT_TV_WEIGHTS[self.cost] if self.tv is None else self.tv
