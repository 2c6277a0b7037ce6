"""Local losses and steps of the gallery against their papers' formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.gallery_runs import LR, NET
from support.oracle_cases import MODES, distance
from torch import Tensor

CLASSES = 10


def gradient(
    w: np.ndarray, X: np.ndarray, y: np.ndarray, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> np.ndarray:
    """The gradient at w of loss(logits, features, y), by autograd."""
    flat = torch.tensor(w, requires_grad=True)
    h, z = forward(flat, X)
    loss(z, h, torch.tensor(y)).backward()
    assert flat.grad is not None
    return flat.grad.numpy()


def forward(w: Tensor, X: np.ndarray) -> tuple[Tensor, Tensor]:
    """The features [n, F] and logits [n, 10] of an MLP."""
    parts = w.split([int(np.prod(shape)) for shape in NET.shapes])
    W1, b1, W2, b2 = (part.reshape(shape) for part, shape in zip(parts, NET.shapes, strict=True))
    h = torch.relu(torch.tensor(X) @ W1.T + b1)
    return h, h @ W2.T + b2


def sgd(loss_of: Callable) -> Callable:
    """Local SGD on the loss that `loss_of(x, client)` returns."""

    def local(x, i, batches):
        w, loss = x, loss_of(x, i)
        for X, y in batches:
            w = w - LR * gradient(w, X, y, lambda *given: loss(*given, X))  # noqa: B023
        return w

    return local


@pytest.mark.parametrize("mode", MODES)
def test_fedlc(mode, train):
    """Zhang 2022: -log softmax of z_c - τ n_c^(-1/4)."""
    done = train(mode, client={"name": "losses/fedlc.py:FedLCClient", "tau": 0.7})

    def loss_of(x, i):
        n = [max((done.feed.data[i][1] == c).sum(), 1e-8) for c in range(CLASSES)]
        margins = torch.tensor([0.7 / k**0.25 for k in n], dtype=torch.float64)

        def loss(z, h, y, X):
            e = torch.exp(z - margins)
            return -torch.log(e[torch.arange(len(y)), y] / e.sum(1)).mean()

        return loss

    assert distance(done.xs, done.averaged(sgd(loss_of))) < 1e-9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("privacy", [{}, {"max_grad_norm": 1e9, "noise_multiplier": 0.0}])
def test_fedntd(privacy, mode, train):
    """Lee 2022: CE + β Σ_{c ≠ y} q_g log(q_g / q), where q are softmaxes without the true class.
    Gradients by example, which nothing clips, have the same mean."""
    client = {"name": "losses/fedntd.py:FedNTDClient", "beta": 0.6, "tau": 2.0}
    done = train(mode, client=client, **({"privacy": privacy} if privacy else {}))

    def loss_of(x, i):
        def loss(z, h, y, X):
            z_g = forward(torch.tensor(x), X)[1]
            total = torch.zeros((), dtype=torch.float64)
            for k in range(len(y)):
                rest = [c for c in range(CLASSES) if c != y[k]]
                q, q_g = torch.softmax(z[k, rest] / 2, 0), torch.softmax(z_g[k, rest] / 2, 0)
                total = total + 0.6 * (q_g * torch.log(q_g / q)).sum()
                total = total - torch.log_softmax(z[k], 0)[y[k]]
            return total / len(y)

        return loss

    assert distance(done.xs, done.averaged(sgd(loss_of))) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_feddecorr(mode, train):
    """Shi 2023: CE + β / d² |K|_F², where K is the correlation matrix of the representations."""
    done = train(mode, client={"name": "losses/feddecorr.py:FedDecorrClient", "beta": 2.0})

    def loss_of(x, i):
        def loss(z, h, y, X):
            features = [h[:, j] - h[:, j].mean() for j in range(h.shape[1])]
            units = [f / ((f**2).mean() + 1e-8) ** 0.5 for f in features]  # f may be constant
            K = [(f * g).mean() for f in units for g in units]
            ce = torch.nn.functional.cross_entropy(z, y)
            return ce + 2.0 / h.shape[1] ** 2 * sum(k**2 for k in K)

        return loss

    assert distance(done.xs, done.averaged(sgd(loss_of))) < 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_fedsam(mode, train):
    """Qu 2022, algorithm 1: w <- w - η ∇f(w + ρ g / |g|)."""
    done = train(mode, client={"name": "losses/fedsam.py:FedSAMClient", "rho": 0.3})

    def local(w, i, batches):
        for X, y in batches:
            g = NET.grad(w, X, y)
            w = w - LR * NET.grad(w + 0.3 * g / np.linalg.norm(g), X, y)
        return w

    assert distance(done.xs, done.averaged(local)) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedasam(mode, train):
    """Caldarola 2022: the perturbation ρ T² g / |T g| with T = diag(|w| + η)."""
    client = {"name": "losses/fedasam.py:FedASAMClient", "rho": 0.7, "eta": 0.1}
    done = train(mode, client=client)

    def local(w, i, batches):
        for X, y in batches:
            g, T = NET.grad(w, X, y), np.abs(w) + 0.1
            w = w - LR * NET.grad(w + 0.7 * T * T * g / np.linalg.norm(T * g), X, y)
        return w

    assert distance(done.xs, done.averaged(local)) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedspeed(mode, train):
    """Sun 2023, algorithm 1, over three rounds, so that some clients come back with their
    correction."""
    client = {"name": "losses/fedspeed.py:FedSpeedClient", "lam": 5.0, "alpha": 0.7, "rho": 0.3}
    done = train(mode, client=client)
    corrections: dict[int, np.ndarray] = {}
    back = 0

    def local(x, i, batches):
        nonlocal back
        w, back = x, back + (i in corrections)
        correction = corrections.get(i, np.zeros_like(x))
        for X, y in batches:
            g1 = NET.grad(w, X, y)
            g2 = NET.grad(w + 0.3 * g1, X, y)
            mixed = 0.3 * g1 + 0.7 * g2
            w = w - LR * (mixed - correction + (w - x) / 5.0)
        corrections[i] = correction - (w - x) / 5.0
        return w - 5.0 * corrections[i]

    assert distance(done.xs, done.averaged(local)) < 1e-9
    assert back > 0
