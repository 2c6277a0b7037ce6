"""Projection on the cone of vectors without a negative inner product with given columns.

    p̃ = argmin_v ½‖v - p‖²  subject to  Mᵀv ≥ 0                       (Luo 2023, the QPs of GradMA)

The dual is min_{z ≥ 0} ½ zᵀQz + bᵀz with Q = MᵀM and b = Mᵀp: non-negative least squares. Then
p̃ = p + Mz. The dual is solved from Q and b alone, with p and the columns normalised. So nothing
depends on the scale of p or of a column, and all tolerances are relative.

- `solve_dual`: from Q and b, which the server's memory stores.
- `project`: from the vectors.

A client's local step has three constraints: see `closed_form_qp`.

`scipy.optimize.nnls` solves the dual too, on a square root of Q. It is not used, because it gives
other bits and takes longer where columns are many or dependent. Milliseconds of one solution, by
the solver here and by nnls, median, one thread:

    50 columns                   0.18    0.17
    200 columns                  1.2     15
    100 columns, each twice      0.6     1.1

    python benchmarks/qp_solvers.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.linalg import LinAlgError
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from raysim.numerics.inner_products import gram

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Solver = Literal["exact", "ecos", "clarabel"]
SmallTensorRule = Literal["exact", "sum"]

STATUSES = ("inactive", "optimal", "fallback", "failed")
"""Values of `QPInfo.status`, from best to worst."""

ZERO_COLUMN_RATIO = 1e-12
"""Fraction of the largest column norm below which a column counts as zero."""

SMALL_TENSOR_NORM = 2e-4
"""Largest column norm below which the small-tensor rule "sum" applies."""

RIDGE = 1e-12
"""Value added to the unit diagonal if columns are dependent."""

TOLERANCE = 1e-13
"""Multipliers and slacks above -1e-13 count as non-negative, for normalised p and columns."""

MIN_CHOLESKY_PIVOT = 1e-10
"""Cholesky pivot up to which a column counts as linearly dependent."""

MAX_ACCEPTED_RESIDUAL = 1e-8
"""Residual above which the next, safer solver is tried."""


@dataclass(frozen=True)
class QPInfo:
    """Outcome of a projection."""

    status: str
    """One of "inactive", "optimal", "fallback" and "failed".

    inactive: no constraint is violated, so p is its own projection. fallback: the solver missed
    its tolerance, and its best result is used. failed: no result, so p is not projected.
    """
    active: int = 0
    """Constraints with a positive multiplier."""
    residual: float = 0.0
    """max_i |min(z_i, w_i)| with w = Qz + b, for normalised p and columns; 0 at the solution."""
    iterations: int = 0
    """Linear systems solved (exact), or the count of the library."""
    dropped: int = 0
    """Non-finite columns that were ignored."""
    to_zero: bool = False
    """Whether the cone of the columns contains -p, so that the projection is 0 up to rounding."""


def least_on_simplex(Q: ArrayLike) -> Array:
    """Return the weights z >= 0, Σ z = 1, that minimise zᵀQz, by `solve_dual`.

    Args:
        Q: positive definite, [C, C].

    Returns:
        The weights, [C].
    """
    Q = np.asarray(Q)
    # They are the minimum of zᵀQz / 2 - Σ z over z >= 0, divided by its sum.
    z, _ = solve_dual(Q, -np.ones(len(Q)), 1 / np.sqrt(Q.diagonal().min()))
    return z / z.sum()


def solve_dual(
    Q: ArrayLike,
    b: ArrayLike,
    p_norm: float,
    solver: Solver = "exact",
    warm: ArrayLike | None = None,
) -> tuple[Array, QPInfo]:
    """Return the multipliers of the projection p + Mz.

    The solver "exact" is block principal pivoting (Portugal, Júdice and Vicente 1994), followed by
    `scipy.optimize.nnls` if that cycles. The solvers "ecos" (through cvxpy) and "clarabel" ignore
    `warm`. If they have no result, z is 0 and the status "failed".

    Args:
        Q: MᵀM, [C, C].
        b: Mᵀp, [C].
        p_norm: ‖p‖; 0 gives z = 0.
        solver: a key of `SOLVERS`.
        warm: constraints that are active at the start, [C] bool; None: the violated ones.

    Returns:
        z, [C], with 0 for zero and non-finite columns, and the outcome.

    Raises:
        ValueError: the solver is unknown, or `p_norm` is not finite.
        ModuleNotFoundError: the package of the solver is not installed.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown QP solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    if not np.isfinite(p_norm):
        raise ValueError("the vector to project is not finite")
    Q, b = np.asarray(Q, np.float64), np.asarray(b, np.float64)
    square = np.diagonal(Q)
    finite = np.isfinite(square) & np.isfinite(b)
    norms = np.sqrt(np.where(finite, square, 0.0).clip(min=0.0))
    kept = np.flatnonzero(norms > ZERO_COLUMN_RATIO * norms.max(initial=0.0))
    z, info = np.zeros(len(b)), QPInfo("inactive", dropped=int((~finite).sum()))
    if p_norm == 0.0 or not len(kept):
        return z, info
    scale = norms[kept]
    cosines = Q[np.ix_(kept, kept)] / (scale[:, None] * scale)
    slack = (b[kept] / scale) / p_norm
    if slack.min() >= -TOLERANCE:
        return z, info
    start = slack < -TOLERANCE
    if warm is not None and np.asarray(warm)[kept].any():
        start = np.asarray(warm, bool)[kept]
    unit, status, iterations = SOLVERS[solver](cosines, slack, start)
    z[kept] = unit * (p_norm / scale)
    return z, replace(
        info,
        status=status,
        active=int((unit > 0).sum()),
        residual=_residual(cosines, slack, unit),
        iterations=iterations,
        to_zero=bool(1.0 + slack @ unit < 1e-12),
    )


