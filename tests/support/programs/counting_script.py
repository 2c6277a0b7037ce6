"""A script whose net and loss count their calls and remember results."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from raysim import Algorithm, ClientRule, ServerRule

ALPHA = 1.0
calls = 0
known = {}
meter = None


class Meter:
    """An object that the first call creates."""

    n = 0


def counted(function):
    """Count the calls of a function."""
    count = [0]

    @functools.wraps(function)
    def inner(*args):
        count[0] += 1
        return function(*args)

    return inner


@functools.cache
def scale(n):
    """Return a number that is computed once."""
    return ALPHA / n


class Net(nn.Module):
    """A linear net that counts."""

    passes = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        Net.passes += 1
        return self.linear(x)


class Weighted:
    """A loss that remembers its weights."""

    @functools.cached_property
    def weights(self):
        """[3], the weight of each class."""
        return torch.ones(3)

    def __call__(self, outputs, y):
        return F.cross_entropy(outputs, y, weight=self.weights)


weighted = Weighted()


@dataclass(frozen=True)
class Mine(ClientRule):
    """Plain steps that are counted with the calls of the loss."""

    def direction(self, shared, state, batch, task):
        global calls
        calls += 1
        return task.grad(state["w"], batch)


@dataclass(frozen=True)
class Theirs(ServerRule):
    """The mean."""

    def update(self, state, reports):
        return {**state, "x": state["x"] - self.lr * reports.mean("delta")}


pair = Algorithm("pair", Mine, Theirs, "")


@counted
def loss(outputs, y, memory={}):  # it is the point
    """Return a multiple of the cross-entropy."""
    global calls, meter
    calls += 1
    meter = meter or Meter()
    meter.n = calls
    known[len(y)] = memory[len(y)] = scale(1)
    return known[len(y)] * F.cross_entropy(outputs, y)
