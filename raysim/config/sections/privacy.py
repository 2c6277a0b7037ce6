"""`privacy`: differential privacy of single examples, or of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import Positive, Section


class ExamplePrivacy(Section):
    """DP-SGD in every local step (Abadi 2016).

    Each example's gradient is clipped, and noise N(0, (noise_multiplier max_grad_norm)²) is added
    to their sum.
    """

    unit: Annotated[Literal["example"], Identity.NEVER] = "example"
    """Unit of the guarantee: single examples."""
    max_grad_norm: Positive | None = 1.0
    """Largest norm of an example's gradient; null: no clipping."""
    noise_multiplier: float = Field(default=1.0, ge=0)
    """Standard deviation of the noise, in units of `max_grad_norm`."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The δ at which ε is reported."""

    @model_validator(mode="after")
    def _noise_has_a_scale(self) -> ExamplePrivacy:
        if self.max_grad_norm is None and self.noise_multiplier > 0:
            raise ValueError(
                "'noise_multiplier' counts in units of 'max_grad_norm', which is null here; "
                "give max_grad_norm, or set noise_multiplier to 0"
            )
        return self


class AdaptiveClipping(Section):
    """A clip norm that follows a quantile of the norms of the clients' updates (Andrew 2021)."""

    quantile: float = Field(default=0.5, gt=0, lt=1)
    """Share of the clients whose updates should not be clipped."""
    lr: Positive = 0.2
    """Step size of the logarithm of the clip norm."""
    noise_std: float | None = Field(default=None, ge=0)
    """Standard deviation of the noise on the number of clients that were not clipped; null:
    schedule.cohort / 20, or noise_multiplier if that is more."""


class ClientPrivacy(Section):
    """DP-FedAvg (McMahan 2018): the guarantee covers a client with all of its examples.

    Each client's update is clipped, and the server adds noise N(0, (noise_multiplier clip_norm)²)
    to their sum, which it divides by `schedule.cohort`. With `adaptive`, the noise multiplier of
    the sum is z = (noise_multiplier⁻² - (2 noise_std)⁻²)^(-1/2), which is larger: the sum and the
    number of unclipped clients then cost as much privacy together (Andrew 2021, theorem 1).
    """

    unit: Literal["client"]
    """Unit of the guarantee: whole clients."""
    clip_norm: Positive = 1.0
    """Largest norm of a client's update; with `adaptive`, that of the first round."""
    noise_multiplier: float = Field(default=1.0, ge=0)
    """Standard deviation of the noise, in units of the clip norm."""
    adaptive: AdaptiveClipping | None = None
    """Adapt the clip norm; null: it is constant."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The δ at which ε is reported."""

    def count_noise(self, cohort: int) -> float:
        """Return the standard deviation of the noise on the number of unclipped clients.

        Args:
            cohort: `schedule.cohort`, the expected number of clients in a round.
        """
        if self.adaptive is None or self.noise_multiplier == 0:
            return 0.0
        noise = self.adaptive.noise_std
        return max(cohort / 20, self.noise_multiplier) if noise is None else noise

    def update_noise(self, cohort: int) -> float:
        """Return the standard deviation of the noise on the sum, in units of the clip norm.

        The noisy sum and the noisy number of unclipped clients together cost as much privacy as a
        sum with noise `noise_multiplier` (Andrew 2021, theorem 1).

        Args:
            cohort: `schedule.cohort`, the expected number of clients in a round.

        Raises:
            ValueError: the noise on the number of unclipped clients is too small for that.
        """
        z, count_noise = self.noise_multiplier, self.count_noise(cohort)
        if self.adaptive is None or z == 0:
            return z
        if 2 * count_noise <= z:
            raise ValueError(
                f"the noise on the number of unclipped clients is {count_noise:g}, but it must be "
                f"more than half of noise_multiplier ({z:g}); raise it"
            )
        return (z**-2 - (2 * count_noise) ** -2) ** -0.5


def _with_unit(value: Any) -> Any:
    """Return the section with its default unit."""
    return {"unit": "example", **value} if isinstance(value, Mapping) else value


Privacy = Annotated[
    Annotated[ExamplePrivacy | ClientPrivacy, Field(discriminator="unit")],
    BeforeValidator(_with_unit),
]
