"""Clustered methods of the gallery against their papers' formulas."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.gallery_runs import LR, NET, SIZES
from support.oracle_cases import MODES
from support.server_rules import reports, rule


@pytest.mark.parametrize("mode", MODES)
def test_ifca(mode, train):
    """Ghosh 2020, algorithm 1 (model averaging): j = argmin f_i(θ_j); θ_j <- mean of the models of
    those who chose j."""
    done = train(
        mode,
        client="clustered/ifca.py:IFCAClient",
        server={"name": "clustered/ifca.py:IFCAServer", "k": 3},
        rounds=4,
    )
    models = list(done.states[0]["models"])

    def nearest(i):
        return int(np.argmin([NET.loss(model, *done.feed.data[i]) for model in models]))

    chosen = set()
    for t, cohort in enumerate(done.feed.cohorts):
        trained: dict[int, list[np.ndarray]] = {}
        for i in cohort:
            j = nearest(i)
            w = models[j]
            for X, y in done.batches(t, i):
                w = w - LR * NET.grad(w, X, y)
            trained.setdefault(j, []).append(w)
        for j, ends in trained.items():
            models[j] = np.mean(ends, axis=0)
        chosen |= trained.keys()
    assert len(chosen) > 1
    assert np.allclose(done.states[-1]["models"], models, rtol=1e-9)
    loss = done.mean_test_loss(lambda i: models[nearest(i)])
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)


def bipartition(updates: list[np.ndarray]) -> tuple[int, ...]:
    """The halves whose largest cosine across is least, by trying all of them (Sattler 2020,
    equation 12)."""
    rows = np.array([u / np.linalg.norm(u) for u in updates])
    cosine = rows @ rows.T

    def across(half):
        half = np.array(half)
        return cosine[half == 0][:, half == 1].max()

    return min((h for h in product((0, 1), repeat=len(rows)) if 0 < sum(h) < len(h)), key=across)


@pytest.mark.parametrize("sizes", [[4], [4, 4]])
def test_cfl_does_not_split_a_client(sizes):
    """Nor is an update of length 0, which has no cosine, an error."""
    server = rule("clustered/cfl.py:CFLServer", eps1=9.0, eps2=0.0)
    x0 = torch.zeros(4, dtype=torch.float64)
    state = server.init(x0, SimpleNamespace(n_clients=3))
    deltas = np.array([[1.0, 0, 0, 0], [0, 0, 0, 0]])[: len(sizes)]
    after = server.update(state, reports(deltas))["cluster"].tolist()
    assert len(set(after)) == len(sizes) and after[2] in after[:2]


@pytest.mark.parametrize("mode", MODES)
def test_cfl(mode, train):
    """Sattler 2020, algorithms 1 to 3: split a cluster if |mean Δ| < ε1 and max |Δ| > ε2; FedAvg in
    each cluster."""
    done = train(
        mode,
        server={"name": "clustered/cfl.py:CFLServer", "eps1": 0.35, "eps2": 0.4},
        schedule={"cohort": len(SIZES)},
        rounds=4,
    )
    clusters = [list(range(len(SIZES)))]
    models = {i: done.xs[0] for i in range(len(SIZES))}
    for t in range(4):
        updates = {}
        for i, x in models.items():
            w = x
            for X, y in done.batches(t, i):
                w = w - LR * NET.grad(w, X, y)
            updates[i] = x - w
        after = []
        for members in clusters:
            mean = np.mean([updates[i] for i in members], axis=0)
            models |= {i: models[i] - mean for i in members}
            longest = max(np.linalg.norm(updates[i]) for i in members)
            if np.linalg.norm(mean) < 0.35 and longest > 0.4:
                half = bipartition([updates[i] for i in members])
                after += [[i for i, h in zip(members, half, strict=True) if h == k] for k in (0, 1)]
            else:
                after.append(members)
        clusters = after
    assert 1 < len(clusters) < len(SIZES)
    found = done.states[-1]["cluster"]
    assert sorted(clusters) == sorted(np.flatnonzero(found == c).tolist() for c in set(found))
    for i, model in models.items():
        assert np.allclose(done.states[-1]["models"][i], model, rtol=1e-9)
    loss = done.mean_test_loss(models.__getitem__)
    assert done.records[-1]["clients/loss"] == pytest.approx(loss)
    used = sum(map(len, done.feed.cohorts))
    assert done.records[-1]["bytes_down"] == used * NET.size * 8
