"""The asynchronous engine and server rules against the papers, number by number, as in
test_oracles.py: x_t after every round equals the NumPy oracle's to 1e-9 relative, in float64, one
client after the other and side by side, on ragged clients of which one has a single sample and one
has none. The oracle takes from the engine who arrives when and with which version, and the
mini-batches; nothing else. `matters` as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from oracle import asynchronous as A
from oracle.batchnorm import MOMENTUM
from oracle.nets import Blocks, MLPBatchNorm
from support import oracle_cases
from support.oracle_cases import (
    BATCH_NORM,
    MODES,
    NETS,
    ROOMY,
    SAMPLES,
    SIZES,
    STEPS,
    UNIFORM,
    Watching,
    assert_insensitive,
    by_round,
    distance,
)
from support.programs import program

from raysim import schedule

KASYNC = {"name": "kasync", "k": 3}
SPREAD = {"name": "lognormal", "sigma": 1.0, "jitter": 0.3}
BUFFERED = {"name": "buffered", "buffer_size": 3, "concurrency": 6, "client_speeds": SPREAD}
BOUNDED = {"name": "kasync", "k": 3, "max_staleness": 2}
SYNC = {"name": "sync", "cohort": 5}
ONE = {"name": "kasync", "k": 1, "concurrency": 6, "client_speeds": SPREAD}
SERVER_STEPS = [[0, 1.0], [3, 0.6], [6, 0.8]]

RULES: dict[str, Callable] = {
    "fedavg": A.FedAvg, "fedavgm": A.FedAvg, "dynsgd": A.DynSGD, "twafl": A.TWAFL, "refl": A.REFL, "wkafl": A.WKAFL,
    "fedhist": A.FedHist, "fedasync": A.FedAsync, "fedbuff": A.FedBuff,
}  # fmt: skip
"""The keys of the oracles are those of the configuration, and so are the defaults."""


@dataclass
class Case:
    """A server rule and its settings, the changes of them that must show, a schedule and a client.
    Among the changes `eta`, `mu` and `temperature` are the client's."""

    server: dict[str, Any]
    matters: list[dict[str, Any]] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=lambda: KASYNC)
    client: dict[str, Any] = field(default_factory=lambda: {"name": "fedavg"})
    eta: Any = 0.3
    epochs: int | None = None
    rounds: int = 10
    seed: int = 0
    side_by_side: bool = False
    """Also on lanes. What a server does with uploads is the same there, so that some cases of
    each rule will do."""


@dataclass
class Feed(oracle_cases.Feed):
    """What the oracle needs of a run."""

    turns: list[list[tuple[int, int]]]
    """Who arrives in each round, and with which version it began."""


def feed(engine: Any) -> Feed:
    """Who arrives when is drawn anew, by a schedule of the same configuration."""
    plan = engine.plan
    clock = schedule.make_schedule(plan.config, plan.clients.sizes)
    turns = [
        [(one.client, one.base) for one in clock.next_round(t).arrivals]
        for t in range(engine.config.rounds)
    ]
    cohorts = [[client for client, _ in turn] for turn in turns]
    return Feed(**vars(oracle_cases.feed(engine, cohorts)), turns=turns)


def staleness(f: Feed) -> list[list[int]]:
    return [[t - base for _, base in turn] for t, turn in enumerate(f.turns)]


def arrivals(schedule: dict[str, Any]) -> int:
    """How many updates a round has."""
    return next(schedule[key] for key in ("k", "buffer_size", "cohort") if key in schedule)


def step_size(value: Any) -> Any:
    return by_round(value) if isinstance(value, list) else value


def rule_of(case: Case, **changes: Any) -> Any:
    settings = {
        key: step_size(value) for key, value in {**case.server, **changes}.items() if key != "name"
    }
    if case.server["name"] == "fedhist":
        settings["K"] = arrivals(case.schedule)
    return RULES[case.server["name"]](**settings)


