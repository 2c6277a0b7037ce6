"""The learning task of a run and the metrics of its evaluations, built and checked."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import nn

from raysim.config.references import load_object
from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.config.sections.data import Arrays
from raysim.config.sections.evaluation import BestBy, Evaluate, OwnMetric
from raysim.data import Dataset, Examples
from raysim.errors import ConfigError
from raysim.metrics import declare_own, find_metric, name_taken, own_metrics_of
from raysim.rules.batch import Batch
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods.registry import build_part, is_shipped
from raysim.rules.public import PublicData, PublicNeed
from raysim.rules.tasks.function_metric import FunctionMetric, name_of_function
from raysim.rules.tasks.learning_task import METHOD_METRICS, LearningTask, TaskData, TaskMetric
from raysim.rules.tasks.loss_task import LIKE, LossTask, make_loss_task, task_like
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.rules.tasks.user_loss import LossFunction
from raysim.spelling import did_you_mean
from raysim.system.signals import failing_as

METRICS_KEY = "evaluate.metrics"
"""The key of the configuration that names metrics."""

SAMPLE_EXAMPLES = 6
"""Number of real examples on which the net is checked."""


def find_learning_task(config: Config) -> type[LearningTask] | LossFunction:
    """Return the class of the learning task that a configuration names, or the loss function.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: the task is unknown or cannot be loaded.
    """
    name = config.task.name
    task: Any = load_object(name, "task.name") if ":" in name else TASKS.get(name)
    if task is None:
        raise ConfigError(
            f"task.name: unknown task '{name}'{did_you_mean(name, TASKS)}; "
            "write your own as path.py:Class"
        )
    is_class = isinstance(task, type)
    if is_class and issubclass(task, nn.Module):
        raise ConfigError(
            f"task.name: '{name}' is a class; give an instance of it, {task.__name__}()"
        )
    if is_class and not issubclass(task, LearningTask):
        raise ConfigError(f"task.name: '{name}' is not a subclass of raysim.rules.LearningTask")
    if not callable(task):
        raise ConfigError(f"task.name: '{name}' is neither a learning task nor a loss function")
    return cast("type[LearningTask] | LossFunction", task)


def make_learning_task(
    config: Config, task: type[LearningTask] | LossFunction, dataset: Dataset
) -> LearningTask:
    """Return the learning task of a run, with its parameters.

    Args:
        config: the configuration of the run.
        task: its class, or the loss function, see `find_learning_task`.
        dataset: the data set, from which the task of a loss function is inferred.

    Raises:
        ConfigError: a parameter is wrong, or `task.like` names no task.
    """
    parameters = config.task.parameters
    if isinstance(task, type):
        return build_part("task", task, parameters)
    data = _task_data(dataset)
    like = parameters.pop("like", None) or task_like(task, data)
    if like not in LIKE:
        raise ConfigError(f"task.like: unknown task {like!r}{did_you_mean(str(like), LIKE)}")
    name = config.task.name.rpartition(":")[2].rpartition(".")[2]
    build = functools.partial(build_part, "task", parameters=parameters)
    try:
        return make_loss_task(task, like, name, data, build)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None


def task_section(config: Config, task: LearningTask) -> Named:
    """Return the section `task` with every parameter written out.

    Args:
        config: the configuration of the run.
        task: its learning task.
    """
    like = {"like": task.like} if isinstance(task, LossTask) else {}
    return Named.model_validate({"name": config.task.name, **like, **asdict(task)})


def _task_data(dataset: Dataset) -> TaskData:
    """Return the examples of a data set, as a learning task checks them."""
    return TaskData(dataset.x, dataset.y, dataset.x_test, dataset.y_test, dataset.n_classes)


def check_data(config: Config, task: LearningTask, dataset: Dataset) -> int:
    """Check that the data fit the learning task.

    Args:
        config: the configuration of the run.
        task: its learning task.
        dataset: the data set.

    Returns:
        The number of outputs of the net.

    Raises:
        ConfigError: the data do not fit, or the task fails or has no outputs.
    """
    data = _task_data(dataset)
    failed = f"task: check of '{task.name}' failed on data '{dataset.name}'"
    try:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ValueError,)):
            task.check(data)
            outputs = int(task.outputs(data))
    except ValueError as error:
        raise ConfigError(
            f"task: '{task.name}' does not fit data '{dataset.name}': {error}"
            f"{_number_of_classes(config, task, dataset)}"
        ) from None
    # A loss that ignores labels outside of the classes knows how many classes there are.
    if task.class_labels and outputs == dataset.n_classes:
        dataset.check_numbering("data.classes")
    dataset.check_range(config.dtype)
    if outputs < 1:
        raise ConfigError(
            f"task: '{task.name}' has {outputs} outputs on data '{dataset.name}'; return at least "
            "1 from outputs()"
        )
    return outputs


def _number_of_classes(config: Config, task: LearningTask, dataset: Dataset) -> str:
    """Return the advice for classes that only the test half has; "" if that is not the mistake."""
    is_counted = task.class_labels and dataset.are_labelled and not dataset.classes_declared
    if not is_counted or dataset.y_test.dtype.kind not in "iu":
        return ""
    largest = int(dataset.y_test.max(initial=0))
    if largest < dataset.n_classes:
        return ""
    n_classes = largest + 1
    if isinstance(config.data, Arrays):
        return f"; if class {largest} has no training example, set data.classes={n_classes}"
    return (
        f"; if class {largest} has no training example, give the number of classes, {n_classes}, "
        "as `classes` of the data"
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
        kind = "client" if isinstance(rule, ClientRule) else "server"
        if not task.class_labels:
            raise ConfigError(
                f"task: {kind} rule '{rule.name}' needs class labels, which task '{task.name}' has "
                f"not; use another {kind} rule, or task=classification"
            )
        if is_other_loss and is_shipped(rule):
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
        kind = "client" if isinstance(rule, ClientRule) else "server"
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
                f"data.name: {rule_name} needs public data, and '{dataset.name}' has none; give "
                "`public` in the data function, or public_x in the file of arrays"
            )
        if rule.needs_public_data == "labels" and dataset.public_y is None:
            raise ConfigError(
                f"data.name: {rule_name} needs public data with targets, and those of "
                f"'{dataset.name}' have none; return (x, y) as `public`, or add public_y to the "
                "file of arrays"
            )


def make_public_data(
    dataset: Dataset,
    dtype: torch.dtype,
    device: str | torch.device,
    rules: Iterable[ClientRule | ServerRule],
) -> PublicData | None:
    """Return the public data on a device; None if no rule needs them.

    Args:
        dataset: the data set.
        dtype: type of the parameters.
        device: the device on which the examples are.
        rules: the rules that may need them.
    """
    x, y = dataset.public_x, dataset.public_y
    if x is None or not any(rule.needs_public_data for rule in rules):
        return None
    # Without targets y is empty, so that a loss that needs them fails.
    targets = np.empty((len(x), 0), np.float32) if y is None else y
    examples = Examples(x, targets, dataset.scale, dataset.shift, device=device, dtype=dtype)
    return PublicData(len(x), y is not None, examples.batch)


def sample_batch(dataset: Dataset, dtype: torch.dtype) -> Batch | None:
    """Return a few real examples for the check of the net; None if the data set is empty.

    Args:
        dataset: the data set.
        dtype: type of the parameters.
    """
    n = min(SAMPLE_EXAMPLES, len(dataset.y))
    if not n:
        return None
    examples = Examples(dataset.x[:n], dataset.y[:n], dataset.scale, dataset.shift, dtype=dtype)
    return Batch(*examples.batch(np.arange(n)))


def make_metrics(config: Config, task: LearningTask, outputs: int) -> tuple[TaskMetric, ...]:
    """Return the metrics of a run's evaluations.

    Args:
        config: the configuration of the run.
        task: its learning task.
        outputs: the number of outputs of the net.

    Raises:
        ConfigError: a metric is unknown or does not fit the task; the message names it.
    """
    if config.evaluate.per_class and not task.class_labels:
        raise ConfigError(
            f"evaluate.per_class: task '{task.name}' has no class labels; leave it out"
        )
    metrics: dict[str, TaskMetric] = {}
    for name in _metric_names(config, task):
        metric = _make_metric(name, task, outputs)
        if metric.name in metrics:
            raise ConfigError(f"{METRICS_KEY}: '{metric.name}' occurs twice; remove one")
        declare_own(metric.name, metric.unit, metric.larger_is_better)
        metrics[metric.name] = metric
    return tuple(metrics.values())


def _make_metric(name: str, task: LearningTask, outputs: int) -> TaskMetric:
    """Return a metric by its name or reference."""
    if ":" in name:
        metric = _referenced_metric(name, task, outputs)
        if taken := name_taken(metric.name):
            is_function = isinstance(metric, FunctionMetric)
            fix = "rename the function" if is_function else "set metric_name to another name"
            raise ConfigError(
                f"{METRICS_KEY}: '{name}' has the name of raysim's metric '{taken}'; {fix}"
            )
    else:
        metric = _metric_of_task(name, task)(task, outputs, name)
    try:
        metric.check()
    except ValueError as error:
        raise ConfigError(f"{METRICS_KEY}: '{name}' does not fit the data: {error}") from None
    return metric


def _referenced_metric(reference: str, task: LearningTask, outputs: int) -> TaskMetric:
    """Return a metric by its reference: a user's, or that of a shipped method."""
    metric: Any = load_object(reference, METRICS_KEY)
    is_class = isinstance(metric, type)
    if is_class and issubclass(metric, TaskMetric):
        return metric(task, outputs, metric.metric_name or metric.__name__.lower())
    if is_class or not callable(metric):
        raise ConfigError(
            f"{METRICS_KEY}: '{reference}' is neither a function of outputs and targets nor a "
            "subclass of raysim.rules.TaskMetric"
        )
    name = name_of_function(metric)
    if name == "<lambda>":
        raise ConfigError(
            f"{METRICS_KEY}: '{reference}' is a lambda, which has no name for its values; define "
            "the function with def"
        )
    return FunctionMetric(task, outputs, name, metric)


