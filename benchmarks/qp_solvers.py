"""Time of raysim's exact solver of the server's QP, and of `scipy.optimize.nnls`, from Q and b.

    python benchmarks/qp_solvers.py [--repeats 51]

Random columns with a component against the vector. In the last case every column occurs twice, once
rounded to float32. nnls needs a square root of Q, a Cholesky factor or, for dependent columns, one
from the eigenvalues; this is part of its time. One thread. The solvers take turns. The script
prints medians and the distance of the two projections of a unit vector. It asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular
from scipy.optimize import nnls

from raysim.numerics import solve_dual

CASES = (("independent", 50), ("independent", 200), ("dependent", 100))
P = 1000
"""Length of the vectors; the solvers see their inner products only."""


def problem(kind: str, n_columns: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return Q, b and the norm of the vector."""
    rng = np.random.default_rng(n_columns)
    vector = rng.standard_normal(P)
    vector /= np.linalg.norm(vector)
    columns = rng.standard_normal((n_columns if kind == "independent" else n_columns // 2, P))
    columns = columns / np.linalg.norm(columns, axis=1)[:, None] - 0.1 * vector
    if kind == "dependent":
        columns = np.concatenate([columns, columns.astype(np.float32)])
    return columns @ columns.T, columns @ vector, 1.0


def by_nnls(Q: np.ndarray, b: np.ndarray, norm: float) -> np.ndarray:
    """Minimise ‖Fz + h‖² over z ≥ 0, with FᵀF = Q and Fᵀh = b."""
    try:
        factor = cholesky(Q)
        offset = solve_triangular(factor, b, trans="T")
    except LinAlgError:
        values, vectors = np.linalg.eigh(Q)
        rank = values > 1e-14 * values[-1]
        root = np.sqrt(values[rank])
        factor = root[:, None] * vectors[:, rank].T
        offset = (vectors[:, rank].T @ b) / root
    return nnls(factor, -offset)[0]


def by_raysim(Q: np.ndarray, b: np.ndarray, norm: float) -> np.ndarray:
    return solve_dual(Q, b, norm)[0]


def seconds(solve: Callable[..., np.ndarray], *arguments: object) -> float:
    began = time.perf_counter()
    solve(*arguments)
    return time.perf_counter() - began


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repeats", type=int, default=51)
    repeats = arguments.parse_args().repeats
    print("| columns | raysim, ms | nnls, ms | distance of the projections |")
    print("|---|---:|---:|---:|")
    for kind, n_columns in CASES:
        given = problem(kind, n_columns)
        difference = by_raysim(*given) - by_nnls(*given)
        apart = np.sqrt(abs(difference @ given[0] @ difference))
        taken = [(seconds(by_raysim, *given), seconds(by_nnls, *given)) for _ in range(repeats)]
        ours, theirs = (1e3 * statistics.median(way) for way in zip(*taken, strict=True))
        print(f"| {n_columns} {kind} | {ours:.2f} | {theirs:.2f} | {apart:.0e} |")


if __name__ == "__main__":
    main()
