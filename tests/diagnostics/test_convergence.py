"""Theorem 1, its numbers written anew from the paper; what a run says of it, recomputed from the
vectors it has saved; and the quadratics on which everything about it is known."""

from __future__ import annotations

import json
import math
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.programs import program

import raysim
from raysim.config.sections.data import Data, Quadratics
from raysim.data import load_dataset, quadratics
from raysim.diagnostics import convergence, recorded_updates
from raysim.diagnostics.convergence import TheoremInputs
from raysim.diagnostics.full_gradients import FullGradients
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_trainer
from raysim.errors import ConfigError
from raysim.models.flat import BoundModel
from raysim.prepare.resolve import prepare
from raysim.reports.analysis import speedup
from raysim.runs.resume import resume
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask

LOG2 = math.log(2)
GIVEN = {
    "clients": 12,
    "dimensions": 6,
    "mu": 0.2,
    "L": 2.0,
    "spread": 2.0,
    "distance": 1.5,
    "seed": 3,
}
QUADRATICS = {
    "dtype": "float64",
    "rounds": 6,
    "data": {"name": "quadratics", "problem": GIVEN},
    "partition": "natural",
    "model": "quadratic",
    "local": {"steps": 2, "batch_size": "full", "lr": 0.1},
    "schedule": {"cohort": 4},
}
PROBLEM = quadratics.problem(Quadratics(**GIVEN))

# --- the numbers of Theorem 1


def sides(lr, server_lr, beta1, steps, cohort, clients, L):
    """(left, right) of the three conditions, as the paper has them."""
    I, S, N = steps, cohort, clients
    kappa, A = (N - S) / (S * (N - 1)), 40 * I * I * lr * lr * L * L
    ii = (1 - beta1) ** 2 * S * (N - 1) / (I * L * (beta1 * S * (N - 1) + 4 * N * (S - 1)))
    iii = (
        320 * I**2 * lr**2 * L**2 + 64 * I * server_lr * lr * L * (1 + A) * kappa / (1 - beta1) ** 2
    )
    return [(lr, 1 / (160**0.5 * L * I)), (server_lr * lr, ii), (iii, 1.0)]


CASES = [
    TheoremInputs(lr, server_lr, beta1, 0.5, steps, cohort, clients, 500)
    for lr, server_lr, beta1, steps, cohort, clients in [
        (0.01, 1.0, 0.9, 5, 10, 100),
        (0.0001, 0.3, 0.5, 5, 50, 100),
        (0.002, 4.0, 0.0, 20, 2, 30),
        (0.03, 0.001, 0.1, 1, 30, 30),
        (0.005, 2.0, 0.7, 3, 1, 1000),
    ]
]


def test_condition_two_of_the_published_setting():
    """L = 1, I = 5, N = 100, S = 10, beta1 = 0.9: 0.01 · 990 / (5 (891 + 3600)) = 4.4e-4."""
    product = convergence.conditions(CASES[0], 1.0)[1]
    assert product.limit == pytest.approx(9.9 / 22455) and product.limit == pytest.approx(
        4.4e-4, rel=0.01
    )
    assert not product.holds and product.share == pytest.approx(0.01 / product.limit)


