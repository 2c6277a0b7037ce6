"""The learning task and the metrics that a configuration names."""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

from torch import nn

from raysim.config.references import load_object
from raysim.config.schema import Config
from raysim.data import Dataset
from raysim.errors import ConfigError
from raysim.metrics import declare_own, name_taken
from raysim.rules.methods.parameters import build_part
from raysim.rules.tasks.function_metric import FunctionMetric, name_of_function
from raysim.rules.tasks.learning_task import METHOD_METRICS, LearningTask, TaskData, TaskMetric
from raysim.rules.tasks.loss_task import LIKE, make_loss_task, task_like
from raysim.rules.tasks.shipped_tasks import TASKS
from raysim.rules.tasks.user_loss import LossFunction
from raysim.spelling import did_you_mean

METRICS_KEY = "evaluate.metrics"
"""The key of the configuration that names metrics."""


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
    data = task_data(dataset)
    like = parameters.pop("like", None) or task_like(task, data)
    if like not in LIKE:
        raise ConfigError(f"task.like: unknown task {like!r}{did_you_mean(str(like), LIKE)}")
    name = config.task.name.rpartition(":")[2].rpartition(".")[2]
    build = functools.partial(build_part, "task", parameters=parameters)
    try:
        return make_loss_task(task, like, name, data, build)
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None


def task_data(dataset: Dataset) -> TaskData:
    """Return the examples of a data set, as a learning task checks them."""
    return TaskData(dataset.x, dataset.y, dataset.x_test, dataset.y_test, dataset.n_classes)


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
    for name in metric_names(config, task):
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
    _refuse_targets_first(reference, name, metric)
    return FunctionMetric(task, outputs, name, metric)


def _refuse_targets_first(reference: str, name: str, function: Any) -> None:
    """Refuse a function that takes targets first, as those of scikit-learn do."""
    try:
        first, second, *_ = inspect.signature(function).parameters
    except (TypeError, ValueError):  # fewer arguments, or none that can be read
        return
    if first.endswith("_true"):
        raise ConfigError(
            f"{METRICS_KEY}: '{reference}' takes ({first}, {second}), and a metric gets outputs "
            f"before targets; write def my_{name}(outputs, y): return {name}(y, ...)"
        )


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


def metric_names(config: Config, task: LearningTask) -> tuple[str, ...]:
    """Return the names or references of the metrics of a run's evaluations."""
    return task.default_metrics if config.evaluate.metrics is None else config.evaluate.metrics
