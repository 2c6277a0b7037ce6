"""The task of one client at a time: when a gradient is computed, and when it is known already."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from raysim.models.flat import Model
from raysim.rules import Batch, Net, cross_entropy
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask


class CountedLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, net: Net, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return 2 * cross_entropy(net, batch)


@pytest.fixture
def started():
    """A task whose client has begun at x, the vector in training, x, a batch and a loss that counts
    its calls."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    )
    model = Model(net, (3, 2, 2), 3, torch.float64)
    task, (x, buffers) = LoopTask(model, LocalSettings(lr=0.1)), model.initial()
    batch = Batch(torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.arange(5) % 3)
    return task, task.start(LocalSettings(lr=0.1), x, buffers, 1), x, batch, CountedLoss()


def test_the_gradient_at_the_start_is_computed_once(started):
    task, w, x, batch, loss = started
    g = task.grad(w, batch, loss)
    buffers = task.buffers.clone()
    for point in (x, w):
        again = task.grad(point, batch, loss, "frozen")
        assert torch.equal(again, g) and again is not g
    assert loss.calls == 1 and len(task.losses) == 1 and torch.equal(task.buffers, buffers)


@pytest.mark.parametrize(
    "change", ["gradient", "batch", "loss", "point", "client", "nothing known"]
)
def test_a_gradient_is_computed_again_after_a_change(started, change):
    """The definition: the same call on a task that remembers nothing."""
    task, w, x, batch, loss = started
    g = task.grad(w, batch, loss)
    if change == "gradient":
        g.mul_(2)
    elif change == "batch":
        batch = replace(batch, x=batch.x + 1)
    elif change == "loss":
        loss = CountedLoss()
    elif change == "point":
        x.add_(0.1)
    elif change == "client":
        task.start(LocalSettings(), x, task.buffers, 1)
    else:
        del g
    before, plain = loss.calls, LoopTask(task.model, LocalSettings())
    assert torch.equal(
        task.grad(x, batch, loss, "frozen"), plain.grad(x.clone(), batch, loss, "frozen")
    )
    assert loss.calls == before + 2


def test_a_moved_vector_is_another_point(started):
    task, w, x, batch, loss = started
    g = task.grad(w, batch, loss)
    task.descend_in_place(w, g)
    plain = LoopTask(task.model, LocalSettings()).grad(w.clone(), batch, loss, "frozen")
    assert torch.equal(task.grad(w, batch, loss, "frozen"), plain) and not torch.equal(plain, g)
    assert torch.equal(task.grad(x, batch, loss, "frozen"), g)