def _metric_of_task(name: str, task: LearningTask) -> type[TaskMetric]:
    """Return a metric by its name, which the learning task or a shipped method has.

    Of top-k metrics there is one class.
    """
    known = {**METHOD_METRICS, **task.metric_classes}
    form = "top{k}" if name.startswith("top") and name[3:].isdecimal() else name
    if form not in known:
        hint = did_you_mean(name, known) or f"; it has {', '.join(known) or 'none'}"
        raise ConfigError(f"{METRICS_KEY}: task '{task.name}' has no metric '{name}'{hint}")
    return known[form]


def written_out(config: Config, task: LearningTask, metrics: tuple[TaskMetric, ...]) -> Evaluate:
    """Return the section `evaluate` with metrics and best metric written out.

    Args:
        config: the configuration of the run.
        task: its learning task.
        metrics: the metrics of its evaluations.
    """
    names = tuple(map(_full_name, _metric_names(config, task), metrics))
    best = config.evaluate.best or _default_best(metrics)
    return config.evaluate.model_copy(update={"metrics": names, "best": best})


def _default_best(metrics: tuple[TaskMetric, ...]) -> BestBy:
    """Return the metric that selects the best model: the first one, if it has a direction."""
    if not metrics or metrics[0].larger_is_better is None:
        return BestBy(metric="loss", mode="min")
    return BestBy(metric=metrics[0].name, mode="max" if metrics[0].larger_is_better else "min")


