"""Momentum, sharpness, robust, personal and fair methods against their papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from oracle import scaffold
from sklearn.cluster import MeanShift, estimate_bandwidth
from support.gallery_runs import LR, NET, SIZES, Done, gradient, net
from support.oracle_cases import MODES, by_round, distance
from support.server_rules import reports
from torch.nn.functional import cross_entropy

from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods import registry
from raysim.rules.rule import Problem

FALLING = [[0, LR], [1, 0.7 * LR], [3, 0.4 * LR]]
"""A schedule of the local step size."""


@pytest.fixture
def train(train_method: Callable[..., Done]) -> Callable[..., Done]:
    return train_method


def sgd(w: np.ndarray, batches: list, lr: float, pull: Callable = lambda w: 0.0) -> np.ndarray:
    """The model after local steps along the gradient plus `pull(w)`."""
    for X, y in batches:
        w = w - lr * (NET.grad(w, X, y) + pull(w))
    return w


@pytest.mark.parametrize("mode", MODES)
def test_fedcm(mode, train):
    """Xu 2021, algorithm 2: w <- w - η (α g + (1 - α) Δ) with Δ = mean (x - w_i) / (η K_i) of the
    last round. The clients take unequally many steps."""
    alpha, server_lr = 0.3, 0.8
    done = train(
        mode,
        {"name": "fedcm", "alpha": alpha, "lr": server_lr},
        local={"epochs": 2, "lr": FALLING},
    )
    xs, D, steps = [done.feed.x0], np.zeros(NET.size), set()
    for t, cohort in enumerate(done.feed.cohorts):
        x, lr = xs[-1], by_round(FALLING)(t)
        deltas, directions = [], []
        for i in cohort:
            w, batches = x, done.batches(t, i)
            for X, y in batches:
                w = w - lr * (alpha * NET.grad(w, X, y) + (1 - alpha) * D)
            deltas.append(x - w)
            directions.append((x - w) / (len(batches) * lr))
            steps.add(len(batches))
        D = np.mean(directions, axis=0)
        xs.append(x - server_lr * np.mean(deltas, axis=0))
    assert len(steps) > 1
    assert distance(done.xs, xs) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedacg(mode, train):
    """Kim 2024, algorithm 1: from s = x + λ m on f(w) + β/2 |w - s|²; m <- λ m + mean (w_i - s);
    x <- x + m."""
    lam, beta, server_lr = 0.6, 0.4, 0.9
    done = train(mode, {"name": "fedacg", "lam": lam, "beta": beta, "lr": server_lr})
    xs, m = [done.feed.x0], np.zeros(NET.size)
    for t, cohort in enumerate(done.feed.cohorts):
        s = xs[-1] + lam * m
        ends = [sgd(s, done.batches(t, i), LR, lambda w: beta * (w - s)) for i in cohort]  # noqa: B023
        m = lam * m + server_lr * np.mean([w - s for w in ends], axis=0)
        xs.append(xs[-1] + m)
    assert distance(done.xs, xs) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedlesam(mode, train):
    """Fan 2024, algorithm 1: w <- w - η ∇f(w + ρ (x_old - x) / |x_old - x|), where x_old is the
    model that the client received in its last round."""
    rho = 0.4
    done = train(mode, {"name": "fedlesam", "rho": rho})
    xs, received, gaps = [done.feed.x0], {}, set()
    for t, cohort in enumerate(done.feed.cohorts):
        x, ends = xs[-1], []
        for i in cohort:
            w, shift = x, np.zeros_like(x)
            if i in received:
                away = xs[received[i]] - x
                shift = rho * away / np.linalg.norm(away)
                gaps.add(t - received[i])
            for X, y in done.batches(t, i):
                w = w - LR * NET.grad(w + shift, X, y)
            received[i] = t
            ends.append(w)
        xs.append(np.mean(ends, axis=0))
    assert gaps > {1}
    assert distance(done.xs, xs) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedgamma(mode, train):
    """Dai 2023, algorithm 1: w <- w - η (∇f(w + ρ g / |g|) - c_i + c); c_i <- c_i - c + (x - w) /
    (K η), c <- c + mean of all clients' changes (SCAFFOLD, option II)."""
    rho, server_lr = 0.4, 0.9
    done = train(
        mode,
        {"name": "fedgamma", "rho": rho, "lr": server_lr},
        local={"epochs": 2, "lr": FALLING},
    )

    def sam(w, X, y):
        g = NET.grad(w, X, y)
        return NET.grad(w + rho * g / np.linalg.norm(g), X, y)

    xs = scaffold.run(*done.feed.args(sam), lr=by_round(FALLING), server_lr=server_lr)
    assert distance(done.xs, xs) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_fedamp(mode, train):
    """Huang 2021, algorithm 1: u_i = (1 - Σ ξ_ij) w_i + Σ ξ_ij w_j with ξ_ij = α A'(|w_i - w_j|²)
    and A(d) = 1 - exp(-d / σ); w_i from u_i on f(w) + λ/2 |w - u_i|². Those who were away keep u_i."""
    sigma, alpha, lam = 0.5, 0.1, 0.7
    done = train(mode, {"name": "fedamp", "sigma": sigma, "alpha": alpha, "mu": lam})
    clouds = {i: done.feed.x0 for i in range(len(SIZES))}
    weights, mixed = [], set()
    for t, cohort in enumerate(done.feed.cohorts):
        w = {
            i: sgd(clouds[i], done.batches(t, i), LR, lambda w: lam * (w - clouds[i]))  # noqa: B023
            for i in cohort
        }
        for i in cohort:
            xi = {
                j: alpha * np.exp(-((w[i] - w[j]) ** 2).sum() / sigma) / sigma
                for j in cohort
                if j != i
            }
            clouds[i] = (1 - sum(xi.values())) * w[i] + sum(xi[j] * w[j] for j in xi)
            weights += xi.values()
            mixed.add(i)
        expected = done.mean_test_loss(clouds.__getitem__)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
        assert t > 0 or len(mixed) < len(SIZES)  # some are evaluated with x_0
    assert max(weights) > 0.02 and max(weights) > 1.5 * min(weights)