@pytest.mark.parametrize("L", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("s", CASES)
def test_conditions_and_the_largest_step_sizes(s, L):
    def holding(lr, server_lr):
        return all(
            a <= b for a, b in sides(lr, server_lr, s.beta1, s.steps, s.cohort, s.clients, L)
        )

    expected = sides(s.lr, s.server_lr, s.beta1, s.steps, s.cohort, s.clients, L)
    for condition, (left, right) in zip(convergence.conditions(s, L), expected, strict=True):
        assert (condition.value, condition.limit) == pytest.approx((left, right), rel=1e-12)
        assert condition.holds == (left <= right)
    lr, server_lr = convergence.largest_lr(s, L), convergence.largest_server_lr(s, L)
    assert holding(lr * (1 - 1e-9), s.server_lr) and not holding(lr * (1 + 1e-6), s.server_lr)
    if server_lr:
        assert holding(s.lr, server_lr * (1 - 1e-9)) and not holding(s.lr, server_lr * (1 + 1e-6))
    else:
        assert not holding(s.lr, 1e-300)


def test_where_a_condition_allows_anything():
    alone = TheoremInputs(0.001, 1.0, 0.0, 0.0, 2, 1, 50, 10)
    assert convergence.conditions(alone, 1.0)[1].limit == math.inf
    everybody = TheoremInputs(
        0.001, 1.0, 0.0, 0.0, 2, 1, 1, 10
    )  # one client there is: nothing is left to chance
    assert convergence.largest_server_lr(everybody, 1.0) == math.inf
    assert convergence.conditions(everybody, 1.0)[2].value == pytest.approx(320 * 4e-6)


@pytest.mark.parametrize("s", CASES)
def test_bound_and_corollary(s):
    L, gap, eps_l, eps_g, rho2, I, S, N, T = (
        0.7,
        2.5,
        0.3,
        0.02,
        1.7,
        s.steps,
        s.cohort,
        s.clients,
        s.rounds,
    )
    kappa, A = (N - S) / (S * (N - 1)), 40 * I**2 * s.lr**2 * L**2
    c1 = (
        8
        + 320 * I**2 * s.lr**2 * L**2
        + 64 * I * s.server_lr * s.lr * L * (1 + A) * kappa / (1 - s.beta1) ** 2
    )
    c2 = 20 * s.server_lr * L / ((1 - s.beta1) ** 2 * (1 - s.beta2) * I * s.lr) + 8 / (
        (1 - s.beta2) * I**2 * s.lr**2
    )
    whole = (
        8 * (1 - s.beta1) * gap / (I * s.server_lr * s.lr * T)
        + c1 * eps_l**2
        + c2 * eps_g**2
        + (c1 - 8) * rho2
    )
    assert convergence.bound(s, L, gap, eps_l, eps_g, rho2) == pytest.approx(whole, rel=1e-12)
    assert convergence.corollary(s, L) == pytest.approx((1 / (T**0.5 * L * I), (S / I) ** 0.5))


# --- the quadratics


def test_optimum_and_smoothness_by_hand():
    """½ w² and ½ 3 (w - 4)²: their mean is least at 3, where it is ½ (½ 9 + 3/2)."""
    by_hand = quadratics.QuadraticProblem(np.array([[[1.0]], [[3.0]]]), np.array([[0.0], [4.0]]))
    assert (
        by_hand.optimum == pytest.approx([3.0])
        and by_hand.least == pytest.approx(3.0)
        and by_hand.L == 3.0
    )
    assert by_hand.gradients(np.array([1.0])).tolist() == [[1.0], [-9.0]]
    slope = [
        (by_hand.value(np.array([1 + h])) - by_hand.value(np.array([1 - h]))) / (2 * h)
        for h in (1e-5,)
    ]
    assert slope == pytest.approx([-4.0])


def test_the_problem_is_as_described():
    H, a = PROBLEM.H, PROBLEM.a
    values = np.linalg.eigvalsh(H)
    assert values == pytest.approx(np.tile(np.geomspace(0.2, 2.0, 6), (12, 1)))
    assert abs(PROBLEM.L - 2) < 1e-9 and np.abs(H[0] - H[1]).max() > 0.1 and a.shape == (12, 6)
    at_rest = PROBLEM.gradients(PROBLEM.optimum)
    assert np.abs(at_rest.mean(0)).max() < 1e-12 < np.abs(at_rest).max()
    assert (a - a.mean(0)).std() == pytest.approx(2.0, rel=0.3)
    other = quadratics.problem(Quadratics(**{**GIVEN, "seed": 4}))
    assert np.abs(other.a - a).max() > 0.1
    assert np.array_equal(quadratics.problem(Quadratics(**GIVEN)).a, a)


def test_any_method_sees_the_quadratics(base):
    """The cross-entropy of a client's examples is f_i + log 2, its gradient that of f_i: by the
    engine's own task."""
    plan = prepare({**base, **QUADRATICS, "algorithm": "fedavg"})
    trainer, rng = make_trainer(plan, "cpu").trainers[0], np.random.default_rng(0)
    assert (
        len(plan.clients) == 12
        and plan.problem.size == 6
        and torch.equal(plan.initial[0], torch.zeros(6).double())
    )
    for client in (0, 7):
        w = 3 * rng.standard_normal(6)
        (batch,) = trainer.client_batches.whole(plan.clients.client(client))
        task = LoopTask(plan.model(), LocalSettings())
        task.start(LocalSettings(), torch.from_numpy(w), torch.zeros(0), 1)
        gradient = task.grad(task.local_params, batch)
        away = w - PROBLEM.a[client]
        assert gradient.numpy() == pytest.approx(PROBLEM.H[client] @ away, abs=1e-12)
        assert float(task.losses[0]) == pytest.approx(0.5 * away @ PROBLEM.H[client] @ away + LOG2)


def test_the_loss_is_exact_near_0_and_far_away():
    net = raysim.models.nets.zoo.quadratic((1, 1, 2), 2)
    for r, expected in ((0.0, LOG2), (1e-3, 5e-7 + LOG2), (2e3, 2e6 + LOG2)):
        loss = torch.nn.functional.cross_entropy(
            net(torch.tensor([[[[1.0, r]]]])), torch.tensor([0])
        )
        (gradient,) = torch.autograd.grad(loss, list(net.parameters()))
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-6) and float(
            gradient
        ) == pytest.approx(-r, rel=1e-5)


