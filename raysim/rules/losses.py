"""Loss functions, and the forward pass that they are given.

A loss takes a `Net` and a `Batch` and returns one value for each example. A method's own loss is
written the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from raysim.rules.batch import Batch
from raysim.rules.tasks.learning_task import LearningTask
from raysim.rules.tasks.loss_task import LossTask
from raysim.rules.tasks.shipped_tasks import Classification


class Net(ABC):
    """A forward pass on one batch. It runs when one of its outputs is first read, and only once."""

    learning_task: LearningTask = Classification()
    """Learning task of the net: the section `task` of the configuration."""
    one_by_one: bool = False
    """True if each example's loss is needed by itself, not as a part of the batch's loss."""

    @property
    @abstractmethod
    def logits(self) -> Tensor:
        """Outputs of the net, `[B, classes]`, or of the shape of the learning task."""

    @property
    @abstractmethod
    def features(self) -> Tensor:
        """The representation, that is the classifier's input, [B, F].

        Raises:
            ValueError: the net does not end in a linear classifier.
        """

    @property
    @abstractmethod
    def levels(self) -> list[Tensor]:
        """Output of each stage, `[h_1, ..., h_L, logits]`.

        Raises:
            ValueError: the net does not consist of stages.
        """

    @abstractmethod
    def tail(self, level: int, h: Tensor) -> Tensor:
        """Run the stages after `level` on other activations.

        Args:
            level: 1..L, the number of the last stage that is left out.
            h: the activations in the place of h_level, [B, ...].

        Returns:
            The logits, [B, classes].
        """

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Run the classifier on other features. The rest of the net does not run for it.

        Args:
            features: inputs of the classifier, [B, F].

        Returns:
            The logits, [B, classes].

        Raises:
            ValueError: the net does not end in a linear classifier.
        """


Loss = Callable[[Net, Batch], Tensor]
"""Returns one value for each example, [B]."""

JointLoss = Callable[[Net, Batch, dict[str, Tensor]], Tensor]
"""A loss that depends on further tensors, by name. It returns one value for each example, [B]."""


def task_loss(net: Net, batch: Batch) -> Tensor:
    """Return the loss of each example by the run's learning task, [B].

    Their mean over the batch is the task's loss of the batch. So a loss with weights of classes is
    divided by the batch's own denominator. A method that adds terms to the loss adds them to this
    one, and then works for every task.

    Args:
        net: the forward pass.
        batch: the batch.
    """
    task = net.learning_task
    if net.one_by_one:
        return task.single_losses(net.logits, batch)
    return task.batch_losses(net.logits, batch)


def cross_entropy(net: Net, batch: Batch) -> Tensor:
    """Return the cross-entropy of each example, [B].

    Args:
        net: the forward pass.
        batch: the batch with labels as y.

    Raises:
        ValueError: the learning task has no class labels.
    """
    _require_class_labels(net, "cross_entropy")
    return F.cross_entropy(net.logits, batch.y, reduction="none")


def soft_cross_entropy(net: Net, batch: Batch) -> Tensor:
    """Return -Σ_c y_c log(p_c + 1e-12) of each example, [B] (Xu 2022).

    The batch has probabilities [B, classes] or labels [B] as its y.

    Args:
        net: the forward pass.
        batch: the batch with labels [B] or probabilities [B, classes] as y.

    Raises:
        ValueError: the learning task has no class labels.
    """
    _require_class_labels(net, "soft_cross_entropy")
    log_p = torch.log(torch.softmax(net.logits, -1) + 1e-12)
    if batch.y.is_floating_point():
        return -(batch.y * log_p).sum(-1)
    return -log_p.gather(-1, batch.y[:, None])[:, 0]


def _require_class_labels(net: Net, loss: str) -> None:
    """Raise ValueError if the learning task has no class labels."""
    task = net.learning_task
    if not task.class_labels:
        raise ValueError(
            f"{loss} needs class labels, which task '{task.name}' has not; use task_loss"
        )
    if isinstance(task, LossTask) and not task.reading.is_cross_entropy:
        raise ValueError(f"{loss} is not the loss '{task.name}' of this run; use task_loss")
