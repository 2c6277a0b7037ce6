"""The projection QP against its optimality conditions, NNLS, closed forms and two interior-point
solvers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from raysim.numerics import least_on_simplex, project, project3, qp, solve_dual

often = settings(deadline=None, max_examples=150, derandomize=True, database=None)


@st.composite
def problems(draw, most: int = 12, closest: int = -2):
    """p [d] and columns [C, d] with correlated, duplicate, zero, anti-parallel and badly scaled
    columns among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    d, C = draw(st.integers(1, 15)), draw(st.integers(1, most))
    p, columns = rng.standard_normal(d), rng.standard_normal((C, d))
    for i in range(1, C):
        other = columns[rng.integers(i)]
        match draw(
            st.sampled_from(["new", "new", "near", "copy", "opposite", "zero", "against", "scaled"])
        ):
            case "near":
                columns[i] = (
                    other + 10.0 ** rng.integers(closest, 0) * np.linalg.norm(other) * columns[i]
                )
            case "copy":
                columns[i] = other
            case "opposite":
                columns[i] = -other
            case "zero":
                columns[i] = 0.0
            case "against":
                columns[i] -= 2 * p
            case "scaled":
                columns[i] *= 10.0 ** rng.integers(-3, 4)
    return p, columns


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def solve(p: np.ndarray, columns: np.ndarray, **options) -> np.ndarray:
    return project(tensor(p), tensor(columns), **options)[0].numpy()


