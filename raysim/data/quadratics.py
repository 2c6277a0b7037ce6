"""Quadratic problems with known optimum and smoothness, as a data set.

They serve to compare runs with convergence theory. Client i has the objective
f_i(w) = ½ (w - a_i)ᵀ H_i (w - a_i) with H_i = Q_i diag(λ) Q_iᵀ:

    λ from mu to L in equal ratios, the same for all clients
    Q_i a random rotation for each client
    a_i = centre + spread z_i, centre = distance c, with z_i and c standard normal

So every f_i, and f = (1/N) Σ f_i, is L-smooth; the minimizer of f is (Σ H_i)⁻¹ Σ H_i a_i.

The data set states the problem as least squares. Client i holds P examples (b, r), [P + 1], with
b = √(P λ_k) q_k and r = bᵀa_i for each column q_k of Q_i. The mean of ½ (bᵀw - r)² over them is
exactly f_i. A mini-batch contains only some of the directions. The parameters of the model
`quadratic` (raysim.models.nets.zoo) are w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.config.explain import checked_section
from raysim.config.sections.data import Quadratics
from raysim.randomness import generator


@dataclass(frozen=True)
class QuadraticProblem:
    """The objectives of N clients, and their mean f."""

    H: np.ndarray
    """Hessians of the clients' objectives, float64 [N, P, P]."""

    a: np.ndarray
    """Minimizers of the clients' objectives, float64 [N, P]."""

    @property
    def optimum(self) -> np.ndarray:
        """The minimizer of f = (1/N) Σ f_i, [P]."""
        return np.linalg.solve(self.H.sum(0), np.einsum("ijk,ik->j", self.H, self.a))

    @property
    def least(self) -> float:
        """The minimum of f."""
        return self.value(self.optimum)

    @property
    def L(self) -> float:
        """The smoothness of all f_i: the largest eigenvalue of any H_i."""
        return float(np.linalg.eigvalsh(self.H).max())

    def value(self, w: np.ndarray) -> float:
        """Return f(w) for parameters w [P].

        Args:
            w: the parameters, [P].
        """
        difference = w - self.a
        total = np.einsum("ij,ijk,ik->", difference, self.H, difference)
        return float(total / (2 * len(self.a)))

    def gradients(self, w: np.ndarray) -> np.ndarray:
        """Return ∇f_i(w) of all clients, [N, P], for parameters w [P].

        Args:
            w: the parameters, [P].
        """
        return np.einsum("ijk,ik->ij", self.H, w - self.a)


def quadratic_problem(**keys: Any) -> QuadraticProblem:
    """Return the quadratics of a run, for the oracle of a method's test.

    Args:
        **keys: the keys of the configuration's `data.problem`, such as `clients` and `dimensions`.

    Returns:
        The problem: the Hessian `H[i]` [P, P] and the minimizer `a[i]` [P] of each client, and the
        optimum of their mean.

    Raises:
        ConfigError: a key is unknown, or its value is invalid.
    """
    return problem(checked_section(Quadratics, keys))


def examples(config: Quadratics) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of all clients, in client order.

    Args:
        config: parameters of the problem: N clients, P dimensions, and others.

    Returns:
        The examples (b, r), float64 [N P, P + 1], and the client of each example, int32 [N P].
    """
    P = config.dimensions
    N = config.clients
    rng = generator(config.seed, "quadratics")
    curvature = np.geomspace(config.mu, config.L, P) if P > 1 else np.array([config.L])
    centre = config.distance * rng.standard_normal(P)
    rows = np.empty((N, P, P + 1))
    for client_rows in rows:
        rotation = np.linalg.qr(rng.standard_normal((P, P)))[0]
        client_rows[:, :P] = np.sqrt(P * curvature)[:, None] * rotation.T
        minimizer = centre + config.spread * rng.standard_normal(P)
        client_rows[:, P] = client_rows[:, :P] @ minimizer
    return rows.reshape(N * P, P + 1), np.repeat(np.arange(N, dtype=np.int32), P)


def problem(config: Quadratics) -> QuadraticProblem:
    """Return the problem that the examples of `config` state.

    Args:
        config: parameters of the problem, as for `examples`.
    """
    P = config.dimensions
    rows = examples(config)[0].reshape(config.clients, P, P + 1)
    b = rows[..., :P]
    r = rows[..., P]
    hessians = np.einsum("ikp,ikq->ipq", b, b) / P
    minimizers = np.linalg.solve(b, r[..., None])[..., 0]
    return QuadraticProblem(hessians, minimizers)