def test_one_step_reaches_the_optimum_and_five_do_not(engine):
    """With everybody in every round; FedAvg stops where Σ A_i (x - a_i) = 0, A_i = 1 - (1 - η
    H_i)^I."""
    everybody = {**QUADRATICS, "algorithm": "fedavg", "schedule": {"cohort": 12}}

    def end(rounds: int, steps: int, lr: float) -> np.ndarray:
        local = {"steps": steps, "batch_size": "full", "lr": lr}
        return engine({**everybody, "rounds": rounds, "local": local})[0].executor.xs[-1]

    assert end(90, 1, 0.9) == pytest.approx(PROBLEM.optimum, abs=1e-6)
    five = end(60, 5, 0.4)
    A = np.stack([np.eye(6) - np.linalg.matrix_power(np.eye(6) - 0.4 * H, 5) for H in PROBLEM.H])
    stop = np.linalg.solve(A.sum(0), np.einsum("ijk,ik->j", A, PROBLEM.a))
    assert five == pytest.approx(stop, abs=1e-6) and np.linalg.norm(stop - PROBLEM.optimum) > 0.05


# --- what a run says


def eigen_share(gradients: np.ndarray) -> float:
    """max_i ‖H_i g_i‖ / ‖g_i‖."""
    return max(
        np.linalg.norm(H @ g) / np.linalg.norm(g) for H, g in zip(PROBLEM.H, gradients, strict=True)
    )


def watched(algorithm: object, **changes: object) -> dict:
    theory_ = {"every": 2, "f_star": LOG2 + PROBLEM.least}
    return {
        **QUADRATICS,
        "algorithm": algorithm,
        "evaluate": {"every": 0, "theory": theory_},
        **changes,
    }


@pytest.mark.parametrize(
    "algorithm", ["fedavg", {"name": "fedavgm", "beta1": 0.3}, {"name": "gradma", "memory": 12}]
)
def test_full_gradients_and_the_bound_are_those_of_the_saved_models(algorithm, engine):
    run, records = engine(watched(algorithm, rounds=5))
    evaluated = [int(r["round"]) for r in records if "theory/f" in r]
    assert evaluated == [0, 2, 4, 5]
    norms, L, rho2, eps_l, eps_g = [], 0.0, 0.0, 0.0, 0.0
    ball = {"fedavg": (0, 0), "fedavgm": (0.3, 0), "gradma": (0.9, 0.5)}
    beta1, beta2 = ball[algorithm if isinstance(algorithm, str) else algorithm["name"]]
    for t, record in enumerate(records):
        eps_l, eps_g = (
            max(eps_l, record.get("client/eps_l_max", 0)),
            max(eps_g, record.get("server/eps_g", 0)),
        )
        if t not in evaluated:
            assert not [key for key in record if key.startswith("theory/")]
            continue
        x = run.executor.xs[t]
        each = PROBLEM.gradients(x)
        mean = each.mean(0)
        apart = ((each - mean) ** 2).sum(1)
        L, rho2 = max(L, eigen_share(each)), max(rho2, apart.max())
        said = {k.removeprefix("theory/"): v for k, v in record.items() if k.startswith("theory/")}
        expected = {
            "f": PROBLEM.value(x) + LOG2,
            "grad_norm2": mean @ mean,
            "rho2_max": apart.max(),
        }
        expected |= {"rho2_mean": apart.mean(), "curvature": eigen_share(each), "L": L}
        shares = [a / b for a, b in sides(0.1, 1.0, beta1, 2, 4, 12, L)]
        expected |= {f"condition_{i + 1}": share for i, share in enumerate(shares)}
        if t:
            last = {
                "eps_l": "client/eps_l",
                "eps_l_max": "client/eps_l_max",
                "eps_g": "server/eps_g",
            }
            expected |= {mine: record.get(theirs, 0.0) for mine, theirs in last.items()}
            expected["grad_norm2_mean"] = np.mean(norms)
            s = TheoremInputs(0.1, 1.0, beta1, beta2, 2, 4, 12, t)
            gap = PROBLEM.value(run.executor.xs[0]) - PROBLEM.least
            expected["bound"] = convergence.bound(s, L, gap, eps_l, eps_g, rho2)
        assert said == {k: pytest.approx(v, rel=1e-8, abs=1e-12) for k, v in expected.items()}
        norms.append(mean @ mean)
    assert (eps_l > 0) == (beta2 > 0)


