"""Federated averaging in plain PyTorch, as a user would write it, on small data: the truth for
nets that users hand over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
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


Losses = Iterator[Tensor]


def averaged(
    net: nn.Module,
    weights: Sequence[float],
    rounds: int,
    losses: Callable[[nn.Module, int, int], Losses],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> nn.Module:
    """Return the net, in float64, after rounds of federated averaging of all its state_dict.

    Args:
        net: the net at the start; not changed.
        weights: the weight of each client, in any unit.
        rounds: number of rounds, in each of which all clients take part.
        losses: `losses(module, t, client)` yields the loss of each local step.
        optimizer: makes the optimizer of a client's module.
    """
    net = copy.deepcopy(net).double()
    for t in range(rounds):
        states = []
        for client in range(len(weights)):
            local = copy.deepcopy(net)
            local.train()  # a net's own may return nothing
            steps = optimizer(local)
            for loss in losses(local, t, client):
                steps.zero_grad()
                loss.backward()
                steps.step()
            states.append(local.state_dict())
        net.load_state_dict(average(states, [weight / sum(weights) for weight in weights]))
    return net


def sgd(lr: float = 0.1) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.SGD(net.parameters(), lr=lr)


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
    x, y = torch.tensor(data[0]).double(), torch.tensor(data[1])

    def losses(local: nn.Module, t: int, client: int) -> Losses:
        for step in range(steps):
            before_pass(t, client, step)
            yield F.cross_entropy(local(x[parts[client]]), y[parts[client]])

    return averaged(net, [len(part) for part in parts], rounds, losses, optimizer or sgd(lr))


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