def oracle(
    f: Feed, case: Case, net: Any, rule: Callable | None = None, **changes: Any
) -> list[np.ndarray]:
    """x_0 .. x_T with these settings changed."""
    client = {k: changes.pop(k, v) for k, v in {**case.client, "eta": case.eta}.items()}
    name, eta, inner = client.pop("name"), step_size(client.pop("eta")), client
    if name == "fedavg":
        train = A.sgd(f.of_clients(net.grad), eta)
    elif name == "fedprox":
        train = A.prox(f.of_clients(net.grad), eta, **inner)
    else:
        train = A.contrast(net, f.data, eta, **inner)
    return A.run(f.x0, f.turns, f.sizes, f.batches, train, rule or rule_of(case, **changes))


def configuration(case: Case, mode: str, ragged: Callable, **more: Any) -> dict[str, Any]:
    local = {"epochs": case.epochs} if case.epochs else {"steps": 2}
    return {
        "seed": case.seed, "rounds": case.rounds, "dtype": "float64", "partition": ragged(SIZES),
        "model": NETS["mlp"][0], "client": case.client, "server": case.server, "schedule": case.schedule,
        "batching": {"mode": mode, "size": 3}, "local": {"batch_size": 16, "lr": case.eta, **local}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "chosen", [KASYNC, BUFFERED, BOUNDED, ONE], ids=["kasync", "buffered", "bounded", "one"]
)
def test_schedules_are_stale_and_ragged(chosen, engine, ragged):
    """What the rest of the file takes for granted: K arrivals, of various staleness within a round
    and among rounds, some rounds with nobody fresh, the client of one sample among them and the
    empty one not, clients that return."""
    rounds = 20 if chosen is ONE else 10
    run, _ = engine(
        configuration(Case({"name": "fedavg"}, schedule=chosen, rounds=rounds), "loop", ragged)
    )
    f = feed(run)
    s, who = staleness(f), [i for turn in f.turns for i, _ in turn]
    every = {one for round in s for one in round}
    assert {len(turn) for turn in f.turns} == {arrivals(chosen)}
    assert len(every) > 2 and max(every) <= chosen.get("max_staleness", 100)
    assert any(min(round) > 0 for round in s) and any(min(round) == 0 for round in s)
    assert arrivals(chosen) == 1 or sum(len(set(round)) > 1 for round in s) > 4
    assert chosen["name"] == "buffered" or arrivals(chosen) == 1 or 1 in who
    assert 5 not in who and all(len({i for i, _ in turn}) == len(turn) for turn in f.turns)
    assert max(who.count(i) for i in who) >= 3


# --- rules


def everywhere(
    name: str, settings: dict, matters: list[dict], synchronous: list[dict], **more: Any
) -> dict[str, Case]:
    """One rule with constants that are not the defaults: with equal weights, with weights by samples
    and step sizes by schedules, and in step. `synchronous` are the changes that show where nobody
    is stale."""
    server = {"name": name, **settings}
    by_samples = {**server, **SAMPLES}
    return {
        f"{name} kasync": Case({**server, **UNIFORM}, [*matters, SAMPLES, {"lr": 0.9}], **more),
        f"{name} buffered samples schedules": Case(
            {**by_samples, "lr": SERVER_STEPS},
            [UNIFORM, {"lr": 1.0}, {"eta": 0.2}],
            BUFFERED,
            eta=STEPS,
            side_by_side=True,
            **more,
        ),
        f"{name} sync": Case(by_samples, [*synchronous, UNIFORM], SYNC, side_by_side=True, **more),
    }


REFL = [{"beta": 0.35}, {"boost_scale": 1.0}]
WKAFL = [{"alpha": 0.1}, {"theta": 0.3}, {"clip": None}, {"clip2": 5.0}, {"stage2": None}, {"sharpness": 50.0},
         {"decay": 0.01}]  # fmt: skip
CHOOSY = {
    "alpha": 0.3,
    "theta": 0.55,
    "clip": 0.5,
    "clip2": 0.8,
    "stage2": 5,
    "sharpness": 10.0,
    "decay": 0.05,
}
FEDHIST = [{"a": 0.1}, {"b": 0.3}, {"theta": 0.0}, {"kappa": 0.9}, {"rho": 0.9995}, {"length": 4}, {"ina": False},
           {"leave_one_out": True}]  # fmt: skip
