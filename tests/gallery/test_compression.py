"""Upload stages, shipped and of the gallery, against their papers' formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle.nets import join, split
from support.examples import gallery
from support.gallery_runs import LR, NET
from support.oracle_cases import distance

from raysim.config.references import load_object
from raysim.randomness import generator

SHAPES = [(8, 64), (8,), (10, 8), (10,)]
RANK = 2


POWERSGD = f"{gallery.FOLDER}/compression/powersgd.py:PowerSGD"


def low_rank(v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Vogels 2019, algorithm 1 with one worker: P = orthonormal basis of M Q, Q = Mᵀ P, M becomes P
    Qᵀ."""
    decoded = []
    for part in split(v, SHAPES):
        if part.ndim == 2:
            U, _, _ = np.linalg.svd(
                part @ rng.standard_normal((part.shape[1], RANK)), full_matrices=False
            )
            part = U @ (U.T @ part)
        decoded.append(part)
    return join(decoded)


def random_k(v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stich 2018: k random entries, the others 0."""
    kept = rng.choice(len(v), round(0.1 * len(v)), replace=False)
    decoded = np.zeros_like(v)
    decoded[kept] = v[kept]
    return decoded


@pytest.mark.parametrize(
    ("name", "fields", "compress", "bytes_each"),
    [
        # r (n + m) numbers of 8 bytes for each matrix, and the vectors
        (POWERSGD, {"rank": RANK}, low_rank, 8 * (2 * 72 + 8 + 2 * 18 + 10)),
        ("randk", {"share": 0.1}, random_k, 8 * 61 + 8),
    ],
)
def test_a_stage_with_error_feedback(name, fields, compress, bytes_each, train):
    """Stich 2018: the client sends C(Δ + e) and keeps e = Δ + e - C(Δ + e)."""
    stage = {"name": name, "error_feedback": True, **fields}
    done = train(sizes=[30, 9, 17, 12, 20], local={"upload": [stage]})
    x, xs, errors = done.feed.x0, [done.feed.x0], {}
    for t, cohort in enumerate(done.feed.cohorts):
        sent = []
        for i in cohort:
            w = x
            for X, y in done.batches(t, i):
                w = w - LR * NET.grad(w, X, y)
            v = x - w + errors.get(i, 0.0)
            sent.append(compress(v, generator(2, "upload", t, i, 0)))
            errors[i] = v - sent[-1]
        x = x - np.mean(sent, axis=0)
        xs.append(x)
        assert done.records[t + 1]["bytes_up"] == (t + 1) * len(cohort) * bytes_each
    assert distance(done.xs, xs) < 1e-9
    assert any(np.abs(e).max() > 1e-3 for e in errors.values())


def test_powersgd_with_many_iterations_is_the_best_approximation():
    """Its subspace iteration converges to the truncated singular value decomposition (section 4.2)."""
    stage = load_object(POWERSGD, "stage")(rank=RANK, iterations=60)
    v = np.random.default_rng(1).standard_normal(sum(np.prod(shape) for shape in SHAPES))
    decoded = stage.at_shapes(SHAPES).encode(torch.from_numpy(v), np.random.default_rng(2)).numpy()
    for ours, part in zip(split(decoded, SHAPES), split(v, SHAPES), strict=True):
        if part.ndim == 2:
            U, s, V = np.linalg.svd(part, full_matrices=False)
            part = U[:, :RANK] * s[:RANK] @ V[:RANK]
        assert np.allclose(ours, part, atol=1e-3)
