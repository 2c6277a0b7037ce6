"""Federated averaging in plain PyTorch, as a user would write it, on small data: the truth for
nets that users hand over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raysim

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def blobs(n: int = 120, d: int = 6, classes: int = 3, test: int = 60) -> Data:
    rng = np.random.default_rng(0)
    centres = 1.5 * rng.normal(size=(classes, d))
    y = rng.integers(0, classes, n + test)
    x = centres[y] + rng.normal(size=(n + test, d))
    return x[:n], y[:n], x[n:], y[n:]


def cut(sizes: list[int]) -> list[list[int]]:
    order = np.random.default_rng(0).permutation(sum(sizes))
    return [np.sort(part).tolist() for part in np.split(order, np.cumsum(sizes)[:-1])]


def fedavg(
    net: nn.Module,
    data: Data,
    parts: list[list[int]],
    rounds: int = 3,
    lr: float = 0.1,
    steps: int = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    before_pass: Callable[[int, int, int], None] = lambda t, client, step: None,
) -> nn.Module:
    """Full batches; means weighted by samples, of all floating-point tensors of the state_dict."""
    net = copy.deepcopy(net).double()
    x, y = torch.tensor(data[0]).double(), torch.tensor(data[1])
    weights = [len(part) / sum(map(len, parts)) for part in parts]
    for t in range(rounds):
        states = []
        for client, part in enumerate(parts):
            local = copy.deepcopy(net)
            local.train()
            opt = optimizer(local) if optimizer else torch.optim.SGD(local.parameters(), lr=lr)
            for step in range(steps):
                opt.zero_grad()
                before_pass(t, client, step)
                F.cross_entropy(local(x[part]), y[part]).backward()
                opt.step()
            states.append(local.state_dict())
        net.load_state_dict(average(states, weights))
    return net


def average(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Mean of the clients' state_dicts; tensors of whole numbers are those of the first client."""
    mean = dict(states[0])
    for key, value in mean.items():
        if value.is_floating_point():
            terms = [w * state[key] for w, state in zip(weights, states, strict=True)]
            mean[key] = torch.stack(terms).sum(0)
    return mean


def run(
    net: Any, data: Any, parts: list[list[int]], rounds: int = 3, **keys: Any
) -> raysim.RunResult:
    local = {"steps": 2, "batch_size": "full", "lr": 0.1}
    config = {
        "data": data,
        "model": net,
        "partition": parts,
        "rounds": rounds,
        "dtype": "float64",
        "local": local,
        "schedule": {"cohort": len(parts)},
        "algorithm": {"name": "fedavg", "weights": "samples"},
        "resources": {"executor": "inline"},
    }
    return raysim.run({**config, **keys}, tracking=False)


def check(result: raysim.RunResult, net: nn.Module, data: Data, tolerance: float = 1e-8) -> None:
    """Compare parameters, statistics and the last evaluation of a run with those of a net."""
    theirs = net.state_dict()
    for key, value in result.state_dict.items():
        if "num_batches_tracked" not in key:
            torch.testing.assert_close(
                value.double(), theirs[key].double(), rtol=tolerance, atol=tolerance
            )
    approx = partial(pytest.approx, rel=1e-6, abs=1e-8)
    accuracy, loss = evaluated(net, data)
    last = result.history[-1]
    assert last["accuracy"] == approx(accuracy) and last["loss"] == approx(loss)
    assert evaluated(result.net(), data) == (approx(accuracy), approx(loss))


@torch.no_grad()
def evaluated(net: nn.Module, data: Data) -> tuple[float, float]:
    x, y = torch.tensor(data[2]).double(), torch.tensor(data[3])
    net = copy.deepcopy(net).double()
    net.eval()
    outputs: Tensor = net(x)
    return float((outputs.argmax(1) == y).double().mean()), float(F.cross_entropy(outputs, y))
