"""Where the baselines end up, on the quadratics of test_fixed_points.py: f_i(w) = ½ (w - a_i)ᵀ H_i
(w - a_i) with full gradients, so that I local steps of η from x leave d_i = A_i (x - a_i), A_i = I
- (I - η H_i)^I, and FedAvg stops where Σ w_i A_i (x - a_i) = 0, which is not the optimum. Each test
derives what its method claims; FedAvg is what it is set against.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import fednova
from support.quadratics import Federation, Quadratics, far

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules.contract import CLIENT_RULES, SERVER_RULES

START = np.ones(4)
WEIGHTS = pytest.mark.parametrize("how", ["uniform", "samples"])
PARTIAL = [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
"""Two clients of five, each in two of five rounds."""


def made(client: str, server: str, problem: Quadratics, *, of_client: dict[str, Any] | None = None, lr: float = 0.2,
         steps: int | list[int] = 10, **of_server: Any) -> Federation:  # fmt: skip
    return Federation(CLIENT_RULES[client](**(of_client or {})), SERVER_RULES[server](**of_server), problem, lr=lr, steps=steps,
                      x0=START)  # fmt: skip


def heterogeneous() -> Quadratics:
    """Five clients, and the two optima and the place where FedAvg stops well apart."""
    problem = Quadratics.random(5, 4, seed=1)
    places = [problem.optimum(how) for how in ("uniform", "samples")]
    places += [problem.balance(problem.local_map(0.2, 10), how) for how in ("uniform", "samples")]
    assert min(far(p, q) for i, p in enumerate(places) for q in places[:i]) > 0.1
    return problem


def partially(federation: Federation, rounds: int) -> list[np.ndarray]:
    """x after each of the rounds, with `PARTIAL` cohorts."""
    xs = []
    for t in range(rounds):
        federation.round(PARTIAL[t % len(PARTIAL)])
        xs.append(federation.x.copy())
    return xs


def jump(xs: list[np.ndarray]) -> float:
    """How far x still moves within the last five rounds."""
    return max(far(x, xs[-1]) for x in xs[-6:])


# --- SCAFFOLD


@pytest.mark.parametrize("option", ["I", "II"])
@WEIGHTS
def test_scaffold_reaches_the_optimum_of_the_plain_average(option, how):
    """At rest no c_i changes. Option II: c_i+ = c_i means d_i = K η c for all i; x at rest then
    says K η c = 0. Option I: c_i = ∇f_i(x), each client begins with the direction c and leaves d_i
    = A_i H_i⁻¹ c; Σ w_i A_i H_i⁻¹ is positive definite, so again c = 0. With c = 0 and d_i = 0,
    ∇f_i(x) = c_i; and Σ c_i = N c = 0. So Σ ∇f_i(x) = 0: the optimum of the plain average also
    where the server weighs by samples, because c never does."""
    problem = heterogeneous()
    federation = made("scaffold", "scaffold", problem, of_client={"option": option}, weights=how)
    reached = federation.run(300)
    assert far(reached, problem.optimum("uniform")) < 1e-9
    for i, row in federation.rows.items():
        assert far(row["c_i"].numpy(), problem.grad(i, reached)) < 1e-8
    assert np.linalg.norm(federation.state["c"].numpy()) < 1e-9
    fedavg = made("fedavg", "fedavg", problem, weights=how).run(60)
    assert far(fedavg, problem.optimum(how)) > 0.1 and far(fedavg, problem.optimum("uniform")) > 0.1


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffolds_c_is_the_mean_of_the_c_i(option):
    """Full participation and equal weights: (1/N) Σ (c_i+ - c_i) is added to c, and both began at
    0."""
    federation = made("scaffold", "scaffold", heterogeneous(), of_client={"option": option})
    for _ in range(10):
        federation.round()
        rows = [row["c_i"].numpy() for row in federation.rows.values()]
        assert far(federation.state["c"].numpy(), np.mean(rows, axis=0)) < 1e-12 * np.linalg.norm(
            rows
        )
        assert np.linalg.norm(federation.state["c"].numpy()) > 1e-6


def test_scaffold_comes_to_rest_with_two_clients_of_five():
    """The place above is one of rest for every single client, so it does not matter who comes.
    FedAvg has no such place: each cohort pulls it to its own."""
    problem = heterogeneous()
    xs = partially(made("scaffold", "scaffold", problem, lr=0.1, steps=5), 1500)
    assert far(xs[-1], problem.optimum()) < 1e-8
    assert jump(xs) < 1e-8
    assert jump(partially(made("fedavg", "fedavg", problem, lr=0.1, steps=5), 60)) > 0.5


# --- FedDyn


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@WEIGHTS
def test_feddyn_reaches_the_optimum_of_the_plain_average(alpha, how):
    """At rest no λ_i changes: y_i = x for all i. So a = x whatever the weights, hence h = 0, the
    mean of the λ_i; and a client that starts at x and stays has ∇f_i(x) + α λ_i = 0. Sum: Σ ∇f_i(x)
    = 0."""
    problem = heterogeneous()
    federation = made("feddyn", "feddyn", problem, of_client={"alpha": alpha}, weights=how)
    reached = federation.run(400)
    assert far(reached, problem.optimum("uniform")) < 1e-8
    for i, row in federation.rows.items():
        assert far(-alpha * row["lambda"].numpy(), problem.grad(i, reached)) < 1e-7


@WEIGHTS
def test_feddyn_with_scaled_alpha_reaches_the_optimum_by_samples(how):
    """The same with α_i = α n̄ / n_i: -λ_i = ∇f_i(x) / α_i is n_i ∇f_i(x) / (α n̄), and their sum
    is still 0. So the place is the optimum of Σ n_i f_i, again whatever the server's weights."""
    problem = heterogeneous()
    scaled = {"alpha": 0.3, "scale_alpha": True}
    reached = made("feddyn", "feddyn", problem, of_client=scaled, weights=how).run(400)
    assert far(reached, problem.optimum("samples")) < 1e-8


