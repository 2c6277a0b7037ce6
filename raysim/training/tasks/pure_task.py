"""A task as a pure function of tensors, for attacks that differentiate a client's training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raysim.rules.batch import Batch
from raysim.rules.contract import State
from raysim.rules.losses import JointLoss, Loss, task_loss
from raysim.rules.task import PassMode
from raysim.training.tasks.forward_pass import ForwardPass, forward_pass
from raysim.training.tasks.task import ModelTask, NetAtPoint, losses_of


class PureTask(ModelTask):
    """A client's problem without any state: gradients by `torch.func`, also under its `vmap`."""

    def _grad(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor | None
    ) -> Tensor:
        statistics = self._statistics(mode, buffers)
        (gradient,), moved, value = self._pass((w,), batch, loss, mode, statistics)
        if mode == "train":
            self.buffers = moved
            self.losses.append(value)
        return gradient

    def _grad_and_buffers(
        self, w: Tensor, batch: Batch, loss: Loss, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        (gradient,), moved, _ = self._pass((w,), batch, loss, "train", buffers)
        return gradient, moved

    def _joint_grad(
        self, w: Tensor, batch: Batch, others: State, loss: JointLoss
    ) -> tuple[Tensor, State]:
        points = w, others
        gradients, self.buffers, value = self._pass(points, batch, loss, "train", self.buffers)
        self.losses.append(value)
        return gradients

    def _pass(
        self,
        points: tuple[Any, ...],
        batch: Batch,
        loss: Callable[..., Tensor],
        mode: PassMode,
        statistics: Tensor,
    ) -> tuple[Any, Tensor, Tensor]:
        """Return the gradients at points, in mode "train" new statistics [Q], a loss for the log.

        The points are the parameters [P], and what the loss gets in addition.
        """

        def mean_loss(w: Tensor, *others: State) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            moved: list[Tensor] = []
            net = self._net(w, batch, mode, statistics, True, moved)
            with self._nets_at(points[0], partial(self._net, w, moved=[])):
                value = batch.mean(losses_of(loss, net, batch, *others))
            is_plain = self.model.is_own_loss(loss) or mode != "train"
            plain = value if is_plain else batch.mean(task_loss(net, batch))
            # torch.func.grad returns tensors only: no statistics are an empty one.
            return value, (moved[0] if moved else value.new_zeros(0), plain.detach())

        with self.model.passes():
            which = tuple(range(len(points)))
            gradients, (moved, value) = torch.func.grad(mean_loss, which, has_aux=True)(*points)
        return gradients, moved, value

    def input_grad(
        self, w: Tensor, batch: Batch, loss: Loss = task_loss, buffers: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient of each example's loss with respect to its input.

        See `Task.input_grad`.
        """
        self._guard("input_grad", batch)

        def total(x: Tensor) -> Tensor:
            net = self.net(w, replace(batch, x=x), "eval", buffers)
            net.one_by_one = True
            return losses_of(loss, net, batch).sum()

        with self.model.passes():
            return torch.func.grad(total)(batch.x)

    def _nets_of(self, w: Tensor) -> NetAtPoint:
        """Return what makes pure forward passes. See `ModelTask._nets_of`."""
        return partial(self._net, w, moved=[])

    def _net(
        self,
        w: Tensor,
        batch: Batch | None,
        mode: PassMode,
        buffers: Tensor,
        dropout: bool,
        moved: list[Tensor],
    ) -> ForwardPass:
        """In mode "train" the new statistics are left in `moved`."""

        def call(
            x: Tensor, first: int, levels: list[Tensor] | None
        ) -> tuple[Tensor, Tensor | None]:
            drop = batch.drop if batch and dropout else ()
            return forward_pass(self.model, w, x, first, levels, mode, buffers, drop, moved)

        return ForwardPass(self.model, batch and batch.x, call)
