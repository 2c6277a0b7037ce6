"""Where the methods end up, on quadratics f_i(w) = ½ (w - a_i)ᵀ H_i (w - a_i) whose optimum is
known in closed form.

The rules are driven directly, without the engine: a rule is a pure function of what it is given, so
a task of ten lines will do. With full gradients and I steps of size η from x, y_I - a_i = (I - η
H_i)^I (x - a_i), so that

    d_i = A_i (x - a_i),   A_i = I - (I - η H_i)^I            and FedAvg stops at   x = (Σ w_i A_i)⁻¹ Σ w_i A_i a_i

while the optimum of Σ w_i f_i is (Σ w_i H_i)⁻¹ Σ w_i H_i a_i. They agree for I = 1 (A_i = η H_i)
and where all H_i are equal, and differ elsewhere: FedAvg must NOT reach the optimum there.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy.optimize import nnls
from support.batteries import is_usual
from support.pairs import all_pairs, with_every_rule
from support.quadratics import Federation, Quadratics, far

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.algorithms.fedavgm import FedAvgMServer
from raysim.algorithms.fedprox import FedProxClient
from raysim.algorithms.gradma import GradMAClient, GradMAServer
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES
from raysim.rules.methods import registry
from raysim.rules.rule import family

registry.discover()


# --- averaging: the optimum, or a closed form that is not


@pytest.mark.parametrize("how", ["uniform", "samples"])
def test_fedavg_with_one_step_reaches_the_optimum(how):
    """I = 1: x <- x - η Σ w_i H_i (x - a_i) is gradient descent on Σ w_i f_i."""
    problem = Quadratics.random(5, 4, seed=1)
    reached = Federation(
        FedAvgClient(), FedAvgServer(weights=how), problem, lr=0.4, steps=1, x0=np.ones(4)
    ).run(300)
    assert far(reached, problem.optimum(how)) < 1e-10
    assert far(problem.optimum("uniform"), problem.optimum("samples")) > 0.1


@pytest.mark.parametrize("how", ["uniform", "samples"])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_fedavg_drifts_to_a_closed_form_that_is_not_the_optimum(how, server_lr):
    """I = 10 and unequal H_i: the module's A_i. The server's lr changes the way there, not the
    place."""
    problem = Quadratics.random(5, 4, seed=1)
    reached = Federation(
        FedAvgClient(),
        FedAvgServer(weights=how, lr=server_lr),
        problem,
        lr=0.4,
        steps=10,
        x0=np.ones(4),
    ).run(200)
    assert far(reached, problem.balance(problem.local_map(0.4, 10), how)) < 1e-10
    assert far(reached, problem.optimum(how)) > 0.1


def test_equal_curvature_does_not_drift():
    """All H_i = H, hence all A_i = A: Σ w_i A (x - a_i) = 0 is the mean of the a_i, for any number
    of steps."""
    problem = Quadratics.random(5, 4, seed=1, equal_curvature=True)
    reached = Federation(
        FedAvgClient(), FedAvgServer(), problem, lr=0.4, steps=10, x0=np.ones(4)
    ).run(200)
    assert far(reached, problem.optimum()) < 1e-10
    assert far(problem.optimum(), problem.a.mean(axis=0)) < 1e-10


def test_fedprox_stops_at_its_own_closed_form_nearer_to_the_optimum():
    """`proximal_map`; a larger mu lets the local models less far from x and leaves less of the
    drift. Twice the mu (the term without its ½) would stop elsewhere."""
    problem = Quadratics.random(5, 4, seed=1)
    reached = {}
    for mu in (0.0, 0.5, 1.0, 2.5):
        federation = Federation(
            FedProxClient(mu=mu), FedAvgServer(), problem, lr=0.4, steps=10, x0=np.ones(4)
        )
        reached[mu] = federation.run(250)
        assert (
            far(reached[mu], problem.balance(problem.proximal_map(0.4, 10, mu), "uniform")) < 1e-10
        )
    distance = [far(reached[mu], problem.optimum()) for mu in (0.0, 0.5, 1.0, 2.5)]
    assert distance == sorted(distance, reverse=True)
    assert min(far(reached[0.5], reached[mu]) for mu in (0.0, 1.0)) > 0.01
    assert far(reached[0.0], problem.balance(problem.local_map(0.4, 10), "uniform")) < 1e-10


@pytest.mark.parametrize("beta1", [0.5, 0.9])
def test_momentum_changes_the_way_and_not_the_place(beta1):
    """x and m stand still only if m = beta1 m + d and m = 0, that is d = 0: the fixed points of
    FedAvg and FedProx. The first two rounds by hand: m_1 = d_0, m_2 = beta1 d_0 + d_1, undamped and
    without Nesterov's look ahead."""
    problem = Quadratics.random(5, 4, seed=1)
    for client, A in (
        (FedAvgClient(), problem.local_map(0.1, 5)),
        (FedProxClient(mu=0.7), problem.proximal_map(0.1, 5, 0.7)),
    ):
        federation = Federation(
            client, FedAvgMServer(beta1=beta1), problem, lr=0.1, steps=5, x0=np.ones(4)
        )
        d0 = np.einsum("ijk,ik->j", A, np.ones(4) - problem.a) / 5
        assert far(federation.run(1), np.ones(4) - d0) < 1e-13
        d1 = np.einsum("ijk,ik->j", A, federation.x - problem.a) / 5
        assert far(federation.run(1), np.ones(4) - d0 - (beta1 * d0 + d1)) < 1e-13
        assert far(federation.run(700), problem.balance(A, "uniform")) < 1e-9


