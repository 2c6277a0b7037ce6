"""The loss of the methods compared with FedReg in the code of Xu 2022.

That code has -log(p + 1e-12) for every method, where p is the probability of the label. So the loss
is at most 27.6, and its gradient vanishes where p is far below 1e-12, while that of the
cross-entropy does not. FedReg has this loss with either task.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.rules import Batch, Classification


@dataclass(frozen=True)
class BoundedClassification(Classification):
    """Classification with the loss -log(p + 1e-12)."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each example, [B]. See `LearningTask.loss`."""
        log_p = torch.log(torch.softmax(outputs, -1) + 1e-12)
        return -log_p.gather(-1, batch.y[:, None])[:, 0]
