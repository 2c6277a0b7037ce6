"""Checks of a net's first outputs, and of their loss, against the learning task."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.errors import ConfigError
from raysim.rules.batch import Batch
from raysim.rules.tasks.learning_task import LearningTask
from raysim.rules.tasks.loss_task import LossTask
from raysim.rules.tasks.shipped_tasks import TASKS, Classification, Multilabel, Regression
from raysim.system.global_generators import generators_kept
from raysim.system.signals import failing_as


def check_outputs(
    outputs: Any,
    shape: tuple[int, ...] | None,
    task: LearningTask,
    label: str,
    of_one_number: bool,
) -> None:
    """Check that a net returns outputs as its learning task expects them.

    Args:
        outputs: what the net returned for two examples.
        shape: the expected shape of the output for one example; None: any.
        task: the learning task.
        label: beginning of a message about the net.
        of_one_number: whether each example is one number, which the net gets as [B, 1].

    Raises:
        ConfigError: they are no tensor, or have another shape; the message names the fix.
    """
    if not isinstance(outputs, Tensor):
        form = type(outputs).__name__
        is_logits = isinstance(getattr(outputs, "logits", None), Tensor)
        one = "its logits, out.logits" if is_logits else "the tensor of the outputs"
        raise ConfigError(
            f"{label} turns two examples into {form}, and task '{task.name}' takes one tensor; let "
            f"forward return {one}, or give a loss function of ({form}, y) with task.like: any"
        )
    got = list(outputs.shape)
    # A net for one number, or one label, may leave out the dimension of its only column.
    has_columns = isinstance(task, Regression | Multilabel)
    is_squeezed = has_columns and got == [2] and shape == (1,)
    if is_squeezed or (got[:1] == [2] and shape in (None, tuple(got[1:]))):
        return
    if shape is None:
        expected = "[2, ...]"
    else:
        expected = f"{[2, *shape]}{_fix_of_outputs(task, got, [2, *shape])}"
        if of_one_number and got == [2, 1, *shape]:  # of an embedding
            expected += "; x is [2, 1] here, so let forward take x[:, 0]"
    raise ConfigError(
        f"{label} turns two examples into {got}, but task '{task.name}' expects outputs of shape "
        f"{expected}"
    )


def _fix_of_outputs(task: LearningTask, got: list[int], expected: list[int]) -> str:
    """Return the advice for outputs of another shape than the task's; "" if there is none."""
    are_classes = len(got) == 2 and got > [2, 1]
    if isinstance(task, LossTask) and not (isinstance(task, Classification) and are_classes):
        return (
            f" like task '{task.like}'; set task.like to "
            "any if the loss takes these outputs as they are, or to the task of these outputs "
            f"({', '.join(TASKS)}; labels of classes are whole numbers [n], as y[:, 0])"
        )
    if isinstance(task, Classification) and are_classes:
        why = "some classes have no example"
        if got < expected:
            why = f"the data have fewer classes than the {expected[1]} that they name"
        of_loss = ", or set task.like to any for other outputs, which have no accuracy"
        of_loss = of_loss if isinstance(task, LossTask) else ""
        return f"; if {why}, give their number with the data, classes={got[1]}{of_loss}"
    return ""


def check_first_loss(task: LearningTask, outputs: Tensor, batch: Batch) -> None:
    """Check that a user's task returns one finite number for each example.

    Args:
        task: the learning task; a shipped one is not checked.
        outputs: the net's outputs for the examples, [2, ...].
        batch: two real examples.

    Raises:
        ConfigError: its loss fails, or returns something else.
    """
    if type(task) in TASKS.values():
        return
    with failing_as(lambda why: failed_loss(task, outputs, why, "two")):
        loss, again = (_loss_of_copies(task, outputs, batch) for _ in range(2))
        if isinstance(task, LossTask):
            task.confirm(outputs, batch.y)
    if not isinstance(loss, Tensor) or loss.shape != (2,) or not loss.is_floating_point():
        kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"task: loss of '{task.name}' returns {kind} for two examples, expected one number for "
            "each, [2]; the engine takes the mean"
        )
    if not torch.allclose(loss, again, equal_nan=True):
        raise ConfigError(
            f"task: loss of '{task.name}' gives something else for the same outputs when it is "
            "called again, as with an attribute or a generator of its own, which workers do not "
            "share; compute it from its arguments"
        )


def _loss_of_copies(task: LearningTask, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the loss of copies of outputs and targets, which a task may change in place."""
    with generators_kept():
        return task.loss(outputs.clone(), replace(batch, y=batch.y.clone()))


def failed_loss(task: LearningTask, outputs: Tensor, why: str, n_examples: str) -> ConfigError:
    """Return the error for a user's loss that raised one.

    Args:
        task: the learning task.
        outputs: the outputs that it was given.
        why: what the loss raised, in one line.
        n_examples: the number of examples, for the message.
    """
    hint = ""
    if re.search("scalar type|same dtype", why):
        hint = (
            f"; outputs are {str(outputs.dtype).removeprefix('torch.')}, as the key dtype says: "
            "convert tensors that the loss computes with, for example weight.to(outputs)"
        )
    return ConfigError(f"task: loss of '{task.name}' fails on {n_examples} examples: {why}{hint}")