RECALL = {"a": 0.4, "b": 0.6, "theta": 0.2, "kappa": 0.5, "rho": 0.95, "length": 3}

CASES: dict[str, Case] = {
    "fedavg kasync": Case({"name": "fedavg"}, [{"lr": 0.9}, {"eta": 0.2}, SAMPLES], eta=STEPS, side_by_side=True),
    "fedavg bounded epochs": Case({"name": "fedavg"}, [SAMPLES], BOUNDED, epochs=2, side_by_side=True),
    "fedavgm kasync": Case({"name": "fedavgm", "beta1": 0.6}, [{"beta1": 0.0}, {"lr": 0.9}, SAMPLES]),
    "fedavgm buffered": Case({"name": "fedavgm", "beta1": STEPS, **SAMPLES}, [{"beta1": 0.2}, UNIFORM], BUFFERED),
    **everywhere("dynsgd", {}, [{"normalise": False}], []),
    "dynsgd not normalised samples": Case(
        {"name": "dynsgd", "normalise": False, **SAMPLES}, [{"normalise": True}, UNIFORM], BUFFERED
    ),
    **everywhere("twafl", {}, [], []),
    **everywhere("refl", {"beta": 0.8, "boost_scale": 3.0}, REFL, []),
    **everywhere("wkafl", CHOOSY, WKAFL, WKAFL),
    **everywhere("fedhist", RECALL, FEDHIST, FEDHIST),
    **everywhere("fedbuff", {"beta1": 0.5}, [{"beta1": 0.0}], [{"beta1": 0.0}]),
    "fedhist leave one out": Case(
        {"name": "fedhist", **RECALL, "leave_one_out": True}, [{"leave_one_out": False}, {"length": 2}]
    ),
    "fedhist without norm matching": Case(
        {"name": "fedhist", **RECALL, "ina": False, "lr": 1.5}, [{"ina": True}, {"lr": 1.0}, {"a": 0.3}]
    ),
    "fedhist median norm": Case(
        {"name": "fedhist", **RECALL, "ina_norm": "median"}, [{"ina_norm": "mean"}, {"ina_norm": "largest"}]
    ),
    "fedhist largest norm, factor decays": Case(
        {"name": "fedhist", **RECALL, "ina_norm": "largest", "ina_decay": "factor"},
        [{"ina_norm": "mean"}, {"ina_decay": "norm"}, {"rho": 1.0}],
    ),
    "fedhist only up": Case({"name": "fedhist", **RECALL, "rho": 0.8, "ina_only_up": True}, [{"ina_only_up": False}]),
    "fedhist length 0": Case({"name": "fedhist", **RECALL, "length": 0}, [{"length": 1}, {"rho": 0.9}, SAMPLES]),
    # utilities rule, and all of them are penalties: round after round nobody has any weight
    "fedhist penalties": Case(
        {"name": "fedhist", **RECALL, "b": 1.0, "theta": 1.0, **SAMPLES}, [{"b": 0.9}, {"theta": 0.1}]
    ),
    "fedhist some penalties": Case(
        {"name": "fedhist", **RECALL, "b": 0.9, "theta": 0.7, "kappa": 0.2}, [{"b": 0.8}, {"theta": 0.6}], rounds=16
    ),
    "wkafl nobody agrees": Case({"name": "wkafl", **CHOOSY, "theta": 0.99}, [{"theta": 0.5}]),
    "wkafl all agree": Case(
        {"name": "wkafl", **CHOOSY, "theta": -1.0, "clip": None, "stage2": None}, [{"theta": 0.5}, {"clip": 0.7}]
    ),
    "fedasync": Case(
        {"name": "fedasync"}, [{"alpha": 0.5}, {"a": 0.4}, {"staleness": "hinge"}], side_by_side=True
    ),
    "fedasync prox": Case(
        {"name": "fedasync", "a": 1.5, "alpha": 0.9}, [{"a": 0.5}, {"alpha": 0.6}, {"mu": 0.4}],
        client={"name": "fedprox", "mu": 0.5},
    ),
    "fedasync constant": Case(
        {"name": "fedasync", "staleness": "constant"}, [{"staleness": "polynomial"}, {"alpha": 0.9}], BUFFERED,
        side_by_side=True,
    ),
    "fedasync hinge": Case(
        {"name": "fedasync", "staleness": "hinge"}, [{"staleness": "constant"}, {"a": 9}, {"c": 3}], rounds=16
    ),
    "fedasync one by one": Case(
        {"name": "fedasync", "alpha": [[0, 0.9], [8, 0.45]]}, [{"alpha": 0.9}, {"eta": 0.2}, {"a": 0.4}], ONE,
        eta=STEPS, rounds=20, side_by_side=True,
    ),
    "fedasync sync": Case({"name": "fedasync"}, [{"alpha": 0.5}], SYNC, side_by_side=True),
    "fedbuff beta1 by round": Case({"name": "fedbuff", "beta1": STEPS}, [{"beta1": 0.2}], BUFFERED),
    # defaults (of the others see `test_the_named_algorithms`)
    "wkafl default": Case({"name": "wkafl"}, [{"alpha": 0.2}, {"clip": 0.5}, {"sharpness": 40.0}, {"decay": 0.02}]),
    "fedhist default": Case(
        {"name": "fedhist"}, [{"a": 0.2}, {"b": 0.2}, {"kappa": 0.8}, {"theta": 0.1}, {"rho": 0.999}, {"length": 14}],
        rounds=18,
    ),
    # clients that look at the net they began with
    "fedprox": Case(
        {"name": "fedavg"}, [{"mu": 0.0}, {"mu": 0.6}, SAMPLES], client={"name": "fedprox", "mu": 0.7},
        side_by_side=True,
    ),
    "moon": Case(
        {"name": "fedavg"}, [{"mu": 0.0}, {"temperature": 0.5}], client={"name": "moon", "mu": 2.0, "temperature": 0.3},
        side_by_side=True,
    ),
}  # fmt: skip