@pytest.mark.parametrize("mode", MODES)
def test_feddistill(mode, train):
    """Jeong 2018, Seo 2020: cross-entropy + λ |z(x) - mean logits of the class|² / C; the nets stay
    with the clients, and the mean logits of a class are those of the round's examples of it."""
    lam = 0.7
    done = train(mode, {"name": "feddistill", "lam": lam})
    x0, models, forgotten = done.feed.x0, {}, 0
    known = torch.full((10, 10), torch.nan, dtype=torch.float64)
    for t, cohort in enumerate(done.feed.cohorts):
        logits_of: dict[int, list[torch.Tensor]] = {}
        for i in cohort:
            w = models.get(i, x0)
            for X, y in done.batches(t, i):

                def loss(w, X=X, y=y, known=known):
                    z = net(w, X)[1]
                    total = cross_entropy(z, torch.from_numpy(y))
                    for row, label in zip(z, y, strict=True):
                        if not known[label].isnan().any():
                            total = total + lam * ((row - known[label]) ** 2).sum() / 10 / len(y)
                    return total

                w = w - LR * gradient(loss, w)
            models[i] = w
            X, y = done.feed.data[i]
            for row, label in zip(net(torch.from_numpy(w), X)[1], y, strict=True):
                logits_of.setdefault(int(label), []).append(row)
        forgotten += sum(c not in logits_of and not known[c].isnan().any() for c in range(10))
        known = known.clone()
        for label, rows in logits_of.items():
            known[label] = torch.stack(rows).mean(0)
        expected = done.mean_test_loss(lambda i: models.get(i, x0))
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert forgotten > 0 and known[9].isnan().all()
    (found,) = [v for v in done.states[-1].values() if v.shape == (10, 10)]
    assert np.allclose(found, known, rtol=1e-9, equal_nan=True)
    for i, w in models.items():
        assert np.allclose(done.kept(i)["personal parameters"], w, rtol=1e-9)
    assert np.array_equal(done.xs[-1], x0)


