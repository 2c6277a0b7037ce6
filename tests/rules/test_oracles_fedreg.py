"""FedReg, FedCurv and DP-SGD of the engine against the papers, number by number, as in
test_oracles.py: x_t after every round equals the NumPy oracle's to 1e-9 relative, in float64, one
client after the other and side by side, on ragged clients of which one has a single sample and one
has none. `matters` as there; an oracle can make a `mistake`.

The oracle is given, beside cohorts and mini-batches, what else is drawn: the order of FedReg's own
pass and the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from oracle import dpsgd, fedavg, fedcurv, fedreg
from oracle.batches import batch_sizes
from oracle.nets import Blocks
from support.normal_numbers import normal_numbers
from support.oracle_cases import (
    MODES,
    NETS,
    SAMPLES,
    SIZES,
    STEPS,
    UNIFORM,
    Feed,
    by_round,
    differs,
    distance,
    feed,
)

from raysim.algorithms import fedreg as fedreg_rules
from raysim.randomness import generator

SEVENS = [29, 1, 17, 2, 22, 0, 8, 23, 16, 5, 15, 7]
"""Beside batches of 7, in one pass: a partial one of 1 left out (29, 22, 8, 15), others kept (17,
23, 16), none (7)."""


def made(run, f: Feed) -> list[dict[int, list[np.ndarray]]]:
    """The batches of FedReg's own pass, of each round and client."""
    local, out = run.config.local, []
    for t, cohort in enumerate(f.cohorts):
        out.append({})
        for i in cohort:
            n = f.sizes[i]
            size = n if local.batch_size == "full" else local.batch_size
            places = (
                generator(run.config.seed, "made", t, i).permutation(n)
                if n > size
                else np.arange(n)
            )
            cuts = np.cumsum([0, *batch_sizes(n, size)])
            out[-1][i] = [places[a:b] for a, b in pairwise(cuts)]
    return out


def noisy(run, f: Feed) -> list[dict[int, list]]:
    """The mini-batches with each step's noise."""

    def z(t: int, i: int) -> list[np.ndarray]:
        drawn = generator(run.config.seed, "noise", t, i)
        return [normal_numbers(drawn, (len(f.x0),)).astype(np.float64) for _ in f.batches[t][i]]

    return dpsgd.with_noise(f.batches, z)


@dataclass
class Case:
    """`settings`: the algorithm's section, `hyper`: the oracle's, `matters`: its changes that must
    show."""

    settings: dict[str, Any]
    hyper: dict[str, Any]
    matters: list[dict[str, Any]] = field(default_factory=list)
    local: dict[str, Any] = field(default_factory=lambda: {"lr": 0.3, "epochs": 2})
    hidden: list[int] = field(default_factory=lambda: [8])
    """[]: logistic regression"""
    rounds: int = 3
    cohort: int = 5
    seed: int = 0
    sizes: list[int] = field(default_factory=lambda: SIZES)
    least: float = 1e-5
    """How far the engine must be from an oracle with another value."""

    @property
    def model(self) -> dict[str, Any]:
        return {"name": "mlp", "hidden": self.hidden} if self.hidden else {"name": "logistic"}

    @property
    def net(self) -> Any:
        return Blocks(64, self.hidden, 10) if self.hidden else fedreg.OneLayer(64, 10)

    def config(self, mode: str, ragged: Callable) -> dict[str, Any]:
        local = {"batch_size": 16, **self.local}
        if self.settings["name"] in ("fedsgd", "dpsgd"):
            local = self.local
        return {
            "seed": self.seed, "rounds": self.rounds, "dtype": "float64", "model": self.model,
            "partition": ragged(self.sizes), "algorithm": self.settings, "schedule": {"cohort": self.cohort},
            "batching": {"mode": mode, "size": 3}, "local": local,
        }  # fmt: skip


def close(ours: Any, theirs: Any, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-12)


# --- FedReg


def reg(
    settings: dict[str, Any], matters: list[dict[str, Any]], *, mg: bool = False, **more: Any
) -> Case:
    """Settings that have the same name here and there, but for the server's step size; schedules
    where lists."""
    local = more.pop("local", {"lr": 1.0, "epochs": 2})
    settings = {"gamma": 0.4, "eta_s": 0.2, **settings}
    hyper = {
        "server_lr" if k == "lr" else k: by_round(v) if isinstance(v, list) else v
        for k, v in settings.items()
    }
    hyper = {**hyper, "lr": by_round(v) if isinstance(v := local["lr"], list) else v}
    name = "fedreg_mg" if mg else "fedreg"
    return Case({"name": name, **settings}, {**hyper, "mg": mg}, matters, local, **more)


