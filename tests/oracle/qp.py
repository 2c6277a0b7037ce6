"""QP(p, M) of Luo, Li, Lan, Gao, CVPR 2023, by brute force.

    QP(p, M) = argmin_v ||v - p||^2 / 2   subject to   M' v >= 0,      p [P], M [P, C]
    dual:  z* = argmin_{z >= 0} ||M z - (-p)||^2   (non-negative least squares),   QP(p, M) = p + M z*
    optimal if and only if   z >= 0,   w = M' (p + M z) >= 0,   z_i w_i = 0

Positive scaling of a column and zero columns change nothing: columns are normalised, zero columns
dropped. scipy.optimize.nnls 1.17.1 silently returns wrong answers when some w_i is near 0, as when
p was projected before (compare scipy issues 25389 and 26180). So every answer is checked, and
computed again if not optimal.
"""

import numpy as np
from scipy.optimize import nnls

TOLERANCE = 1e-12


def optimal(U: np.ndarray, q: np.ndarray, z: np.ndarray) -> bool:
    """The conditions above, for |q| = 1 and columns of norm 1, up to the rounding of U z."""
    w = U.T @ (q + U @ z)
    tolerance = TOLERANCE * (1.0 + z.max())
    return bool(
        z.min() >= 0 and w.min() >= -tolerance and np.minimum(z, np.abs(w)).max() <= tolerance
    )


def lawson_hanson(U: np.ndarray, q: np.ndarray) -> np.ndarray:
    """argmin_{z >= 0} ||U z + q||. Lawson, Hanson 1974, algorithm 23.10, each subproblem by lstsq."""
    C = U.shape[1]
    z = np.zeros(C)
    active = np.zeros(C, dtype=bool)
    for _ in range(100 * C):
        descent = np.where(active, 0.0, -U.T @ (q + U @ z))
        while True:
            j = int(np.argmax(descent))
            if descent[j] <= 0.01 * TOLERANCE:
                return z
            active[j] = True
            s = np.zeros(C)
            s[active] = np.linalg.lstsq(U[:, active], -q, rcond=None)[0]
            if s[j] > 0:
                break
            active[j] = False  # rounding: column j would not move
            descent[j] = 0.0
        while (s[active] <= 0).any():
            blocking = np.flatnonzero(active & (s <= 0))
            steps = z[blocking] / (z[blocking] - s[blocking])
            z = np.maximum(z + steps.min() * (s - z), 0.0)
            active[blocking[np.argmin(steps)]] = False
            z[~active] = 0.0
            s = np.zeros(C)
            s[active] = np.linalg.lstsq(U[:, active], -q, rcond=None)[0]
        z = s
    return z


def project(p: np.ndarray, M: np.ndarray) -> np.ndarray:
    """Nearest vector to p [P] with non-negative inner product with every column of M [P, C].

    Raises ArithmeticError if no optimal z is found.
    """
    p = np.asarray(p, dtype=np.float64)
    M = np.asarray(M, dtype=np.float64).reshape(len(p), -1)
    size = np.linalg.norm(p)
    norms = np.linalg.norm(M, axis=0)
    U = M[:, norms > 0] / norms[norms > 0]
    if size == 0 or U.shape[1] == 0:
        return p.copy()
    q = p / size  # QP(p) = |p| QP(p / |p|)
    z, _ = nnls(U, -q, maxiter=100 * U.shape[1])
    if not optimal(U, q, z):
        z = lawson_hanson(U, q)
        if not optimal(U, q, z):
            raise ArithmeticError("no optimal multipliers found")
    return p + size * (U @ z)


def project_per_tensor(p, M, segments, small_tensor_rule: str | None = None) -> np.ndarray:
    """One QP for each tensor; `segments` are the lengths of the tensors, in order.

    small_tensor_rule="sum": a tensor whose largest column norm is below 2e-4 gets p + the sum of
    its columns.
    """
    if sum(segments) != len(p):
        raise ValueError(f"segments add up to {sum(segments)}, the vector has {len(p)}")
    if small_tensor_rule not in (None, "sum"):
        raise ValueError(f"small_tensor_rule={small_tensor_rule!r}, expected None or 'sum'")
    M = np.asarray(M, dtype=np.float64).reshape(len(p), -1)
    projected, start = [], 0
    for length in segments:
        part, columns = p[start : start + length], M[start : start + length]
        largest = np.linalg.norm(columns, axis=0).max(initial=0.0)
        if small_tensor_rule == "sum" and largest < 2e-4:
            projected.append(part + columns.sum(axis=1))
        else:
            projected.append(project(part, columns))
        start += length
    return np.concatenate(projected)