def test_weights_by_samples_and_a_sample_of_clients(engine):
    uneven = {"name": "dirichlet", "alpha": 0.3, "clients": 9}
    config = {
        "data": "digits",
        "rounds": 1,
        "schedule": {"cohort": 9},
        "algorithm": "fedavg",
        "model": "logistic",
        "dtype": "float64",
    }
    plan = prepare({**config, "partition": uneven})
    (x, buffers), trainer = plan.initial, make_trainer(plan, "cpu").trainers[0]
    full = FullGradients(trainer, np.arange(9), "samples").measure(x, buffers, False)
    bound = torch.zeros_like(x).requires_grad_()
    pixels = torch.from_numpy(plan.dataset.x[plan.clients.indices] / 16.0).flatten(1)
    named = plan.model().views(bound + x)
    loss = torch.nn.functional.cross_entropy(pixels @ named["0.0.1.weight"].T + named["0.0.1.bias"],
                                             torch.from_numpy(plan.dataset.y[plan.clients.indices]))  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, bound)
    assert full["f"] == pytest.approx(float(loss.detach())) and full["grad_norm2"] == pytest.approx(
        float(gradient @ gradient)
    )
    asked = {"every": 3, "sample": 5, "L": 2.0}
    records = engine({**watched("fedavg"), "evaluate": {"every": 0, "theory": asked}})[1]
    again = engine({**watched("fedavg"), "evaluate": {"every": 0, "theory": asked}})[1]
    assert [r["theory/f"] for r in records if "theory/f" in r] == [
        r["theory/f"] for r in again if "theory/f" in r
    ]
    values = 0.5 * np.einsum("ij,ijk,ik->i", PROBLEM.a, PROBLEM.H, PROBLEM.a) + LOG2
    sums = [np.mean(c) for c in combinations(values, 5)]
    assert (
        min(abs(records[0]["theory/f"] - s) for s in sums) < 1e-9
        and abs(values.mean() - records[0]["theory/f"]) > 1e-6
    )
    assert records[0]["theory/L"] == 2.0 and "theory/curvature" not in records[0]


def saved(base: dict, algorithm: dict) -> tuple[list, list, list[dict[str, float]]]:
    """A run of ten rounds of two steps: what was observed of everybody, x_t, and its records."""
    config = {
        **base,
        **watched(algorithm, rounds=10),
        "record_updates": {"rounds": list(range(10)), "clients": 4},
    }
    done = raysim.run(config)
    seen = [recorded_updates.read_observations(Path(base["run_dir"]), t) for t in range(10)]
    xs = [one[0].broadcast.global_params.numpy() for one in seen] + [done.parameters.numpy()]
    return seen, xs, done.history


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_eps_l_and_eps_g_are_those_of_the_saved_vectors(mode, base):
    """Of two steps the second is what the update leaves: y_1 = x - η g_0 where the QP has nothing
    to do (asserted), so g̃_1 = d / η - g_0, to be compared with g_1 = ∇f_i(y_1). And p = β1 m̃ +
    mean(d), m̃ = (x_t - x_{t+1}) / η_g."""
    base["batching"] = {"mode": mode, "size": 4}
    server = {"name": "gradma", "memory": 6, "beta1": 0.6, "beta2": 0.4, "lr": 0.8}
    seen, xs, history = saved(base, server)
    lr, server_lr, m = 0.1, 0.8, np.zeros(6)
    last = {}
    for t, clients in enumerate(seen):
        deltas = {one.client: one.uploads["delta"].numpy() for one in clients}
        moved = []
        for i, d in deltas.items():
            g0 = PROBLEM.H[i] @ (xs[t] - PROBLEM.a[i])
            a = PROBLEM.H[i] @ (last.get(i, xs[0]) - PROBLEM.a[i])
            assert g0 @ a >= 0
            g1 = PROBLEM.H[i] @ (xs[t] - lr * g0 - PROBLEM.a[i])
            moved.append(np.linalg.norm(d / lr - g0 - g1))
            last[i] = xs[t] - d
        record = history[t + 1]
        assert (
            record["client/eps_l"] == pytest.approx(np.mean(moved) / 2, rel=1e-7)
            and min(moved) > 0.01
        )
        assert record["client/eps_l_max"] == pytest.approx(max(moved), rel=1e-7)
        p = 0.6 * m + np.mean(list(deltas.values()), 0)
        m = (xs[t] - xs[t + 1]) / server_lr
        assert record["server/eps_g"] == pytest.approx(np.linalg.norm(p - m) * 0.6**0.5, abs=1e-10)
    assert max(record["server/eps_g"] for record in history[1:]) > 0.01