MISTAKES = [
    {"mistake": m} for m in ("gamma", "hard", "first", "joint", "at theta", "no projection")
]
IMAGES = [{"eta_s": 0.21}, {"eta_p": 0.02}, {"ascent": 9}, {"pairing": "own"}]
EASY = {"lr": 0.3, "epochs": 2}
"""w_p is 0 in nearly every step: neither eta_p nor MISTAKES[2:4] show. With lr 1 it is above 0 in
some."""
ONCE = {"mistake": "first"}
LOG = {"mistake": "plain loss"}

REG: dict[str, Case] = {
    "fedreg": reg({}, [*MISTAKES, *IMAGES, LOG, {"gamma": 0.41}, {"mg": True}, SAMPLES], rounds=5),
    "defaults": Case({"name": "fedreg"}, {"lr": 0.3, "gamma": 0.5, "eta_s": 0.1}, [{"gamma": 0.51}, {"eta_s": 0.11}]),
    "gamma 1": reg({"gamma": 1.0}, [{"gamma": 0.99}]),
    "eta_p": reg({"eta_p": 0.05}, [{"eta_p": None}, {"eta_p": 0.06}, ONCE], seed=2),
    "ascent 1": reg({"ascent": 1, "eta_s": 1.0, "eta_p": 0.1}, [{"ascent": 2}, {"eta_s": 0.9}, {"pairing": "own"}]),
    "own": reg({"pairing": "own"}, [{"pairing": "index"}]),
    "clamp own": reg({"clamp": True, "pairing": "own", "eta_p": 0.04}, [{"clamp": False}, {"pairing": "index"}]),
    "schedules": reg({"lr": [[0, 1.0], [3, 0.6]]}, [{"lr": 0.2}, {"server_lr": 1.0}],
                     local={"lr": STEPS, "steps": 3}, rounds=4),
    "epochs 3 of sevens": reg({"gamma": 1.0}, [MISTAKES[3]], sizes=SEVENS,
                              local={"lr": 1.0, "epochs": 3, "batch_size": 7}),
    "batches of 1": reg({}, IMAGES[:1], sizes=[5, 1, 4, 2, 6, 0, 3, 3, 4, 5, 1, 2],
                        local={"lr": 0.05, "epochs": 2, "batch_size": 1}),
    "full": reg({}, [{"eta_s": 0.21}, ONCE], local={"lr": 1.0, "steps": 4, "batch_size": "full"}),
    "logistic sevens": reg({}, IMAGES[:1], hidden=[], sizes=SEVENS,
                           local={"lr": 0.3, "epochs": 2, "batch_size": 7}),
    "dead": reg({}, [{"pairing": "own"}, {"eta_s": 0.21}], hidden=[3], seed=3, local=EASY),
    "mg": reg({"gamma": 0.0}, [{"mg": False}, {"fresh": True}, {"mistake": "clipped v"}, ONCE, *MISTAKES[3:]],
              mg=True),
    "mg fresh": reg({"fresh": True, "gamma": 1.0},
                    [{"fresh": False}, {"mistake": "clipped v"}], mg=True,
                    local={"lr": 2.0, "epochs": 2}),
    "mg sevens": reg(SAMPLES, [UNIFORM, {"fresh": True}], mg=True, sizes=SEVENS,
                     local={"lr": 0.3, "epochs": 2, "batch_size": 7}, rounds=5),
    "mg reference": Case({"name": "fedreg_mg", "preset": "authors_code", "gamma": 1.0, "eta_s": 0.2},
                         {"lr": 1.0, "gamma": 1.0, "eta_s": 0.2, "mg": True, "fresh": True},
                         [{"fresh": False}, {"mg": False}, ONCE], {"lr": 1.0, "epochs": 2, "batch_size": 7},
                         sizes=SEVENS, rounds=3),
}  # fmt: skip


SIDE_BY_SIDE = (
    *("fedreg", "gamma 1", "own", "clamp own", "epochs 3 of sevens", "batches of 1", "full"),
    *("logistic sevens", "mg", "mg fresh", "mg sevens"),
)
"""Also on lanes: each option, and each way in which batches are padded."""