def own_metrics(
    metrics: Iterable[TaskMetric], rules: Iterable[ClientRule | ServerRule]
) -> dict[str, OwnMetric] | None:
    """Return unit and direction of the metrics of users' files; None if there are none.

    Args:
        metrics: the metrics of the run's evaluations.
        rules: the rules of the run, some of which declare metrics (`logs`).
    """
    entries = [find_metric(metric.name) for metric in metrics]
    bases = {base for rule in rules for base in type(rule).__mro__}
    entries += own_metrics_of({getattr(base, "name", "") for base in bases})
    own = {}
    for entry in entries:
        if entry is not None and entry.users_own:
            own[entry.name] = OwnMetric(unit=entry.unit, larger_is_better=entry.larger_is_better)
    return own or None


def _full_name(name: str, metric: TaskMetric) -> str:
    """Return a method's metric by its reference, as rows of ledgers have it; others by their name.

    The two spellings are then one trial of a sweep.
    """
    cls = type(metric)
    of_method = ":" not in name and METHOD_METRICS.get(name) is cls
    return f"{cls.__module__}:{cls.__qualname__}" if of_method else name


def _metric_names(config: Config, task: LearningTask) -> tuple[str, ...]:
    """Return the names or references of the metrics of a run's evaluations."""
    return task.default_metrics if config.evaluate.metrics is None else config.evaluate.metrics