def test_without_it_the_bits_are_the_same_and_nothing_is_said(base):
    config = {
        **base,
        "rounds": 4,
        "partition": {"clients": 12},
        "model": {"name": "mlp", "hidden": [8]},
    }
    config |= {
        "algorithm": {"name": "gradma", "memory": 10},
        "local": {"steps": 2, "batch_size": "full"},
    }
    plain = raysim.run({**config, "run_dir": base["run_dir"] + "-plain"})
    with_it = raysim.run({**config, "evaluate": {"every": 0, "theory": {"every": 1}}})
    assert plain.digest == with_it.digest
    assert not [key for record in plain.history for key in record if key.startswith("theory/")]
    assert all("theory/bound" in record for record in with_it.history[1:])


def said(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k.startswith("theory/")} for record in history]


@pytest.mark.ray
def test_actors_and_a_resume_say_the_same(base, recycled_actors):
    config = {**base, **watched({"name": "gradma", "memory": 12}), "checkpoint": {"every": 1}}
    here = raysim.run({**config, "run_dir": base["run_dir"] + "-here"})
    raysim.run({**config, "rounds": 4})
    resumed = resume(base["run_dir"], ["rounds=6"])
    on_ray = {"resources": {"executor": "ray", "actors": 2, "threads": 1, "timeout": 300}}
    remote = raysim.run({**config, **on_ray, "run_dir": base["run_dir"] + "-ray"})
    assert said(here.history)[2]["theory/bound"] > 0
    assert said(remote.history) == said(resumed.history) == said(here.history)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedadam"])
def test_of_other_servers_it_says_what_it_can(algorithm, engine):
    records = engine(watched(algorithm))[1]
    assert "theory/grad_norm2_mean" in records[-1] and "theory/L" in records[-1]
    assert not {"theory/bound", "theory/condition_1", "theory/eps_g"} & set(records[-1])


def test_of_other_clients_there_is_no_bound(engine):
    records = engine(watched("fedprox"))[1]
    assert "theory/condition_3" in records[-1] and records[-1]["theory/eps_g"] == 0
    assert not {"theory/bound", "theory/eps_l"} & set(records[-1])


def test_gradients_of_parts_of_the_data_are_a_departure(engine, caplog):
    """The theorem has ‖g - g̃‖, g = ∇f_i, and nothing for the noise of mini-batches, which outlasts
    any T: the numbers come with a warning. A batch that no client fills is as good as a full one.
    """
    parts = {"local": {"steps": 2, "batch_size": 5, "lr": 0.1}}
    records = engine(watched("fedavg", **parts))[1]
    assert "theory/bound" in records[-1] and "do not follow full gradients" in caplog.text
    caplog.clear()
    parts["local"]["batch_size"] = 6
    assert "theory/bound" in engine(watched("fedavg", **parts))[1][-1] and not caplog.text