def near(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-9, atol=1e-12)


def updates(name: str, *rounds: np.ndarray, **parameters: Any) -> list[np.ndarray]:
    """What the server rule of a method subtracts from x in each round, for the uploads [K, P]."""
    registry.discover()
    server = ALGORITHMS[name].server(**parameters)
    k, size = rounds[0].shape
    problem = Problem(k, k, size, segments=(size,), shapes=((size,),), n_nonempty=k)
    state = server.init(torch.zeros(size, dtype=torch.float64), problem)
    found = []
    for t, deltas in enumerate(rounds):
        after = server.update(state, reports(deltas, None, t))
        found.append((state["x"] - after["x"]).numpy())
        state = after
    return found


DELTAS = np.random.default_rng(36).normal(size=(11, 7)) * np.arange(1, 12)[:, None] ** 0.5


@pytest.mark.parametrize(("f", "c", "cut"), [(1, 1.0, 1), (3, 1.0, 3), (3, 1.5, 4), (2, 0.0, 0)])
@pytest.mark.parametrize("iterations", [1, 3])
def test_dnc(f, c, cut, iterations):
    """Shejwalkar 2021, algorithm 2: scores <Δ_i - μ, v>² along the first principal direction v; the
    c f largest are removed."""
    centred = DELTAS - DELTAS.mean(0)
    v = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    scores = [(row @ v) ** 2 for row in centred]
    kept = sorted(range(11), key=scores.__getitem__)[: 11 - cut]
    (found,) = updates("dnc", DELTAS, attackers=f, filter=c, iterations=iterations, lr=0.5)
    assert near(found, 0.5 * DELTAS[kept].mean(0))


def test_dnc_on_some_coordinates():
    """The attackers stand out in every coordinate, so all draws of coordinates agree, and the mean
    is over whole updates."""
    deltas = np.random.default_rng(1).normal(size=(9, 40))
    deltas[[2, 7]] += 30
    (found,) = updates("dnc", deltas, attackers=2, coordinates=6, iterations=4)
    assert near(found, np.delete(deltas, [2, 7], axis=0).mean(0))


def test_dnc_means_what_all_iterations_keep():
    """On one coordinate at a time, other updates are removed: update k is far off in coordinate k.
    After many draws only those are left that are far off nowhere."""
    deltas = np.random.default_rng(1).normal(size=(9, 4))
    deltas[np.arange(4), np.arange(4)] = 100
    (found,) = updates("dnc", deltas, attackers=1, coordinates=1, iterations=200)
    assert near(found, deltas[4:].mean(0))


def test_signguard():
    """Xu 2022, algorithm 2: norms between L and R times the median; the largest cluster (MeanShift)
    of the shares of positive, zero and negative signs; the mean of their updates, clipped to the
    median norm."""
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(13, 200)) + 0.5
    deltas[[1, 6, 11]] *= -1
    deltas[:, :10] = 0
    lengths = np.array([1, 1, 0.6, 1.2, 8, 0.9, 1.1, 0.02, 2.5, 0.8, 1.3, 1.4, 0.7])
    deltas *= (lengths / np.linalg.norm(deltas, axis=1))[:, None]
    median = np.sort(lengths)[6]
    clipped = [d * min(1, median / n) for d, n in zip(deltas, lengths, strict=True)]
    shares = np.array([[(d > 0).mean(), (d == 0).mean(), (d < 0).mean()] for d in deltas])
    bandwidth = estimate_bandwidth(shares, quantile=0.5, n_samples=50)
    cluster = MeanShift(bandwidth=bandwidth).fit(shares).labels_
    largest = np.flatnonzero(cluster == np.bincount(cluster).argmax())
    assert largest.tolist() == [0, 2, 3, 4, 5, 7, 8, 9, 10, 12]
    kept = [i for i in largest if 0.1 * median <= lengths[i] <= 3 * median]
    assert len(kept) == len(largest) - 2
    (found,) = updates("signguard", deltas, share=1.0)
    assert near(found, np.mean([clipped[i] for i in kept], axis=0))
    kept = [i for i in largest if 0.85 * median <= lengths[i] <= 1.25 * median]
    (found,) = updates("signguard", deltas, share=1.0, lower=0.85, upper=1.25, lr=0.5)
    assert near(found, 0.5 * np.mean([clipped[i] for i in kept], axis=0))


