"""Methods that mix models or choose clients, against their papers' formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle.batches import batch_sizes
from oracle.nets import log_softmax, split
from support.gallery_runs import BODY, LR, NET, SIZES, Done, check, gradient, net
from support.oracle_cases import MODES, by_round, distance, feed
from support.server_rules import rule
from torch.nn.functional import cross_entropy

from raysim.config.sections.data import Data
from raysim.data import load_dataset
from raysim.randomness import generator
from raysim.rules import Reports

SEED = 2
FALLING = [[0, LR], [1, 0.7 * LR], [3, 0.4 * LR]]
"""A schedule of the local step size."""
F, C = 8, 10
"""Features below the classifier, and classes."""
EMPTY = [*SIZES, 0]
"""The last client has no examples."""
EPOCHS = {"epochs": 2, "lr": FALLING}
"""Local steps of which the clients take unequally many."""


@pytest.fixture
def train(train_method: Callable[..., Done]) -> Callable[..., Done]:
    return train_method


def sgd(w: np.ndarray, batches: list, lr: float) -> np.ndarray:
    for X, y in batches:
        w = w - lr * NET.grad(w, X, y)
    return w


def features(w: np.ndarray, X: np.ndarray) -> np.ndarray:
    W, b = split(w, NET.shapes)[:2]
    return np.maximum(X @ W.T + b, 0.0)


def losses(w: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cross-entropy of each example."""
    W, b = split(w, NET.shapes)[2:]
    return -log_softmax(features(w, X) @ W.T + b)[np.arange(len(y)), y]


def samples(done: Done, cohort: list[int]) -> np.ndarray:
    """The clients' shares of the round's examples."""
    n = np.array([len(done.feed.data[i][1]) for i in cohort])
    return n / n.sum()


def validation(done: Done) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """The clients' validation examples (X, y)."""
    data, mine = done.engine.plan.dataset, done.engine.plan.clients.val
    scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
    found = {}
    for i in range(len(mine)):
        x = data.x[mine.client(i)].astype(np.float64) * scale + shift
        found[i] = x.reshape(len(x), 64), data.y[mine.client(i)]
    return found


def choose(pool: list[int], scores: np.ndarray, m: int, epsilon: float, rng: Any) -> list[int]:
    """Up to m of the pool: each is the best that is left, or with probability ε a random one."""
    order, u = rng.permutation(pool).astype(int).tolist(), rng.random(m)
    ranked = sorted(pool, key=lambda n: (-scores[n], n))
    chosen: list[int] = []
    for s in range(min(m, len(pool))):
        source = order if u[s] < epsilon else ranked
        chosen.append(next(n for n in source if n not in chosen))
    return chosen


