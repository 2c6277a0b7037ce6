"""The projection of `qp` with three constraints in closed form, for a client's local step.

`project3` works eagerly and under `torch.func.vmap`. It tries each set of active constraints, small
sets first, and keeps the least violated one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from raysim.numerics.inner_products import LazyGram, gram
from raysim.numerics.qp import (
    SMALL_TENSOR_NORM,
    ZERO_COLUMN_RATIO,
    SmallTensorRule,
    add_segments,
    checked_segments,
)

MIN_COSINE_DETERMINANT = 1e-12
"""Determinant of cosines below which columns are dependent: an angle of 1e-6 between two."""

ROUNDING_TOLERANCE = 1e-14
"""Violation up to which a constraint counts as satisfied."""

COLUMN_PAIRS = ((0, 1), (0, 2), (1, 2))
"""Pairs of the three columns."""


_formulas_for_gpus = ContextVar("formulas for GPUs", default=False)


@contextmanager
def formulas_for_gpus() -> Iterator[None]:
    """Solve single problems on a CPU by the formulas for GPUs, which read no value of a tensor."""
    token = _formulas_for_gpus.set(True)
    try:
        yield
    finally:
        _formulas_for_gpus.reset(token)


def project3(
    p: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    segments: Sequence[int] | None = None,
    small_tensor_rule: SmallTensorRule = "exact",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `project(p, [a, b, c])` for a client's local step.

    The function supports `torch.func.vmap` over clients. A single problem on a CPU is solved in
    Python floats. Several problems, or one on a GPU, are solved batched, by the same formulas in
    float64. The result is not differentiable.

    Args:
        p: the vector, [P]; a non-finite vector is returned as it is.
        a: first column, [P]; a column with a non-finite entry is ignored.
        b: second column, [P].
        c: third column, [P].
        segments: as in `project`.
        small_tensor_rule: as in `project`.

    Returns:
        The projection p̃, [P], equal to p bit for bit if no constraint is violated; the number of
        active constraints, a float scalar; ‖p̃ - p‖, a scalar.

    Raises:
        ValueError: the rule "sum" has no segments.
    """
    parts = checked_segments(p, segments, small_tensor_rule)
    return _Project3.apply(p, a, b, c, parts, small_tensor_rule == "sum")


