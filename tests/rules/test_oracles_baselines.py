"""The baselines of the engine against the papers, number by number, as in test_oracles.py: x_t
after every round equals the NumPy oracle's to 1e-9 relative, in float64, one client after the other
and side by side, on ragged clients of which one has a single sample and one has none, with
schedules and both kinds of weights. `matters` as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from oracle import (
    averaging,
    fedavg,
    feddyn,
    fedmlb,
    fednova,
    fedopt,
    mifa,
    mimelite,
    moon,
    scaffold,
)
from oracle.nets import Blocks
from support.oracle_cases import (
    MODES,
    NETS,
    SAMPLES,
    SIZES,
    STEPS,
    UNIFORM,
    Case,
    Feed,
    assert_papers_rounds,
    by_round,
    configuration,
    differs,
    distance,
    feed,
)

from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

SERVER_STEPS = [[0, 1.0], [3, 0.6], [6, 0.8]]
BY_ROUND = {"lr": by_round(STEPS), "server_lr": by_round(SERVER_STEPS)}
LR = {"lr": 0.3}
EPOCHS = {"lr": 0.3, "epochs": 2}
"""Clients then take from 2 to 6 steps."""


def case(
    name: str,
    oracle: Callable,
    settings: dict,
    matters: list[dict],
    *,
    lr: float = 0.3,
    **more: Any,
) -> Case:
    """Settings that have the same name here and in the configuration; constant step sizes."""
    named = {"server_lr" if key == "lr" else key: value for key, value in settings.items()}
    local = {"lr": lr, **more.pop("local", {})}
    return Case({"name": name, **settings}, oracle, {"lr": lr, **named}, matters, local, **more)


def scheduled(
    name: str, oracle: Callable, settings: dict, matters: list[dict], **more: Any
) -> Case:
    """Both step sizes by schedules."""
    matters = [{"lr": 0.2}, {"server_lr": 1.0}, *matters]
    return Case({"name": name, "lr": SERVER_STEPS, **settings}, oracle, {**BY_ROUND, **settings}, matters,
                {"lr": STEPS}, **more)  # fmt: skip


ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
ADAM_MATTERS = [{"beta1": 0.9}, {"beta2": 0.99}, {"tau": 1e-3}, {"server_lr": 0.02}, SAMPLES]


def adaptive(name: str) -> dict[str, Case]:
    """FedAdam, FedYogi and FedAMS. The floor of AMS is τ, under the root: with the default no
    coordinate of these runs is above it and beta2 shows nowhere, with 1e-4 some are and some are
    not."""
    oracle = getattr(fedopt, name)
    settings = {**ADAM, "tau": 1e-4} if name == "fedams" else ADAM
    others = [{"rule": rule} for rule in ("adam", "yogi", "ams") if name != f"fed{rule}"]
    return {
        name: Case(
            {"name": name, **settings}, fedopt.run,
            {"lr": 0.3, "rule": name[3:], "server_lr": settings["lr"],
             **{k: v for k, v in settings.items() if k != "lr"}},
            [*ADAM_MATTERS, *others], {"lr": 0.3},
        ),
        f"{name} samples schedules": Case(
            {"name": name, **settings, **SAMPLES, "lr": [[0, 0.05], [3, 0.02]]}, oracle,
            {**settings, **SAMPLES, "lr": by_round(STEPS), "server_lr": by_round([[0, 0.05], [3, 0.02]])},
            [{"lr": 0.2}, {"server_lr": 0.05}, UNIFORM], {"lr": STEPS},
        ),
    }  # fmt: skip


CASES: dict[str, Case] = {
    # SCAFFOLD
    "scaffold": case("scaffold", scaffold.run, {}, [{"option": "I"}, SAMPLES]),
    "scaffold I": case("scaffold", scaffold.run, {"option": "I"}, [{"option": "II"}, SAMPLES]),
    "scaffold samples": case("scaffold", scaffold.run, {**SAMPLES, "lr": 0.5}, [UNIFORM, {"server_lr": 1.0}]),
    "scaffold schedules": scheduled("scaffold", scaffold.run, {}, [SAMPLES]),
    "scaffold epochs": Case({"name": "scaffold"}, scaffold.run, LR, [SAMPLES, {"option": "I"}], EPOCHS),
    # FedDyn
    "feddyn": case("feddyn", feddyn.run, {"alpha": 0.3}, [{"alpha": 0.1}, {"scale_alpha": True}, SAMPLES]),
    "feddyn scaled samples": case(
        "feddyn", feddyn.run, {"alpha": 0.05, "scale_alpha": True, **SAMPLES}, [{"scale_alpha": False}, UNIFORM]
    ),
    "feddyn schedules": Case(
        {"name": "feddyn", "alpha": 0.3}, feddyn.run, {"lr": by_round(STEPS), "alpha": 0.3}, [{"lr": 0.2}],
        {"lr": STEPS},
    ),
    "feddyn epochs": Case({"name": "feddyn", "alpha": 0.3}, feddyn.run, {**LR, "alpha": 0.3}, [SAMPLES], EPOCHS),
    # MimeLite
    "mimelite": case("mimelite", mimelite.run, {"beta": 0.6}, [{"beta": 0.5}, {"damped": False}, SAMPLES]),
    "mimelite undamped samples schedules": scheduled(
        "mimelite", mimelite.run, {"beta": 0.4, "damped": False, **SAMPLES}, [{"damped": True}, UNIFORM]
    ),
    "mimelite beta by round": Case(
        {"name": "mimelite", "beta": STEPS, "lr": 0.5}, mimelite.run, {**LR, "beta": by_round(STEPS), "server_lr": 0.5},
        [{"beta": 0.2}], LR,
    ),
    "mimelite epochs": Case({"name": "mimelite", "beta": 0.6}, mimelite.run, {**LR, "beta": 0.6}, [SAMPLES], EPOCHS),
    # MIFA
    "mifa": case("mifa", mifa.run, {}, [SAMPLES, {"beta1": 0.1}, {"wait": True}], rounds=12),
    "mifa waits samples": scheduled("mifa", mifa.run, {"wait": True, **SAMPLES}, [UNIFORM], rounds=12),
    "mifam samples": scheduled("mifam", mifa.mifam, {"beta1": 0.4, **SAMPLES}, [{"beta1": 0.0}, UNIFORM], rounds=12),
    "mifam schedules": Case(
        {"name": "mifam", "beta1": STEPS}, mifa.mifam, {**LR, "beta1": by_round(STEPS)}, [{"beta1": 0.2}], LR
    ),
    # FedOpt
    **adaptive("fedadam"), **adaptive("fedyogi"), **adaptive("fedams"),
    "fedadam betas by round": Case(
        {"name": "fedadam", **ADAM, "beta1": STEPS, "beta2": [[0, 0.9], [4, 0.5]]}, fedopt.fedadam,
        {**LR, "server_lr": 0.03, "tau": 0.05, "beta1": by_round(STEPS), "beta2": by_round([[0, 0.9], [4, 0.5]])},
        [{"beta1": 0.2}, {"beta2": 0.9}], LR,
    ),
    "fedadagrad": Case(
        {"name": "fedadagrad", "lr": 0.03, "beta1": 0.7, "tau": 0.05}, fedopt.fedadagrad,
        {**LR, "server_lr": 0.03, "beta1": 0.7, "tau": 0.05}, [{"beta1": 0.0}, {"tau": 1e-3}, SAMPLES], LR,
    ),
    "fedadagrad schedules": Case(
        {"name": "fedadagrad", "lr": [[0, 0.05], [3, 0.02]]}, fedopt.fedadagrad,
        {"lr": by_round(STEPS), "server_lr": by_round([[0, 0.05], [3, 0.02]])}, [{"lr": 0.2}, {"server_lr": 0.05}],
        {"lr": STEPS},
    ),
    # FedNova
    "fednova": Case({"name": "fednova"}, fednova.run, LR, [UNIFORM, {"beta1": 0.1}, {"mu": 0.2}, {"rho": 0.2}], EPOCHS),
    "fednova momentum": Case(
        {"name": "fednova", "beta1": 0.6, "rho": 0.3, "lr": 0.5}, fednova.run,
        {**LR, "beta1": 0.6, "rho": 0.3, "server_lr": 0.5}, [{"beta1": 0.0}, {"server_lr": 1.0}], EPOCHS,
    ),
    "fednova schedules": scheduled(
        "fednova", fednova.run, {"mu": 0.7, "beta1": 0.3}, [{"mu": 0.0}, UNIFORM, {"beta1": 0.0}]
    ),
    "fednova rho schedules epochs": Case(
        {"name": "fednova", "rho": 0.6, "lr": SERVER_STEPS, **UNIFORM}, fednova.run,
        {**BY_ROUND, "rho": 0.6, **UNIFORM}, [{"lr": 0.2}, {"server_lr": 1.0}, SAMPLES], {"lr": STEPS, "epochs": 2},
    ),
    # the same with FedAvg, whose a_i are 1: what FedNova differs from
    "fedavg epochs samples": Case({"name": "fedavg", **SAMPLES}, fedavg.run, {**LR, **SAMPLES}, [UNIFORM], EPOCHS),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_papers(name, engine, ragged):
    f = assert_papers_rounds(CASES[name], engine, ragged)
    assert min(f.sizes) == 0 and 1 in {f.sizes[i] for cohort in f.cohorts for i in cohort}


def close(ours: Any, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-9 * np.abs(theirs).max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffolds_control_variates(option, mode, engine, ragged):
    """From inside: c and every c_i are the oracle's, and c is the mean of the c_i of all eleven
    clients with examples, the absent ones included, whatever the weights; c_i of a client never
    seen is 0."""
    case = Case({"name": "scaffold", "option": option, **SAMPLES}, scaffold.trace, {}, local=LR)
    run, _ = engine(configuration(case, mode, ragged, NETS["mlp"][0]))
    f, net = feed(run), NETS["mlp"][1]
    theirs = scaffold.trace(*f.args(net.grad), **LR, option=option, **SAMPLES)
    assert 5 < len(theirs.rows[-1]) < 12
    rows = {i: np.asarray(run.store.get(i)["c_i"]) for i in theirs.rows[-1]}
    for i, row in rows.items():
        close(row, theirs.rows[-1][i])
    close(run.executor.server.state["c"], theirs.c[-1])
    close(run.executor.server.state["c"], sum(rows.values()) / 11)  # one of twelve has no examples


@pytest.mark.parametrize("mode", MODES)
def test_feddyns_h_is_the_mean_of_all_lambda_i(mode, engine, ragged):
    """From inside: every λ_i and h, of eleven clients with examples, and the mean of the
    participants, x - h."""
    case = Case({"name": "feddyn", "alpha": 0.3, **SAMPLES}, feddyn.trace, {}, local=LR)
    run, _ = engine(configuration(case, mode, ragged, NETS["mlp"][0]))
    f, net = feed(run), NETS["mlp"][1]
    theirs = feddyn.trace(*f.args(net.grad), **LR, alpha=0.3, **SAMPLES)
    assert 5 < len(theirs.rows[-1]) < 12
    rows = {i: np.asarray(run.store.get(i)["lambda"]) for i in theirs.rows[-1]}
    for i, row in rows.items():
        close(row, theirs.rows[-1][i])
    close(run.executor.server.state["h"], theirs.h[-1])
    state = run.executor.server.state
    close(state["x"] - state["h"], theirs.x[-1] - theirs.h[-1])
    close(run.executor.server.state["h"], sum(rows.values()) / 11)  # one of twelve has no examples


# --- methods that look into the net


@dataclass
class Deep:
    """A method whose loss needs the net's inside: configuration, oracle, hyper-parameters as in
    `Case`."""

    algorithm: dict[str, Any]
    oracle: Callable
    hyper: dict[str, Any]
    matters: list[dict[str, Any]] = field(default_factory=list)
    local: dict[str, Any] = field(default_factory=lambda: LR)
    hidden: list[int] = field(default_factory=lambda: [8])
    rounds: int = 8
    seed: int = 0
    sizes: list[int] = field(default_factory=lambda: SIZES)


MOON = {"mu": 2.0, "temperature": 0.3}
MLB = {"lambda1": 0.8, "lambda2": 0.6, "lambda3": 1.5, "temperature": 2.0}
MOON_MATTERS = [{"mu": 0.0}, {"mu": 1.9}, {"temperature": 0.5}]
MLB_MATTERS = [
    {"lambda1": 1.0},
    {"lambda2": 0.5},
    {"lambda3": 1.4},
    {"temperature": 1.0},
    {"detach": True},
]
TWO = {"hidden": [10, 8]}

DEEP: dict[str, Deep] = {
    "moon": Deep({"name": "moon", **MOON}, moon.trace, {**LR, **MOON}, [*MOON_MATTERS, SAMPLES]),
    "moon dead": Deep({"name": "moon", **MOON}, moon.trace, {**LR, **MOON}, MOON_MATTERS, hidden=[4], seed=3),
    "moon schedules": Deep(
        {"name": "moon", **MOON, **SAMPLES, "lr": SERVER_STEPS}, moon.trace, {**BY_ROUND, **MOON, **SAMPLES},
        [{"lr": 0.2}, {"server_lr": 1.0}, UNIFORM], {"lr": STEPS},
    ),
    "moonm": Deep(
        {"name": "moonm", **MOON, "beta1": 0.6, "lr": 0.5}, moon.trace, {**LR, **MOON, "beta1": 0.6, "server_lr": 0.5},
        [{"beta1": 0.0}, {"mu": 0.0}, SAMPLES],
    ),
    "fedmlb": Deep({"name": "fedmlb", **MLB}, fedmlb.trace, {**LR, **MLB}, [*MLB_MATTERS, SAMPLES]),
    "fedmlb schedules": Deep(
        {"name": "fedmlb", **MLB, **SAMPLES, "lr": SERVER_STEPS}, fedmlb.trace, {**BY_ROUND, **MLB, **SAMPLES},
        [{"lr": 0.2}, {"server_lr": 1.0}, UNIFORM], {"lr": STEPS}, **TWO,
    ),
    "fedmlbm": Deep(
        {"name": "fedmlbm", **MLB, "beta1": 0.6, "lr": 0.5}, fedmlb.trace,
        {**LR, **MLB, "beta1": 0.6, "server_lr": 0.5}, [{"beta1": 0.0}, {"lambda3": 0.0}, SAMPLES], **TWO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_every_round_of_a_deep_method_is_the_papers(name, engine, ragged):
    """MOON and FedMLB on nets of one and two hidden layers."""
    case = DEEP[name]
    net = Blocks(64, case.hidden, 10)
    model = {"name": "mlp", "hidden": case.hidden}
    runs = [engine(configuration(case, mode, ragged, model))[0] for mode in MODES]
    f = feed(runs[0])
    assert len(f.x0) == net.size

    def xs(f: Feed, **change: Any) -> list[np.ndarray]:
        given = (f.x0, f.cohorts, f.sizes, f.batches, net, f.data)
        return case.oracle(*given, **{**case.hyper, **change})[0]

    theirs = xs(f)
    for run in runs:
        assert distance(run.executor.xs, theirs) < 1e-9, run.plan.mode
    for change in case.matters:
        assert differs(theirs, partial(xs, **change), f), change
    if name == "moon dead":  # samples of which no feature is left, in several rounds
        dead = [
            sum((~net.forward(x, f.data[i][0]).levels[-1].any(axis=1)).sum() for i in cohort)
            for x, cohort in zip(theirs, f.cohorts, strict=False)
        ]
        assert sum(count > 0 for count in dead) > 1


NORM: dict[str, Deep] = {
    "moon samples": Deep(
        {"name": "moon", **MOON, **SAMPLES, "lr": 0.5}, moon.trace, {"lr": 0.1, **MOON, **SAMPLES, "server_lr": 0.5},
        [{"previous": "received"}, UNIFORM, {"server_lr": 1.0}],
    ),
    "moonm": Deep(
        {"name": "moonm", **MOON, "beta1": 0.5, "lr": 0.5}, moon.trace,
        {"lr": 0.1, **MOON, "beta1": 0.5, "server_lr": 0.5}, [{"previous": "received"}, {"beta1": 0.0}],
    ),
    "fedmlb samples": Deep(
        {"name": "fedmlb", **MLB, **SAMPLES, "lr": 0.5}, fedmlb.trace, {"lr": 0.1, **MLB, **SAMPLES, "server_lr": 0.5},
        [UNIFORM, {"detach": True}],
    ),
}  # fmt: skip


FOURS = [40, 1, 20, 38, 64, 0, 45, 38, 54, 32, 36, 48]
"""Sizes for two layers of BatchNorm. Batches of 16, of 4 and more, and of one sample, but none of
two or three: through two samples BatchNorm enlarges what the engine rounds away, 1e-12 of each
block's sum, by up to 1/√ε in each layer."""