def given(run, net, f: Feed | None = None) -> tuple:
    f = f or feed(run)
    assert len(f.x0) == net.size
    return f.x0, f.cohorts, f.sizes, f.batches, net, f.data, made(run, f)


def faintest(theirs: fedreg.Trace) -> float:
    """The shortest g_s or g_p of a step. Where the net is certain of every pseudo image, p - f(θ0)
    cancels: 1e-16 of 1e-13, say, and w_s g_s is all of θ - θ0 in the direction of what is left.
    There the method has no definite answer.
    """
    steps = [s for of_round in theirs.rounds for s in of_round]
    return min(
        float(np.linalg.norm(g))
        for s in steps
        for g, w in ((s.g_s, s.w_s), (s.g_p, s.w_p))
        if w > 0
    )


@pytest.mark.parametrize("name", REG)
def test_fedreg(name, engine, ragged):
    """x_1 .. x_T, and the means of w_s and w_p, of the engine and of the oracle."""
    case = REG[name]
    modes = MODES if name in SIDE_BY_SIDE else MODES[:1]
    runs = [engine(case.config(mode, ragged)) for mode in modes]
    first, net = runs[0][0], case.net
    f = feed(first)

    def xs(f: Feed, **change: Any) -> list[np.ndarray]:
        return fedreg.run(*given(first, net, f), **{**case.hyper, **change})

    theirs = fedreg.trace(*given(first, net, f), **case.hyper)
    assert (
        theirs.closest > 1e-10 and faintest(theirs) > 1e-6
    )  # no sign and no direction hangs on a rounding
    if name == "dead":
        assert theirs.zeros > 100  # sign(0)
    assert np.abs(theirs.x[-1] - theirs.x[0]).max() > 1e-4
    assert np.abs(theirs.x[-1]).max() < 1e3
    w = [fedreg.shares(steps) for steps in theirs.rounds]
    for run, records in runs:
        assert distance(run.executor.xs, theirs.x) < 1e-9, run.plan.mode
        ours = [(r["client/w_s"], r["client/w_p"]) for r in records if "client/w_s" in r]
        close(np.array(ours), np.array(w), 1e-6)
    for change in case.matters:
        assert differs(theirs.x, partial(xs, **change), f, case.least), change


@pytest.mark.parametrize("mode", MODES)
def test_data_are_made_of_as_many_batches_as_steps_meet(mode, engine, ragged, monkeypatch):
    """Clients of 40, 12 and 3 examples in batches of 8 have 5, 2 and 1 of them; three steps meet 3,
    2 and 1."""
    calls, make = [], fedreg_rules.FedRegClient.prepare
    monkeypatch.setattr(
        fedreg_rules.FedRegClient, "prepare", lambda *given: calls.append(1) or make(*given)
    )
    case = reg(
        {},
        [],
        local={"lr": 0.3, "steps": 3, "batch_size": 8},
        sizes=[40, 12, 3],
        rounds=1,
        cohort=3,
    )
    engine(case.config(mode, ragged))
    assert len(calls) == 3 + 2 + 1


def test_these_runs_have_what_they_are_for(engine, ragged):
    """Clients with more steps than made batches and with as many; w_p that bind and that do not;
    partial batches."""
    case = REG["epochs 3 of sevens"]
    run, _ = engine(case.config("loop", ragged))
    args = given(run, case.net)
    theirs = fedreg.trace(*args, **case.hyper)
    steps = [s for of_round in theirs.rounds for s in of_round]
    assert 0 < sum(s.w_p > 0 for s in steps) < len(steps)
    assert any(s.w_s > 0 and s.w_p > 0 for s in steps)
    batches, pictures = args[3], args[6]
    counts = {(len(b[i]), len(m[i])) for b, m in zip(batches, pictures, strict=True) for i in b}
    assert (12, 4) in counts and (3, 1) in counts
    of_pass = {tuple(map(len, m[i])) for m in pictures for i in m}
    assert any(1 < lengths[-1] < 7 for lengths in of_pass if len(lengths) > 1)
    # the own pass is another one in every round, and not that of training
    seen = [tuple(np.concatenate(m[i])) for m in pictures for i in m if args[2][i] > 7]
    assert len(set(seen)) == len(seen)
    firsts = [np.concatenate(b[i][: len(m[i])]) for b, m in zip(batches, pictures, strict=True) for i in m
              if args[2][i] > 7]  # fmt: skip
    assert all(tuple(a) != b for a, b in zip(firsts, seen, strict=True))


