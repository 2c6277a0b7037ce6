"""Quadratics in the plane, for tests of the oracles themselves."""

from __future__ import annotations

import numpy as np

CENTRES = np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 1.0], [2.0, -2.0], [0.5, 0.5]])


def quadratic(w, client, batch):
    """Return the gradient of f_i(w) = |w - centre_i|^2 / 2; the batch is ignored."""
    return w - CENTRES[client]


def rounds(cohorts, steps=2):
    return [{i: [None] * steps for i in range(5)} for _ in cohorts]