def net_of(case: Case) -> Any:
    return Blocks(64, [8], 10) if case.client["name"] == "moon" else NETS["mlp"][1]


@pytest.mark.parametrize(
    "name, mode",
    [
        (name, mode)
        for name in CASES
        for mode in MODES
        if mode == "loop" or CASES[name].side_by_side
    ],
)
def test_every_round_is_the_papers(name, mode, engine, ragged):
    """x_1 .. x_T of the engine are those of the oracle, and would not be with another value of an
    option."""
    case = CASES[name]
    net = net_of(case)
    run, _ = engine(configuration(case, mode, ragged))
    f = feed(run)
    theirs = oracle(f, case, net)
    assert len(theirs) == case.rounds + 1
    assert np.abs(theirs[-1] - theirs[0]).max() > 1e-4
    assert np.abs(theirs[-1]).max() < 1e3  # nothing runs away
    assert distance(run.executor.xs, theirs) < 1e-9
    if mode == "loop":
        assert_insensitive(theirs, lambda f: oracle(f, case, net), f)
        for other in case.matters:
            assert distance(run.executor.xs, oracle(f, case, net, **other)) > 1e-5, other


# --- failures


FAILING = program("oracles_async_failing")

DROPS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "dynsgd": {"normalise": False, **SAMPLES}, "twafl": {}, "refl": {"beta": 0.8},
    "wkafl": CHOOSY, "fedhist penalties": {**RECALL, "b": 1.0, "theta": 1.0, **SAMPLES},
    "fedhist leave one out": {**RECALL, "leave_one_out": True}, "fedasync": {},
    "fedbuff": {"beta1": 0.6},
}  # fmt: skip