# --- GradMA's server


@pytest.mark.parametrize("beta1, beta2", [(0.0, 0.0), (0.5, 0.5), (0.9, 0.9), (0.9, 0.99)])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_gradma_s_never_moves_against_a_remembered_update(beta1, beta2, server_lr):
    """In every round, with D kept by hand: ⟨m̃, D_i⟩ >= 0 for all i, ‖m̃‖ <= ‖p‖, ⟨m̃, p - m̃⟩ = 0,
    and x moves by server_lr m̃; m̃, not p, is what the next round's momentum carries. Some round
    must really project."""
    problem = Quadratics.random(6, 4, seed=2)
    federation = Federation(
        FedAvgClient(), GradMAServer(beta1=beta1, beta2=beta2, memory=6, lr=server_lr), problem,
        lr=0.3, steps=5, x0=9 * np.ones(4),
    )  # fmt: skip
    D, m, projected = np.zeros((6, 4)), np.zeros(4), 0
    for t in range(40):
        before = federation.x.copy()
        ids = [
            i for i in range(6) if t == 0 or (i + t) % 3
        ]  # at first all, then two absent in every round
        federation.round(ids)
        p = beta1 * m + np.mean([federation.deltas[i] for i in ids], axis=0)
        for i in range(6):
            D[i] = beta2 * D[i] + (federation.deltas[i] if i in ids else 0)
        m = (before - federation.x) / server_lr
        size = np.linalg.norm(p)
        norms = np.linalg.norm(D, axis=1)
        if size < 1e-6:  # it has stopped: what is left is rounding
            break
        assert (D @ m >= -1e-6 * size * norms).all(), t
        assert np.linalg.norm(m) <= size * (1 + 1e-9), t
        assert abs(m @ (p - m)) < 1e-9 * size**2, t
        projected += far(m, p) > 1e-6 * size
        columns = D[norms > 0].T / norms[norms > 0]
        assert far(m, p + columns @ nnls(columns, -p)[0]) < 1e-8 * size, t
    assert projected > 3


