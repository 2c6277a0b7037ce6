"""Server rules of the gallery against their papers' formulas."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import softmax_regression
from support.examples import gallery
from support.server_rules import noise, reports, rule, step
from support.softmax_regression import LR, SIZES, X, Y, examples_of, local_models, logits, softmax

DELTAS = np.random.default_rng(2).normal(size=(5, 8))


@pytest.mark.parametrize("common", [0.0, 3.0])
def test_fedexp(common):
    """Jhunjhunwala 2023: η = max(1, Σ |Δ_i|² / (2 M (|mean Δ|² + ε))); it is 1 for similar updates."""
    deltas = DELTAS + common
    mean = deltas.mean(0)
    eta = max(1, sum(d @ d for d in deltas) / (2 * 5 * (mean @ mean + 0.1)))
    assert (eta == 1) == (common == 3.0)
    server = rule("servers/fedexp.py:FedExPServer", epsilon=0.1, lr=0.5)
    assert np.allclose(step(server, deltas), 0.5 * eta * mean, rtol=1e-10)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedavg(q, base, engine, tmp_path):
    """Li 2020, algorithm 2, with L = 1 / η; q = 0 is FedAvg."""
    file = f"{gallery.FOLDER}/fairness/qfedavg.py"
    client = {"name": f"{file}:QFedAvgClient", "q": q}
    config = softmax_regression.config(
        tmp_path, base, client=client, server=f"{file}:QFedAvgServer", rounds=2
    )
    run, _ = engine(config)
    x, L = run.executor.xs[0], 1 / LR
    for t in range(2):
        above, below = np.zeros_like(x), 0.0
        models = local_models(x)
        for i in range(len(SIZES)):
            rows = examples_of(i)
            p = softmax(logits(x, X[rows]))[np.arange(len(rows)), Y[rows]]
            F, u = -np.log(p).mean(), L * (x - models[i])
            above += F**q * u
            below += q * F ** (q - 1) * (u @ u) + L * F**q
        x = models.mean(0) if q == 0 else x - above / below
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_qfedavg_weighs_clients_whose_losses_are_small(dtype, base, engine, tmp_path):
    """With q = 5 the clients' uploads get as small as their losses' fifth powers, 1e-14 and less,
    and the method goes on as in exact arithmetic."""
    x, rounds = 4 * X / np.abs(X).max(1, keepdims=True) + 8 * np.eye(3, 5)[Y], 120
    file = f"{gallery.FOLDER}/fairness/qfedavg.py"
    config = softmax_regression.config(
        tmp_path,
        base,
        client={"name": f"{file}:QFedAvgClient", "q": 5.0},
        server=f"{file}:QFedAvgServer",
        rounds=rounds,
        dtype=dtype,
    )
    data = np.load(tmp_path / "arrays.npz")
    np.savez(tmp_path / "arrays.npz", **{**data, "x": x[: sum(SIZES)]})
    run, records = engine(config)
    w, L = run.executor.xs[0].astype(np.float64), 1 / LR
    losses = []
    for t in range(rounds):
        above, below, losses = np.zeros_like(w), 0.0, []
        for i in range(len(SIZES)):
            rows, end = examples_of(i), w
            for _ in range(softmax_regression.STEPS):
                target = np.eye(3)[Y[rows]]
                end = end - LR * softmax_regression.gradient(end, x[rows], target)
            p = softmax(logits(w, x[rows]))[np.arange(len(rows)), Y[rows]]
            F, u = -np.log(p).mean(), L * (w - end)
            losses.append(F)
            above += F**5 * u
            below += 5 * F**4 * (u @ u) + L * F**5
        w = w - above / below
        tolerance = 1e-9 if dtype == "float64" else 1e-3
        assert np.abs(run.executor.xs[t + 1] - w).max() <= tolerance * np.abs(w).max()
    assert max(losses) ** 5 < 1e-12
    assert not any("server/short_sums" in record for record in records)


def test_dp_ftrl():
    """Kairouz 2021, algorithm 1: x_0 - lr (sum + tree noise) / K; the nodes of t updates are the
    bits of t. Rounds without clients are no updates, others have more or fewer than K, and lr is
    that of the round: the noise is that of the tree in all of them."""
    x0 = torch.from_numpy(np.random.default_rng(3).normal(size=8))
    rules = [
        rule("servers/dp_ftrl.py:DPFTRLServer", clip=2.0, noise_multiplier=0.7, lr=lr, levels=4)
        for lr in (0.3, 0.6)
    ]
    state, total = rules[0].init(x0, SimpleNamespace(cohort=5, n_nonempty=9)), np.zeros(8)
    with_clients = [0, 1, 4, 5, 6, 7, 9, 10, 12]

    def of_the_tree(t: int) -> np.ndarray:
        """The noise of the first t updates: the node that ends in t, and those before it."""
        if not t:
            return np.zeros(8)
        return noise("tree", with_clients[t - 1], 8) + of_the_tree(t - (t & -t))

    for t, round in enumerate(with_clients, start=1):
        deltas = np.random.default_rng(t).normal(size=(3 + t % 4, 8))
        state = rules[t % 2].update(state, reports(deltas, None, round))
        total = total + sum(d * min(1, 2.0 / np.linalg.norm(d)) for d in deltas)
        expected = x0.numpy() - (0.3, 0.6)[t % 2] * (total + 1.4 * of_the_tree(t)) / 5
        assert np.allclose(state["x"].numpy(), expected, rtol=1e-10)


def test_dp_ftrl_needs_a_level_for_each_bit_of_the_rounds():
    server = rule("servers/dp_ftrl.py:DPFTRLServer", levels=3)
    server.check(SimpleNamespace(rounds=7))
    with pytest.raises(ValueError, match="set levels to 4"):
        server.check(SimpleNamespace(rounds=8))