class _Project3(torch.autograd.Function):
    """Non-differentiable function with a rule for `vmap`."""

    @staticmethod
    def forward(
        p: Tensor, a: Tensor, b: Tensor, c: Tensor, parts: tuple[int, ...], small: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if p.device.type != "cpu" or _formulas_for_gpus.get():
            projected, active, moved = _many(p[None], a[None], b[None], c[None], parts, small)
            return projected[0], active[0], moved[0]
        return _one(p, a, b, c, parts, small)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        p, a, b, c = (
            vector.expand(info.batch_size, -1) if dim is None else vector.movedim(dim, 0)
            for vector, dim in zip(args[:4], in_dims[:4], strict=True)
        )
        return _many(p, a, b, c, *args[4:]), (0, 0, 0)


def _one(
    p: Tensor, a: Tensor, b: Tensor, c: Tensor, parts: tuple[int, ...], small: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `project3` for one client, [P], on a CPU."""
    products = LazyGram([p, a, b, c], parts)
    # Often no constraint is violated; then the other products are not needed.
    if not small and bool((products.first()[..., 1:] >= 0.0).all()):
        return p.clone(), p.new_zeros(()), p.new_zeros(())
    grams = products.gram().tolist()  # T matrices [4][4]
    finite = [all(isfinite(G[i][i]) for G in grams) for i in range(4)]
    projected = p.clone()
    solutions = []
    total = 0
    moved = 0.0
    for G in grams:
        z, active = _solve_one(G, finite, small)
        solutions.append(z)
        total += active
        for i, j in product(range(3), range(3)):
            if z[i] and z[j]:
                moved += z[i] * z[j] * G[i + 1][j + 1]
    for column, multipliers in zip((a, b, c), zip(*solutions, strict=True), strict=True):
        add_segments(projected, column, multipliers, parts)
    return (
        projected,
        torch.tensor(float(total), dtype=p.dtype),
        torch.tensor(sqrt(max(moved, 0.0)), dtype=p.dtype),
    )


def _many(
    p: Tensor, a: Tensor, b: Tensor, c: Tensor, parts: tuple[int, ...], small: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `project3` for K clients: [K, P], [K] and [K]."""
    grams = gram([p, a, b, c], parts)  # [K, T, 4, 4]
    finite = grams.diagonal(dim1=2, dim2=3).isfinite().all(1)[:, None]  # [K, 1, 4]
    grams = torch.where(finite[..., None] & finite[..., None, :], grams, 0.0)
    z, active = _solve_many(grams, small)
    projected = p
    for i, column in enumerate((a, b, c)):
        shares = z[..., i].to(p.dtype).split(1, 1)  # [K, 1] for each segment
        factor = torch.cat([share.expand(-1, n) for share, n in zip(shares, parts, strict=True)], 1)
        projected = torch.where(factor != 0, torch.addcmul(projected, factor, column), projected)
    moved = torch.einsum("kti,ktij,ktj->k", z, grams[..., 1:, 1:], z).clamp(min=0.0).sqrt()
    return projected, active.sum(1).to(p.dtype), moved.to(p.dtype)


def _active_sets(
    c01: Any, c02: Any, c12: Any, b0: Any, b1: Any, b2: Any
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield the determinant and determinant · z for each non-empty A ⊆ {0, 1, 2}, small sets first.

    z_A = -G_AA⁻¹ b_A by Cramer's rule. G has a unit diagonal and the cosines `cij` off it. The
    arguments are floats, or tensors of one shape.
    """
    zero, unit = 0.0 * b0, 0.0 * b0 + 1.0
    yield unit, -b0, zero, zero
    yield unit, zero, -b1, zero
    yield unit, zero, zero, -b2
    yield 1.0 - c01 * c01, c01 * b1 - b0, c01 * b0 - b1, zero
    yield 1.0 - c02 * c02, c02 * b2 - b0, zero, c02 * b0 - b2
    yield 1.0 - c12 * c12, zero, c12 * b2 - b1, c12 * b1 - b2
    m01, m02, m12 = c01 - c02 * c12, c02 - c01 * c12, c12 - c01 * c02
    yield (
        1.0 - c12 * c12 - c01 * m01 - c02 * m02,
        m01 * b1 + m02 * b2 - (1.0 - c12 * c12) * b0,
        m01 * b0 + m12 * b2 - (1.0 - c02 * c02) * b1,
        m02 * b0 + m12 * b1 - (1.0 - c01 * c01) * b2,
    )


def _solve_one(
    G: list[list[float]], finite: list[bool], small: bool
) -> tuple[Sequence[float], int]:
    """Return z and |A| of the least violated active set, the first on ties.

    G is the Gram matrix [4][4] of p, a, b and c.
    """
    # The norm of a vector that is not finite counts as 0.
    p_norm, *norms = [sqrt(G[i][i]) if finite[i] else 0.0 for i in range(4)]
    largest = max(norms)
    if small and largest < SMALL_TENSOR_NORM:
        return [float(norm > 0.0) for norm in norms], 0
    if p_norm == 0.0:
        return (0.0, 0.0, 0.0), 0
    inverse = [1.0 / norm if norm > ZERO_COLUMN_RATIO * largest else 0.0 for norm in norms]
    b = [0.0, 0.0, 0.0]
    for i in range(3):
        if inverse[i]:
            b[i] = G[0][i + 1] * inverse[i] / p_norm
    if max(-b[0], -b[1], -b[2]) <= ROUNDING_TOLERANCE:
        return (0.0, 0.0, 0.0), 0
    c = [_cosine(G[i + 1][j + 1], inverse[i], inverse[j]) for i, j in COLUMN_PAIRS]
    best = _least_violated(*c, *b)
    active = sum(z > 0.0 for z in best)
    return [max(z, 0.0) * p_norm * inverse[i] for i, z in enumerate(best)], active


def _cosine(product: float, inverse_a: float, inverse_b: float) -> float:
    """Return the cosine of two columns, 0 if one is ignored: its product may be non-finite."""
    return product * inverse_a * inverse_b if inverse_a and inverse_b else 0.0


def _least_violated(
    c01: float, c02: float, c12: float, b0: float, b1: float, b2: float
) -> tuple[float, float, float]:
    """Return z of the least violated active set, the first on ties; arguments of `_active_sets`."""
    best = 0.0, 0.0, 0.0
    least = max(-b0, -b1, -b2)
    for determinant, n0, n1, n2 in _active_sets(c01, c02, c12, b0, b1, b2):
        if determinant < MIN_COSINE_DETERMINANT:
            continue
        z0, z1, z2 = n0 / determinant, n1 / determinant, n2 / determinant
        w0 = z0 + c01 * z1 + c02 * z2 + b0
        w1 = z1 + c01 * z0 + c12 * z2 + b1
        w2 = z2 + c02 * z0 + c12 * z1 + b2
        violation = max(-z0, -z1, -z2, -w0, -w1, -w2)
        if violation < least:
            best = z0, z1, z2
            least = violation
        if least <= ROUNDING_TOLERANCE:
            break
    return best


def _solve_many(G: Tensor, small: bool) -> tuple[Tensor, Tensor]:
    """Return z [..., 3] and |A| [...] as `_solve_one`, for Gram matrices [..., 4, 4].

    Non-finite rows of G are zeroed.
    """
    norms = G.diagonal(dim1=-2, dim2=-1).sqrt()
    p_norm, norms = norms[..., :1], norms[..., 1:]
    largest = norms.amax(-1, keepdim=True)
    kept = (norms > ZERO_COLUMN_RATIO * largest) & (p_norm > 0.0)
    inverse = torch.where(kept, 1.0 / norms, 0.0)
    b = torch.where(kept, G[..., 0, 1:] * inverse / p_norm, 0.0)
    c01, c02, c12 = (
        G[..., i + 1, j + 1] * inverse[..., i] * inverse[..., j] for i, j in COLUMN_PAIRS
    )
    sets = [
        torch.stack(values, -1)
        for values in zip(*_active_sets(c01, c02, c12, *b.unbind(-1)), strict=True)
    ]
    determinant = sets[0][..., None]  # [..., 7, 1]
    z = torch.stack(sets[1:], -1) / determinant  # [..., 7, 3]
    z = torch.cat(
        [
            torch.zeros_like(z[..., :1, :]),
            torch.where(determinant < MIN_COSINE_DETERMINANT, -torch.inf, z),
        ],
        -2,
    )
    z0, z1, z2 = z.unbind(-1)
    c01, c02, c12, b = c01[..., None], c02[..., None], c12[..., None], b[..., None, :]
    w = (
        torch.stack(
            [z0 + c01 * z1 + c02 * z2, z1 + c01 * z0 + c12 * z2, z2 + c02 * z0 + c12 * z1], -1
        )
        + b
    )
    violation = torch.cat([-z, -w], -1).nan_to_num(nan=torch.inf).amax(-1)  # [..., 8]
    chosen = (
        violation.clamp(min=ROUNDING_TOLERANCE)
        .argmin(-1, keepdim=True)[..., None]
        .expand(*b.shape[:-2], 1, 3)
    )
    z = z.gather(-2, chosen)[..., 0, :].clamp(min=0.0)
    active = (z > 0.0).sum(-1)
    z = z * p_norm * inverse
    if small:
        tiny = largest < SMALL_TENSOR_NORM
        z, active = (
            torch.where(tiny, (norms > 0.0).to(z.dtype), z),
            torch.where(tiny[..., 0], 0, active),
        )
    return z, active
