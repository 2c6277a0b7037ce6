"""Checks of a net's first outputs, and of their loss, against the learning task."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from raysim.errors import ConfigError, in_a_line
from raysim.rules.batch import Batch
from raysim.rules.tasks.learning_task import LearningTask
from raysim.rules.tasks.loss_task import LossTask
from raysim.rules.tasks.shipped_tasks import TASKS, Classification
from raysim.system.signals import reraise_stop


def check_outputs(outputs: Any, shape: list[int], task: LearningTask, label: str) -> None:
    """Check that a net returns outputs as its learning task expects them.

    Args:
        outputs: what the net returned for two examples.
        shape: the expected shape of the outputs.
        task: the learning task.
        label: beginning of a message about the net.

    Raises:
        ConfigError: they are no tensor, or have another shape; the message names the fix.
    """
    if isinstance(outputs, Tensor) and list(outputs.shape) == shape:
        return
    if isinstance(getattr(outputs, "logits", None), Tensor):
        raise ConfigError(
            f"{label} returns a {type(outputs).__name__}; let forward return its logits: return "
            "out.logits"
        )
    if not isinstance(outputs, Tensor):
        kind, fix = type(outputs).__name__, "; return a tensor, such as out.logits"
    elif isinstance(task, LossTask):
        kind = list(outputs.shape)
        fix = (
            f" like task '{task.like}'; set task.like to the task of these outputs "
            f"({', '.join(TASKS)}), or give a class, a LearningTask with this loss and its own "
            "output_shape"
        )
    else:
        kind, fix = list(outputs.shape), ""
    if isinstance(outputs, Tensor) and [*outputs.shape, 1] == shape:
        fix = "; let forward return one column, without squeeze"
    elif isinstance(task, Classification) and _has_more_classes(outputs, shape):
        fix = (
            "; if some classes have no example, give their number with the data, "
            f"classes={outputs.shape[1]}"
        )
    raise ConfigError(
        f"{label} turns two examples into {kind}, but task '{task.name}' expects outputs of shape "
        f"{shape}{fix}"
    )


def _has_more_classes(outputs: Any, shape: list[int]) -> bool:
    """Return whether outputs are those of more classes than the data set has."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return False
    return outputs.shape[0] == shape[0] and outputs.shape[1] > shape[1]


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
    try:
        loss = task.loss(outputs, batch)
        if isinstance(task, LossTask):
            task.confirm(outputs, batch)
    except BaseException as error:
        reraise_stop(error)
        raise failed_loss(task, outputs, error, "two") from None
    if not isinstance(loss, Tensor) or loss.shape != (2,) or not loss.is_floating_point():
        kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"task: loss of '{task.name}' returns {kind} for two examples, expected one number for "
            "each, [2]; the engine takes the mean"
        )


def failed_loss(
    task: LearningTask, outputs: Tensor, error: BaseException, n_examples: str
) -> ConfigError:
    """Return the error for a user's loss that raised one.

    Args:
        task: the learning task.
        outputs: the outputs that it was given.
        error: what the loss raised.
        n_examples: the number of examples, for the message.
    """
    text, hint = in_a_line(error), ""
    if re.search("scalar type|same dtype", text):
        hint = (
            f"; outputs are {str(outputs.dtype).removeprefix('torch.')}, as the key dtype says: "
            "convert tensors that the loss computes with, for example weight.to(outputs)"
        )
    return ConfigError(f"task: loss of '{task.name}' fails on {n_examples} examples: {text}{hint}")
