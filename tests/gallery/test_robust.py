"""Robust server rules of the gallery against their papers' formulas, in loops over clients and
coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import plain_fedavg, softmax_regression
from support.examples import gallery
from support.server_rules import noise, reports, rule, step
from support.softmax_regression import local_models
from torch import nn

from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

DELTAS = np.random.default_rng(36).normal(size=(11, 7)) * np.arange(1, 12)[:, None] ** 0.5


def near(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-9, atol=1e-12)


def scores(deltas: np.ndarray, candidates: Sequence[int], f: int) -> dict[int, float]:
    """Blanchard 2017: the sum of the squared distances to the n - f - 2 closest vectors."""
    found = {}
    for i in candidates:
        squared = sorted(((deltas[i] - deltas[j]) ** 2).sum() for j in candidates if j != i)
        found[i] = sum(squared[: len(candidates) - f - 2])
    return found


@pytest.mark.parametrize(("beta", "cut"), [(0.1, 1), (0.3, 3), (0.0, 0)])
def test_trimmed_mean(beta, cut):
    """Yin 2018, definition 2: of each coordinate's n values the beta n largest and smallest are
    removed."""
    expected = [np.mean(sorted(values)[cut : 11 - cut]) for values in DELTAS.T]
    assert near(step(rule("robust/trimmed_mean.py:TrimmedMeanServer", beta=beta), DELTAS), expected)


@pytest.mark.parametrize(("n", "cut"), [(1, 0), (2, 0), (4, 1), (5, 2)])
def test_a_trimmed_mean_of_few_updates_keeps_the_middle(n, cut):
    """A share of 0.45, rounded, may be half of the clients."""
    expected = [np.mean(sorted(values)[cut : n - cut]) for values in DELTAS[:n].T]
    server = rule("robust/trimmed_mean.py:TrimmedMeanServer", beta=0.45)
    assert near(step(server, DELTAS[:n]), expected)


@pytest.mark.parametrize(("f", "m"), [(1, 1), (4, 1), (2, 5)])
def test_krum(f, m):
    found = scores(DELTAS, range(11), f)
    best = sorted(found, key=found.__getitem__)[:m]
    server = rule("robust/krum.py:KrumServer", attackers=f, m=m)
    assert near(step(server, DELTAS), DELTAS[best].mean(0))


def bulyan(deltas: np.ndarray, f: int) -> list[float]:
    """El Mhamdi 2018: theta = n - 2 f vectors, then the mean of theta - 2 f values near the median."""
    n = len(deltas)
    left, selected = list(range(n)), []
    for _ in range(n - 2 * f):
        found = scores(deltas, left, f)
        # The last of these may have one neighbour that counts, each other's: the paper does not say
        # which is taken. We take the one nearer to all.
        apart = {i: ((deltas[left] - deltas[i]) ** 2).sum() for i in left}
        selected.append(min(left, key=lambda i: (found[i], apart[i])))
        left.remove(selected[-1])
    expected = []
    for values in deltas[selected].T:
        median = np.sort(values)[(len(values) - 1) // 2]
        nearest = sorted(values, key=lambda value: abs(value - median))
        expected.append(np.mean(nearest[: n - 4 * f]))
    return expected


@pytest.mark.parametrize("f", [1, 2])
def test_bulyan(f):
    assert near(step(rule("robust/bulyan.py:BulyanServer", attackers=f), DELTAS), bulyan(DELTAS, f))


ROBUST: dict[str, tuple[int, dict[str, Any]]] = {
    "bulyan.py:BulyanServer": (7, {"attackers": 1}),
    "krum.py:KrumServer": (7, {"attackers": 2}),
    "median.py:MedianServer": (2, {}),
    "trimmed_mean.py:TrimmedMeanServer": (2, {}),
    "rfa.py:RFAServer": (2, {}),
    "dnc.py:DnCServer": (3, {}),
    "signguard.py:SignGuardServer": (2, {}),
    "clipped_clustering.py:ClippedClusteringServer": (3, {}),
}
"""Rules by file, each with the fewest clients for which its paper leaves no choice."""


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_clients_does_not_matter(name):
    """An attacker must not win by its place."""
    fewest, parameters = ROBUST[name]
    server, orders = rule(f"robust/{name}", **parameters), np.random.default_rng(2)
    for n in (fewest, 11):
        state = server.init(torch.zeros(7, dtype=torch.float64), None)
        moved = [
            server.update(state, reports(DELTAS[order]))["x"].numpy()
            for order in (range(n), *(orders.permutation(n) for _ in range(8)))
        ]
        assert all(near(each, moved[0]) for each in moved)


def test_the_first_of_two_equal_clusters_does_not_win():
    server = rule("robust/signguard.py:SignGuardServer", share=1.0)
    signs = np.array([[1], [1], [-1], [-1]])
    deltas = signs * np.arange(1.0, 8) * np.array([[1.0], [1.1], [1.2], [1.3]])
    state = server.init(torch.zeros(7, dtype=torch.float64), None)
    moved = [
        server.update(state, reports(deltas[order]))["x"].numpy()
        for order in ([0, 1, 2, 3], [3, 2, 1, 0])
    ]
    assert near(*moved)


CHOOSING: dict[str, dict[str, Any]] = {
    "bulyan.py:BulyanServer": {"attackers": 2},
    "krum.py:KrumServer": {"attackers": 2, "m": 3},
    "dnc.py:DnCServer": {"attackers": 2},
    "rfa.py:RFAServer": {"iterations": 5},
    "signguard.py:SignGuardServer": {},
    "clipped_clustering.py:ClippedClusteringServer": {},
}


@pytest.mark.parametrize("name", CHOOSING)
def test_batch_norm_statistics_are_averaged_as_the_updates_are(name):
    """Two of eleven updates are far off: their weights are 0 where the rule leaves them out. An
    update that is a weighted mean has these very weights."""
    deltas = 1 + 0.1 * DELTAS
    deltas[[2, 7]] *= -30
    server, arrived = rule(f"robust/{name}", **CHOOSING[name]), reports(deltas)
    state = server.init(torch.zeros(7, dtype=torch.float64), None)
    moved = -server.update(state, arrived)["x"].numpy()
    weights = np.array(arrived.given_weights)
    assert weights.sum() == pytest.approx(1) and weights.min() >= 0 and len(weights) == 11
    assert weights[[2, 7]] == pytest.approx(0, abs=1e-2 if "rfa" in name else 0)
    if name.split(".")[0] in ("krum", "dnc", "rfa"):
        assert near(weights @ deltas, moved)


def test_an_attacker_does_not_reach_the_batch_norm_statistics_of_krum():
    """The net after a round is that of one honest client, with its statistics."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    parts = plain_fedavg.cut([20] * 6)
    data = plain_fedavg.blobs()
    result = plain_fedavg.run(
        net,
        data,
        parts,
        rounds=1,
        algorithm={"name": "krum", "attackers": 1},
        groups={"bad": {"ids": [0], "client": {"name": "sign_flip"}}},
    )
    honest = [plain_fedavg.fedavg(net, data, [part], rounds=1) for part in parts[1:]]
    gaps = [
        max(
            float((value - other.state_dict()[key]).abs().max())
            for key, value in result.state_dict.items()
            if "tracked" not in key
        )
        for other in honest
    ]
    assert min(gaps) < 1e-12 and result.history[-1]["server/weights_entropy"] == 0


