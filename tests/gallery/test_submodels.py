"""Methods of the gallery whose clients train sub-models, against nets that are really small."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch
from oracle.nets import join, split
from support.examples import gallery
from support.gallery_runs import LR
from support.oracle_cases import MODES, distance
from torch.nn import functional as F

from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator

DECAY = 0.1

SHAPES = [(8, 64), (8,), (10, 8), (10,)]
PATH = f"{gallery.FOLDER}/submodels/heterofl.py"


def trained(x: np.ndarray, width: float, batches) -> list[np.ndarray]:
    """Train a net with ceil(width * 8) hidden units, whose first layer's outputs are divided by
    `width`."""
    n = ceil(width * 8)
    W1, b1, W2, b2 = split(x, SHAPES)
    small = [torch.tensor(v, requires_grad=True) for v in (W1[:n], b1[:n], W2[:, :n], b2)]
    for X, y in batches:
        h = torch.relu(F.linear(torch.tensor(X), small[0], small[1]) / width)
        loss = F.cross_entropy(F.linear(h, small[2], small[3]), torch.tensor(y))
        grads = torch.autograd.grad(loss, small)
        steps = [
            g + DECAY * v * (v.ndim == 2)  # the biases do not decay
            for v, g in zip(small, grads, strict=True)
        ]
        small = [(v - LR * u).detach().requires_grad_() for v, u in zip(small, steps, strict=True)]
    return [v.detach().numpy() for v in small]


@pytest.mark.parametrize("mode", MODES)
def test_heterofl(mode, train):
    """Diao 2021, algorithm 1: each parameter is the mean over the clients that have it."""
    width = {0: 0.5, 1: 0.5, 2: 0.3, 3: 0.3}
    groups = {
        name: {"ids": ids, "client": {"name": f"{PATH}:HeteroFLClient", "width": w}}
        for name, ids, w in (("half", [0, 1], 0.5), ("small", [2, 3], 0.3))
    }
    done = train(
        mode,
        sizes=[30, 9, 17, 12, 45, 8, 14],
        client={"name": "submodels/heterofl.py:HeteroFLClient", "width": 0.8},
        server="submodels/heterofl.py:HeteroFLServer",
        groups=groups,
        schedule={"cohort": 7},
        local={"weight_decay": DECAY},
    )
    xs = [done.feed.x0]
    kept = False
    for t, cohort in enumerate(done.feed.cohorts):
        total = [np.zeros(shape) for shape in SHAPES]
        count = [np.zeros(shape) for shape in SHAPES]
        for i in cohort:
            end = trained(xs[-1], width.get(i, 0.8), done.batches(t, i))
            for s, c, v in zip(total, count, end, strict=True):
                part = tuple(slice(size) for size in v.shape)
                s[part] += v
                c[part] += 1
        x = [
            np.where(c > 0, s / np.maximum(c, 1), old)
            for s, c, old in zip(total, count, split(xs[-1], SHAPES), strict=True)
        ]
        kept |= any((c == 0).any() for c in count)
        xs.append(join(x))
    assert distance(done.xs, xs) < 1e-9
    assert kept, "some parameters are in nobody's sub-model"


@pytest.mark.parametrize("mode", MODES)
def test_fjord(mode, train):
    """Horváth 2021, algorithm 1, with a width for each local step."""
    largest = {0: 3, 1: 3, 2: 1, 3: 1}
    path = "submodels/fjord.py:FjordClient"
    groups = {
        name: {"ids": ids, "client": {"name": f"{gallery.FOLDER}/{path}", "largest": m}}
        for name, ids, m in (("medium", [0, 1], 3), ("small", [2, 3], 1))
    }
    done = train(
        mode,
        client={"name": path, "largest": 4},
        server="submodels/heterofl.py:HeteroFLServer",
        groups=groups,
        schedule={"cohort": 4},
    )
    xs = [done.feed.x0]
    drawn = set()
    for t, cohort in enumerate(done.feed.cohorts):
        total = [np.zeros(shape) for shape in SHAPES]
        count = [np.zeros(shape) for shape in SHAPES]
        for i in cohort:
            w = [part.copy() for part in split(xs[-1], SHAPES)]
            m = largest.get(i, 4)
            rng = generator(done.engine.config.seed, "client rule noise width", t, i)
            for X, y in done.batches(t, i):
                units = ceil((np.floor(m * float(rng.random(dtype="float32"))) + 1) * 8 / 5)
                drawn.add((m, units))
                for part, v in zip(first(w, units), descended(first(w, units), X, y), strict=True):
                    part[...] = v
            n = ceil(m * 8 / 5)
            for s, c, v in zip(first(total, n), first(count, n), first(w, n), strict=True):
                s += v
                c += 1
        x = [
            np.where(c > 0, s / np.maximum(c, 1), old)
            for s, c, old in zip(total, count, split(xs[-1], SHAPES), strict=True)
        ]
        xs.append(join(x))
    assert distance(done.xs, xs) < 1e-9
    assert {(4, n) for n in (2, 4, 5, 7)} <= drawn, "all widths of a client are drawn"


def first(parts: list[np.ndarray], n: int) -> list[np.ndarray]:
    """Return views of the parameters W1, b1, W2, b2 of the first n hidden units."""
    W1, b1, W2, b2 = parts
    return [W1[:n], b1[:n], W2[:, :n], b2]


def descended(small: list[np.ndarray], X: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Return the parameters of a net of these sizes after one step of SGD."""
    leaves = [torch.tensor(v, requires_grad=True) for v in small]
    h = torch.relu(F.linear(torch.tensor(X), leaves[0], leaves[1]))
    loss = F.cross_entropy(F.linear(h, leaves[2], leaves[3]), torch.tensor(y))
    grads = torch.autograd.grad(loss, leaves)
    return [(v - LR * g).detach().numpy() for v, g in zip(leaves, grads, strict=True)]