@pytest.mark.parametrize("mode", MODES)
def test_fedfomo(mode, train):
    """Zhang 2021, eq. 5 to 7: w_n = (L(θ_i) - L(θ_n)) / |θ_n - θ_i| on validation examples, θ_i <- θ_i
    + Σ w⁺_n (θ_n - θ_i) with Σ w⁺ = 1; the server sends the models of the largest sums of w_n, or
    random ones."""
    n, m, epsilon, decay = len(EMPTY), 2, 0.6, 0.1
    done = train(
        mode,
        {"name": "fedfomo", "M": m, "epsilon": epsilon, "decay": decay},
        sizes=EMPTY,
        rounds=8,
        partition={"val": {"fraction": 0.3}},
        local=EPOCHS,
    )
    x0, val = done.feed.x0, validation(done)
    models, P, trained = np.tile(x0, (n, 1)), np.eye(n), np.zeros(n)
    start, own, seen = {}, {}, {"negative": 0, "none": 0, "mixed": 0, "fewer": 0, "explored": 0}
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        rng, after, before = generator(SEED, "server rule models", t), models.copy(), P.copy()
        for i in cohort:
            pool = [j for j in range(n) if trained[j] and j != i]
            chosen = choose(pool, before[i], m, max(epsilon - t * decay, 0), rng)
            best = sorted(pool, key=lambda j, i=i, P=before: (-P[i, j], j))[: len(chosen)]
            row = done.states[t]["chosen"][i]
            assert row.tolist() == chosen + [-1] * (m - len(chosen))
            theta = start.get(i, x0)
            candidates = [own.get(i, x0), *(models[j] for j in chosen)]
            w = np.zeros(len(candidates))
            for k, model in enumerate(candidates):
                length = np.linalg.norm(model - theta)
                if length > 0:
                    w[k] = (NET.loss(theta, *val[i]) - NET.loss(model, *val[i])) / length
            positive = np.maximum(w, 0)
            begin = theta
            if positive.sum() > 0:
                shares = positive / positive.sum()
                begin = theta + sum(
                    a * (c - theta) for a, c in zip(shares, candidates, strict=True)
                )
            start[i], own[i] = begin, sgd(begin, done.batches(t, i), by_round(FALLING)(t))
            after[i] = own[i]
            P[i, chosen] += w[1:]
            seen["negative"] += int((w < 0).sum())
            seen["none"] += bool(len(w) > 1 and positive.sum() == 0)
            seen["mixed"] += int((positive > 0).sum() > 1)
            seen["fewer"] += len(chosen) < m
            seen["explored"] += chosen != best
        models = after
        trained[cohort] = 1
        state = done.states[t + 1]
        check(state["models"], models)
        check(state["P"], P)
        expected = done.mean_test_loss(lambda i: own.get(i, x0))
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert min(seen["negative"], seen["mixed"], seen["fewer"], seen["explored"]) > 0, seen
    assert P.min() < 0 and not trained[-1]
    assert all(np.array_equal(x, x0) for x in done.xs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheduler", ["exponential", "cosine"])
def test_apple(mode, scheduler, train):
    """Luo 2022, algorithm 1: w^p = Σ p_j w_j; w_i <- w_i - η1 p_i ∇f(w^p), p_j <- p_j - η2 (<∇f, w_j>
    + λ(r) μ (p_j - p0_j))."""
    n, eta2, mu, L, server_lr = len(EMPTY), 0.03, 2.0, 4, 0.9
    done = train(
        mode,
        {"name": "apple", "eta2": eta2, "mu": mu, "L": L, "scheduler": scheduler, "lr": server_lr},
        sizes=EMPTY,
        rounds=6,
        local=EPOCHS,
    )
    cores, counts, trained = np.tile(done.feed.x0, (n, 1)), np.zeros(n), set()
    p, pulls = np.full((n, n), 1 / n), []
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        for i in cohort:
            counts[i] = len(done.feed.data[i][1])
        p0 = counts / counts.sum()
        p[[i not in trained for i in range(n)]] = p0
        check(done.states[t]["p"], p)
        lam = 1e-3 ** (t / L) if scheduler == "exponential" else (1 + np.cos(np.pi * t / L)) / 2
        lam = lam if t < L else 0.0
        after, lr = cores.copy(), by_round(FALLING)(t)
        for i in cohort:
            received, own = cores.copy(), p[i].copy()
            for X, y in done.batches(t, i):
                g = NET.grad(own @ received, X, y)
                pull = lam * mu * (own - p0)
                pulls.append(np.abs(pull).max() / np.abs(received @ g).max())
                own_before = own[i]
                own = own - eta2 * (received @ g + pull)
                received[i] = received[i] - lr * own_before * g
            after[i] = cores[i] - server_lr * (cores[i] - received[i])
            p[i] = own
        trained.update(cohort)
        before, cores = cores, after
        state = done.states[t + 1]
        check(state["models"], cores, before)
        check(state["p"][cohort], p[cohort], p0)
        if t + 1 < len(done.feed.cohorts):  # the broadcast that is evaluated is of the next round
            for i in done.feed.cohorts[t + 1]:
                counts[i] = len(done.feed.data[i][1])
        p0 = counts / counts.sum()

        def model(i, p0=p0, cores=cores):
            return (p[i] if i in trained else p0) @ cores

        expected = done.mean_test_loss(model)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert max(pulls) > 0.1 and 0 in pulls
    assert np.ptp([p[i, i] for i in trained]) > 1e-3
    assert all(np.array_equal(x, done.feed.x0) for x in done.xs)


def on_simplex(M: np.ndarray) -> np.ndarray:
    """The α >= 0 with Σ α = 1 of least α' M α, by trying which of them are zero."""
    k, best = len(M), (np.inf, np.zeros(len(M)))
    for size in range(1, k + 1):
        for support in map(list, combinations(range(k), size)):
            z = np.linalg.solve(M[np.ix_(support, support)], np.ones(size))
            alpha = np.zeros(k)
            alpha[support] = z / z.sum()
            if alpha.min() >= 0:
                best = min(best, (alpha @ M @ alpha, alpha), key=lambda pair: pair[0])
    return best[1]


@pytest.fixture
def overlapping(tmp_path: Path) -> str:
    """A partition of the digits: even clients have the digits 0, 1, 2 in equal shares, odd ones 2,
    3, 4, and the last one that has examples 5."""
    y = load_dataset(Data(name="digits")).y
    pools = [np.flatnonzero(y == c).tolist() for c in range(6)]
    lists: list[list[int]] = []
    for k, n in enumerate(EMPTY):
        digits = [5] if k == len(SIZES) - 1 else [2 * (k % 2) + j for j in range(3)]
        lists.append([pools[digits[e % len(digits)]].pop() for e in range(n)])
    path = tmp_path / "overlapping.json"
    path.write_text(json.dumps(lists))
    return str(path)


@pytest.mark.parametrize("mode", MODES)
def test_fedpac(mode, train, overlapping):
    """Xu 2023, algorithm 1: first steps of the classifier, then of the body with λ/F |f - c_y|²; each
    client's next classifier is the mix of least variance and bias (eq. 10)."""
    lam, head_share, server_lr, n = 3.0, 0.4, 0.9, len(EMPTY)
    done = train(
        mode,
        {"name": "fedpac", "lam": lam, "head_share": head_share, "lr": server_lr,
         "weights": "samples"},
        partition={"path": overlapping},
        local={"epochs": 3, "lr": FALLING},
    )  # fmt: skip
    x = done.feed.x0
    heads, c = np.tile(x[BODY:], (n, 1)), np.full((C, F), np.nan)
    alphas, missing, is_body = [], 0, np.arange(NET.size) < BODY
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        lr, ends, h, V = by_round(FALLING)(t), [], [], []
        sums, counts = np.zeros((C, F)), np.zeros(C)
        for i in cohort:
            X, y = done.feed.data[i]
            onehot = np.eye(C)[y]
            w = np.concatenate([x[:BODY], heads[i]])
            f = features(w, X)
            h.append(onehot.T @ f / len(y))
            V.append(((f**2).sum() / len(y) - (h[-1] ** 2).sum()) / len(y))
            batches = done.batches(t, i)
            head_steps = min(max(round(head_share * len(batches)), 1), len(batches) - 1)
            for k, (X_b, y_b) in enumerate(batches):
                known = ~np.isnan(c[y_b, 0])
                missing += int((~known).sum())

                def loss(w, X=X_b, y=y_b, known=known, c=c):
                    f, z = net(w, X)
                    away = ((f - torch.tensor(np.nan_to_num(c))[y]) ** 2).mean(1)
                    pull = (away * torch.tensor(known)).mean()
                    return cross_entropy(z, torch.tensor(y)) + lam * pull

                g = gradient(loss, w)
                w = w - lr * np.where(is_body, k >= head_steps, k < max(head_steps, 1)) * g
            f = features(w, X)
            sums, counts = sums + onehot.T @ f, counts + onehot.sum(0)
            ends.append(w)
        x = x - server_lr * (x - samples(done, cohort) @ np.array(ends))
        trained, had = np.array(ends)[:, BODY:], counts > 0
        c = np.where(had[:, None], sums / np.maximum(counts, 1)[:, None], c)
        for k, i in enumerate(cohort):
            apart = np.array([(h[k] - other).ravel() for other in h])
            alpha = on_simplex(np.diag(np.maximum(V, 1e-12)) + apart @ apart.T)
            heads[i] = alpha @ trained
            alphas.append(alpha)
        state = done.states[t + 1]
        check(done.xs[t + 1][:BODY], x[:BODY])  # nobody receives a classifier that is the same
        check(state["heads"], heads)
        check(state["prototypes"], np.nan_to_num(c))
        assert np.array_equal(state["known"].ravel() > 0, ~np.isnan(c[:, 0]))

        def model(i, x=x):
            return np.concatenate([x[:BODY], heads[i]])

        expected = done.mean_test_loss(model)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    zero = [(alpha == 0).sum() for alpha in alphas]
    assert max(zero) > 0 and max(np.sort(alpha)[-2] for alpha in alphas) > 0.05
    assert missing > sum(len(b) for steps in done.feed.batches[0].values() for b in steps)


@pytest.mark.parametrize("mode", MODES)
def test_fedas(mode, train):
    """Yang 2024, algorithm 1: the received body descends the distance of its features to the own
    prototypes, then local SGD; clients count by the trace of their Fisher information."""
    align_lr, passes, server_lr = 0.6, 2, 0.9
    done = train(
        mode,
        {"name": "fedas", "align_lr": align_lr, "align_passes": passes, "lr": server_lr},
        local=EPOCHS,
    )
    x, own, moves, traces = done.feed.x0, {}, [], []
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        ends, F_i = [], []
        for i in cohort:
            X, y = done.feed.data[i]
            v = x
            if i in own:
                v = received = np.concatenate([x[:BODY], own[i][BODY:]])
                f = features(own[i], X)
                prototypes = {label: f[y == label].mean(0) for label in set(y.tolist())}
                cuts = np.cumsum([0, *batch_sizes(len(y), 16, batch_norm=True)])
                for a, b in passes * list(pairwise(cuts)):

                    def away(w, X=X[a:b], y=y[a:b], prototypes=prototypes):
                        f = net(w, X)[0]
                        parts = [
                            ((f[y == label] - torch.tensor(prototypes[label])) ** 2).mean()
                            for label in set(y.tolist())
                        ]
                        return torch.stack(parts).sum()

                    v = v - align_lr * gradient(away, v)
                moves.append(np.abs(v - received).max())
            w = own[i] = sgd(v, done.batches(t, i), by_round(FALLING)(t))
            singles = [NET.grad(w, X[k : k + 1], y[k : k + 1]) for k in range(len(y))]
            F_i.append(np.mean([g @ g for g in singles]))
            ends.append(np.concatenate([w[:BODY], x[BODY:]]))
        a = np.array(F_i) / sum(F_i)
        traces.append(a.max() / a.min())
        before, x = x, x - server_lr * (x - a @ np.array(ends))
        check(done.xs[t + 1], x, before)
        expected = done.mean_test_loss(lambda i, x=x: own.get(i, x))
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    for i, w in own.items():
        check(done.kept(i)["own"], w)
    assert max(moves) > 0.01 and max(traces) > 1.2


@pytest.mark.parametrize("mode", MODES)
def test_agnostic_fedavg(mode, train):
    """Mohri 2019, Ro 2021: clients count by λ, and λ_k <- λ_k exp(γ F_k(x)), normalised over all."""
    gamma, server_lr, n = 0.4, 0.9, len(EMPTY)
    done = train(
        mode,
        {"name": "agnostic_fedavg", "gamma": gamma, "lr": server_lr},
        sizes=EMPTY,
        local=EPOCHS,
    )
    x, lam = done.feed.x0, np.full(n, 1 / n)
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        ends = [sgd(x, done.batches(t, i), by_round(FALLING)(t)) for i in cohort]
        a = lam[cohort] / lam[cohort].sum()
        risks = [NET.loss(x, *done.feed.data[i]) for i in cohort]
        before, x = x, x - server_lr * (x - a @ np.array(ends))
        lam[cohort] *= np.exp(gamma * np.array(risks))
        lam = lam / lam.sum()
        check(done.xs[t + 1], x, before)
        (found,) = [v for v in done.states[t + 1].values() if v.shape == (n,)]
        check(np.exp(found), lam)
        expected = done.mean_test_loss(lambda i, x=x: x)
        assert done.records[t + 1]["clients/loss"] == pytest.approx(expected, rel=1e-9)
    assert lam.max() > 2 * lam.min() > 0


def test_agnostic_fedavg_takes_losses_that_no_float_holds_the_power_of():
    """λ_2 / λ_1 is exp(1000) after one round: client 2 alone counts, and later counts as before."""
    server = rule("fairness/agnostic_fedavg.py:AgnosticFedAvgServer", gamma=1.0)
    state = server.init(torch.zeros(2), SimpleNamespace(n_clients=2))
    deltas = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for t, losses in enumerate([(0.0, 1000.0), (1000.0, 0.0), (0.0, 0.0)]):
        F = [torch.tensor([loss]) for loss in losses]
        rows = {"delta": list(deltas), "F": F}
        state = server.update(state, Reports(t, [0, 1], 2, weights=[0.5, 0.5], seed=0, rows=rows))
    # Half of each, client 2 alone, and half of each.
    assert state["x"].tolist() == [-1.0, -2.0]


def test_fedexp_evaluates_the_mean_of_its_last_two_models(train):
    """Jhunjhunwala 2023, section 3: the mean of the last two iterates. Clients receive the last."""
    epsilon, server_lr = 0.01, 0.9
    done = train(
        "loop",
        {"name": "fedexp", "epsilon": epsilon, "lr": server_lr},
        local=EPOCHS,
        evaluate={"every": 1, "clients": {"every": 1}},
    )
    xs, factors = [done.feed.x0], []
    for t, cohort in enumerate(map(list, done.feed.cohorts)):
        x, lr = xs[-1], by_round(FALLING)(t)
        deltas = np.array([x - sgd(x, done.batches(t, i), lr) for i in cohort])
        mean = deltas.mean(0)
        factors.append((deltas**2).sum(1).mean() / (2 * (mean @ mean + epsilon)))
        xs.append(x - server_lr * max(1, factors[-1]) * mean)
    assert distance(done.xs, xs) < 1e-9
    assert max(factors) > 1
    data = done.engine.plan.dataset
    scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
    X = (data.x_test.astype(np.float64) * scale + shift).reshape(len(data.y_test), -1)
    for t, record in enumerate(done.records):
        evaluated = (xs[t] + xs[max(t - 1, 0)]) / 2
        assert record["loss"] == pytest.approx(NET.loss(evaluated, X, data.y_test), rel=1e-9)
        expected = done.mean_test_loss(lambda i, w=evaluated: w)
        assert record["clients/loss"] == pytest.approx(expected, rel=1e-9)


class Oort:
    """Lai 2021, algorithm 1, with the blacklist of section 4.4."""

    def __init__(self, n: int, T: float, **keys: Any):
        self.T, self.keys = T, keys
        self.U, self.last, self.duration = (np.full(n, np.nan) for _ in range(3))
        self.picks, self.sums = np.zeros(n, dtype=int), []
        self.seen = {"clipped": 0, "slow": 0, "blacklisted": 0, "cut": 0, "paced": 0, "steady": 0}

    def select(self, pool: list[int], K: int, t: int, rng: np.random.Generator) -> list[int]:
        """The clients of round t, R = t + 1."""
        k, R = self.keys, t + 1
        explored = [i for i in pool if not np.isnan(self.U[i])]
        unseen = [i for i in pool if np.isnan(self.U[i])]
        unseen = rng.permutation(unseen).astype(int).tolist()
        noise = dict(zip(pool, rng.gumbel(size=len(pool)), strict=True))
        black = sorted(
            (i for i in explored if self.picks[i] > k["blacklist"]),
            key=lambda i: (-self.picks[i], i),
        )[: int(0.3 * len(pool))]
        util = {}
        if explored:
            values = sorted(self.U[explored])
            cap = values[min(int(k["clip"] * len(values)), len(values) - 1)]
            for i in explored:
                fast = min(1.0, self.T / self.duration[i]) ** k["alpha"]
                age = np.sqrt(0.1 * np.log(R) / (self.last[i] + 1))
                self.seen["clipped"] += int(self.U[i] > cap)
                self.seen["slow"] += int(fast < 1)
                if i not in black:
                    util[i] = (min(self.U[i], cap) + age) * fast
        self.seen["blacklisted"] += len(black)
        epsilon = max(k["epsilon"] * k["decay"] ** t, k["epsilon_min"])
        n_new = min(len(unseen), round(epsilon * K))
        n_old = min(len(util), K - n_new)
        old: list[int] = []
        if n_old:
            cut = 0.95 * sorted(util.values(), reverse=True)[n_old - 1]
            above = [i for i in util if util[i] >= cut]
            self.seen["cut"] += int(len(above) > n_old)
            old = sorted(above, key=lambda i: -np.log(util[i]) - noise[i])[:n_old]
        return old + unseen[: K - len(old)]

    def update(self, t: int, U: dict[int, float], duration: dict[int, float]) -> None:
        """Note what the clients of round t reported, and pace."""
        for i, value in U.items():
            self.U[i], self.last[i], self.duration[i] = value, t, duration[i]
            self.picks[i] += 1
        W = self.keys["W"]
        self.sums.append(sum(U.values()))
        if len(self.sums) >= 2 * W:
            falls = sum(self.sums[-2 * W : -W]) > sum(self.sums[-W:])
            self.T += self.keys["Delta"] if falls else 0.0
            self.seen["paced" if falls else "steady"] += 1


@pytest.mark.parametrize("mode", MODES)
def test_oort_paces_clips_and_explores_less_and_less(mode, train):
    """Lai 2021, algorithm 1: T grows by Δ when utilities fall; utilities are clipped to a share of
    the clients; ε decays; clients that took part often are left out."""
    sizes, K, rounds = [30, 9, 17, 12, 45, 8, 21, 14, 0, 26, 11, 19, 7], 4, 12
    keys = {"Delta": 0.3, "W": 2, "alpha": 1.5, "epsilon": 0.8, "decay": 0.6, "epsilon_min": 0.25,
            "clip": 0.6, "blacklist": 3}  # fmt: skip
    done = train(
        mode,
        {"name": "oort", "T": 0.7, "lr": 0.9, **keys},
        sizes=sizes,
        rounds=rounds,
        schedule={"cohort": K, "client_speeds": {"name": "lognormal", "sigma": 0.7}},
        local=EPOCHS,
    )
    pool, oort, x = [i for i, n in enumerate(sizes) if n], Oort(len(sizes), 0.7, **keys), None
    cohorts = []
    for t in range(rounds):
        cohort = oort.select(pool, K, t, generator(SEED, "cohort", t))
        assert len(set(cohort)) == K
        U, duration = {}, {}
        for i in cohort:
            X, y = done.feed.data[i]
            U[i] = np.sqrt(len(y)) * np.linalg.norm(losses(done.xs[t], X, y))
            duration[i] = done.engine.schedule._times.duration(i, t)
        oort.update(t, U, duration)
        state = done.states[t + 1]
        assert state["T"].item() == pytest.approx(oort.T, rel=1e-9)
        W2 = 2 * keys["W"]
        history = [np.nan] * max(W2 - len(oort.sums), 0) + oort.sums[-W2:]
        check(state["sums"], history)
        cohorts.append(cohort)
    assert min(oort.seen.values()) > 0, oort.seen
    known = done.engine.state.client_history.pack()
    assert known["history/n_rounds"].tolist() == oort.picks.tolist()
    f = feed(done.engine, cohorts)
    xs = [f.x0]
    for t, cohort in enumerate(cohorts):
        x = xs[-1]
        batches = {i: [(f.data[i][0][b], f.data[i][1][b]) for b in f.batches[t][i]] for i in cohort}
        lr = by_round(FALLING)(t)
        xs.append(x - 0.9 * np.mean([x - sgd(x, batches[i], lr) for i in cohort], axis=0))
    assert distance(done.xs, xs) < 1e-9
