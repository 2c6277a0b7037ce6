"""GradMA's memory against the oracle's mem_red and Server_Update, in NumPy with dictionaries."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracle import gradma
from oracle.qp import project_per_tensor

from raysim.numerics import (
    NonFiniteError,
    admit,
    check_finite,
    memory_bytes,
    memory_init,
    project,
    project_on_memory,
    remember,
)


class Literal:
    """The oracle's mem_red and Server_Update. A client whose upload is lost has a row of zeros, and
    stays new until it delivers."""

    def __init__(self, m: int, beta1: float, beta2: float, segments: list[int]):
        self.m, self.betas, self.segments = m, {"beta1": beta1, "beta2": beta2}, segments
        self.cuts = np.cumsum(segments)[:-1]
        self.D: dict[int, np.ndarray] = {}
        self.c: dict[int, int] = {}
        self.entered: list[int] = []
        self.new: list[int] = []
        self.x = self.momentum = np.zeros(sum(segments))

    def mem_red(self, cohort: list[int]) -> int:
        evicted = gradma.mem_red(cohort, self.m, self.c, self.entered, self.new, self.D)
        self.new = [client for client in self.new if client in self.entered]
        self.D |= {client: np.zeros_like(self.x) for client in self.new if client not in self.D}
        return len(evicted)

    def update(self, deltas: dict[int, np.ndarray], weights: dict[int, float]) -> np.ndarray:
        def qp(p: np.ndarray, M: np.ndarray) -> np.ndarray:
            return project_per_tensor(p, M, self.segments)

        still_new = [client for client in self.new if client not in deltas]
        self.x, self.momentum = gradma.server_update(
            self.x, self.momentum, deltas, weights, self.entered, self.new, self.D,
            **self.betas, server_lr=1.0, qp=qp,
        )  # fmt: skip
        self.new = still_new
        return self.momentum


def contents(memory) -> dict[int, np.ndarray]:
    """D, by client, out of the scaled rows."""
    P = int(memory["segments"].sum())
    D = (memory["scale"][:, None] * memory["rows"][:, :P].double()).numpy()
    return {client: D[slot] for slot, client in enumerate(memory["owner"].tolist()) if client >= 0}


def absorb(memory, ids, deltas, d_mean, momentum, beta1, beta2, **options):
    """The server's update as GradMA's rule composes it."""
    p = beta1 * momentum + d_mean
    check_finite(p, "the aggregated update or the momentum")
    return project_on_memory(memory, p, remember(memory, ids, deltas, beta2), **options)


def play(
    memory,
    rounds: int,
    *,
    N: int = 20,
    S: int = 4,
    beta1: float = 0.9,
    beta2: float = 0.5,
    lose=(),
    check=None,
    **options,
):
    """Random rounds through `memory` and the transcription; `lose`: rounds whose first upload does
    not arrive."""
    rng = np.random.default_rng(1)
    segments = memory["segments"].tolist()
    P, dtype = sum(segments), memory["rows"].dtype
    literal, momentum = (
        Literal(len(memory["owner"]), beta1, beta2, segments),
        torch.zeros(P, dtype=dtype),
    )
    common, everything = rng.standard_normal(P), []
    for t in range(rounds):
        cohort = rng.choice(N, S, replace=False).tolist()
        evicted = admit(memory, cohort, t)
        assert evicted == literal.mem_red(cohort)
        arrived = cohort[1:] if t in lose else cohort
        deltas = torch.from_numpy(
            0.01 * rng.standard_normal((len(arrived), P)) + 0.001 * common
        ).to(dtype)
        weights = rng.dirichlet(np.ones(len(arrived))).tolist()
        d_mean = torch.tensor(weights, dtype=dtype) @ deltas
        momentum, metrics = absorb(
            memory, arrived, deltas, d_mean, momentum, beta1, beta2, **options
        )
        exact = {i: d.double().numpy() for i, d in zip(arrived, deltas, strict=True)}
        expected = literal.update(exact, dict(zip(arrived, weights, strict=True)))
        everything.append(metrics)
        assert metrics["memory_evictions"] == evicted
        if check:
            check(t, literal, momentum, expected)
    return everything


@pytest.mark.parametrize("segments", [[37], [5, 1, 20, 11]])
@pytest.mark.parametrize("beta2", [0.5, 0.0, 1.0])
def test_two_hundred_rounds_with_evictions(segments, beta2):
    memory = memory_init(8, 37, dtype=torch.float64, segments=segments)

    def check(t, literal, momentum, expected):
        assert (
            np.linalg.norm(momentum.numpy() - expected) <= 1e-10 * np.linalg.norm(expected) + 1e-13
        )
        D = contents(memory)
        assert D.keys() == literal.D.keys()
        slots = {client: slot for slot, client in enumerate(memory["owner"].tolist())}
        for client, row in literal.D.items():
            assert np.allclose(D[client], row, rtol=1e-10, atol=1e-14 * np.abs(row).max(initial=0))
            assert memory["count"][slots[client]] == literal.c[client]
        order = sorted(D, key=lambda client: int(memory["entered"][slots[client]]))
        assert order == literal.entered
        for q, start, stop in zip(
            range(len(segments)), [0, *literal.cuts], [*literal.cuts, 37], strict=True
        ):
            index = [slots[k] for k in literal.D]
            part = np.stack([row[start:stop] for row in literal.D.values()])
            scale = memory["scale"].numpy()[index]
            gram = memory["gram"].numpy()[q][np.ix_(index, index)] * scale[:, None] * scale
            norms = np.linalg.norm(part, axis=1)
            assert (np.abs(gram - part @ part.T) <= 1e-10 * np.outer(norms, norms)).all()

    metrics = play(memory, 200, beta2=beta2, lose={3, 50, 51}, check=check)
    assert sum(m["memory_evictions"] for m in metrics) > 50
    assert sum(m["qp_active"] > 0 for m in metrics) > 50
    assert all(m["qp_failed"] == 0 for m in metrics)


def test_storage_in_float32_is_as_good_after_many_rounds():
    memory = memory_init(8, 5000)

    def check(t, literal, momentum, expected):
        assert np.linalg.norm(momentum.numpy() - expected) <= 1e-4 * np.linalg.norm(expected)
        rows = memory["rows"][:, :5000].double()
        norms = rows.norm(dim=1)
        assert ((memory["gram"][0] - rows @ rows.T).abs() <= 1e-6 * torch.outer(norms, norms)).all()

    play(memory, 60, check=check)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [None, [3000, 5, 1995]])
def test_rows_in_half_precision_are_rounded_once_and_the_qp_is_that_of_what_is_stored(
    storage, segments
):
    memory = memory_init(8, 5000, dtype=storage, segments=segments)
    generator = torch.Generator().manual_seed(3)
    momentum, common = torch.zeros(5000), 0.3 * torch.randn(5000, generator=generator)
    bound = False
    for t in range(40):
        cohort = [(5 * t + 3 * i) % 11 for i in range(4)]
        admit(memory, cohort, t)
        deltas = torch.randn(4, 5000, generator=generator)
        deltas += torch.stack([-common if client % 3 == 0 else common for client in cohort])
        kept = memory["scale"][:, None] * memory["rows"].double()
        before = dict(zip(memory["owner"].tolist(), kept, strict=True))
        p = 0.9 * momentum + deltas.mean(0)
        momentum, metrics = absorb(memory, cohort, deltas, deltas.mean(0), momentum, 0.9, 0.5)
        stored = memory["rows"][:, :5000].to(torch.float64)
        slots = {client: slot for slot, client in enumerate(memory["owner"].tolist())}
        for client, delta in zip(cohort, deltas, strict=True):
            wanted = (0.5 * before[client][:5000] + delta.double()).float()
            unit = float(memory["scale"][slots[client]])
            assert unit == 1 or (
                storage == torch.float16 and math.frexp(unit)[0] == 0.5
            )  # a power of two
            assert torch.equal(stored[slots[client]], (wanted / unit).to(storage).double())
        live = memory["scale"] > 0
        expected, _ = project(p.double(), stored[live], segments=segments)
        assert float((momentum - expected).norm()) <= 1e-4 * float(expected.norm())
        assert metrics["memory_bytes"] < 8 * 5008 * 2 + 4000
        bound = bound or metrics["qp_active"] > 0
    assert bound


@pytest.mark.parametrize("solver", ["ecos", "clarabel"])
def test_the_libraries_solve_the_server_qp(solver):
    def check(t, literal, momentum, expected):
        assert np.linalg.norm(momentum.numpy() - expected) <= 1e-3 * np.linalg.norm(expected)

    play(memory_init(8, 40, dtype=torch.float64), 15, check=check, solver=solver)


def test_no_rows_is_fedavgm():
    memory = memory_init(0, 6)
    assert admit(memory, [1, 2, 3], 0) == 0
    d, momentum = torch.randn(2, 6).unbind()
    p, metrics = absorb(memory, [1], d[None], d, momentum, 0.9, 0.5)
    assert torch.equal(p, 0.9 * momentum + d)
    assert metrics["memory_rows"] == 0


def test_a_memory_smaller_than_the_cohort_is_refused():
    with pytest.raises(ValueError, match="cohort of 3"):
        admit(memory_init(2, 4), [1, 2, 3], 0)


def test_a_dropped_client_constrains_nothing_until_it_delivers():
    memory = memory_init(3, 4, dtype=torch.float64)
    admit(memory, [7, 8], 0)
    up = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    m1, metrics = absorb(memory, [7], up, up[0], torch.zeros(4, dtype=torch.float64), 0.9, 0.5)
    assert torch.equal(m1, up[0])
    assert (metrics["memory_rows"], metrics["qp_active"]) == (2, 0)
    assert contents(memory)[8].tolist() == [0, 0, 0, 0]
    admit(memory, [8], 1)
    late = torch.tensor([[-1.0, 1, 0, 0]], dtype=torch.float64)
    m2, metrics = absorb(memory, [8], late, late[0], m1, 0.0, 0.5)
    assert contents(memory)[8].tolist() == late[0].tolist()
    assert contents(memory)[7].tolist() == [0.5, 0, 0, 0]
    assert torch.allclose(m2, torch.tensor([0.0, 1, 0, 0], dtype=torch.float64))
    assert metrics["qp_active"] == 1


def test_nobody_arrived_and_an_upload_without_a_row():
    memory = memory_init(2, 3, dtype=torch.float64)
    admit(memory, [1, 2], 0)
    d, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    momentum, _ = absorb(memory, [1, 2], d[:2], d[:2].mean(0), zero, 0.9, 0.5)
    before = momentum
    momentum, _ = absorb(memory, [], d[:0], zero, momentum, 0.9, 0.5)
    assert torch.allclose(momentum, 0.9 * before)
    momentum, _ = absorb(memory, [99], -d[:1], -d[0], momentum, 0.9, 0.5)  # pushes against client 1
    assert sorted(contents(memory)) == [1, 2]
    assert torch.allclose(momentum, torch.tensor([0.0, 0.81 / 2, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["delta", "mean", "momentum"])
def test_what_is_not_finite_never_gets_in(value, where):
    memory = memory_init(3, 5)
    admit(memory, [4, 5], 0)
    deltas, momentum = torch.ones(2, 5), torch.zeros(5)
    before = {key: tensor.clone() for key, tensor in memory.items()}
    mean = deltas.mean(0)
    {"delta": deltas[1], "mean": mean, "momentum": momentum}[where][2] = value
    with pytest.raises(NonFiniteError, match=r"\[5\]" if where == "delta" else "aggregated"):
        absorb(memory, [4, 5], deltas, mean, momentum, 0.9, 0.5)
    assert all(torch.equal(memory[key], before[key]) for key in memory)


def test_rows_do_not_fade_unless_asked():
    P = 4
    up, zero = torch.eye(P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64)

    def after(rounds: int, **options) -> torch.Tensor:
        memory = memory_init(2, P, dtype=torch.float64)
        admit(memory, [0], 0)
        absorb(memory, [0], up[:1], up[0], zero, 0.0, 0.5)
        for t in range(1, rounds):
            admit(memory, [1], t)
            absorb(memory, [1], up[1:2], up[1], zero, 0.0, 0.5)
        admit(memory, [1], rounds)
        return absorb(memory, [1], -up[:1] + up[1:2], -up[0] + up[1], zero, 0.0, 0.5, **options)[0]

    assert torch.allclose(after(1200), up[1])  # 0.5^2000 is far below the smallest float
    assert not torch.allclose(after(10, max_age=10), up[1])
    assert torch.allclose(after(10, max_age=11), up[1])
    assert not torch.allclose(after(30, norm_floor=1e-6), up[1])
    assert torch.allclose(after(10, norm_floor=1e-6), up[1])


def test_small_tensors_become_sums_when_asked():
    memory = memory_init(2, 6, dtype=torch.float64, segments=[2, 4])
    admit(memory, [0, 1], 0)
    deltas = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    deltas[:, :2] *= 1e-6
    zero, mean = torch.zeros(6, dtype=torch.float64), deltas.mean(0)
    absorb(memory, [0, 1], deltas, mean, zero, 0.0, 0.5)
    momentum, _ = absorb(
        memory, [0], -deltas[:1], -deltas[0], zero, 0.0, 0.5, small_tensor_rule="sum"
    )
    rows = torch.stack([-0.5 * deltas[0], 0.5 * deltas[1]])
    options = {"segments": [2, 4], "small_tensor_rule": "sum"}
    assert torch.allclose(momentum, project(-deltas[0], rows, **options)[0], rtol=1e-12, atol=0)
    assert torch.allclose(momentum[:2], -deltas[0, :2] + rows[:, :2].sum(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("P", [33, 5001])
def test_bits_do_not_see_alignment(P, S):
    def run(offset: int) -> list[torch.Tensor]:
        memory, out = memory_init(6, P), []
        momentum = torch.zeros(P)
        generator = torch.Generator().manual_seed(0)
        for t in range(12):
            deltas = torch.randn(S, P, generator=generator)
            cohort = [(t * 5 + 2 * i) % 9 for i in range(S)]
            admit(memory, cohort, t)
            rows = [
                torch.empty(P + offset + i)[offset + i :].copy_(d) for i, d in enumerate(deltas)
            ]
            shifted = torch.empty(P + offset)[offset:].copy_(momentum)
            momentum, _ = absorb(memory, cohort, rows, deltas.mean(0), shifted, 0.9, 0.5)
            if offset:  # as if restored from a mapped file
                memory["rows"] = (
                    torch.empty(memory["rows"].numel() + offset)[offset:]
                    .view_as(memory["rows"])
                    .copy_(memory["rows"])
                )
            out += [momentum, memory["gram"].clone()]
        return out

    expected = run(0)
    for offset in (1, 3, 7, 15):
        assert all(torch.equal(a, b) for a, b in zip(run(offset), expected, strict=True))


def test_updates_that_cancel_leave_a_row_that_constrains_nothing():
    memory, zero = memory_init(2, 900), torch.zeros(900)
    d = torch.randn(1, 900, generator=torch.Generator().manual_seed(1))
    for t, sign in enumerate((1.0, -0.5)):
        admit(memory, [3], t)
        absorb(memory, [3], sign * d, sign * d[0], zero, 0.9, 0.5, norm_floor=0.0)
    assert contents(memory)[3].tolist() == [0.0] * 900
    memory["gram"][0, 0, 0] = -1e-7  # what rounding may leave of it
    momentum, _ = absorb(memory, [], d[:0], zero, -d[0], 1.0, 0.5)
    assert torch.equal(momentum, -d[0])
    assert memory["gram"][0, 0, 0] == 0


def test_bytes():
    memory = memory_init(10, 1000, segments=[600, 400])
    assert memory_bytes(memory) == 10 * 1008 * 4 + 2 * 100 * 8 + 2 * 10 + 5 * 10 * 8 + 2 * 8 + 3 * 8
    with pytest.raises(ValueError, match="add up to 5"):
        memory_init(1, 6, segments=[5])


def test_the_bits_of_inner_products_do_not_depend_on_how_many_threads_share_them():
    """In a fresh process, whose threads would else use every core for one product."""
    code = """