def oracle(p: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """p + Mz with z from scipy's NNLS, on normalised columns."""
    norms = np.linalg.norm(columns, axis=1)
    unit = columns[norms > 0] / norms[norms > 0, None]
    if not len(unit):
        return p
    return p + unit.T @ nnls(unit.T, -p, maxiter=10_000)[0]


@often
@given(problems())
def test_the_least_point_of_the_simplex(problem):
    """Optimal are weights whose gradient 2Qz is least, and equal, where they are positive."""
    _, columns = problem
    Q = columns @ columns.T + np.diag(1e-3 * (1 + (columns**2).sum(1)))
    z = least_on_simplex(Q)
    gradient, scale = Q @ z, np.abs(Q).max()
    assert (z >= 0).all() and z.sum() == pytest.approx(1)
    assert gradient[z > 0].max() <= gradient.min() + 1e-9 * scale


@often
@given(problems())
def test_optimality(problem):
    p, columns = problem
    Q, b = columns @ columns.T, columns @ p
    z, info = solve_dual(Q, b, float(np.linalg.norm(p)))
    projected = p + columns.T @ z
    scale, norms = np.linalg.norm(p), np.linalg.norm(columns, axis=1)
    w = columns @ projected
    assert info.status in ("inactive", "optimal")
    assert (z >= 0).all()
    assert (w >= -1e-9 * norms * scale).all()
    assert np.abs(z * w).max() <= 1e-9 * scale**2
    assert abs(projected @ (p - projected)) <= 1e-9 * scale**2
    assert np.dot(projected, projected) + np.sum((columns.T @ z) ** 2) == pytest.approx(
        scale**2, rel=1e-9
    )
    assert np.linalg.norm(projected - solve(p, columns)) <= 1e-9 * scale
    assert np.linalg.norm(projected - oracle(p, columns)) <= 1e-9 * scale
    assert info.residual <= 1e-8
    assert info.active == (z > 0).sum()


@often
@given(problems(closest=-7))
def test_nearly_dependent_columns_are_still_respected(problem):
    p, columns = problem
    projected, info = project(tensor(p), tensor(columns))
    w = columns @ projected.numpy()
    assert (w >= -1e-6 * np.linalg.norm(columns, axis=1) * np.linalg.norm(p)).all()
    assert np.linalg.norm(projected) <= (1 + 1e-6) * np.linalg.norm(p)
    assert info.residual <= 1e-6


@often
@given(problems(), st.floats(1e-6, 1e6))
def test_idempotent_and_homogeneous(problem, alpha):
    p, columns = problem
    once = solve(p, columns)
    assert np.linalg.norm(solve(once, columns) - once) <= 1e-9 * np.linalg.norm(p)
    assert np.linalg.norm(
        solve(alpha * p, columns) - alpha * once
    ) <= 1e-9 * alpha * np.linalg.norm(p)


@often
@given(problems())
def test_nothing_violated_returns_p_itself(problem):
    p, columns = problem
    columns = columns * np.where(columns @ p < 0, -1.0, 1.0)[:, None]
    given_p = tensor(p)
    projected, info = project(given_p, tensor(columns))
    assert projected is given_p
    assert (info.status, info.active, info.residual) == ("inactive", 0, 0.0)


@pytest.mark.parametrize("d", [1, 2, 5, 30])
def test_a_contradiction_projects_to_zero(d):
    p = np.random.default_rng(d).standard_normal(d)
    projected, info = project(tensor(p), tensor(np.concatenate([np.eye(d), -np.eye(d)])))
    assert np.abs(projected.numpy()).max() <= 1e-12
    assert info.to_zero
    corners = np.concatenate(
        [np.eye(d), -np.ones((1, d))]
    )  # no two opposite, and still the whole space
    assert np.abs(solve(p, corners)).max() <= 1e-10


@pytest.mark.parametrize("C", [3, 20, 100])
@pytest.mark.parametrize("solver", ["ecos", "clarabel"])
def test_libraries_agree_with_the_exact_solver(C, solver):
    rng = np.random.default_rng(C)
    p, columns = rng.standard_normal(150), rng.standard_normal((C, 150))
    columns -= 0.3 * p
    exact, info = project(tensor(p), tensor(columns))
    other, other_info = project(tensor(p), tensor(columns), solver=solver)
    assert info.status == other_info.status == "optimal"
    assert info.active > 0
    assert other_info.iterations > 0
    assert torch.linalg.norm(exact - other) <= 1e-4 * np.linalg.norm(p)
    tiny, _ = project(
        tensor(1e-8 * p), tensor(1e-7 * columns), solver=solver
    )  # nothing is absolute
    assert torch.linalg.norm(1e8 * tiny - other) <= 1e-4 * np.linalg.norm(p)


@pytest.mark.parametrize("name", ["_block_pivoting", "_nnls"])
def test_each_of_the_exact_methods_stands_alone(name):
    rng = np.random.default_rng(8)
    for C in (1, 4, 25):
        p, columns = rng.standard_normal(30), rng.standard_normal((C, 30))
        columns -= 0.2 * p
        p, columns = p / np.linalg.norm(p), columns / np.linalg.norm(columns, axis=1)[:, None]
        slack = columns @ p
        z, iterations = getattr(qp, name)(columns @ columns.T, slack, slack < 0)
        assert np.abs(z - nnls(columns.T, -p)[0]).max() <= 1e-6
        assert iterations > 0
    duplicates = np.ones((3, 3))
    z, _ = getattr(qp, name)(duplicates, -0.5 * np.ones(3), np.ones(3, bool))
    assert z.sum() == pytest.approx(0.5)


def test_an_indefinite_gram_matrix_still_gives_an_answer():
    """Sums of float32 products may leave a Gram matrix with an eigenvalue of about -1e-7."""
    Q = np.array([[1.0, 1.0 + 1e-7], [1.0 + 1e-7, 1.0]])
    z, info = solve_dual(Q, -np.array([0.5, 0.5]), 1.0)
    assert z.sum() == pytest.approx(0.5, abs=1e-5)
    assert info.residual <= 1e-6


@often
@given(problems(), st.integers(0, 2**12))
def test_a_warm_start_changes_nothing(problem, bits):
    p, columns = problem
    Q, b, p_norm = columns @ columns.T, columns @ p, float(np.linalg.norm(p))
    warm = np.array([bits >> i & 1 for i in range(len(columns))], bool)
    cold, started = solve_dual(Q, b, p_norm)[0], solve_dual(Q, b, p_norm, warm=warm)[0]
    assert np.linalg.norm(columns.T @ (cold - started)) <= 1e-8 * p_norm


def test_the_right_warm_start_needs_one_system():
    rng = np.random.default_rng(4)
    columns, p = rng.standard_normal((40, 60)), rng.standard_normal(60)
    Q, b, p_norm = columns @ columns.T, columns @ p, float(np.linalg.norm(p))
    z, cold = solve_dual(Q, b, p_norm)
    assert cold.iterations > 1
    assert solve_dual(Q, b, p_norm, warm=z > 0)[1].iterations == 1


def test_degenerate_inputs():
    p, *columns = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    columns = torch.stack(columns)
    assert torch.equal(project(torch.zeros(8), columns.float())[0], torch.zeros(8))
    assert project(p, [])[0] is p
    assert project(p, torch.zeros(2, 8, dtype=torch.float64))[0] is p
    bad = columns.clone()
    bad[1, 3] = torch.inf
    projected, info = project(p, bad)
    assert info.dropped == 1
    assert torch.allclose(projected, project(p, columns[[0, 2]])[0], rtol=0, atol=1e-12)
    for value in (torch.nan, torch.inf):
        broken = p.clone()
        broken[0] = value
        with pytest.raises(ValueError, match="finite"):
            project(broken, columns)
    with pytest.raises(ValueError, match="finite"):
        solve_dual(np.eye(2), np.ones(2), float("nan"))
    with pytest.raises(ValueError, match="exact, ecos, clarabel"):
        solve_dual(np.eye(1), -np.ones(1), 1.0, "cvxopt")  # type: ignore[arg-type]


def test_a_failed_library_is_said_and_leaves_p(monkeypatch):
    import cvxpy

    def fail(*_, **__):
        raise cvxpy.SolverError("no")

    monkeypatch.setattr(cvxpy.Problem, "solve", fail)
    p = torch.tensor([1.0, -1.0])
    projected, info = project(p, torch.tensor([[0.0, 1.0]]), solver="ecos")
    assert info.status == "failed"
    assert torch.equal(projected, p)


def test_clarabel_does_not_import_ecos():
    import subprocess
    import sys

    code = (
        "import sys; from raysim.numerics import solve_dual\n"
        "assert solve_dual([[1.0]], [-1.0], 1.0, 'clarabel')[1].status == 'optimal'\n"
        "assert solve_dual([[1.0]], [-1.0], 1.0)[1].status == 'optimal'\n"
        "assert 'ecos' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_segments_are_separate_problems():
    generator = torch.Generator().manual_seed(0)
    p, columns = torch.randn(20, generator=generator), torch.randn(4, 20, generator=generator)
    segments = [6, 1, 13]
    projected, info = project(p, columns, segments=segments)
    parts = [
        project(q, c) for q, c in zip(p.split(segments), columns.split(segments, 1), strict=True)
    ]
    assert torch.allclose(projected, torch.cat([part for part, _ in parts]), atol=1e-7)
    assert info.active == sum(part.active for _, part in parts) > 0
    assert info.residual == max(part.residual for _, part in parts)
    assert not torch.allclose(projected, project(p, columns)[0], atol=1e-3)


def test_small_tensors_become_sums_when_asked():
    generator = torch.Generator().manual_seed(0)
    p, columns = torch.randn(20, generator=generator), torch.randn(3, 20, generator=generator)
    columns[:, :8] *= 1e-5  # norms well below 2e-4
    options = {"segments": [8, 12], "small_tensor_rule": "sum"}
    projected = project(p, columns, **options)[0]
    exact = project(p, columns, segments=[8, 12])[0]
    assert torch.allclose(projected[:8], p[:8] + columns[:, :8].sum(0), atol=1e-7)
    assert torch.equal(projected[8:], exact[8:])
    assert not torch.equal(projected, exact)
    assert torch.allclose(project3(p, *columns, **options)[0], projected, atol=1e-7)
    batch = torch.func.vmap(lambda q: project3(q, *columns, **options)[0])(torch.stack([p, -p]))
    assert torch.allclose(batch[0], projected, atol=1e-7)
    for solver in (project, lambda q, c, **k: project3(q, *c, **k)):
        with pytest.raises(ValueError, match="segments"):
            solver(p, columns, small_tensor_rule="sum")


def nasty(n: int, d: int, seed: int) -> np.ndarray:
    """[n, 4, d]: p, a, b, c, with duplicate, zero, near-parallel, anti-parallel and badly scaled
    columns."""
    rng = np.random.default_rng(seed)
    v = rng.standard_normal((n, 4, d))
    v[:, 1] -= rng.uniform(-2, 2, (n, 1)) * v[:, 0]
    kind = rng.integers(0, 8, n)
    v[kind == 1, 2] = v[kind == 1, 1]
    v[kind == 2, 2] = v[kind == 2, 1] + 1e-7 * v[kind == 2, 2]
    v[kind == 3, 3] = -v[kind == 3, 1]
    v[kind == 4, 2] = 0.0
    v[kind == 5, 1:] = 0.3 * v[kind == 5, 1:] + v[kind == 5, 3:]
    v[kind == 6] *= 10.0 ** rng.uniform(-6, 6, (int((kind == 6).sum()), 4, 1))
    v[kind == 7, 1], v[kind == 7, 2] = (
        v[kind == 7, 0],
        v[kind == 7, 0],
    )  # the first local step: c = 0, a = b = g
    v[kind == 7, 3] = 0.0
    return v


@pytest.mark.parametrize("d", [1, 2, 3, 40])
def test_project3_alone_batched_and_by_oracle(d):
    cases = nasty(800, d, seed=d)
    batched, counts, lengths = torch.func.vmap(project3)(*tensor(cases).unbind(1))
    for case, together, count, length in zip(cases, batched, counts, lengths, strict=True):
        scale = np.linalg.norm(case[0])
        alone, active, moved = project3(*tensor(case))
        assert abs(moved - torch.linalg.norm(alone - tensor(case[0]))) <= 1e-7 * scale
        assert abs(moved - length) <= 1e-7 * scale
        assert torch.linalg.norm(alone - together) <= 1e-12 * scale
        assert np.linalg.norm(alone.numpy() - oracle(case[0], case[1:])) <= 1e-7 * scale
        assert np.linalg.norm(alone.numpy() - solve(case[0], case[1:])) <= 1e-7 * scale
        if (case[1:] @ case[0] >= 0).all():
            assert torch.equal(alone, tensor(case[0]))
            assert torch.equal(together, tensor(case[0]))
            assert active == count == 0
        assert 0 <= active <= 3


def test_project3_by_segments_and_with_unbatched_inputs():
    p, a, b, c = torch.randn(
        4, 5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    segments = [4, 20, 1, 5]
    together, active, _ = torch.func.vmap(
        lambda q, r: project3(q, r, b[0], c[0], segments=segments)
    )(p, a)
    for i in range(5):
        alone, count, _ = project3(p[i], a[i], b[0], c[0], segments=segments)
        exact, info = project(p[i], [a[i], b[0], c[0]], segments=segments)
        assert torch.allclose(alone, together[i], rtol=0, atol=1e-12)
        assert torch.allclose(alone, exact, rtol=0, atol=1e-12)
        assert count == active[i]
        assert info.status == "optimal"
    moved = torch.func.vmap(project3, in_dims=(1, 1, None, None), out_dims=(1, 0, 0))(
        p.T, a.T, b[0], c[0]
    )[0]
    assert torch.equal(moved.T, torch.func.vmap(lambda q, r: project3(q, r, b[0], c[0])[0])(p, a))


def test_project3_with_what_is_not_finite():
    p, a, b, c = torch.randn(4, 12, generator=torch.Generator().manual_seed(5))
    a, b = a - p, b - p
    expected = project(p, [a, c])[0]
    broken = b.clone()
    broken[2] = torch.inf
    alone = project3(p, a, broken, c)[0]
    together = torch.func.vmap(lambda q: project3(q, a, broken, c)[0])(p[None])[0]
    assert torch.allclose(alone, expected, atol=1e-6)
    assert torch.allclose(together, expected, atol=1e-6)
    lost = torch.full((12,), torch.nan)
    assert project3(lost, a, b, c)[0].isnan().all()
    assert torch.func.vmap(lambda q: project3(q, a, b, c)[0])(lost[None]).isnan().all()
    assert project3(torch.zeros(12), a, b, c)[0].eq(0).all()


def test_bits_do_not_see_alignment():
    v = torch.randn(4, 5001, generator=torch.Generator().manual_seed(7))
    v[1:] -= 0.1 * v[0]
    expected, exact = project3(*v)[0], project(v[0], v[1:])[0]
    for offset in range(1, 17):
        moved = [torch.empty(5001 + offset)[offset:].copy_(row) for row in v]
        assert torch.equal(project3(*moved)[0], expected)
        assert torch.equal(project(moved[0], moved[1:])[0], exact)