def test_gradma_s_stands_still_wherever_clients_contradict_each_other():
    """H = 1, I = 1, beta1 = beta2 = 0, all clients in every round: D_i = η (x - a_i), p their mean.
    m̃ = 0 exactly where -p is in the cone of the D_i, that is where 0 = Σ λ_i (x - a_i) with all
    λ_i > 0: anywhere inside the hull of the minima. FedAvg goes on to their mean."""
    problem = Quadratics([np.eye(2)] * 3, [[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    x0 = np.array([0.5, 0.7])
    server = GradMAServer(beta1=0.0, beta2=0.0, memory=3)
    stays = Federation(FedAvgClient(), server, problem, lr=0.5, steps=1, x0=x0)
    assert far(stays.run(20), x0) < 1e-12
    moves = Federation(FedAvgClient(), FedAvgServer(), problem, lr=0.5, steps=1, x0=x0)
    assert far(moves.run(60), problem.a.mean(axis=0)) < 1e-12


@pytest.mark.parametrize("beta1, beta2", [(0.0, 0.0), (0.5, 0.5)])
@pytest.mark.parametrize("equal", [True, False])
def test_gradma_s_stops_where_no_step_is_good_for_all(beta1, beta2, equal):
    """From far outside it comes to a stop at which p is cancelled by remembered updates (-p in the
    cone of D), which is not the optimum, and not where FedAvg stops either."""
    problem = Quadratics.random(4, 3, seed=4, equal_curvature=equal)
    federation = Federation(
        FedAvgClient(),
        GradMAServer(beta1=beta1, beta2=beta2, memory=4),
        problem,
        lr=0.2,
        steps=3,
        x0=20 * np.ones(3),
    )
    began = np.linalg.norm(np.mean([problem.grad(i, 20 * np.ones(3)) for i in range(4)], axis=0))
    federation.run(400)
    m, stopped = federation.state["m"].numpy(), federation.x.copy()
    assert np.linalg.norm(m) < 1e-6 * began
    assert far(federation.run(50), stopped) < 1e-3
    d = np.stack(
        [A @ (federation.x - a) for A, a in zip(problem.local_map(0.2, 3), problem.a, strict=True)]
    )
    _, left = nnls(d.T, -d.mean(axis=0))
    assert left < 1e-3 * np.linalg.norm(d.mean(axis=0))
    assert far(federation.x, problem.optimum()) > 0.1
    assert far(federation.x, problem.balance(problem.local_map(0.2, 3), "uniform")) > 0.1


# --- GradMA's clients


def projection(p: np.ndarray, columns: list[np.ndarray]) -> np.ndarray:
    """QP(p, columns), from its conditions: of all active sets the one with the least violated, each
    by least squares on the columns themselves (not on their Gram matrix, which has half the
    digits)."""
    U = np.stack([c / np.linalg.norm(c) for c in columns if np.linalg.norm(c) > 0], axis=1)
    best, least = p, np.inf
    for k in range(U.shape[1] + 1):
        for chosen in combinations(range(U.shape[1]), k):
            z = np.zeros(U.shape[1])
            if k:
                z[list(chosen)] = np.linalg.lstsq(U[:, list(chosen)], -p, rcond=None)[0]
            v = p + U @ z
            violation = max([0.0, *(-z), *(-(U.T @ v))])
            if violation < least - 1e-14:
                best, least = v, violation
    return best


@pytest.mark.parametrize("previous", ["memory", "reset"])
@pytest.mark.parametrize("first_previous", ["x0", "global"])
@pytest.mark.parametrize("lr", [0.3, 0.7, 1.1])
def test_gradma_w_steps_agree_with_all_three_constraints(previous, first_previous, lr):
    """g̃ = (y_τ - y_{τ+1}) / η is QP(g, [a, b, c]) with a = ∇f_i(y_{τ-1}) (at first ∇f_i(x')), b =
    ∇f_i(x), c = y_τ - x, all recomputed here. Its inner product with none of them is negative, and
    each of them is the reason somewhere: x' only once a client comes back. Clients come and go, so
    that x' is not x."""
    problem = Quadratics.random(4, 5, seed=3)
    federation = Federation(
        GradMAClient(previous=previous, first_previous=first_previous), FedAvgServer(), problem,
        lr=lr, steps=4, x0=5 * np.ones(5),
    )  # fmt: skip
    last: dict[int, np.ndarray] = {}
    reasons = {"a": 0, "b": 0, "c": 0, "x'": 0}
    for t in range(8):
        x, cohort = (
            federation.x.copy(),
            [i for i in range(4) if (i + t) % 4 < 2 or (t == 5 and i == 0)],
        )
        federation.round(cohort)
        for i in cohort:
            path = federation.paths[i]
            first = federation.x0.numpy() if first_previous == "x0" else x
            before = x if previous == "reset" else last.get(i, first)
            for y, after in pairwise(path):
                g, a, b, c = problem.grad(i, y), problem.grad(i, before), problem.grad(i, x), y - x
                step = (y - after) / lr
                size = np.linalg.norm(g)
                for name, column in (("a", a), ("b", b), ("c", c)):
                    assert column @ step >= -1e-6 * size * np.linalg.norm(column), (t, i, name)
                    if column @ g < -1e-6 * size * np.linalg.norm(column):
                        reasons["x'" if name == "a" and y is path[0] else name] += 1
                assert far(step, projection(g, [a, b, c])) < 1e-6 * size, (t, i)
                before = y
            last[i] = path[-1]
    if lr == 0.7:
        assert min(reasons["a"], reasons["b"], reasons["c"]) > 5
        assert (reasons["x'"] > 0) == (previous == "memory")


@pytest.mark.parametrize("small", [1e-1, 1e-2, 1e-3, 1e-4, 5e-6, 1e-8])
def test_gradma_w_constraints_hold_where_b_and_c_nearly_oppose_each_other(small):
    """f(w) = ½ (w_1² + ½ w_2²) from x = (1, 4 small) with η = 1: the first step solves for w_1, and
    after the second one c = -(b + about small · e_2). What is feasible is then orthogonal to both,
    and in the plane nothing is. So the answer is g̃ = 0; what may not happen is ⟨g̃, c⟩ < -1e-6 ‖g‖
    ‖c‖, in these units."""
    problem = Quadratics([np.diag([1.0, 0.5])], [[0.0, 0.0]])
    federation = Federation(
        GradMAClient(), FedAvgServer(), problem, lr=1.0, steps=4, x0=np.array([1.0, 4 * small])
    )
    federation.round()
    path = federation.paths[0]
    for y, after in pairwise(path):
        g, step, c = problem.grad(0, y), y - after, y - path[0]
        for column in (problem.grad(0, path[0]), c):
            assert column @ step >= -1e-6 * np.linalg.norm(g) * np.linalg.norm(column)


# --- everybody agrees


INSIDE = ("moon", "fedmlb", "fedreg", "fedreg_mg")
"""Client rules that look into a net, or at images; a quadratic has neither."""
STEADY = {
    "fedadagrad": {"lr": 8.0, "tau": 1.0}, "fedadam": {"lr": 1.0, "tau": 1.0}, "fedyogi": {"lr": 2.0, "tau": 1.0},
    "fedams": {"lr": 1.0, "tau": 1.0}, "mimelite": {"beta": 0.5}, "fedhist": {},
}  # fmt: skip
"""A τ so large that FedOpt's steps are in proportion to d at the end: with a small one it circles
round the place."""


def every_rule() -> list[tuple[str, str]]:
    """Pairs in which every rule occurs, beside plain averaging if possible. But FedDyn's halves need
    each other: its clients rest where ∇f_i = -α λ_i, and only its server makes the mean of the λ_i
    vanish."""
    pairs = []
    for client, server in all_pairs():
        # Rules of families look into nets, personalise or attack; tests/gallery has their oracles.
        # The steps of FedMGDA+ do not become shorter, and DP-FTRL adds noise.
        plain = client not in INSIDE and family(CLIENT_RULES[client].__module__) == "general"
        quiet = is_usual(SERVER_RULES[server]()) and server not in ("dp_ftrl", "fedmgda")
        if plain and quiet and (client == "feddyn") == (server == "feddyn"):
            pairs.append((client, server))
    return with_every_rule(sorted(pairs, key=lambda pair: "fedavg" not in pair))


@pytest.mark.parametrize("client, server", every_rule())
def test_identical_clients_reach_their_optimum(client, server):
    """All f_i equal: no drift, no contradiction, nothing to remember that would stand in the way."""
    problem = Quadratics.random(1, 3, seed=7)
    problem = Quadratics(np.repeat(problem.H, 4, axis=0), np.repeat(problem.a, 4, axis=0))
    momentum = ("beta", "beta1", "momentum")
    given = {key: 0.5 for key in momentum if hasattr(SERVER_RULES[server], key)}
    rule = SERVER_RULES[server](**{**given, **STEADY.get(server, {})})
    mine = CLIENT_RULES[client](**(STEADY["mimelite"] if client == "mimelite" else {}))
    federation = Federation(mine, rule, problem, lr=0.3, steps=4, x0=5 * np.ones(3))
    assert far(federation.run(400 if server in STEADY else 250), problem.a[0]) < 1e-6