import torch
from raysim.numerics import aligned, cross, use_threads
torch.manual_seed(0)
torch.set_num_threads(1)
for size in (5, 4096, 4810):
    left, right = aligned(torch.randn(10, size)), aligned(torch.randn(100, size))
    use_threads(1)
    alone = cross(left, right)
    for threads in (2, 3):
        use_threads(threads)
        assert torch.equal(alone, cross(left, right)), (size, threads)
        assert torch.get_num_threads() == 1
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("size", [1e5, 1e-9])
def test_half_precision_has_room_for_updates_of_any_size(size):
    """float16 itself ends at 65504 and 6e-8. One row, d = -size·1, against p = size·2·1 and a
    second direction that is orthogonal to it: what is left of p is the second direction alone,
    whatever the size."""
    ones, across = torch.ones(64), torch.tensor([1.0, -1.0]).repeat(32)
    memory, p = memory_init(2, 64, dtype=torch.float16), size * (2 * ones + across)
    for round, client in enumerate([0, 1, 0, 2]):  # at last client 1 gives its row to another
        admit(memory, [client], round)
        m, metrics = absorb(memory, [client], [-size * ones], p, torch.zeros(64), 0.5, 0.5)
        assert (
            m.numpy() == pytest.approx(size * across.numpy(), rel=1e-6)
            and metrics["qp_active"] >= 1
        )
    assert torch.isfinite(memory["rows"]).all() and metrics["memory_evictions"] == 1