# --- FedCurv


def curv(settings: dict[str, Any], matters: list[dict[str, Any]], **more: Any) -> Case:
    local = more.pop("local", {"lr": 0.3, "epochs": 2})
    hyper = {
        "server_lr" if k == "lr" else k: by_round(v) if isinstance(v, list) else v
        for k, v in settings.items()
    }
    hyper = {**hyper, "lr": by_round(local["lr"]) if isinstance(local["lr"], list) else local["lr"]}
    return Case({"name": "fedcurv", **settings}, hyper, matters, local, **{"cohort": 9, **more})


CURV_MISTAKES = [{"mistake": "half"}, {"lam": 0.0}]
OWN, MEAN = {"own": False}, {"over": "mean"}
CURV: dict[str, Case] = {
    "sum": curv({"lam": 0.1}, [*CURV_MISTAKES, {"lam": 0.09}, OWN, MEAN, SAMPLES]),
    "sum others": curv({"lam": 0.1, **OWN}, [*CURV_MISTAKES, {"own": True}, MEAN, {"mistake": "stale"}]),
    "few": curv({"lam": 0.1, **OWN}, [{"own": True}, {"mistake": "stale"}], cohort=5, rounds=8),
    "samples others": curv({"lam": 0.1, **SAMPLES, **OWN}, [UNIFORM, {"own": True}]),
    "schedules": curv({"lam": 0.1, "lr": [[0, 1.0], [3, 0.6]]}, [{"lr": 0.2}, {"server_lr": 1.0}, {"lam": 0.0}],
                      local={"lr": STEPS, "steps": 3}, rounds=4),
    "sevens": curv({"lam": 0.1, **OWN}, [*CURV_MISTAKES, {"own": True}], sizes=SEVENS,
                   local={"lr": 0.2, "epochs": 2, "batch_size": 7}),
}  # fmt: skip


def fisher_of(f: Feed, net: Any) -> Callable:
    return lambda w, client: fedcurv.diagonal(net, w, *f.data[client])


def plain(case: Case) -> Any:
    """The net by its other name, for plain gradients."""
    return case.net if case.hidden else NETS["logistic"][1]


@pytest.mark.parametrize("name", CURV)
def test_fedcurv(name, engine, ragged):
    """x_1 .. x_T of the engine and of the oracle; and the metric 2 λ η max A."""
    case = CURV[name]
    runs = [engine(case.config(mode, ragged)) for mode in MODES]
    f, net = feed(runs[0][0]), plain(case)

    def xs(f: Feed, **change: Any) -> list[np.ndarray]:
        return fedcurv.run(*f.args(net.grad), fisher_of(f, net), **{**case.hyper, **change})

    theirs = fedcurv.trace(*f.args(net.grad), fisher_of(f, net), **case.hyper)
    returned = [set(a) & set(b) for a, b in zip(f.cohorts, f.cohorts[1:], strict=False)]
    assert any(returned) and any(
        set(b) - both for b, both in zip(f.cohorts[1:], returned, strict=True)
    )
    assert np.abs(theirs.x[-1] - theirs.x[0]).max() > 1e-4
    assert np.abs(theirs.x[-1]).max() < 1e2
    stiffness = [
        2 * case.hyper["lam"] * fedavg.at(case.hyper["lr"], t) * A.max()
        for t, A in enumerate(theirs.A)
    ]
    for run, records in runs:
        assert distance(run.executor.xs, theirs.x) < 1e-9, run.plan.mode
        close([r["client/stiffness"] for r in records if "client/stiffness" in r], stiffness)
    for change in case.matters:
        assert differs(theirs.x, partial(xs, **change), f, case.least), change


# --- DP-SGD


def private(settings: dict[str, Any], hyper: dict[str, Any], privacy: dict[str, Any], matters: list[dict[str, Any]],
            **more: Any) -> Case:  # fmt: skip
    local = more.pop("local", {"lr": 0.3, "epochs": 2})
    if settings["name"] in ("fedsgd", "dpsgd"):
        local = {"lr": 0.5}
    lr = by_round(local["lr"]) if isinstance(local["lr"], list) else local["lr"]
    return Case(settings, {"lr": lr, **hyper, **privacy}, matters, local, **more)