def project(
    p: Tensor,
    columns: Tensor | Sequence[Tensor],
    *,
    solver: Solver = "exact",
    segments: Sequence[int] | None = None,
    small_tensor_rule: SmallTensorRule = "exact",
) -> tuple[Tensor, QPInfo]:
    """Return the projection of a vector on {v : ⟨v, column⟩ ≥ 0 for every column}.

    Args:
        p: the vector, [P].
        columns: [C, P], or C tensors [P]; a column with a non-finite entry is ignored.
        solver: a key of `SOLVERS`.
        segments: lengths that add up to P, with one QP for each segment; None: one segment.
        small_tensor_rule: "sum" (with segments only) returns p plus the sum of the columns in a
            segment whose largest column norm is below `SMALL_TENSOR_NORM`. An interior-point
            solver with absolute tolerances, as in the authors' code of Luo 2023, returns the same.

    Returns:
        The projection, `p` itself if no constraint is violated, and the outcome over all segments.

    Raises:
        ValueError: `p` is not finite, the rule "sum" has no segments, or the solver is unknown.
        ModuleNotFoundError: the package of the solver is not installed.
    """
    parts = checked_segments(p, segments, small_tensor_rule)
    columns = list(columns)
    grams = gram([p, *columns], parts).cpu().numpy()  # [T, C + 1, C + 1]
    if not np.isfinite(grams[:, 0, 0]).all():
        raise ValueError("the vector to project is not finite")
    good = np.isfinite(np.einsum("tii->ti", grams)[:, 1:]).all(axis=0)
    z, infos = np.zeros((len(parts), len(columns))), []
    for t, G in enumerate(grams):
        Q, b = G[1:, 1:][np.ix_(good, good)], G[0, 1:][good]
        z[t, good], info = solve_segment(Q, b, G[0, 0] ** 0.5, solver, small_tensor_rule)
        infos.append(info)
    projected = p
    if z.any():
        projected = p.to(torch.float64, copy=True)
        for column, multipliers in zip(columns, z.T, strict=True):
            add_segments(projected, column, multipliers, parts)
        projected = projected.to(p.dtype)
    return projected, replace(combine_infos(infos), dropped=int((~good).sum()))


def checked_segments(
    p: Tensor, segments: Sequence[int] | None, small_tensor_rule: SmallTensorRule
) -> tuple[int, ...]:
    """Return the lengths of the segments, that of the whole vector if there are none.

    Args:
        p: the vector, [P].
        segments: lengths that add up to P; None: one segment.
        small_tensor_rule: treatment of small tensors; see `project`.

    Raises:
        ValueError: the rule "sum" has no segments.
    """
    if segments is not None:
        return tuple(segments)
    if small_tensor_rule == "sum":
        raise ValueError(
            "small_tensor_rule='sum' needs segments: it is a rule about one tensor at a time"
        )
    return (p.shape[0],)