def halves(rows: np.ndarray) -> list[list[int]]:
    """Join the two nearest clusters, by the mean of 1 - cosine over their pairs, until two are left."""
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    apart = 1 - units @ units.T
    clusters = [[i] for i in range(len(rows))]
    while len(clusters) > 2:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        a, b = min(pairs, key=lambda p: apart[np.ix_(clusters[p[0]], clusters[p[1]])].mean())
        clusters[b] += clusters.pop(a)
    return clusters


def test_clipped_clustering():
    """Li 2022, algorithm 1: clip to the median of all norms so far, cluster by cosine into two with
    average linkage, and take the mean of the larger cluster."""
    rng = np.random.default_rng(7)
    rounds = [scale * rng.normal(size=(9, 5)) + 0.6 for scale in (1.0, 3.0, 0.3, 1.5)]
    norms: list[float] = []
    for deltas, found in zip(rounds, updates("clipped_clustering", *rounds), strict=True):
        norms += [np.sqrt((d**2).sum()) for d in deltas]
        tau = np.median(norms)
        clipped = np.array([d * min(1, tau / np.sqrt((d**2).sum())) for d in deltas])
        larger = max(halves(deltas), key=len)
        assert near(found, clipped[larger].mean(0))


def shortest(d: np.ndarray, low: float, high: float) -> np.ndarray:
    """The λ of least |Σ λ_i d_i|² with Σ λ_i = 1 and low <= λ_i <= high, by trying which of them are
    at a bound."""
    k, best = len(d), (np.inf, np.zeros(len(d)))
    for at in product((low, high, None), repeat=k):
        free = [i for i in range(k) if at[i] is None]
        lam = np.array([0.0 if value is None else value for value in at])
        if free:
            gram = d[free] @ d[free].T
            ones = np.ones((len(free), 1))
            kkt = np.block([[gram, ones], [ones.T, np.zeros((1, 1))]])
            right = np.append(-d[free] @ (lam @ d), 1 - lam.sum())
            lam[free] = np.linalg.solve(kkt, right)[:-1]
        inside = low - 1e-12 < lam.min() and lam.max() < high + 1e-12
        if inside and abs(lam.sum() - 1) < 1e-12:
            best = min(best, (((lam @ d) ** 2).sum(), lam), key=lambda pair: pair[0])
    return best[1]


@pytest.mark.parametrize(("epsilon", "at_bounds"), [(0.0, 5), (0.1, 3), (0.15, 2), (1.0, 1)])
def test_fedmgda(epsilon, at_bounds):
    """Hu 2022, algorithm 1: x <- x - η Σ λ_i d_i / |d_i|, with the λ of the simplex within ε of 1/K
    for which the sum is shortest."""
    deltas = np.random.default_rng(0).normal(size=(5, 6)) + 0.3
    d = deltas / np.linalg.norm(deltas, axis=1, keepdims=True)
    low, high = max(0, 0.2 - epsilon), min(1, 0.2 + epsilon)
    lam = shortest(d, low, high)
    assert sum(min(v - low, high - v) < 1e-9 for v in lam) == at_bounds
    (found,) = updates("fedmgda", deltas, epsilon=epsilon, lr=0.5)
    assert near(found, 0.5 * lam @ d)