def test_the_bound_holds_for_plain_means_only(base, source, ragged):
    """Two clients, f_i = ½ (w ∓ 1)², of 49 and of 1 examples, one of them a round: sampling is
    uniform, so x hovers around 0 whatever the weights of a single client, while f = Σ n_i/n f_i has
    its minimum at 0.96. There ‖∇f‖² = 0.92 for ever; the bound goes to C3 ρ², which any small step
    makes less."""
    s = TheoremInputs(1e-4, 1.0, 0.0, 0.0, 1, 1, 2, 10**9)
    rho2 = max((1 - 0.96) ** 2, (-1 - 0.96) ** 2)
    assert (
        all(c.holds for c in convergence.conditions(s, 1.0))
        and convergence.bound(s, 1.0, 2.0, 0, 0, rho2) < 0.05 < 0.96**2
    )

    def told(**changes: object) -> str | None:
        uneven = {"name": "dirichlet", "alpha": 0.3, "clients": 9}
        given = {
            "data": "digits",
            "rounds": 2,
            "partition": uneven,
            "schedule": {"cohort": 3},
            "algorithm": "fedavg",
        }
        plan = prepare({**base, **given, **changes, "local": {"batch_size": "full"}})
        return convergence.why_not(plan) or "; ".join(convergence.departures(plan)) or None

    samples, sync = {"name": "fedavg", "weights": "samples"}, {"name": "sync", "cohort": 3}
    assert told() is None and told(partition=ragged([5, 5, 5]), algorithm=samples) is None
    assert "weighs" in str(told(algorithm=samples)) and "weighs" in str(
        told(algorithm="twafl", schedule=sync)
    )
    assert told(algorithm="dynsgd", schedule=sync) is None
    for key, value in (
        ("deadline", 1.0),
        ("client_dropout", {"rate": 0.1}),
        ("availability", {"period": 2, "open": 1}),
    ):
        assert "different numbers" in str(told(schedule={"cohort": 3, key: value}))
    empty = ragged([5, 5, 5, 0])
    assert (
        "different numbers" in str(told(partition=empty))
        and told(partition=empty, schedule={"cohort": 4}) is None
    )
    path = source("rule", RULE)
    assert "does more" in str(told(algorithm=f"{path}:Signs"))


NETS = program("convergence_nets")


def losses_of_one_client(
    engine, source, net: str, every: int = 2, **local: object
) -> tuple[Plan, list[float]]:
    config = {
        "data": "digits",
        "model": f"{source('nets', NETS)}:{net}",
        "partition": {"name": "iid", "clients": 1},
        "schedule": {"cohort": 1},
        "algorithm": "fedavg",
        "local": {"batch_size": "full", **local},
        "rounds": 2,
        "evaluate": {"every": 0, "theory": {"every": every}},
    }
    run, records = engine(config)
    return run.plan, [record["theory/f"] for record in records if "theory/f" in record]


def test_statistics_that_a_net_reads_are_those_of_the_global_model(engine, source):
    """However often they are read."""
    often, seldom = (
        losses_of_one_client(engine, source, "SubtractsMeans", every)[1] for every in (1, 2)
    )
    assert often[::2] == seldom


def test_frozen_statistics_are_the_initial_ones(engine, source):
    plan, (f, _) = losses_of_one_client(engine, source, "norm", buffers="frozen")
    bound, buffers = BoundModel.at_start(plan.model())
    x = torch.from_numpy(plan.dataset.x[plan.clients.indices] / 16.0).float()
    y = torch.from_numpy(plan.dataset.y[plan.clients.indices])
    outputs = bound.forward(x, "eval", buffers).detach()
    assert f == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)))


def test_random_numbers_of_a_net_are_a_departure(engine, source, caplog):
    losses_of_one_client(engine, source, "drawing")
    assert "do not follow full gradients" in caplog.text


RULE = program("convergence_rule")


# --- the estimate of L


def hessian(plan: Plan, client: int) -> torch.Tensor:
    """Of a client's mean cross-entropy at x_0, entry by entry."""
    mine = plan.clients.client(client)
    x, y = (
        torch.from_numpy(plan.dataset.x[mine] / 16.0).flatten(1),
        torch.from_numpy(plan.dataset.y[mine]),
    )

    def loss(w: torch.Tensor) -> torch.Tensor:
        a, b, c, d = plan.model().views(w).values()
        return torch.nn.functional.cross_entropy(torch.tanh(x @ a.T + b) @ c.T + d, y)

    return torch.autograd.functional.hessian(loss, plan.initial[0])  # type: ignore[return-value]


TANH = """
from torch import nn


def net():
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Tanh()), nn.Linear(2, 10))
"""


def test_the_power_method_and_the_curvature_along_gradients(base, source):
    """With batches smaller than a client's data, whose mean counts."""
    path = source("net", TANH)
    uneven = {
        "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
        "local": {"batch_size": 50},
        "schedule": {"cohort": 4},
    }
    plan = prepare(
        {
            **base,
            **uneven,
            "dtype": "float64",
            "rounds": 1,
            "algorithm": "fedavg",
            "model": f"{path}:net",
        }
    )
    gradients = FullGradients(make_trainer(plan, "cpu").trainers[0], np.arange(4), "uniform")
    H = [hessian(plan, i) for i in range(4)]
    largest = max(float(torch.linalg.eigvalsh(each).abs().max()) for each in H)
    found = gradients.largest_curvature(*plan.initial)
    assert 0.97 * largest < found < largest * (1 + 1e-9)
    gradients.bound.w.copy_(plan.initial[0])
    along = [gradients._gradient(i)[1] for i in range(4)]
    expected = max(float((h @ g).norm() / g.norm()) for h, g in zip(H, along, strict=True))
    assert gradients.measure(*plan.initial, True)["curvature"] == pytest.approx(expected)


