"""Check that under `privacy` the gradient of an example depends on that example alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from raysim.errors import ContractError
from raysim.models.comparison import close
from raysim.rules.batch import Batch
from raysim.rules.errors.user_code import function_defined_at
from raysim.rules.losses import Loss
from raysim.rules.task import PassMode
from raysim.training.tasks.loop_task import LoopTask


class SeparateExamples(LoopTask):
    """Task that refuses a private gradient by a loss in which examples of a batch meet.

    Clipping bounds what an example changes in its own gradient, not in those of others.
    """

    def _sample_grads(
        self, w: Tensor, batch: Batch, loss: Loss, mode: PassMode, buffers: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, values = super()._sample_grads(w, batch, loss, mode, buffers)
        # The first example becomes each of the others in turn, which also changes how often a
        # label occurs in the batch.
        for k in range(1, batch.size if mode == "train" else 1):
            x, y = batch.x.clone(), batch.y.clone()
            x[0], y[0] = x[k], y[k]
            changed, _ = super()._sample_grads(w, replace(batch, x=x, y=y), loss, mode, buffers)
            tolerance = 1e-8 if rows.dtype is torch.float64 else 1e-4
            if not close(changed[1:], rows[1:], tolerance):
                raise ContractError(
                    "under `privacy` the loss of an example changes with the other examples of "
                    "its batch, so that clipping does not bound what one of them changes; compute "
                    "it from the example alone, or leave `privacy` out "
                    f"({function_defined_at(loss)})"
                )
        return rows, values