# --- MIFA


@pytest.mark.parametrize(
    "server, more", [("mifa", {}), ("mifa", {"wait": True}), ("mifam", {"beta1": 0.4})]
)
@WEIGHTS
def test_mifa_with_few_clients_rests_where_fedavg_does_with_all(server, more, how):
    """Everybody comes again and again, so at rest row i is d_i = A_i (x - a_i), and x at rest says
    that Σ ω_i A_i (x - a_i) = 0 (with momentum: m = β1 m, hence 0): where FedAvg stops with full
    participation. With these cohorts FedAvg itself goes on jumping from one's place to the next
    one's. MIFA's rows are old: it needs small steps."""
    problem = heterogeneous()
    place = problem.balance(problem.local_map(0.2, 10), how)
    rule = SERVER_RULES[server](weights=how, lr=0.2, **more)
    xs = partially(Federation(FedAvgClient(), rule, problem, lr=0.2, steps=10, x0=START), 600)
    assert far(xs[-1], place) < 1e-8
    assert jump(xs) < 1e-8
    assert far(made("fedavg", "fedavg", problem, weights=how).run(200), place) < 1e-9
    fedavg = Federation(
        FedAvgClient(), FedAvgServer(weights=how, lr=0.2), problem, lr=0.2, steps=10, x0=START
    )
    assert jump(partially(fedavg, 60)) > 0.1


def test_mifa_takes_a_client_never_seen_for_one_at_rest():
    """Row 0 for it: with three of five clients ever present, x rests where their three d_i balance;
    the divisor N = 5 changes the speed alone: in the first round x moves by 3/5 of their mean.
    Waiting, x does not move at all."""
    problem = heterogeneous()
    A = problem.local_map(0.2, 10)
    three = Quadratics(problem.H[:3], problem.a[:3])
    federation = made("fedavg", "mifa", problem)
    federation.round([0, 1, 2])
    d = np.stack([A[i] @ (START - problem.a[i]) for i in range(3)])
    assert far(federation.x, START - d.sum(axis=0) / 5) < 1e-12
    for _ in range(200):
        federation.round([0, 1, 2])
    assert far(federation.x, three.balance(A[:3], "uniform")) < 1e-9
    waiting = made("fedavg", "mifa", problem, wait=True)
    for cohort in ([0, 1, 2], [2, 3], [0, 3]):
        waiting.round(cohort)
        assert far(waiting.x, START) == 0
    waiting.round([4])
    d = np.stack([A[i] @ (START - problem.a[i]) for i in range(5)])  # all taken at the same x
    assert far(waiting.x, START - d.mean(axis=0)) < 1e-12


# --- FedNova

TAU = [1, 3, 9, 2, 6]
KINDS = [{}, {"rho": 0.5}, {"mu": 0.7}]