# --- the commands


@pytest.fixture
def file(base, tmp_path):
    def write(**config: object) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**base, **QUADRATICS, "algorithm": "gradma", **config}))
        return path

    return write


def test_the_command_tells_conditions_and_largest_step_sizes(raysim_, file):
    code, out, err = raysim_(
        "check-convergence", file(), "L=1", "local.lr=0.001", "algorithm.beta1=0.9", "--json"
    )
    assert code == 0 and "holds" in err and "largest local.lr" in err
    told = json.loads(out.splitlines()[-1])
    for condition, (left, right) in zip(
        told["conditions"], sides(0.001, 1.0, 0.9, 2, 4, 12, 1.0), strict=True
    ):
        assert (condition["value"], condition["limit"], condition["holds"]) == pytest.approx(
            (left, right, left <= right)
        )
    s = TheoremInputs(0.001, 1.0, 0.9, 0.5, 2, 4, 12, 6)
    assert told["largest_lr"] == convergence.largest_lr(s, 1.0) and told[
        "largest_server_lr"
    ] == convergence.largest_server_lr(s, 1.0)
    code, out, _ = raysim_("check-convergence", file(), "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["L"] == pytest.approx(2.0, rel=0.02)
    code, out, _ = raysim_(
        "check-convergence", file(), "algorithm=fedavg", "schedule.cohort=1", "L=2.0", "--json"
    )
    assert json.loads(out.splitlines()[-1])["conditions"][1]["limit"] is None  # infinite


MANY = {
    "data": "digits",
    "partition": {"name": "virtual", "clients": 1_000_000, "samples": 100},
    "model": "mlp",
}


@pytest.mark.parametrize(
    ("changes", "arguments", "parts"),
    [
        ({}, ["L=-1"], ["L: '-1'", "not a positive number"]),
        ({}, ["L=two"], ["L: 'two'"]),
        ({}, ["algorithm=scaffold"], ["server rule 'scaffold'"]),
        ({"schedule": {"name": "kasync", "k": 4}}, [], ["not synchronous"]),
        ({}, ["local.lr=[[0, 0.1], [3, 0.01]]"], ["change with the rounds"]),
        ({}, ["local.max_grad_norm=1"], ["local.max_grad_norm"]),
        (MANY, [], ["floating-point operations", "give L=", "--sample"]),
        ({}, ["model=mlp"], ["model.name", "quadratic"]),
        ({"data": "digits", "partition": "iid"}, [], ["model.name", "data.name=quadratics"]),
        ({}, ["data.problem.mu=3"], ["data.problem", "'mu'"]),
        ({}, ["data.augment=true"], ["data.augment"]),
        ({"data": {"name": "digits", "problem": {"clients": 3}}}, [], ["data.problem", "quadratics"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(changes, arguments, parts, raysim_, file):
    code, _, err = raysim_("check-convergence", file(**changes), *arguments)
    assert code == 2 and "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**MANY, "rounds": 10}, "sample"),
        ({"data": "digits", "model": {"name": "mlp", "hidden": [1000, 1000]}, "rounds": 20_000}, "every"),
    ],
)  # fmt: skip
def test_what_costs_too_much_says_so_and_what_would_do(config, key, base):
    asked = {"every": 0, "theory": {"every": 1}}
    with pytest.raises(ConfigError) as caught:
        prepare({**base, "algorithm": "fedavg", **config, "evaluate": asked})
    message = str(caught.value)
    assert message.startswith("evaluate.theory: ") and "floating-point operations" in message
    assert caught.value.exit_code == 2
    value = int(re.search(rf"evaluate\.theory\.{key}=(\d+)", message)[1])
    asked["theory"][key] = value
    if key == "sample":
        asked["theory"]["every"] = 10
    assert (
        prepare({**base, "algorithm": "fedavg", **config, "evaluate": asked}).config.evaluate.theory
        is not None
    )
    asked["theory"][key] = value * 3 if key == "sample" else value // 3
    with pytest.raises(ConfigError):
        prepare({**base, "algorithm": "fedavg", **config, "evaluate": asked})


# --- the linear speed-up


def test_the_slope_of_a_law_is_found():
    """The mean of squared norms falls as c √(1 / (S T)), so that T = (c / target)² / S."""
    ends = [(seed, S, T, (1 + seed / 10) * (S * T) ** -0.5)
            for seed in range(3) for S in (1, 2, 5, 10) for T in (50 // S, 500 // S)]  # fmt: skip
    lines = speedup.speedup(ends, 0.1, print)
    for seed, line in lines.items():
        assert line == {S: pytest.approx(((1 + seed / 10) / 0.1) ** 2 / S) for S in (1, 2, 5, 10)}
    found = speedup.slope(lines)
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((-1, -1, -1, 3))


def test_the_interval_is_students():
    lines = {seed: {1.0: 1.0, 10.0: 10.0**k} for seed, k in enumerate((-0.9, -1.0, -1.2))}
    found, t = speedup.slope(lines), 4.302653  # of two degrees of freedom, 97.5 %
    mean = -3.1 / 3
    half = t * np.std([-0.9, -1.0, -1.2], ddof=1) / 3**0.5
    assert (found.mean, found.low, found.high) == pytest.approx((mean, mean - half, mean + half))


def test_a_target_must_lie_between_two_lengths():
    told: list[str] = []
    ends = [(s, S, T, T**-0.5) for s in (0, 1) for S in (1, 2, 4) for T in (4, 16)] + [
        (0, 8, 100, 0.1),
        (0, 9, 4, 0.1),
    ]
    assert set(speedup.speedup(ends, 0.3, told.append)[0]) == {1, 2, 4}
    assert len(told) == 2 and "seed 0, 8" in told[0]
    with pytest.raises(ConfigError, match="needs at least two"):
        speedup.speedup(ends, 0.9, told.append)
    with pytest.raises(ConfigError, match="two runs have 4 rounds"):
        speedup.speedup([*ends, (0, 1, 4, 0.3)], 0.3, told.append)


def test_the_shipped_experiment_has_the_step_sizes_of_the_corollary():
    shipped = yaml.safe_load(
        (Path(convergence.__file__).parents[2] / "configs/theory/speedup.yaml").read_text()
    )
    steps, L = shipped["local"]["steps"], shipped["data"]["problem"]["L"]
    assert load_dataset(Data(**shipped["data"])).group_names[-1] == "client 199"
    assert {line["schedule.cohort"] for line in shipped["sweep"]} == {1, 2, 5, 10, 20, 50}
    for line in shipped["sweep"]:
        T, S = line["rounds"], line["schedule.cohort"]
        assert line["local.lr"] == pytest.approx(1 / (T**0.5 * L * steps), rel=1e-5)
        assert line["algorithm.lr"] == pytest.approx((S / steps) ** 0.5, rel=1e-5)


@pytest.mark.usefixtures("pictures")
@pytest.mark.ray
def test_from_runs_to_a_figure(base, raysim_, tmp_path):
    uri = base["tracking"]["uri"]
    for number, (seed, S, T) in enumerate(
        [(s, S, T) for s in (0, 1) for S in (2, 8) for T in (10, 80)]
    ):
        asked = {"every": 0, "theory": {"every": 1, "L": 2.0}}
        step = {"steps": 2, "batch_size": "full", "lr": 1 / (T**0.5 * 4)}
        own = {
            "run_dir": str(tmp_path / f"run-{number}"),
            "tracking": {"uri": uri, "experiment": "law"},
        }
        own |= {
            "seed": seed,
            "rounds": T,
            "schedule": {"cohort": S},
            "local": step,
            "checkpoint": {"every": 0},
        }
        own |= {"algorithm": {"name": "fedavg", "lr": (S / 2) ** 0.5}, "evaluate": asked}
        raysim.run({**base, **QUADRATICS, **own})
    out = tmp_path / "law.png"
    code, text, err = raysim_("report", "speedup", "law", "--target", 5, "--uri", uri, "--out", out)
    assert code == 0, err
    slope = re.search(
        r"slope (-\d\.\d+), 95 % interval \[(-?\d+\.\d+), (-?\d+\.\d+)\] over 2 seeds", text
    )
    assert (
        slope
        and -2 < float(slope[1]) < -0.5
        and float(slope[2]) <= float(slope[1]) <= float(slope[3])
    )
    assert out.stat().st_size > 5000 and "| 8 |" in text
    assert (
        raysim_("report", "speedup", "law", "--target", 5, "--uri", uri, "--over", "data.name")[0]
        == 2
    )
    assert raysim_("report", "speedup", "law", "--target", 1e9, "--uri", uri)[0] == 2
