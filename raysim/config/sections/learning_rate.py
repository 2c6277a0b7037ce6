"""`local.lr`: a number, a list of [first round, value], a schedule, or a function of the round.

The schedules have the parameters and values of those in torch.optim.lr_scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from raysim.config.sections.base import (
    Named,
    Positive,
    PositiveScheduled,
    Section,
    ShortForm,
    at_round,
    bounds,
    kind_or_own,
    named,
)
from raysim.config.users_function import users_function
from raysim.errors import ConfigError


class StepSizes:
    """The step sizes of all local steps of a run."""

    def at(self, i: int) -> float:
        """Return the step size in a round or step.

        Args:
            i: number of the round or step, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no at")

    @property
    def largest(self) -> float:
        """The largest step size."""
        raise NotImplementedError(f"{type(self).__name__} defines no largest")

    @property
    def varies_in_a_round(self) -> bool:
        """Whether the steps of a round have different step sizes."""
        return False

    def of_step(self, t: int, step: int = 0) -> float:
        """Return the step size of a local step.

        Args:
            t: the round in which the client started, from 0.
            step: number of the step in its round, from 0.
        """
        return self.at(step if self.varies_in_a_round else t)

    def mean(self, t: int, steps: int) -> float:
        """Return the mean step size of the local steps of a client in a round.

        Args:
            t: the round in which the client started, from 0.
            steps: number of its steps.
        """
        if not self.varies_in_a_round or not steps:
            return self.of_step(t)
        return sum(self.at(step) for step in range(steps)) / steps


@dataclass(frozen=True)
class StepSizesByRound(StepSizes):
    """One step size for all rounds, or one for each part of a run."""

    values: float | list[tuple[int, float]]
    """The step size; or pairs of a first round and the step size from there on, by ascending
    rounds."""

    def at(self, i: int) -> float:
        """Return the step size. See `StepSizes.at`."""
        return at_round(self.values, i)

    @property
    def largest(self) -> float:
        """The largest step size."""
        return bounds(self.values)[1]


class LearningRateSchedule(Section, StepSizes):
    """Keys that all schedules have. Their length is a key: it does not follow `rounds`."""

    base_lr: Positive
    """Step size that the schedule multiplies."""
    over: Literal["rounds", "steps"] = "rounds"
    """Whether it counts rounds, or the steps of a client in a round (anew in each round)."""

    @property
    def varies_in_a_round(self) -> bool:
        """Whether the steps of a round have different step sizes."""
        return self.over == "steps"

    @property
    def largest(self) -> float:
        """The largest step size."""
        return self.base_lr


class CosineSchedule(LearningRateSchedule):
    """From `base_lr` down to `eta_min` along half a cosine (CosineAnnealingLR)."""

    name: Literal["cosine"]
    T_max: int = Field(ge=1)
    """Length, in rounds or steps. The step size then stays at `eta_min`."""
    eta_min: float = Field(default=0.0, ge=0)
    """Last step size."""

    @model_validator(mode="after")
    def _goes_down(self) -> CosineSchedule:
        if self.eta_min > self.base_lr:
            raise ValueError("'eta_min' must not be larger than 'base_lr'")
        return self

    def at(self, i: int) -> float:
        """Return the step size. See `StepSizes.at`."""
        share = min(i, self.T_max) / self.T_max
        return self.eta_min + (self.base_lr - self.eta_min) * (1 + cos(pi * share)) / 2


