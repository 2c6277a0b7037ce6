"""Check data, rules and privacy against the learning task."""

from __future__ import annotations

import math
from functools import partial
from typing import get_args

import numpy as np
import torch

from raysim.config.schema import Config
from raysim.data import Dataset
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.errors import ConfigError
from raysim.models.first_outputs import failed_loss
from raysim.models.flat import Model
from raysim.models.parts import listed
from raysim.prepare.configured_task import task_data
from raysim.rules.contract import ClientRule, ServerRule, half_of
from raysim.rules.methods.registry import is_shipped
from raysim.rules.public import PublicNeed
from raysim.rules.tasks.learning_task import LearningTask
from raysim.rules.tasks.loss_reading import MAX_PROBE_NUMBERS, made_up
from raysim.rules.tasks.loss_task import LossTask
from raysim.system import startup_stages
from raysim.system.signals import failing_as


def check_data(config: Config, task: LearningTask, dataset: Dataset) -> int:
    """Check that the data fit the learning task.

    Args:
        config: the configuration of the run.
        task: its learning task.
        dataset: the data set.

    Returns:
        The number of outputs of the net; 0: unknown.

    Raises:
        ConfigError: the data do not fit, or the task fails or has no outputs.
    """
    data = task_data(dataset)
    failed = f"task: check of '{task.name}' failed on data '{dataset.name}'"
    try:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ValueError,)):
            task.check(data)
            outputs = int(task.outputs(data))
            takes_any = task.output_shape(dataset.shape, outputs) is None
    except ValueError as error:
        raise ConfigError(
            f"task: '{task.name}' does not fit data '{dataset.name}': {error}"
        ) from None
    # A loss that ignores labels outside of the classes knows how many classes there are.
    if task.class_labels and outputs == dataset.n_classes:
        dataset.check_numbering("data.classes")
    dataset.check_range(config.dtype)
    if outputs < (0 if takes_any else 1):
        raise ConfigError(
            f"task: '{task.name}' has {outputs} outputs on data '{dataset.name}'; return at least "
            "1 from outputs()"
        )
    return outputs


def confirm_loss(model: Model, dataset: Dataset, clients: Clients | VirtualClients) -> None:
    """Compare a loss function with its reading on as many examples as a client or test set has.

    A function may couple the examples of large batches only, as one does that keeps the hardest
    70 %, but at least 64. The outputs are made up, at most `MAX_PROBE_NUMBERS` numbers.

    Args:
        model: the net, with the learning task of the run.
        dataset: the data set.
        clients: the partition of its training examples.

    Raises:
        ConfigError: the loss couples tokens.
    """
    task, shape = model.learning_task, model.output_shape
    if not isinstance(task, LossTask) or shape is None:
        return
    of_training = max(int(clients.sizes_by_round.largest.max()), len(clients.validation))
    for y, size in ((dataset.y, of_training), (dataset.y_test, len(dataset.y_test))):
        n = min(size, MAX_PROBE_NUMBERS // math.prod(shape))
        outputs = made_up((n, *shape), model.dtype)
        targets = torch.from_numpy(y[np.linspace(0, len(y) - 1, n).astype(int)])
        with failing_as(partial(failed_loss, task, outputs, n_examples=str(n))):
            task.confirm(outputs, targets, may_fail=True)


def note_absent_classes(task: LearningTask, dataset: Dataset) -> None:
    """Log which classes below the largest one have no training example.

    Args:
        task: the learning task.
        dataset: the data set.
    """
    if not task.class_labels or not dataset.are_labelled:
        return
    absent = np.flatnonzero(np.bincount(dataset.y) == 0)
    if absent.size:
        startup_stages.notes.info(
            "data: labels without a training example: %s; %d of the %d test examples have one",
            listed([*map(str, absent)]),
            np.isin(dataset.y_test, absent).sum(),
            len(dataset.y_test),
        )


def check_rules_of_task(task: LearningTask, *rules: ClientRule | ServerRule) -> None:
    """Check that rules that need class labels have them, and that they train by the task's loss.

    Args:
        task: the learning task.
        rules: the rules of the run.

    Raises:
        ConfigError: a rule needs class labels, or has a loss of its own; the message names it.
    """
    is_other_loss = isinstance(task, LossTask) and not task.reading.is_cross_entropy
    for rule in rules:
        if not rule.needs_class_labels:
            continue
        kind = half_of(rule)
        if not task.class_labels:
            raise ConfigError(
                f"task: {kind} rule '{rule.name}' needs class labels, which task '{task.name}' has "
                f"not; use another {kind} rule, or task=classification"
            )
        # Shipped attackers train by the loss of the run, on other labels.
        is_attacker = isinstance(rule, ClientRule) and rule.attacks
        if is_other_loss and is_shipped(rule) and not is_attacker:
            raise ConfigError(
                f"task: {kind} rule '{rule.name}' trains by a cross-entropy of its own and not by "
                f"the loss '{task.name}'; use another {kind} rule, or task=classification"
            )


def check_privacy_of_task(config: Config, task: LearningTask) -> None:
    """Check that the loss has a gradient for each example, if privacy clips those.

    Args:
        config: the configuration of the run.
        task: the learning task.

    Raises:
        ConfigError: the loss is one of all examples of a batch together.
    """
    if config.example_privacy is not None and task.loss_reduction == "batch":
        raise ConfigError(
            f"privacy: the loss '{task.name}' is one of all examples of a batch together, so that "
            "no example has a gradient that could be clipped; use another loss"
        )


def check_public_data(dataset: Dataset, *rules: ClientRule | ServerRule) -> None:
    """Check that the data set has the public data that rules need.

    Args:
        dataset: the data set.
        rules: the rules of the run.

    Raises:
        ConfigError: it has none, or they have no targets; the message names the rule.
    """
    for rule in rules:
        kind = half_of(rule)
        rule_name = f"{kind} rule '{rule.name}'"
        if rule.needs_public_data not in get_args(PublicNeed):
            raise ConfigError(
                f"{kind}.name: {rule_name} says needs_public_data = {rule.needs_public_data!r}; "
                'it is "inputs", "labels" or ""'
            )
        if not rule.needs_public_data:
            continue
        if dataset.public_x is None or not len(dataset.public_x):
            raise ConfigError(
                f"data.name: {rule_name} needs public data, and '{dataset.name}' has none; move "
                "training examples there (partition.public_fraction=0.1), or give `public` in the "
                "data function, or public_x in the file of arrays"
            )
        if rule.needs_public_data == "labels" and dataset.public_y is None:
            raise ConfigError(
                f"data.name: {rule_name} needs public data with targets, and those of "
                f"'{dataset.name}' have none; return (x, y) as `public`, or add public_y to the "
                "file of arrays"
            )