def solve_segment(
    Q: Array,
    b: Array,
    p_norm: float,
    solver: Solver,
    small_tensor_rule: SmallTensorRule,
    warm: ArrayLike | None = None,
    scale: Array | float = 1.0,
) -> tuple[Array, QPInfo]:
    """Return `solve_dual` for one segment, whose columns are `scale` times those of Q and b.

    Args:
        Q: MᵀM, [C, C], in units of the scales.
        b: Mᵀp, [C].
        p_norm: ‖p‖ in the segment.
        solver: a key of `SOLVERS`.
        small_tensor_rule: treatment of small tensors; see `project`.
        warm: as for `solve_dual`.
        scale: scale of each column, [C], or of all.
    """
    if (
        small_tensor_rule == "sum"
        and (scale * np.sqrt(np.diagonal(Q).clip(min=0.0))).max(initial=0.0) < SMALL_TENSOR_NORM
    ):
        return np.broadcast_to(scale, b.shape).astype(np.float64), QPInfo("inactive")
    return solve_dual(Q, b, p_norm, solver, warm)


def add_segments(
    total: Tensor, column: Tensor, multipliers: Sequence[float] | Array, segments: Sequence[int]
) -> None:
    """Add `column` [P], times one multiplier for each segment, to `total` [P] in place.

    Segments whose multiplier is 0 are not written.

    Args:
        total: [P], changed in place.
        column: [P].
        multipliers: one number for each segment.
        segments: lengths that add up to P.
    """
    parts = total.split(list(segments)), column.split(list(segments))
    for part, added, multiplier in zip(*parts, multipliers, strict=True):
        if multiplier:
            part.add_(added, alpha=float(multiplier))


def combine_infos(infos: Sequence[QPInfo]) -> QPInfo:
    """Combine the outcomes of segments: the worst status, the largest residual, sums of counts.

    Args:
        infos: the outcomes by segment.
    """
    return QPInfo(
        status=max((info.status for info in infos), key=STATUSES.index),
        active=sum(info.active for info in infos),
        residual=max(info.residual for info in infos),
        iterations=sum(info.iterations for info in infos),
        dropped=sum(info.dropped for info in infos),
        to_zero=all(info.to_zero for info in infos),
    )


# Solvers map cosines [C, C] with unit diagonal, the slack [C] at z = 0 and the active constraints
# [C] at the start to z [C], a status and a number of iterations.


def _exact(cosines: Array, slack: Array, start: Mask) -> tuple[Array, str, int]:
    """Try the solvers of this module in turn until the residual is accepted."""
    best, iterations = np.zeros(len(slack)), 0
    for attempt in (_block_pivoting, _nnls):
        z, count = attempt(cosines, slack, start)
        iterations += count
        if _residual(cosines, slack, z) <= MAX_ACCEPTED_RESIDUAL:
            return z, "optimal", iterations
        best = min(best, z, key=lambda candidate: _residual(cosines, slack, candidate))
    return best, "fallback", iterations


def _block_pivoting(cosines: Array, slack: Array, start: Mask) -> tuple[Array, int]:
    """Exchange all infeasible indices at once; stop when their number no longer decreases."""
    passive, fewest, patience, iteration = start.copy(), len(slack) + 1, 5, 0
    while True:
        iteration += 1
        z = _passive_solution(cosines, slack, passive)
        below = -TOLERANCE * max(1.0, float(np.abs(z).max()))
        wrong = np.where(passive, z, cosines @ z + slack) < below
        count = int(wrong.sum())
        fewest, patience = (count, 5) if count < fewest else (fewest, patience - 1)
        if not count or not patience:
            return z.clip(min=0.0), iteration
        passive = passive ^ wrong


def _nnls(cosines: Array, slack: Array, start: Mask) -> tuple[Array, int]:
    """Solve min ‖Fz + h‖² over z ≥ 0 by SciPy (Lawson and Hanson 1974, chapter 23)."""
    from scipy.optimize import nnls

    factor, offset = _square_root(cosines, slack)
    try:
        return nnls(factor, -offset)[0], 1
    except RuntimeError:  # too many iterations; the residual of 0 is not accepted
        return np.zeros(len(slack)), 1


def _square_root(cosines: Array, slack: Array) -> tuple[Array, Array]:
    """Return F and h with FᵀF = Q and Fᵀh = b."""
    values, vectors = np.linalg.eigh(cosines)
    rank = values > 1e-14 * values[-1]
    root = np.sqrt(values[rank])
    return root[:, None] * vectors[:, rank].T, (vectors[:, rank].T @ slack) / root