def test_signguard_keeps_a_few_that_are_alike():
    """The width of MeanShift is 0 for two or three clients, of whom none is like another."""
    deltas = 1 + 0.1 * np.random.default_rng(3).normal(size=(3, 40))
    deltas[:, :4] *= [[1], [-1], [0]]
    norms = np.linalg.norm(deltas, axis=1)
    expected = (deltas * np.minimum(np.median(norms) / norms, 1)[:, None]).mean(0)
    server = rule("robust/signguard.py:SignGuardServer", share=1.0)
    assert near(step(server, deltas), expected)


def test_distances_of_updates_that_are_alike_do_not_cancel():
    """|a|² - 2 ab + |b|² has no digit left in float32 at |a - b| = 1e-4 |a|. torch computes it so
    for more than 25 vectors."""
    alike = np.float32(100 + 0.01 * np.random.default_rng(1).normal(size=(30, 5)))
    exact = alike.astype(float)
    found = scores(exact, range(30), 2)
    best = sorted(found, key=found.__getitem__)[:9]
    expected = {
        "krum.py:KrumServer": (exact[best].mean(0), {"m": 9}),
        "bulyan.py:BulyanServer": (bulyan(exact, 2), {}),
    }
    for name, (wanted, parameters) in expected.items():
        server = rule(f"robust/{name}", attackers=2, **parameters)
        assert np.allclose(step(server, alike), wanted, rtol=0, atol=1e-4), name