CONVOLUTIONS = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten(),
            nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, classes),
        )
"""
OF_CONVOLUTIONS = [(4, 1, 3, 3), (4,), (6, 4, 2, 2), (6,), (8, 24), (8,), (10, 8), (10,)]


def convolutional(parts: list[torch.Tensor], X: torch.Tensor, width: float) -> torch.Tensor:
    """The logits of a net of these tensors, whose hidden outputs are divided by `width`."""
    h = torch.relu(F.conv2d(X, parts[0], parts[1], stride=2) / width)
    h = torch.relu(F.conv2d(h, parts[2], parts[3]) / width).flatten(1)
    h = torch.relu(F.linear(h, parts[4], parts[5]) / width)
    return F.linear(h, parts[6], parts[7])


@pytest.mark.parametrize("width", [0.5, 0.3])
def test_heterofl_of_convolutions_is_a_net_with_fewer_channels(width, engine, ragged, source):
    """Channels in place of units. Below the flattening, 4 inputs come from each channel: the small
    net has those of its own channels."""
    config = {
        "rounds": 1, "dtype": "float64", "model": source("net", CONVOLUTIONS) + ":Net",
        "partition": ragged([12]), "schedule": {"cohort": 1}, "batching": {"mode": "loop"},
        "algorithm": {"name": "heterofl", "width": width},
        "local": {"steps": 1, "batch_size": "full", "lr": LR},
    }  # fmt: skip
    done, _ = engine(config)
    x0, x1 = (split(x, OF_CONVOLUTIONS) for x in done.executor.xs)
    a, b, c = (ceil(width * n) for n in (4, 6, 8))
    cut = [np.s_[:a], np.s_[:a], np.s_[:b, :a], np.s_[:b], np.s_[:c, : 4 * b], np.s_[:c], np.s_[:, :c], np.s_[:]]  # fmt: skip
    small = [torch.tensor(v[s], requires_grad=True) for v, s in zip(x0, cut, strict=True)]
    data, positions = done.plan.dataset, done.plan.clients.client(0)
    scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
    X = torch.tensor(data.x[positions].astype(np.float64) * scale + shift)
    loss = F.cross_entropy(convolutional(small, X, width), torch.tensor(data.y[positions]).long())
    for old, new, s, v, g in zip(x0, x1, cut, small, torch.autograd.grad(loss, small), strict=True):
        expected = old.copy()
        expected[s] = (v - LR * g).detach().numpy()
        np.testing.assert_allclose(new, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["heterofl", "fjord"])
@pytest.mark.parametrize("model", ["tinynn", "resnet20"])
def test_submodels_of_other_nets_are_refused(method, model, base):
    with pytest.raises(ConfigError, match=r"^algorithm\.name: sub-models are for nets of linear"):
        prepare({**base, "rounds": 1, "algorithm": method, "model": model})
