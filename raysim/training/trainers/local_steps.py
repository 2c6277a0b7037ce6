"""The local steps of one client: what they carry from one mini-batch to the next, and one of them.

A step computes with tensors only. A lane can therefore capture it as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from raysim.config.schema import Config
from raysim.models.default_device import tensors_on
from raysim.rules.batch import Batch
from raysim.rules.contract import PLAIN_STEP, overridden
from raysim.rules.errors.returned_values import (
    check_constant,
    check_direction,
    check_passes,
    check_step,
)
from raysim.training.client_start import PreparedClient
from raysim.training.tasks.loop_task import LoopTask


class Place(NamedTuple):
    """Place of a mini-batch among those of its step (`local.accumulate`)."""

    number: int
    """Number of mini-batches of the step so far, with this one."""
    last: bool
    """Whether the optimizer makes its step after this mini-batch."""

    @classmethod
    def of(cls, i: int, of_step: int, batches: int) -> Place:
        """Return the place of a mini-batch.

        Args:
            i: number of the mini-batch, from 0.
            of_step: mini-batches of a step.
            batches: mini-batches of all steps; the last step may have fewer.
        """
        number = i % of_step + 1
        return cls(number, number == of_step or i + 1 == batches)


class LocalSteps:
    """The local steps of one client.

    Args:
        config: the configuration of its group.
        task: the task, which the client's start has set.
        client: the client before its steps.

    Attributes:
        state: what the rule carries from step to step, with the parameters [P] as "w".
    """

    def __init__(self, config: Config, task: LoopTask, client: PreparedClient):
        self.config = config
        self.task = task
        self.rule = client.rule
        self.shared = client.broadcast.shared
        self.state = client.state
        self.plain = config.takes_bare_gradients and not overridden(client.rule, PLAIN_STEP)
        self.in_place = not overridden(client.rule, ["step"])
        self.accumulated: Tensor | None = None
        """[P], sum of the directions of the mini-batches of a step; None: there is one of each."""

    def set_step_size(self, lr: float) -> None:
        """Set the step size of the steps that follow.

        Args:
            lr: the step size.
        """
        self.task.settings = replace(self.task.settings, lr=lr)

    def make(self, batch: Batch, place: Place) -> None:
        """Make the step of a mini-batch, or add its direction to those of its step.

        Args:
            batch: the mini-batch.
            place: its place in its step.

        Raises:
            ContractError: the rule returns something that its contract forbids.
        """
        with tensors_on(self.task.model.device):
            task, rule = self.task, self.rule
            task.logged = {}
            passes = len(task.losses)
            if self.plain:
                task.descend_plainly(batch)
            elif self.in_place:
                w = self.state["w"]
                direction = rule.direction(self.shared, self.state, batch, task)
                check_direction(rule, w, direction)
                check_constant(rule, "direction", "the direction", direction)
                if self.config.local.accumulate > 1:
                    direction = self._mean_with(direction, place)
                if place.last:
                    task.descend_in_place(w, direction)
            else:
                # `check_update` expects one call of `descend` in this step.
                task.updates = 0
                # A copy, since a step that adds a key to its argument would not be noticed.
                after = rule.step(self.shared, {**self.state}, batch, task)
                check_step(rule, self.state, after)
                task.check_update(rule)
                self.state = after
            check_passes(rule, len(task.losses) - passes)

    def end(self) -> None:
        """Leave task and state as `finish` expects them."""

    def _mean_with(self, direction: Tensor, place: Place) -> Tensor:
        """Add a direction [P] to those of its step; return the mean of all so far."""
        if self.accumulated is None:
            self.accumulated = direction.clone()
        elif place.number == 1:
            self.accumulated.copy_(direction)
        else:
            self.accumulated += direction
        return self.accumulated / place.number