def work_and_map(
    problem: Quadratics, lr: float, rho: float = 0.0, mu: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """a_i [N], and A_i [N, P, P] with d_i = A_i (x - a_i) after `TAU` steps: y - a = R (x - a) and
    the momentum U (x - a), from R = I, U = 0, move by U <- ρ U + H R + μ (R - I), R <- R - η U."""
    eye = np.eye(problem.H.shape[1])
    maps = []
    for H, steps in zip(problem.H, TAU, strict=True):
        R, U = eye, 0 * eye
        for _ in range(steps):
            U = rho * U + H @ R + mu * (R - eye)
            R = R - lr * U
        maps.append(eye - R)
    return np.array([fednova.work(steps, lr=lr, rho=rho, mu=mu) for steps in TAU]), np.stack(maps)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@WEIGHTS
def test_fednova_stops_where_normalised_updates_balance(kind, how):
    """x at rest: Σ q_i d_i / a_i = 0 with d_i = A_i (x - a_i). τ_eff and momentum change the way
    there alone."""
    problem = heterogeneous()
    a, A = work_and_map(problem, 0.1, **kind)
    place = problem.balance(A / a[:, None, None], how)
    for more in ({}, {"beta1": 0.5}):
        reached = made(
            "fednova", "fednova", problem, of_client=kind, lr=0.1, steps=TAU, weights=how, **more
        ).run(250)
        assert far(reached, place) < 1e-9
    assert far(place, problem.balance(A, how)) > 0.1  # without the a_i


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fednova_has_the_optimum_in_the_limit_of_small_steps_and_fedavg_has_not(kind):
    """d_i = η a_i H_i (x - a_i) + O(η²): each gradient of a local step has the weight that a_i adds
    up. So FedNova stops where Σ q_i H_i (x - a_i) = O(η), at a distance O(η) of the optimum by
    samples: half the η, half the distance. FedAvg by samples goes to the optimum of Σ q_i a_i f_i
    instead, and stays away."""
    problem = heterogeneous()
    optimum, nova, plain, biased = problem.optimum("samples"), [], [], []
    for lr in (1e-2, 5e-3, 2.5e-3):
        a, A = work_and_map(problem, lr, **kind)
        nova.append(far(problem.balance(A / a[:, None, None], "samples"), optimum))
        plain.append(far(problem.balance(A, "samples"), optimum))
        biased.append(
            far(
                problem.balance(A, "samples"),
                problem.balance(a[:, None, None] * problem.H, "samples"),
            )
        )
    for errors in (nova, biased):
        assert 1.8 < errors[0] / errors[1] < 2.2 and 1.8 < errors[1] / errors[2] < 2.2
    assert min(plain) > 10 * max(nova) and min(plain) > 0.2
    for client, given, errors in (("fednova", kind, nova), ("fedavg", {}, plain)):
        if client == "fednova" or not kind:  # a large step of the server, to get there in time
            rule = SERVER_RULES[client](lr=5.0, weights="samples")
            federation = Federation(
                CLIENT_RULES[client](**given), rule, problem, lr=1e-2, steps=TAU, x0=START
            )
            assert far(federation.run(150), optimum) == pytest.approx(errors[0], rel=1e-3)


# --- MimeLite


def mimelite_place(problem: Quadratics, lr: float, steps: int, beta: float, how: str) -> np.ndarray:
    """m at rest is ∇F(x) = Σ w_j H_j (x - a_j). A client's step y <- y - η ((1 - β) H (y - a) + β
    m) leaves the point a - β/(1 - β) H⁻¹ m in place, so d_i = C_i ((x - a_i) + β/(1 - β) H_i⁻¹ m),
    C_i = I - (I - η (1 - β) H_i)^I. x at rest: Σ w_i d_i = 0, a linear system."""
    C, w = problem.local_map(lr * (1 - beta), steps), problem.weights(how)
    G = np.einsum("i,ijk->jk", w, problem.H)
    g = np.einsum("i,ijk,ik->j", w, problem.H, problem.a)
    K = beta / (1 - beta) * sum(w[i] * C[i] @ np.linalg.inv(problem.H[i]) for i in range(len(w)))
    left = np.einsum("i,ijk->jk", w, C) + K @ G
    return np.linalg.solve(left, np.einsum("i,ijk,ik->j", w, C, problem.a) + K @ g)


@WEIGHTS
def test_mimelite_stops_at_its_closed_form_nearer_to_the_optimum(how):
    """`mimelite_place`: FedAvg's own at β = 0. It has no control variates, so it does not reach the
    optimum; but the more of a step is the common m, the less of it drifts."""
    problem = heterogeneous()
    optimum, distance = problem.optimum(how), []
    assert (
        far(
            mimelite_place(problem, 0.2, 10, 0.0, how),
            problem.balance(problem.local_map(0.2, 10), how),
        )
        < 1e-10
    )
    for beta in (0.0, 0.8):
        given = {"beta": beta}
        federation = made("mimelite", "mimelite", problem, of_client=given, weights=how, **given)
        reached = federation.run(300)
        assert far(reached, mimelite_place(problem, 0.2, 10, beta, how)) < 1e-8
        gradient = sum(w * problem.grad(i, reached) for i, w in enumerate(problem.weights(how)))
        assert far(federation.state["m"].numpy(), gradient) < 1e-8
        distance.append(far(reached, optimum))
    assert distance == sorted(distance, reverse=True) and distance[-1] > 0.01


@WEIGHTS
def test_mimelite_with_one_step_reaches_the_optimum(how):
    """I = 1: d = η ((1 - β) ∇F(x) + β m) and m = ∇F(x) at rest: η ∇F(x) = 0."""
    problem, given = heterogeneous(), {"beta": 0.7}
    reached = made(
        "mimelite", "mimelite", problem, of_client=given, steps=1, weights=how, **given
    ).run(500)
    assert far(reached, problem.optimum(how)) < 1e-8


def test_undamped_mimelite_is_mimelite_with_a_smaller_lr():
    """m undamped is m / (1 - β), so η (1 - β) (∇f + β m / (1 - β)) = η ((1 - β) ∇f + β m): always
    the same x."""
    problem, given = heterogeneous(), {"beta": 0.6}
    damped = made("mimelite", "mimelite", problem, of_client=given, lr=0.2, **given)
    given = {**given, "damped": False}
    undamped = made("mimelite", "mimelite", problem, of_client=given, lr=0.08, **given)
    for _ in range(8):
        before = damped.x.copy()
        assert far(damped.run(1), undamped.run(1)) < 1e-12
        assert far(before, damped.x) > 1e-3


# --- FedOpt


@pytest.mark.parametrize(
    "server, lr", [("fedadagrad", 4.0), ("fedadam", 1.0), ("fedyogi", 1.5), ("fedams", 1.0)]
)
@WEIGHTS
def test_adaptive_servers_change_the_way_and_not_the_place(server, lr, how):
    """x at rest needs m = 0, that is Δ = 0: FedAvg's own place, drift and all. With τ = 1 the last
    steps are a fraction of d."""
    problem = heterogeneous()
    rule = SERVER_RULES[server](lr=lr, tau=1.0, beta1=0.5, weights=how)
    federation = Federation(FedAvgClient(), rule, problem, lr=0.2, steps=10, x0=START)
    assert far(federation.run(200), problem.balance(problem.local_map(0.2, 10), how)) < 1e-6


def test_the_first_adaptive_steps_by_hand():
    """From m = 0 and v = τ²: m_1 = (1 - β1) Δ, and Adam's v_1 = β2 τ² + (1 - β2) Δ², Adagrad's τ² +
    Δ², Yogi's τ² ± (1 - β2) Δ², towards Δ²; nothing is corrected for its bias."""
    problem, tau = heterogeneous(), 0.9
    A = problem.local_map(0.2, 10)
    delta = -np.mean([A[i] @ (START - problem.a[i]) for i in range(5)], axis=0)
    assert (np.abs(delta) > tau).any() and (np.abs(delta) < tau).any()  # Yogi goes up and down
    adam = 0.8 * tau**2 + 0.2 * delta**2
    divisor = {
        "fedadagrad": np.sqrt(tau**2 + delta**2) + tau,
        "fedadam": np.sqrt(adam) + tau,
        "fedyogi": np.sqrt(tau**2 + 0.2 * delta**2 * np.sign(delta**2 - tau**2)) + tau,
        "fedams": np.sqrt(np.maximum(adam, tau)),
    }
    for server, root in divisor.items():
        more = {} if server == "fedadagrad" else {"beta2": 0.8}
        rule = SERVER_RULES[server](lr=0.3, tau=tau, beta1=0.4, **more)
        federation = Federation(FedAvgClient(), rule, problem, lr=0.2, steps=10, x0=START)
        assert far(federation.run(1), START + 0.3 * 0.6 * delta / root) < 1e-12, server