def flat(statistics: averaging.Statistics) -> np.ndarray:
    return np.concatenate([part for layer in statistics for part in layer])


@pytest.mark.parametrize("name", NORM)
def test_frozen_nets_with_batch_norm(name, engine, ragged):
    """TinyNN of Luo et al. 2023, with images of 64 pixels: 200 and 100 hidden units, BatchNorm in
    front of each ReLU.

    MOON's frozen nets use running statistics, the previous local model those it ended with
    (`previous: received` is the other reading); FedMLB's frozen tails use the batch's. The server's
    statistics are those of the local nets' own passes in train mode, averaged with the round's
    weights: no frozen net leaves a trace in them.
    """
    case = replace(NORM[name], local={"lr": 0.1}, rounds=6, sizes=FOURS)
    net = Blocks(64, [200, 100], 10, norm=True)
    runs = [engine(configuration(case, mode, ragged, "tinynn"))[0] for mode in MODES]
    f = feed(runs[0])
    assert len(f.x0) == net.size and any(1 in cohort for cohort in f.cohorts)

    def xs(f: Feed, **change: Any) -> list[np.ndarray]:
        given = (f.x0, f.cohorts, f.sizes, f.batches, net, f.data)
        return case.oracle(*given, **{**case.hyper, **change})[0]

    given = (f.x0, f.cohorts, f.sizes, f.batches, net, f.data)
    theirs, statistics = case.oracle(*given, **case.hyper)
    for run in runs:
        assert distance(run.executor.xs, theirs) < 1e-9, run.plan.mode
        assert distance(run.executor.statistics, [flat(s) for s in statistics]) < 1e-9, (
            run.plan.mode
        )
    for change in case.matters:
        assert differs(theirs, partial(xs, **change), f), change


