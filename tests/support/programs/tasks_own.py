import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from raysim.rules import Regression, TaskMetric


@dataclass(frozen=True)
class Quantile(Regression):
    """Pinball loss: the net learns a quantile of the target."""

    q: float = 0.5
    default_metrics: ClassVar = ("mae",)

    def loss(self, outputs, batch):
        error = batch.y.to(outputs.dtype).reshape(outputs.shape) - outputs
        return torch.maximum(self.q * error, (self.q - 1) * error).mean(1)


@dataclass(frozen=True)
class OneNumber(Regression):
    def loss(self, outputs, batch):
        return ((outputs - batch.y) ** 2).mean()


class Bias(TaskMetric):
    metric_name = "bias"
    larger_is_better = False

    def rows(self, outputs, y):
        return (outputs - y).double().mean(1)

    def value(self, rows):
        return float(np.abs(rows.mean()))


class Shifted(TaskMetric):
    """Sum of the outputs of the examples with a positive target, for inputs that are 1 larger."""

    def inputs(self, x):
        return x + 1

    def rows(self, outputs, y):
        return outputs.sum(1)[y[:, 0] > 0]


class Accuracy(Bias):
    metric_name = "accuracy"


class Used(Bias):
    metric_name = "used"


class Broken(Bias):
    metric_name = "broken"

    def value(self, rows):
        raise ValueError("not today")


class Noisy(Bias):
    metric_name = "noisy"

    def inputs(self, x):
        return x + torch.randn_like(x)


class Resampled(Bias):
    metric_name = "resampled"

    def value(self, rows):
        return float(np.random.choice(rows))


@dataclass(frozen=True)
class Jittered(Quantile):
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * random.random()


class NoTask:
    pass
