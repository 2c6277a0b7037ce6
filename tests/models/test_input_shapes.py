"""Nets that reshape their inputs themselves: the same training for inputs of any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysim
from raysim.errors import ConfigError
from raysim.rules import ServerRule

RNG = np.random.default_rng(5)
Y = np.arange(48) % 3
X = (RNG.normal(size=(48, 1, 8, 8)) + RNG.normal(size=(3, 1, 8, 8))[Y]).astype(np.float32)


class Reshaping(nn.Module):
    """A convolution on inputs that become images [B, 1, 8, 8] first."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, stride=2)
        self.classifier = nn.Linear(18, 3)

    def forward(self, x):
        return self.classifier(self.convolution(x.reshape(-1, 1, 8, 8)).relu().flatten(1))


@dataclass(frozen=True)
class PublicStep(ServerRule):
    """One step of the server on the public examples after the mean update."""

    needs_public_data = "labels"

    def update(self, state, reports):
        x = state["x"] - reports.mean("delta")
        (batch,) = reports.public.batches(len(reports.public), reports.rng("public"))
        return {"x": reports.task.descend(x, reports.task.grad(x, batch))}


def trained(config: dict[str, Any], mode: str, x: np.ndarray) -> raysim.RunResult:
    net = Reshaping()
    for i, p in enumerate(net.parameters()):
        with torch.no_grad():
            p.copy_(torch.linspace(-0.5, 0.4 + 0.1 * i, p.numel()).view(p.shape))
    content = {"train": (x[:36], Y[:36]), "test": (x[36:42], Y[36:42]), "public": (x[42:], Y[42:])}
    return raysim.run(
        {
            **config,
            "data": content,
            "model": net,
            "client": "fedavg",
            "server": PublicStep,
            "rounds": 2,
            "partition": {"clients": 4, "test": {"fraction": 0.3}},
            "local": {"steps": 2, "batch_size": 4, "lr": 0.1},
            "schedule": {"cohort": 3},
            "batching": {"mode": mode},
            "evaluate": {"clients": {"every": 1, "fine_tune": {"steps": 1}}},
        },
        tracking=False,
        run_dir=None,
    )


@pytest.mark.parametrize("shape", [(8, 8), (64,), (4, 1, 4, 4)])
def test_inputs_of_any_rank_train_and_are_evaluated_like_images(base, tmp_path, monkeypatch, shape):
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "data"))
    x = X.reshape(len(X), *shape)
    for mode in ("loop", "lanes"):
        images, given = (trained(base, mode, inputs) for inputs in (X, x))
        torch.testing.assert_close(given.parameters, images.parameters, rtol=1e-5, atol=1e-6)
        assert given.history[-1]["loss"] == pytest.approx(images.history[-1]["loss"], rel=1e-5)
        assert given.clients.loss.tolist() == pytest.approx(images.clients.loss.tolist(), rel=1e-5)


TOKENS = np.tile([3, 29, 5, 7], (9, 1))


class Named(nn.Linear):
    def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]  # as nets of transformers do
        return {"logits": super().forward(x)}


@pytest.mark.parametrize(
    ("x", "net", "message"),
    [
        (np.zeros((9, 4), int), nn.Linear(4, 3), "x is int64: give floats, or use nn.Embedding"),
        (TOKENS, nn.Sequential(nn.Embedding(20, 3), nn.Flatten()), "the numbers in .* from 3 to 29$"),
        (np.zeros((9, 4)), Named(4, 3), r"into dict, and task .* takes one tensor"),
    ],
)  # fmt: skip
def test_a_net_that_does_not_fit_is_told_the_fix(base, tmp_path, monkeypatch, x, net, message):
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "data"))
    y = np.arange(9) % 3
    config = {**base, "data": (x, y, x, y), "algorithm": "fedavg", "rounds": 1}
    with pytest.raises(ConfigError, match=message):
        raysim.run({**config, "partition": {"clients": 3}, "schedule": {"cohort": 2}}, model=net)
