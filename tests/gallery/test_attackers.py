"""Attackers of the gallery against their papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle.nets import split
from support import gallery_runs, softmax_regression
from support.examples import gallery
from support.oracle_cases import MODES, distance
from support.server_rules import rule
from support.softmax_regression import LR, SEED, STEPS, X, Y, examples_of, gradient, local_models

from raysim.metrics import all_metrics, find_metric, lower_is_better
from raysim.prepare.resolve import prepare
from raysim.randomness import generator

ATTACKERS, HONEST = [1, 4], [0, 2, 3, 5]


@pytest.fixture
def attacked(base, engine, tmp_path):
    """attacked(client, mode) -> x_0 .. x_3 of FedAvg with two attackers of six clients."""

    def run(client, mode="loop"):
        client = {**client, "name": f"{gallery.FOLDER}/attackers/{client['name']}"}
        groups = {"attackers": {"ids": ATTACKERS, "client": client}}
        config = softmax_regression.config(tmp_path, base, groups=groups)
        return engine({**config, "batching": {"mode": mode}})[0].executor.xs

    return run


def test_gaussian_noise(attacked):
    xs = attacked({"name": "gaussian_noise.py:GaussianNoiseClient", "sigma": 0.3})
    x = xs[0]
    for t in range(3):
        updates = x - local_models(x)
        for i in ATTACKERS:
            z = generator(SEED, "client rule attack", t, i).standard_normal(len(x))
            updates[i] = 0.3 * z
        x = x - updates.mean(0)
        assert np.allclose(xs[t + 1], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_label_flip(mode, attacked):
    xs = attacked({"name": "label_flip.py:LabelFlipClient"}, mode)
    x = xs[0]
    for t in range(3):
        models = local_models(x)
        for i in ATTACKERS:
            rows, models[i] = examples_of(i), x
            for _ in range(STEPS):
                models[i] -= LR * gradient(models[i], X[rows], np.eye(3)[2 - Y[rows]])
        x = models.mean(0)
        assert np.allclose(xs[t + 1], x, rtol=0, atol=1e-10)


def triggered(images: np.ndarray) -> np.ndarray:
    """Flat 8 x 8 images [n, 64] with the last two pixels of the last two rows at 3."""
    images = images.copy()
    images[:, [54, 55, 62, 63]] = 3.0
    return images


@pytest.mark.parametrize("mode", MODES)
def test_model_replacement(mode, train):
    """Bagdasaryan 2020: c images of each batch have the trigger and its label; γ (x - w) is sent."""
    file = f"{gallery.FOLDER}/attackers/model_replacement.py"
    client = {"name": f"{file}:BackdoorClient", "share": 0.4, "boost": 4.0}
    done = train(
        mode,
        groups={"attackers": {"ids": [1, 4], "client": client}},
        evaluate={"every": 3, "metrics": ["accuracy", f"{file}:Backdoor"]},
    )

    def local(x, i, batches):
        w = x
        for X_, y in batches:
            if i in (1, 4):
                poisoned = np.arange(len(y)) < 0.4 * len(y)
                X_ = np.where(poisoned[:, None], triggered(X_), X_)
                y = np.where(poisoned, 0, y)
            w = w - gallery_runs.LR * gallery_runs.NET.grad(w, X_, y)
        return x + 4.0 * (w - x) if i in (1, 4) else w

    xs = done.averaged(local)
    assert distance(done.xs, xs) < 1e-9
    data = done.engine.plan.dataset
    images = data.x_test.reshape(len(data.y_test), -1) * data.scale[0] + data.shift[0]
    others = triggered(images.astype(np.float64)[data.y_test != 0])
    W1, b1, W2, b2 = split(xs[-1], gallery_runs.NET.shapes)
    predicted = (np.maximum(others @ W1.T + b1, 0) @ W2.T + b2).argmax(1)
    assert done.records[-1]["backdoor"] == pytest.approx(np.mean(predicted == 0))


def test_images_of_the_target_do_not_count_as_success():
    metric = rule("attackers/model_replacement.py:Backdoor", task=None, outputs=5, name="backdoor")
    predicted, y = torch.tensor([0, 0, 1, 0]), torch.tensor([0, 2, 3, 4])
    rows = metric.rows(torch.nn.functional.one_hot(predicted, 5), y)
    assert metric.value(rows.numpy()) == pytest.approx(2 / 3)


REFERENCE = "raysim.algorithms.attackers.model_replacement:Backdoor"


def test_the_success_of_the_backdoor_has_a_name():
    """It is the metric of the reference: rows of ledgers with either spelling are of one run."""
    prepared = []
    for name in ("backdoor", REFERENCE):
        metrics = {"evaluate.metrics": [name], "algorithm": "fedavg"}
        prepared.append(prepare("quickstart", metrics).config)
    named, referred = prepared
    assert named == referred and named.evaluate.metrics == (REFERENCE,)
    best = named.evaluate.best
    assert best is not None and (best.metric, best.mode) == ("backdoor", "min")
    entry = find_metric("backdoor")
    assert entry is not None and not entry.users_own and entry.unit == "share"
    assert lower_is_better("backdoor") and lower_is_better("clients/backdoor_worst10")
    assert [metric.name for metric in all_metrics()].count("backdoor") == 1


@pytest.mark.parametrize(
    ("n", "offset", "dtype", "atol"), [(6, 0, np.float64, 1e-4), (30, 1000, np.float32, 1e-3)]
)
def test_min_max(n, offset, dtype, atol):
    """Shejwalkar 2021: the largest γ with max_i |mean - γ std - g_i| <= max_ij |g_i - g_j|,
    exactly; also if updates are alike."""
    updates = dtype(offset + np.random.default_rng(5).normal(size=(n, 9)))
    g = updates.astype(float)
    mean, std = g.mean(0), g.std(0)
    largest = max(((a - b) ** 2).sum() for a in g for b in g)
    roots = []
    for gap in mean - g:  # γ² |std|² - 2 γ std·gap + |gap|² = largest
        b, c = std @ gap, gap @ gap - largest
        roots.append((b + np.sqrt(b * b - (std @ std) * c)) / (std @ std))
    expected = mean - min(roots) * std
    client = rule("attackers/min_max.py:MinMaxClient")
    honest = torch.from_numpy(updates)
    sent = client.collude({"delta": honest[:2]}, {"delta": honest}, None)["delta"].numpy()
    assert sent.shape == (2, 9) and np.allclose(sent, expected, rtol=0, atol=atol)
    if dtype is np.float64:
        assert ((sent[0] - g) ** 2).sum(1).max() <= largest * (1 + 1e-12)
