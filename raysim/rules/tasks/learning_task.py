"""Bases of learning tasks (`task` in the configuration) and of the metrics of an evaluation.

A `LearningTask` defines the loss of each example, the shape of the net's outputs, what the examples
must look like, and the metrics of an evaluation. It is not to be confused with `Task`, one client's
training in one round, through which a rule reaches the loss.

A `TaskMetric` first turns each batch into numbers for each example, and then the numbers of all
examples, in their order, into one value. So the value's bits do not depend on how the examples are
divided over evaluations.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor

from raysim.metrics import declare_evaluation
from raysim.rules.batch import Batch
from raysim.rules.rule import SHIPPED_PACKAGE
from raysim.rules.tasks.several_outputs import OutputForms

LossReduction = Literal["mean", "sum", "batch"]
"""How the losses of examples become the loss of a batch; see `LearningTask.loss_reduction`."""


@dataclass(frozen=True)
class TaskData:
    """The examples of a data set, as a learning task checks them."""

    x: np.ndarray
    """Inputs of the training examples, [n, ...]."""
    y: np.ndarray
    """Targets of the training examples, [n, ...]."""
    x_test: np.ndarray
    """Inputs of the test examples."""
    y_test: np.ndarray
    """Targets of the test examples."""
    n_classes: int = 0
    """Number of classes that the data set declares; 0 if it declares none."""

    def halves(self) -> Iterable[tuple[str, np.ndarray, np.ndarray]]:
        """Return name, inputs and targets of both halves."""
        return ("training", self.x, self.y), ("test", self.x_test, self.y_test)


@dataclass(frozen=True)
class LearningTask:
    """Base of learning tasks (`task: path.py:Class`).

    A subclass is a frozen dataclass; its fields are set from the section `task`. All methods must
    be functions of their arguments and the fields alone.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)

    config_name: ClassVar[str] = ""
    """Name of a shipped task in the configuration; a task of your own is named by its path."""
    default_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of an evaluation if `evaluate.metrics` names none; the first one selects the best
    model."""
    metric_classes: ClassVar[dict[str, type[TaskMetric]]] = {}
    """The metrics that `evaluate.metrics` can name, by name; "top{k}" stands for any number k."""
    class_labels: ClassVar[bool] = False
    """Whether y is one class label for each example, [n]."""

    @property
    def name(self) -> str:
        """Name of the task in messages."""
        return type(self).__dict__.get("config_name", type(self).__name__)

    @property
    def forms(self) -> OutputForms | None:
        """The forms of a net's outputs, if `loss` and metrics take several tensors; else None."""
        return None

    def as_returned(self, outputs: Tensor, user: Any) -> Any:
        """Return outputs as the net's forward returned them, such as a tuple.

        Args:
            outputs: the outputs as one tensor, [B, ...].
            user: the function or class that uses them.

        Raises:
            ValueError: its module has another copy of a class of the net's outputs.
        """
        return outputs if self.forms is None else self.forms.unpacked(outputs, user)

    @property
    def loss_reduction(self) -> LossReduction:
        """How the losses of examples become the loss of a batch.

        mean: their sum over the sum of `mean_weights`. sum: their sum. batch: they cannot be
        divided, and `loss` gives every example the loss of its whole batch.
        """
        return "mean"

    def check(self, data: TaskData) -> None:
        """Check the examples before the run starts.

        Args:
            data: the examples.

        Raises:
            ValueError: the examples do not fit; the message names the example and the fix.
        """

    def outputs(self, data: TaskData) -> int:
        """Return the number of outputs, which the net receives as its argument `classes`.

        A task of outputs of any shape may return 0: the net then keeps its own default.

        Args:
            data: the examples.
        """
        return data.n_classes

    def output_shape(self, x_shape: tuple[int, ...], outputs: int) -> tuple[int, ...] | None:
        """Return the shape of the net's output for one example; None if any will do.

        Args:
            x_shape: shape of one example's input.
            outputs: number of outputs, as from `outputs`.
        """
        return (outputs,)

    @abstractmethod
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each example, [B].

        The engine averages over the examples. On a GPU local steps are captured: a method that
        branches on a tensor or calls `.item()` works there too, but its steps take longer.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        raise NotImplementedError(f"{type(self).__name__} defines no loss")

    def mean_weights(self, y: Tensor) -> Tensor | None:
        """Return each example's weight in the mean, [B]; by default None: all have weight 1.

        The loss of a batch is Σ loss / Σ weight over its real examples. A weight counts in the
        denominator only: `loss` contains it already. The same holds for the examples of a client
        or of a test set, however they are divided into batches.

        Args:
            y: the targets, [B, ...].
        """
        return None

    @property
    def zero_denominator(self) -> float:
        """The number by which a sum of losses whose weights are all 0 is divided.

        By default NaN: the mean is 0 / 0. A loss such as sum / weights.sum().clamp(min=1) has 1.
        """
        return float("nan")

    def batch_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the examples' parts of the batch's loss, [B]; `batch.mean` of them is the loss.

        Where all weights are 1, they are the losses themselves. They are 0 if the sum of the
        weights is 0, as for a batch of ignored labels: such a step has no gradient.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        values = self.loss(outputs, batch)
        if self.loss_reduction == "sum":
            return values * batch.size
        weights = self.mean_weights(batch.y)
        if self.loss_reduction == "batch" or weights is None:
            return values
        weights = weights.to(values.dtype)  # counts are integers, and a quotient of them float32
        total = weights.sum()
        return values * (batch.size / torch.where(total > 0, total, 1.0))

    def mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss of a batch without padding, a scalar: the mean of `batch_losses`.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        return self.batch_losses(outputs, batch).mean()

    def single_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return each example's loss by itself, [B]; for privacy and the Fisher information.

        It depends on no other example, so it has no part in a common denominator.

        Args:
            outputs: the net's outputs, [B, ...].
            batch: the batch, with the targets as `y`, [B, ...].
        """
        return self.loss(outputs, batch)

    def in_batches(
        self, batches: Callable[[], Iterable[Batch]], n: int
    ) -> Iterator[tuple[Batch, float]]:
        """Yield batches and the number of examples that each stands for in a mean over all.

        The loss of all examples is Σ number · loss of the batch / n. A loss that cannot be divided
        needs all examples in one batch.

        Args:
            batches: returns the batches, without padding; the same ones whenever it is called.
            n: number of all examples.
        """
        if self.loss_reduction == "batch":
            parts = list(batches())
            if parts:
                x, y = (torch.cat([getattr(part, key) for part in parts]) for key in "xy")
                yield Batch(x, y), n
            return
        if self.loss_reduction == "sum":
            for batch in batches():
                yield batch, n
            return
        total: float | None = None
        for batch in batches():
            weights = self.mean_weights(batch.y)
            if weights is None:
                yield batch, len(batch.y)
                continue
            if total is None:
                total = sum(self._total_weight(other.y) for other in batches())
            yield batch, n * self._total_weight(batch.y) / (total or 1.0)

    def counted(self, y: Tensor) -> Tensor | None:
        """Return which examples count in metrics other than the loss, bool [B]; None: all.

        Args:
            y: the targets, [B, ...].
        """
        return None

    def _total_weight(self, y: Tensor) -> float:
        """Return the sum of the weights of targets."""
        weights = self.mean_weights(y)
        return float(len(y) if weights is None else weights.sum())


@dataclass(frozen=True)
class TaskMetric:
    """Base of the metrics of evaluations (`evaluate.metrics: path.py:Class`)."""

    task: LearningTask
    """The task of the run."""
    outputs: int
    """Number of outputs of the net."""
    name: str
    """Name under which the value is logged; a class of your own has `metric_name`."""

    metric_name: ClassVar[str] = ""
    """Name of a metric of your own; by default the class's name in lower case."""
    unit: ClassVar[str] = ""
    """Unit of the value in lists of metrics, such as "share"; "" for none."""
    larger_is_better: ClassVar[bool | None] = True
    """True if larger values are better, False if smaller ones are; None if it has no direction."""

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith(f"{SHIPPED_PACKAGE}."):
            name = cls.metric_name or cls.__name__.lower()
            METHOD_METRICS[name] = cls
            meaning = (inspect.getdoc(cls) or "").partition("\n\n")[0].rstrip(".")
            meaning = meaning[:1].lower() + " ".join(meaning[1:].split())
            declare_evaluation(name, cls.unit, meaning, cls.larger_is_better)

    def check(self) -> None:
        """Check that the metric fits the task.

        Raises:
            ValueError: it does not; the message is the reason.
        """

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs that the net receives for this metric; by default the examples' own.

        A metric that overrides it costs a second forward pass. An example is the success rate of a
        backdoor, which puts a trigger on each image.

        Args:
            x: the inputs of a batch, [B, ...], as the net receives them; not to be changed.

        Returns:
            The changed inputs, [B, ...].
        """
        return x

    def rows(self, outputs: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the numbers of each example that the value needs, [B, ...].

        Examples that do not count are left out. Several tensors reach `value` as several arrays.

        Args:
            outputs: the net's outputs, [B, ...].
            y: the targets, [B, ...].
        """
        raise NotImplementedError(f"{type(self).__name__} defines no rows")

    def value(self, rows: Any) -> float:
        """Return the metric's value; by default the mean of the rows, NaN without any.

        Args:
            rows: the numbers of all examples in their order, [n, ...].
        """
        return float(rows.sum() / rows.size) if rows.size else float("nan")


METHOD_METRICS: dict[str, type[TaskMetric]] = {}
"""Metrics of evaluations in the files of shipped methods, by name."""
