"""Personalised methods of the gallery against their papers' formulas."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.gallery_runs import BODY, LR, NET, net
from support.oracle_cases import MODES, distance
from torch.nn import functional as F


@pytest.mark.parametrize("mode", MODES)
def test_apfl(mode, train):
    """Deng 2020, algorithm 1: w <- w - η ∇f(w), v <- v - η ∇_v f(u), α <- α - η ∂f(u)/∂α, u = α v +
    (1 - α) w."""
    done = train(mode, client={"name": "personalised/apfl.py:APFLClient", "alpha": 0.3})
    own: dict[int, tuple] = {}

    def local(x, i, batches):
        w, (v, alpha) = x, own.get(i, (done.xs[0], 0.3))
        for X, y in batches:
            g = NET.grad(alpha * v + (1 - alpha) * w, X, y)
            after = np.clip(alpha - LR * g @ (v - w), 0, 1)
            w, v, alpha = w - LR * NET.grad(w, X, y), v - LR * alpha * g, after
        own[i] = v, alpha
        return w

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9
    for i, (v, alpha) in own.items():
        assert np.allclose(done.kept(i)["v"], v, rtol=1e-9)
        assert np.allclose(done.kept(i)["alpha"], alpha, rtol=1e-9) and alpha != 0.3

    def model(i):
        v, alpha = own.get(i, (done.xs[0], 0.3))
        return alpha * v + (1 - alpha) * xs[-1]

    assert done.records[-1]["clients/loss"] == pytest.approx(done.mean_test_loss(model))


@pytest.mark.parametrize("mode", MODES)
def test_pfedme(mode, train):
    """Dinh 2020, algorithm 1: θ ≈ argmin f(θ) + λ/2 |θ - w|², w <- w - η λ (w - θ), x <- (1 - β) x
    + β mean w."""
    client = {"name": "personalised/pfedme.py:PFedMeClient", "lam": 2.0, "personal_lr": 0.1, "K": 3}
    done = train(mode, client=client, server={"name": "fedavg", "lr": 0.5})
    own: dict[int, np.ndarray] = {}

    def local(x, i, batches):
        w = theta = x
        for X, y in batches:
            theta = w
            for _ in range(3):
                theta = theta - 0.1 * (NET.grad(theta, X, y) + 2.0 * (theta - w))
            w = w - LR * 2.0 * (w - theta)
        own[i] = theta
        return 0.5 * x + 0.5 * w

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9
    loss = done.mean_test_loss(lambda i: own.get(i, xs[-1]))
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)


@pytest.mark.parametrize("mode", MODES)
def test_perfedavg(mode, train):
    """Fallah 2020, section 5 (FO): w <- w - β ∇f(w - α ∇f(w; D); D') with two batches D and D'."""
    client = {"name": "personalised/perfedavg.py:PerFedAvgClient", "alpha": 0.3}
    done = train(mode, client=client)

    def local(w, i, t):
        for (X, y), first in zip(done.batches(t, i), done.prepared_batches(t, i), strict=True):
            w = w - LR * NET.grad(w - 0.3 * NET.grad(w, *first), X, y)
        return w

    xs = [done.feed.x0]
    for t, cohort in enumerate(done.feed.cohorts):
        xs.append(np.mean([local(xs[-1], i, t) for i in cohort], axis=0))
    assert distance(done.xs, xs) < 1e-9
    loss = done.mean_test_loss(lambda i: xs[-1] - 0.3 * NET.grad(xs[-1], *done.feed.data[i]))
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)


@pytest.mark.parametrize("mode", MODES)
def test_perfedavg_with_the_hessian(mode, train):
    """Fallah 2020, eq. 7: w <- w - β (v - α ∇²f(w; D) v), v = ∇f(w - α ∇f(w; D); D'). The product is
    exact here; the difference of gradients in its place has an error of order δ²."""
    client = {"name": "personalised/perfedavg.py:PerFedAvgClient", "alpha": 0.3, "delta": 1e-4}
    done = train(mode, client=client)

    def product(w, v, X, y):
        def loss(w):
            return F.cross_entropy(net(w, X)[1], torch.from_numpy(y).long())

        return torch.autograd.functional.hvp(loss, torch.from_numpy(w), torch.from_numpy(v))[1]

    def local(w, i, t):
        for (X, y), first in zip(done.batches(t, i), done.prepared_batches(t, i), strict=True):
            v = NET.grad(w - 0.3 * NET.grad(w, *first), X, y)
            w = w - LR * (v - 0.3 * product(w, v, *first).numpy())
        return w

    xs = [done.feed.x0]
    for t, cohort in enumerate(done.feed.cohorts):
        xs.append(np.mean([local(xs[-1], i, t) for i in cohort], axis=0))
    assert distance(done.xs, xs) < 1e-6


def whole(done, i):
    """Return the batches [X, y] of one pass over a client's examples in order; a last one of one
    example joins the one before."""
    X, y = done.feed.data[i]
    cuts = list(range(0, len(y), 16))
    if len(y) - cuts[-1] == 1 and len(cuts) > 1:
        cuts.pop()
    return [(X[a:b], y[a:b]) for a, b in pairwise([*cuts, len(y)])]


def test_fedala_trains_its_weights_until_they_are_steady_once(train):
    """Zhang 2023, section 3.3: in its first round with a model of its own, a client passes over its
    data until the loss is steady, and once in later rounds. As in the authors' code (ALA.py), a
    pass has the loss of its last batch before the step, and the passes end when there are more than
    ten losses and the last ten have a small standard deviation."""
    client = {"name": "personalised/fedala.py:FedALAClient", "eta": 3.0, "steady": 1e-3}
    done = train("loop", client=client, rounds=4)
    own: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    passes = []

    def local(x, i, batches):
        model, W = own.get(i, (x, np.ones(NET.size)))
        losses: list[float] = []
        while i in own:
            for X, y in whole(done, i):
                start = model + W * (x - model)
                loss, g = NET.loss(start, X, y), NET.grad(start, X, y)
                W = np.clip(W - 3.0 * g * (x - model), 0, 1)
                W[:BODY] = 1
            losses.append(loss)
            if i in settled or (len(losses) > 10 and np.std(losses[-10:]) < 1e-3):
                settled.add(i)
                passes.append(len(losses))
                break
        w = model + W * (x - model)
        for X, y in batches:
            w = w - LR * NET.grad(w, X, y)
        own[i] = w, W
        return w

    settled: set[int] = set()
    assert distance(done.xs, done.averaged(local)) < 1e-9
    assert 1 in passes and min(set(passes) - {1}) > 10


@pytest.mark.parametrize("mode", MODES)
def test_fedala(mode, train):
    """Zhang 2023: start = own + W (x - own), W <- clip(W - η ∂f/∂start (x - own), 0, 1) in the
    upper layers, else 1."""
    client = {"name": "personalised/fedala.py:FedALAClient", "eta": 3.0, "passes": 2}
    done = train(mode, client=client, rounds=4)
    own: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def start(x, i):
        model, W = own.get(i, (x, np.ones(NET.size)))
        for X, y in 2 * whole(done, i):
            g = NET.grad(model + W * (x - model), X, y)
            W = np.where(np.arange(NET.size) < BODY, 1.0, np.clip(W - 3.0 * g * (x - model), 0, 1))
        return model + W * (x - model), W

    def local(x, i, batches):
        w, W = start(x, i)
        for X, y in batches:
            w = w - LR * NET.grad(w, X, y)
        own[i] = w, W
        return w

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9
    assert any((W < 0.999).any() for _, W in own.values())
    loss = done.mean_test_loss(lambda i: start(xs[-1], i)[0])
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)