class StepSchedule(LearningRateSchedule):
    """`base_lr`, multiplied by `gamma` after every `step_size` rounds or steps (StepLR)."""

    name: Literal["step"]
    step_size: int = Field(ge=1)
    """Rounds or steps between two reductions."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor of a reduction."""

    def at(self, i: int) -> float:
        """Return the step size. See `StepSizes.at`."""
        return self.base_lr * self.gamma ** (i // self.step_size)


class WarmupSchedule(LearningRateSchedule):
    """A linear change from one share of `base_lr` to another (LinearLR), then another schedule."""

    name: Literal["warmup"]
    total_iters: int = Field(ge=1)
    """Length, in rounds or steps. The step size then stays."""
    start_factor: float = Field(default=1 / 3, gt=0, le=1)
    """First share of `base_lr`."""
    end_factor: float = Field(default=1.0, gt=0, le=1)
    """Last share of `base_lr`."""
    then: CosineSchedule | StepSchedule | None = Field(default=None, discriminator="name")
    """Schedule `cosine` or `step` that begins after `total_iters` (SequentialLR)."""

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, keys: Any) -> Any:
        """Give the following schedule the keys of this one that it does not have."""
        if not isinstance(keys, Mapping) or not isinstance(keys.get("then"), Mapping):
            return keys
        shared = {key: keys[key] for key in ("base_lr", "over") if key in keys}
        return {**keys, "then": {**shared, **keys["then"]}}

    @model_validator(mode="after")
    def _one_unit(self) -> WarmupSchedule:
        if self.then and self.then.over != self.over:
            raise ValueError("'then.over' must be the same as 'over'")
        return self

    def at(self, i: int) -> float:
        """Return the step size. See `StepSizes.at`."""
        if self.then and i >= self.total_iters:
            return self.then.at(i - self.total_iters)
        share = min(i, self.total_iters) / self.total_iters
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * share)

    @property
    def largest(self) -> float:
        """The largest step size."""
        warmup = self.base_lr * max(self.start_factor, self.end_factor)
        return max(warmup, self.then.largest) if self.then else warmup


class OwnStepSizes(Named, StepSizes):
    """Your own function of the round, from 0; all keys but these are its arguments.

    It is called when a run is prepared, twice for each round, with the same result.
    """

    name: str = Field(pattern=":")
    """path.py:function"""

    _values: tuple[float, ...] = PrivateAttr(())

    def compute(self, key: str, rounds: int) -> None:
        """Call the function for all rounds of a run.

        Args:
            key: key of the configuration that names it, for messages.
            rounds: number of rounds.

        Raises:
            ConfigError: there is no such function, it fails, or a value is no finite number of at
                least 0, or another one at a second call.
        """
        function = users_function(key, self.name, self.parameters, 1)
        values = [function(t) for t in range(rounds)]
        for t, value in enumerate(values):
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not isfinite(value) or value < 0:
                raise ConfigError(
                    f"{key}: {self.name} returned {value!r} for round {t}; return a finite number "
                    "of at least 0"
                )
            if function(t) != value:
                raise ConfigError(
                    f"{key}: {self.name} returns another number for round {t} when it is called "
                    "again; a step size is a function of the round alone"
                )
        self._values = tuple(map(float, values))

    def at(self, i: int) -> float:
        """Return the step size. See `StepSizes.at`."""
        return self._values[min(i, len(self._values) - 1)]

    @property
    def largest(self) -> float:
        """The largest step size."""
        return max(self._values)


def _kind(value: Any) -> str | None:
    """Return the tag of a step size: "own", the name of its schedule, or "constant"; or None."""
    match value:
        case LearningRateSchedule() | OwnStepSizes():
            return kind_or_own(value)
        case Mapping():
            return kind_or_own(value) if value.get("name") is not None else None
        case str() if ":" in value:
            return "own"
    return "constant"


def _not_a_bare_name(value: Any) -> Any:
    """Refuse the name of a schedule without the keys that it needs."""
    schedules = {"cosine": CosineSchedule, "step": StepSchedule, "warmup": WarmupSchedule}
    if schedule := schedules.get(value) if isinstance(value, str) else None:
        fields = schedule.model_fields.items()
        needed = [f"{key}: …" for key, field in fields if field.is_required() and key != "name"]
        entry = ", ".join([f"name: {value}", *needed])
        raise ValueError(f"a schedule needs its keys; write {{{entry}}}")
    return value


if TYPE_CHECKING:
    LearningRate = float | list[tuple[int, float]] | LearningRateSchedule | OwnStepSizes
else:
    LearningRate = Annotated[
        Annotated[PositiveScheduled, Tag("constant")]
        | Annotated[CosineSchedule, Tag("cosine")]
        | Annotated[StepSchedule, Tag("step")]
        | Annotated[WarmupSchedule, Tag("warmup")]
        | Annotated[OwnStepSizes, ShortForm(named), Tag("own")],
        Discriminator(_kind),
        BeforeValidator(_not_a_bare_name),
    ]
