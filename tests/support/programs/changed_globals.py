"""A net, a loss, data and a metric that use variables of their module, and of another one."""

import changed_settings
import numpy as np
from torch import nn
from torch.nn import functional as F

N = 30
WIDTH = 4
SCALES = {"loss": 1.0}
TABLES = {}
new_ones = 1
"""A variable that no function reads, though the loss has an attribute of this name."""


class Net(nn.Sequential):
    """A net of one hidden layer."""

    def __init__(self):
        super().__init__(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x):
        """Return the outputs."""
        return super().forward(x)


def factor():
    """Return the factor of the loss."""
    return SCALES["loss"]


def loss(outputs, y):
    """Return the cross-entropy, times a factor, whose table is filled at the first call."""
    if not TABLES:
        TABLES["ones"] = outputs.new_ones(())
    return F.cross_entropy(outputs, y) * factor() * TABLES["ones"]


def metric(outputs, y):
    """Return a setting."""
    return changed_settings.GAMMA


def data():
    """Return examples of three classes."""
    y = np.arange(N) % 3
    x = np.eye(3, 5)[y] + np.random.default_rng(0).normal(size=(N, 5))
    return x, y, x, y
