"""`local.optimizer`: the optimizer of the local steps, with the parameters of torch.optim."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, model_validator

from raysim.config.identity import Identity
from raysim.config.sections.base import Positive, Section

UnitFactor = Annotated[float, Field(ge=0, lt=1)]
"""A factor of decay."""


class OptimizerSection(Section):
    """Keys that all optimizers have."""

    state: Literal["reset", "keep"] = "reset"
    """Whether a client's moments begin anew in each round, or are kept with its state."""


class SGDSection(OptimizerSection):
    """Stochastic gradient descent; plain without `momentum` and `weight_decay`."""

    name: Literal["sgd"] = "sgd"
    momentum: UnitFactor = 0.0
    """Factor of the momentum buffer; 0: plain SGD."""
    dampening: UnitFactor = 0.0
    """The direction enters the buffer times 1 - dampening, except at the first step."""
    nesterov: bool = False
    """Use Nesterov's momentum."""
    weight_decay: Annotated[float, Identity.UNLESS_DEFAULT] = Field(default=0.0, ge=0)
    """Factor of each parameter, with biases, in the direction. `local.weight_decay` leaves biases
    out."""

    @model_validator(mode="after")
    def _belongs_to_momentum(self) -> SGDSection:
        without_effect = {
            "nesterov": self.nesterov,
            "dampening": self.dampening > 0,
            "state": self.state == "keep",
        }
        if not self.momentum and any(without_effect.values()):
            key = next(key for key, is_set in without_effect.items() if is_set)
            raise ValueError(f"'{key}' has no effect without 'momentum'; give momentum, as 0.9")
        if self.nesterov and self.dampening:
            raise ValueError("'nesterov' needs a 'dampening' of 0")
        return self


class AdamSection(OptimizerSection):
    """Adam (Kingma 2015)."""

    name: Literal["adam"]
    betas: tuple[UnitFactor, UnitFactor] = (0.9, 0.999)
    """Decay of the mean of directions, and of the mean of their squares."""
    eps: Positive = 1e-8
    """Number that is added to the root of the mean of squares."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of each parameter, with biases, in the direction."""
    amsgrad: Annotated[bool, Identity.UNLESS_DEFAULT] = False
    """Use the largest mean of squares so far (Reddi 2018)."""


class AdamWSection(AdamSection):
    """Adam with decoupled weight decay (Loshchilov 2019)."""

    name: Literal["adamw"]  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    weight_decay: float = Field(default=0.01, ge=0)
    """Each step multiplies the parameters, with biases, by 1 - lr weight_decay."""


class RMSpropSection(OptimizerSection):
    """RMSprop (Hinton 2012): the direction over the root of the mean of its squares."""

    name: Literal["rmsprop"]
    alpha: UnitFactor = 0.99
    """Decay of the mean of squares."""
    eps: Positive = 1e-8
    """Number that is added to the root."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of each parameter, with biases, in the direction."""
    momentum: UnitFactor = 0.0
    """Factor of the buffer that sums the quotients; 0: none."""
    centered: bool = False
    """Subtract the square of the mean of directions from the mean of squares."""


class AdagradSection(OptimizerSection):
    """Adagrad (Duchi 2011): the direction over the root of the sum of its squares."""

    name: Literal["adagrad"]
    initial_accumulator_value: float = Field(default=0.0, ge=0)
    """Value at which the sum begins."""
    eps: Positive = 1e-10
    """Number that is added to the root."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Factor of each parameter, with biases, in the direction."""


AnyOptimizer = Annotated[
    SGDSection | AdamSection | AdamWSection | RMSpropSection | AdagradSection, Discriminator("name")
]

PLAIN_SGD = SGDSection()
"""w <- w - lr direction, without any state."""