@pytest.mark.parametrize(
    "name, chosen",
    [
        *((name, "kasync") for name in DROPS),
        *((name, "sync") for name in ("wkafl", "fedhist penalties", "fedbuff")),
    ],
)
def test_who_fails_leaves_no_trace(name, chosen, engine, ragged, source):
    """Clients of 16 samples and more send what is not finite. They leave K, the weights and every
    memory; a round in which all fail changes nothing. Their mini-batches are used up."""
    case = Case(
        {"name": name.split()[0], **DROPS[name]},
        [],
        {"kasync": KASYNC, "sync": SYNC}[chosen],
        rounds=14,
    )
    failing = {"name": source("failing", FAILING) + ":Failing", "least": 16}
    run, records = engine(
        configuration(case, "loop", ragged, client=failing, faults={"on_client_error": "drop"})
    )
    f = feed(run)
    left = [[(i, base) for i, base in turn if f.sizes[i] < 16] for turn in f.turns]
    assert [record["clients/used"] for record in records[1:]] == [len(turn) for turn in left]
    assert len({len(turn) for turn in left}) > 1
    nobody_fresh = [
        turn for t, turn in enumerate(left) if turn and min(t - base for _, base in turn) > 0
    ]
    assert chosen == "sync" or ([] in left and nobody_fresh)
    f.turns = left
    assert distance(run.executor.xs, oracle(f, case, NETS["mlp"][1])) < 1e-9


@pytest.mark.parametrize(
    "algorithm, client, server",
    [
        *[
            (name, {"name": "fedavg"}, {"name": name})
            for name in RULES
            if name not in ("fedavgm", "fedasync")
        ],
        ("fedasync", {"name": "fedprox", "mu": 0.005}, {"name": "fedasync"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_named_algorithms(algorithm, client, server, engine, ragged):
    """By their names alone they are these pairs, with these defaults."""
    case = Case(server, client=client)
    run, _ = engine(
        {
            k: v
            for k, v in configuration(case, "loop", ragged, algorithm=algorithm).items()
            if k not in ("client", "server")
        }
    )
    assert distance(run.executor.xs, oracle(feed(run), case, NETS["mlp"][1])) < 1e-9


# --- BatchNorm

NORM: dict[str, dict[str, Any]] = {
    "fedavg": SAMPLES, "dynsgd": {"normalise": False, **SAMPLES}, "twafl": {},
    "refl": {"beta": 0.8}, "wkafl": CHOOSY, "wkafl nobody agrees": {**CHOOSY, "theta": 0.99}, "fedhist": RECALL,
    "fedasync": {}, "fedbuff": {"beta1": 0.5, "lr": 0.7, **SAMPLES},
}  # fmt: skip


@pytest.mark.parametrize("name", NORM)
def test_running_statistics(name, engine, ragged, source):
    """They start from those of the version that the client began with, and are averaged with the
    rule's weights. Equal weights would give others, and so would a start from the newest version's.
    """
    case = Case({"name": name.split()[0], **NORM[name]}, eta=0.2)
    model = {"name": source("batch_norm", BATCH_NORM) + ":Net"}
    run, _ = engine(configuration(case, "loop", ragged, model=model, partition=ragged(ROOMY)))
    f, watching, rule = feed(run), Watching(MLPBatchNorm(64, 6, 10)), rule_of(case)
    weights: list[np.ndarray] = []

    def noting(t, x, uploads):
        after = rule(t, x, uploads)
        weights.append(rule.p)
        return after

    theirs = A.run(f.x0, f.turns, f.sizes, f.batches, A.sgd(f.of_clients(watching), 0.2), noting)
    assert distance(run.executor.xs, theirs) < 1e-9

    def averages(weights: list[np.ndarray], newest: bool = False) -> list[np.ndarray]:
        history, seen = [np.array([np.zeros(6), np.ones(6)])], iter(watching.seen)
        for t, turn in enumerate(f.turns):
            uploaded = []
            for i, base in turn:
                now = history[t if newest else base]
                for _ in f.batches[t][i]:
                    now = (1 - MOMENTUM) * now + MOMENTUM * np.array(next(seen))
                uploaded.append(now)
            history.append(A.averaged(history[t], weights[t], uploaded, mixes=name == "fedasync"))
        return history

    model, x = run.plan.model(), run.executor.server.state["x"]
    named = [model.state_dict(x, torch.tensor(b)) for b in run.executor.statistics]
    ours = [np.array([n["bn.running_mean"].numpy(), n["bn.running_var"].numpy()]) for n in named]
    assert distance(ours, averages(weights)) < 1e-9
    assert distance(ours, averages([np.full(3, 1 / 3)] * len(weights))) > 1e-4
    assert distance(ours, averages(weights, newest=True)) > 1e-4
