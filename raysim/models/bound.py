"""A copy of a net whose parameters and statistics are parts of flat vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.models.batchnorm_statistics import BoundStatistics
from raysim.models.keyed_layers import ForwardContext
from raysim.rules.task import PassMode

if TYPE_CHECKING:
    from raysim.models.flat import Model


class BoundModel:
    """Copy of a model whose parameters are views of `w` [P]: writing to it changes the net."""

    def __init__(self, model: Model):
        self.model = model
        self.frame = ForwardContext()
        self.module = model.copy_of_module(self.frame)
        self.is_training: bool | None = None
        """Mode that the net was put into; None before its first pass."""
        self.statistics = BoundStatistics(self.module[0], model.statistics)
        self.w = torch.zeros(model.size, dtype=model.dtype, device=model.device)
        self.parameters = model.trained_of(self.module)
        self.views = list(model.views(self.w).values())
        for p, view in zip(self.parameters, self.views, strict=True):
            p.data = view

    @classmethod
    def at_start(cls, model: Model) -> tuple[BoundModel, Tensor]:
        """Return a copy of a model at its initial parameters, and its initial statistics [Q].

        Args:
            model: the model.
        """
        bound = cls(model)
        w, buffers = model.initial()
        bound.w.copy_(w)
        return bound, buffers

    def forward(
        self,
        x: Tensor,
        mode: PassMode,
        buffers: Tensor | None,
        drop: tuple[Tensor, ...] = (),
        first: int = 0,
        levels: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the net at the parameters `w`.

        Args:
            x: inputs of the net, [B, ...], or of stage `first`.
            mode: mode of the pass, see `ForwardContext.mode`.
            buffers: running statistics [Q], updated in place in mode "train"; None where the
                pass uses none.
            drop: dropout masks, in the order of calls, and last the seed of a net that draws; ()
                disables dropout.
            first: see `StagedModel.forward`.
            levels: see `StagedModel.forward`.

        Returns:
            The outputs, [B, classes] or in the shape of the learning task.
        """
        if self.model.changes_inputs:
            x = x.clone()
        with self.model.drawing(mode, drop) as masks:
            self.tell(mode, buffers, masks, first)
            out = self.model.in_precision(lambda: self.module(x, first, levels), self.frame, levels)
        if self.statistics.unkeyed and mode == "train":
            self.statistics.collect()
        return out

    def tell(
        self, mode: PassMode, buffers: Tensor | None, drop: tuple[Tensor, ...], first: int = 0
    ) -> None:
        """Set the behaviour of the next pass, which starts at stage `first`.

        Args:
            mode: see `forward`.
            buffers: see `forward`.
            drop: dropout masks, in the order of calls; () disables dropout.
            first: the first stage that runs.
        """
        is_training = mode != "eval"
        if is_training != self.is_training:
            self.model.set_training(self.module, is_training)
            self.is_training = is_training
        if buffers is not None:
            self.statistics.bind(buffers)
        frame = self.frame
        frame.mode = mode
        frame.buffers = buffers
        frame.drop = drop
        frame.calls = self.model.dropouts_before[first]