@pytest.mark.parametrize("mode", MODES)
def test_moon_without_a_previous_model(mode, engine, ragged):
    """Round 0, where nobody has been before. The received model as the previous one: both cosines
    are one number, the two gradients cancel, and the round is FedAvg's but for rounding. A random
    one: it is not, whatever the seed, and another seed draws other models. From then on a client's
    previous model is its own under both."""

    def after(algorithm: str | dict[str, Any], rounds: int = 1, seed: int = 0) -> np.ndarray:
        run, _ = engine({
            "seed": seed, "rounds": rounds, "dtype": "float64", "model": {"name": "mlp", "hidden": [8]},
            "partition": ragged(SIZES), "algorithm": algorithm, "schedule": {"cohort": 5},
            "batching": {"mode": mode, "size": 3}, "local": {"batch_size": 16, "steps": 3, "lr": 0.3},
        })  # fmt: skip
        return run.executor.xs[-1]

    plain, moon = after("fedavg"), after({"name": "moon", "mu": 5.0})
    assert np.abs(moon - plain).max() < 1e-10
    drawn = after({"name": "moon", "mu": 5.0, "first_previous": "random"})
    assert np.abs(drawn - plain).max() > 1e-3
    np.testing.assert_array_equal(
        drawn, after({"name": "moon", "mu": 5.0, "first_previous": "random"})
    )
    assert (
        np.abs(after({"name": "moon", "mu": 5.0}, rounds=4) - after("fedavg", rounds=4)).max()
        > 1e-3
    )


# --- what cannot be combined


@pytest.mark.parametrize(
    "algorithm, wrong",
    [
        ({"name": "fednova", "mu": 0.1, "rho": 0.1}, "mu"),
        ({"name": "feddyn", "lr": 0.5}, "lr"),
        ({"name": "feddyn", "lr": [[0, 1.0], [3, 0.5]]}, "lr"),
        ({"name": "scaffold", "option": "III"}, "option"),
        ({"name": "moon", "first_previous": "x0"}, "first_previous"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(algorithm, wrong, base):
    """And the same without the offending value is taken."""
    given = {**base, "rounds": 1, "algorithm": algorithm}
    with pytest.raises(ConfigError, match=wrong):
        prepare(given)
    prepare({**given, "algorithm": {"name": algorithm["name"]}})
