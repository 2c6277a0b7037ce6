"""Images have the memory format channels_last only where a net computes in it as in PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raysim
from raysim.models.checks.against_pytorch import check_reading
from raysim.models.flat import Model

SHAPE = (3, 6, 6)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, *SHAPE))
PARTS = [np.arange(8), np.arange(8, 16)]


class Tail(nn.Module):
    """Logits of the values of an image, read in a way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(144, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "strided":
            return self.linear(torch.as_strided(x, (len(x), 144), (144, 1)))
        if self.way == "view" or (self.way == "view in evaluation" and not self.training):
            return self.linear(x.view(len(x), -1))
        return self.linear(x.flatten(1))


class Norm(nn.Module):
    """The normalisation as a function with factors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 3, weight=self.factors)


class Contiguous(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("not contiguous")
        return x


def net(way: str = "flatten", first: nn.Module | None = None, frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1).requires_grad_(not frozen)
    return nn.Sequential(first or nn.Identity(), conv, nn.GroupNorm(2, 4), nn.ReLU(), Tail(way))


NETS = {
    "plain": (net, True),
    "view": (lambda: net("view"), False),
    "view in evaluation": (lambda: net("view in evaluation"), False),
    "strided": (lambda: net("strided"), False),
    "refuses the format": (lambda: net(first=Contiguous()), False),
    "frozen layer before a norm": (lambda: net(frozen=True), False),
    "norm first": (lambda: net(first=nn.GroupNorm(3, 3)), False),
    "functional norm first": (lambda: net(first=Norm()), False),
    "norm without factors first": (lambda: net(first=nn.GroupNorm(3, 3, affine=False)), True),
}


class Dropped(nn.Module):
    """Dropout as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


@pytest.mark.parametrize(("place", "takes"), [(2, False), (6, True)])
def test_numbers_that_are_drawn_in_the_order_of_memory_are_those_of_pytorch(place, takes):
    layers = [*net()[:4], nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 2)]
    model = nn.Sequential(*layers[:place], Dropped(), *layers[place:])
    read = Model(copy.deepcopy(model), SHAPE, 2)
    assert read.channels_last == takes
    check_reading(model, read)


@pytest.mark.parametrize("case", NETS)
def test_the_format_is_taken_where_it_changes_nothing(case, run_of):
    make, takes = NETS[case]
    assert Model(make(), SHAPE, 2).channels_last == takes
    # One full batch on one client, beside PyTorch.
    y = RNG.integers(0, 2, len(X))
    done = run_of(make(), y, partition=[np.arange(16)], schedule={"cohort": 1})
    plain = make().double()
    loss = F.cross_entropy(plain(torch.from_numpy(X[:16])), torch.from_numpy(y[:16]))
    loss.backward()
    stepped = [p - 0.1 * p.grad for p in plain.parameters() if p.grad is not None]
    expected = torch.cat([p.detach().flatten() for p in stepped])
    torch.testing.assert_close(done.parameters, expected, rtol=1e-12, atol=1e-14)


@pytest.fixture
def run_of(base) -> Any:
    """Return a function that makes one full step with a net."""

    def run(model: nn.Module, y: np.ndarray, **keys: Any) -> raysim.RunResult:
        config = {
            **base, "data": (X[:16], y[:16], X[16:], y[16:]), "model": model, "rounds": 1,
            "partition": PARTS, "schedule": {"cohort": 2}, "algorithm": "fedavg",
            "local": {"steps": 1, "batch_size": "full", "lr": 0.1}, "dtype": "float64", "run_dir": None,
        }  # fmt: skip
        return raysim.run({**config, **keys}, tracking=False)

    return run


def test_losses_and_metrics_may_use_view_on_images(run_of):
    def reconstruction(outputs: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(outputs.view(len(outputs), -1), y.view(len(y), -1))

    def error(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.view(-1) - y.view(-1)).square().mean()

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    done = run_of(model, X, task=reconstruction, evaluate={"metrics": [error]})
    with torch.no_grad():
        outputs = done.net().double()(torch.from_numpy(X[16:]))
    expected = float(F.mse_loss(outputs, torch.from_numpy(X[16:])))
    assert done.history[-1]["loss"] == pytest.approx(expected, rel=1e-12)
    assert done.history[-1]["error"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_caller_may_have_switched_gradients_off(off, run_of):
    """A loss of one's own is read by its gradients, also where a result predicts."""
    y = RNG.integers(0, 2, len(X))
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))
    done = run_of(model, y, task=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert done.config.batching.mode == "pooled"
    with off():
        again = run_of(model, y, task=nn.CrossEntropyLoss(label_smoothing=0.1))
        predicted = again.predict(X)
        attacked = {"groups": {"bad": {"share": 0.4, "client": "sign_flip"}}}
        run_of(nn.Sequential(model, nn.BatchNorm1d(2)), y, **attacked)
    assert again.digest == done.digest
    torch.testing.assert_close(predicted, done.net()(torch.from_numpy(X)).detach())


class CallsItsNormInEvaluation(nn.Module):
    """In training it moves the norm's means by itself."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.tail, self.rebinds = Tail("flatten"), rebinds

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        if not self.training:
            return self.tail(self.norm(h))
        means = h.mean((0, 2, 3)).detach()
        if self.rebinds:
            self.norm.running_mean = 0.9 * self.norm.running_mean + 0.1 * means
        else:
            self.norm.running_mean.mul_(0.9).add_(0.1 * means)
        return self.tail(h)


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_norm_that_only_the_passes_of_the_comparison_call_is_not_taken_for_called(rebinds):
    net = CallsItsNormInEvaluation(rebinds)
    model = Model(copy.deepcopy(net), SHAPE, 2)
    assert not any(statistic.is_keyed for statistic in model.statistics)
    check_reading(net, model)