def _passive_solution(cosines: Array, slack: Array, passive: Mask) -> Array:
    """Return z with w = 0 on the passive set and z = 0 elsewhere.

    For dependent columns, `RIDGE` is added to the diagonal.
    """
    # Only the server's QP needs SciPy, whose import takes 0.2 seconds.
    from scipy.linalg import cho_solve

    z, index = np.zeros(len(slack)), np.flatnonzero(passive)
    if not len(index):
        return z
    block, target = cosines[np.ix_(index, index)], -slack[index]
    try:
        z[index] = cho_solve(_cholesky(block, MIN_CHOLESKY_PIVOT), target, check_finite=False)
        return z
    except LinAlgError:
        ridge = RIDGE
    while True:
        try:
            factor = _cholesky(block + ridge * np.eye(len(index)), 0.0)
            break
        except LinAlgError:
            # A Gram matrix of float32 products can be indefinite by more than the ridge.
            ridge *= 100.0
    # After refinement, the ridge only selects one of several solutions.
    for _ in range(3):
        z[index] += cho_solve(factor, target - block @ z[index], check_finite=False)
    return z


def _cholesky(block: Array, least: float) -> tuple[Array, bool]:
    """Return the Cholesky factor; raise `LinAlgError` if a pivot is `least` or less."""
    from scipy.linalg import cho_factor

    factor = cho_factor(block, lower=True, check_finite=False)
    if factor[0].diagonal().min() ** 2 <= least:
        raise LinAlgError("dependent columns")
    return factor


def _residual(cosines: Array, slack: Array, z: Array) -> float:
    """Return max_i |min(z_i, w_i)|."""
    return float(np.abs(np.minimum(z, cosines @ z + slack)).max())


def _clarabel(cosines: Array, slack: Array, start: Mask) -> tuple[Array, str, int]:
    """Solve min ½ zᵀQz + bᵀz with -z + s = 0, s ≥ 0.

    Clarabel is called directly, because importing cvxpy also imports ECOS.
    """
    import clarabel
    from scipy import sparse

    library: Any = clarabel
    settings = library.DefaultSettings()
    settings.verbose = False
    size = len(slack)
    answer = library.DefaultSolver(
        sparse.csc_matrix(np.triu(cosines)), slack, sparse.csc_matrix(-np.eye(size)),
        np.zeros(size), [library.NonnegativeConeT(size)], settings,
    ).solve()  # fmt: skip
    return _answer(
        answer.x,
        {"Solved": "optimal", "AlmostSolved": "fallback"}.get(str(answer.status), "failed"),
        answer.iterations,
        size,
    )


def _ecos(cosines: Array, slack: Array, start: Mask) -> tuple[Array, str, int]:
    """Solve min ‖Fz + h‖² over z ≥ 0 with FᵀF = Q and Fᵀh = b, through cvxpy."""
    import cvxpy

    if "ECOS" not in cvxpy.installed_solvers():
        raise ModuleNotFoundError("qp solver 'ecos' needs the package ecos: pip install ecos")
    factor, offset = _square_root(cosines, slack)
    z = cvxpy.Variable(len(slack), nonneg=True)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(factor @ z + offset)))
    try:
        problem.solve(solver=cvxpy.ECOS)
    except cvxpy.SolverError:
        return np.zeros(len(slack)), "failed", 0
    status = {"optimal": "optimal", "optimal_inaccurate": "fallback"}.get(
        str(problem.status), "failed"
    )
    return _answer(z.value, status, problem.solver_stats.num_iters or 0, len(slack))


def _answer(x: ArrayLike | None, status: str, iterations: int, size: int) -> tuple[Array, str, int]:
    """Return a library's result with small multipliers set to 0; z = 0 if it failed."""
    z = np.full(size, np.nan) if x is None else np.asarray(x, np.float64)
    if status == "failed" or not np.isfinite(z).all():
        return np.zeros(size), "failed", iterations
    return np.where(z > 1e-9, z, 0.0), status, iterations


SOLVERS: dict[str, Callable[[Array, Array, Mask], tuple[Array, str, int]]] = {
    "exact": _exact,
    "ecos": _ecos,
    "clarabel": _clarabel,
}
"""Solvers of the dual by name."""