NOISY = {"clip": 1.85, "sigma": 0.1}
QUIET_LOGISTIC = {"clip": 3.7, "sigma": 0.0}
"""About the median of the samples' gradients in these runs."""
CLIPPING = [
    {"clip": 1.9},
    {"clip": None, "sigma": 0.0},
    {"mistake": "mean"},
    {"mistake": "per tensor"},
]
NOISE = [{"sigma": 0.11}, {"sigma": 0.0}, {"mistake": "unscaled"}, {"mistake": "over n"}]
PROX, CURVED = {"mu": 0.7}, {"lam": 0.1}
DP: dict[str, Case] = {
    "fedavg": private({"name": "fedavg"}, {}, NOISY, [*CLIPPING, *NOISE, SAMPLES]),
    "fedavg samples steps": private({"name": "fedavg", **SAMPLES}, SAMPLES, NOISY, [UNIFORM],
                                    local={"lr": STEPS, "steps": 3}),
    "fedavg sevens": private({"name": "fedavg"}, {}, NOISY, [*CLIPPING[2:3], *NOISE[2:]], sizes=SEVENS,
                             local={"lr": 0.2, "epochs": 2, "batch_size": 7}),
    "fedavg free": private({"name": "fedavg"}, {}, {"clip": None, "sigma": 0.0}, [{"clip": 1.2}]),
    "fedprox": private({"name": "fedprox", **PROX}, PROX, NOISY, [NOISE[0], {"mu": 0.6}]),
    "fedprox quiet": private({"name": "fedprox", **PROX}, PROX, QUIET_LOGISTIC, [CLIPPING[0], {"mu": 0.0}],
                             hidden=[]),
    "fedsgd": private({"name": "fedsgd"}, {}, NOISY, [*CLIPPING, {"sigma": 0.11}, {"mistake": "unscaled"}]),
    "dpsgd": private({"name": "dpsgd"}, {}, NOISY, [CLIPPING[0], SAMPLES]),
    "fedcurv": private({"name": "fedcurv", **CURVED}, CURVED, NOISY, [CLIPPING[0], NOISE[0], {"lam": 0.09}, OWN],
                       cohort=9),
}  # fmt: skip


def dp_config(case: Case, mode: str, ragged: Callable) -> dict[str, Any]:
    privacy = {"max_grad_norm": case.hyper["clip"], "noise_multiplier": case.hyper["sigma"]}
    return {**case.config(mode, ragged), "privacy": privacy}


def dp_run(case: Case, run, f: Feed, **other: Any) -> list[np.ndarray]:
    """The oracle's x_0 .. x_T, with other hyper-parameters if wanted."""
    hyper = {**case.hyper, **other}
    net = plain(case)
    of_privacy = {k: hyper.pop(k) for k in ("clip", "sigma", "mistake") if k in hyper}
    grad = dpsgd.private(net, f.data, **of_privacy)
    args = (f.x0, f.cohorts, f.sizes, noisy(run, f), grad)
    if case.settings["name"] == "fedcurv":
        return fedcurv.run(*args, fisher_of(f, net), **hyper)
    if case.settings["name"] in ("fedsgd", "dpsgd"):
        return fedavg.fedsgd(*args, **hyper)
    return fedavg.run(*args, **hyper)


@pytest.mark.parametrize("name", DP)
def test_private_gradients(name, engine, ragged):
    case = DP[name]
    runs = [engine(dp_config(case, mode, ragged))[0] for mode in MODES]
    f = feed(runs[0])
    theirs = dp_run(case, runs[0], f)
    assert np.abs(theirs[-1] - theirs[0]).max() > 1e-4
    for run in runs:
        assert distance(run.executor.xs, theirs) < 1e-9, run.plan.mode
    for change in case.matters:
        assert differs(theirs, partial(dp_run, case, runs[0], **change), f), change
    if case.hyper["clip"] is not None:
        net = plain(case)
        lengths = [
            np.linalg.norm(dpsgd.each(net, x, *f.data[i]), axis=1) for x, cohort in zip(theirs, f.cohorts, strict=False)
            for i in cohort
        ]  # fmt: skip
        assert 0.1 < np.mean(np.concatenate(lengths) > case.hyper["clip"]) < 0.9
