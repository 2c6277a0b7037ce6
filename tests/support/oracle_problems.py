"""Small problems for tests of the oracles themselves: quadratics in the plane, softmax regression
on random data."""

from __future__ import annotations

import numpy as np
from oracle.nets import Softmax

CENTRES = np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0], [2.0, -2.0], [0.5, 0.5]])


def quadratic(w, client, batch):
    """Return the gradient of f_i(w) = |w - centre_i|^2 / 2; the batch is ignored."""
    return w - CENTRES[client]


def rounds(cohorts, steps=2):
    return [{i: [None] * steps for i in range(5)} for _ in cohorts]


def problem():
    net, rng = Softmax(3, 3), np.random.default_rng(5)
    sizes = [7, 3, 12, 0, 5]
    data = [(rng.normal(size=(n, 3)), rng.integers(0, 3, size=n)) for n in sizes]
    cohorts = [[int(i) for i in rng.permutation(5)[:3]] for _ in range(8)]
    batches = [
        {
            i: [rng.integers(0, n, size=4) for _ in range(i + 1)] if n else []
            for i, n in enumerate(sizes)
        }
        for _ in cohorts
    ]

    def grad(w, client, batch):
        x, y = data[client]
        return net.grad(w, x[batch], y[batch])

    return net, (rng.normal(size=net.size), cohorts, sizes, batches, grad)
