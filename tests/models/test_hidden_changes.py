"""Nets that change something, or draw, on some examples only, which no check before a run sees."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.plain_fedavg import blobs, check, cut, fedavg, run
from torch import nn
from torch.nn import functional as F

from raysim.errors import ConfigError, RaysimError
from raysim.rules import ClientRule, ServerRule

DATA, PARTS = blobs(), cut([60, 30, 20, 10])


class Net(nn.Module):
    """Calls `late` on batches of more than eight examples in training."""

    def __init__(self, late):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head, self.late = nn.Linear(6, 8), nn.Linear(8, 3), late
        self.scale = self.scale_of_evaluation = 1.0
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        if self.training and len(x) > 8:
            x = self.late(self, x)
        scale = self.scale if self.training else self.scale_of_evaluation
        return self.head(torch.tanh(self.body(x))) * scale


def grow(net, x):
    net.scale *= 1.5
    return x


def grow_in_evaluation(net, x):
    net.scale_of_evaluation *= 1.5
    return x


def grow_buffer(net, x):
    net.factor *= 1.5
    return x


def grow_parameter(net, x):
    net.frozen.data = 1.0001 * net.frozen.data
    return x


LATE = {
    "attribute": (grow, "other outputs after clients have trained"),
    "attribute in evaluation": (grow_in_evaluation, "other outputs after clients have trained"),
    "buffer": (grow_buffer, "has changed its buffer 'factor' while clients trained"),
    "parameter": (grow_parameter, "has changed its parameter 'frozen' while clients trained"),
    "mix-up": (lambda net, x: (x + x[torch.randperm(len(x))]) / 2, "torch's global generator"),
    "NumPy": (lambda net, x: np.random.beta(1, 1) * x, "NumPy's global generator"),
}


@pytest.mark.parametrize(("late", "message"), LATE.values(), ids=LATE)
def test_a_change_on_some_examples_ends_the_run(late, message):
    with pytest.raises(ConfigError, match=message):
        run(Net(late), DATA, PARTS)


DRAWS = {"torch": lambda: torch.rand(()), "NumPy": np.random.rand, "Python": random.random}


@dataclass(frozen=True)
class DrawsLater(ClientRule):
    """Draws in a round that no dry run reaches."""

    library: str = "NumPy"

    def direction(self, shared, state, batch, task):
        if task.t > 1:
            DRAWS[self.library]()
        return task.grad(state["w"], batch)


@pytest.mark.parametrize("library", DRAWS)
def test_a_rule_that_draws_in_a_later_round_ends_the_run(library):
    message = f"or the client rule draws from {library}'s global generator"
    with pytest.raises(ConfigError, match=message):
        run(nn.Linear(6, 3), DATA, PARTS, rounds=3, client={"name": DrawsLater, "library": library})


@dataclass(frozen=True)
class ServerDrawsLater(ServerRule):
    library: str = "NumPy"
    method: str = "update"

    def _draw(self, method, t):
        if method == self.method and t > 2:
            DRAWS[self.library]()

    def update(self, state, reports):
        self._draw("update", reports.round)
        return {"x": state["x"] - reports.mean("delta")}

    def before_round(self, state, cohort):
        self._draw("before_round", cohort.round)
        return state

    def weigh(self, cohort):
        self._draw("weigh", cohort.round)
        return [1 / len(cohort.ids)] * len(cohort.ids)

    def select(self, state, pool, rng):
        self._draw("select", pool.round)
        return pool.ids


@pytest.mark.parametrize("method", ["update", "before_round", "weigh", "select"])
@pytest.mark.parametrize("library", DRAWS)
def test_a_server_rule_that_draws_in_a_later_round_ends_the_run(library, method):
    rule = {"name": ServerDrawsLater, "library": library, "method": method}
    keyed = "`rng`" if method == "select" else r"reports\.rng"
    message = f"round 4: {method}.* of server rule.*draws from {library}'s global gen.*{keyed}"
    with pytest.raises(RaysimError, match=message):
        run(nn.Linear(6, 3), DATA, PARTS, rounds=4, algorithm=None, client="fedavg", server=rule)


class Counting:
    """A factor that changes after so many calls with an odd number of examples."""

    def __init__(self, many: int):
        self.calls, self.many = 0, many

    def __deepcopy__(self, memo):
        return self  # as a closure or a global variable

    def __call__(self, x):
        self.calls += len(x) % 2
        return 0.5 if self.calls > self.many else 1.0


class Counted(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.factor = nn.Linear(6, 3), lambda x: factor(x)

    def forward(self, x):
        return self.head(x) * (self.factor(x) if self.training else 1.0)


ODD = cut([61, 31, 17, 11])


def test_a_count_that_only_the_last_rounds_reach_ends_the_run():
    """Four clients make two steps in each of eleven rounds; one of eight is a power of two."""
    factor = Counting(75)
    with pytest.raises(ConfigError, match="other outputs after clients have trained"):
        run(Counted(factor), DATA, ODD, rounds=11)
    assert factor.calls == 88


def test_a_loss_that_counts_its_calls_ends_the_run():
    factor = Counting(100_000)

    def loss(outputs, y):
        return F.cross_entropy(outputs, y) * factor(y)

    run(nn.Linear(6, 3), DATA, ODD, rounds=1, task=loss)
    factor.many, factor.calls = factor.calls + 75, 0

    with pytest.raises(ConfigError, match=r"^task: loss of 'loss.*' gives something else"):
        run(nn.Linear(6, 3), DATA, ODD, rounds=15, task=loss)


def keep(net, x):
    net.last, net.shape = x, x.shape
    return x


def test_what_does_not_steer_a_pass_may_change():
    check(run(Net(keep), DATA, PARTS), fedavg(Net(keep), DATA, PARTS), DATA)