WEIGHTS = (np.arange(1, 12) / 66).tolist()


def test_rfa():
    """Pillutla 2022, algorithm 2: three passes of the smoothed Weiszfeld algorithm."""
    z = np.average(DELTAS, axis=0, weights=WEIGHTS)
    for _ in range(3):
        beta = [p / max(1e-6, np.sqrt(((z - d) ** 2).sum())) for p, d in zip(WEIGHTS, DELTAS)]  # noqa: B905
        z = sum(b * d for b, d in zip(beta, DELTAS)) / sum(beta)  # noqa: B905
    assert near(step(rule("robust/rfa.py:RFAServer"), DELTAS, WEIGHTS), z)


def test_rfa_is_the_geometric_median():
    z = step(rule("robust/rfa.py:RFAServer", iterations=500), DELTAS, WEIGHTS)
    gaps = z - DELTAS
    gradient = np.array(WEIGHTS) @ (gaps / np.linalg.norm(gaps, axis=1, keepdims=True))
    assert np.abs(gradient).max() < 1e-9


def test_centred_clipping_with_momentum(base, engine, tmp_path):
    """Karimireddy 2021: m <- (1 - β) g + β m; v <- v + mean (m_i - v) min(1, τ / |m_i - v|)."""
    file, tau = f"{gallery.FOLDER}/robust/centred_clipping.py", 0.55
    client = {"name": f"{file}:CentredClippingClient", "beta": 0.6}
    server = {"name": f"{file}:CentredClippingServer", "tau": tau, "lr": 0.8}
    run, _ = engine(softmax_regression.config(tmp_path, base, client=client, server=server))
    x, v, m, clipped = run.executor.xs[0], 0.0, None, 0
    for t in range(3):
        g = x - local_models(x)
        m = g if m is None else 0.4 * g + 0.6 * m
        lengths = np.linalg.norm(m - v, axis=1)
        clipped += (lengths > tau).sum()
        v = v + np.mean([(a - v) * min(1, tau / n) for a, n in zip(m, lengths, strict=True)], 0)
        x = x - 0.8 * v
        assert np.allclose(run.executor.xs[t + 1], x, rtol=0, atol=1e-12)
    assert 0 < clipped < 18


def test_norm_bound():
    """Sun 2019: Δ / max(1, |Δ| / M), their mean, and noise N(0, σ²)."""
    bound = np.median(np.linalg.norm(DELTAS, axis=1))
    bounded = [d / max(1, np.sqrt((d**2).sum()) / bound) for d in DELTAS]
    server = rule("robust/norm_bound.py:NormBoundServer", bound=bound, sigma=0.2)
    expected = np.average(bounded, axis=0, weights=WEIGHTS) + 0.2 * noise("noise", 0, 7)
    assert near(step(server, DELTAS, WEIGHTS), expected)


@pytest.mark.parametrize(
    ("reference", "parameters"),
    [
        ("trimmed_mean.py:TrimmedMeanServer", {"beta": 0.2}),
        ("krum.py:KrumServer", {"attackers": 2, "m": 3}),
        ("bulyan.py:BulyanServer", {"attackers": 2}),
    ],
)
def test_two_attackers_do_not_leave_the_range_of_the_others(reference, parameters):
    deltas = DELTAS.copy()
    deltas[[3, 8]] = 1e6
    update = step(rule(f"robust/{reference}", **parameters), deltas)
    honest = np.delete(deltas, [3, 8], axis=0)
    assert (honest.min(0) <= update).all() and (update <= honest.max(0)).all()


@pytest.mark.parametrize(("file", "factor"), [("krum.py:KrumServer", 2), ("bulyan.py:BulyanServer", 4)])  # fmt: skip
def test_cohorts_that_are_too_small_are_refused(file, factor, base, tmp_path):
    """Six clients, two attackers."""
    server = {"name": f"{gallery.FOLDER}/robust/{file}", "attackers": 2}
    with pytest.raises(ConfigError, match=rf"schedule.cohort >= {factor} attackers \+ 3"):
        prepare(softmax_regression.config(tmp_path, base, server=server))
