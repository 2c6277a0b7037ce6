"""Servers that send each client a model of its own, and starts that carry what they have found."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracle_cases import MODES, NETS, distance, feed
from support.programs import program

import raysim
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator

LR = 0.2
NET = NETS["mlp"][1]

RULES = program("models_per_client_rules")


@pytest.fixture
def config(small_mlp):
    return small_mlp(RULES, rounds=3)


def local_sgd(f, net, w, t, i):
    x, y = f.data[i]
    for b in f.batches[t][i]:
        w = w - LR * net.grad(w, x[b], y[b])
    return w


@pytest.mark.parametrize("mode", MODES)
def test_each_client_trains_the_model_that_it_is_sent(mode, config, engine):
    done, records = engine(config(mode, server="FILE:TwoModels"), states=True)
    f = feed(done)
    models = [f.x0, 0.5 * f.x0]
    for t, cohort in enumerate(f.cohorts):
        for k in (0, 1):
            mine = [i for i in cohort if i % 2 == k]
            if mine:
                ends = [local_sgd(f, NET, models[k], t, i) for i in mine]
                models[k] = np.mean(ends, axis=0)
    assert np.allclose(done.executor.states[-1]["state/models"], models, rtol=1e-9)
    used = sum(map(len, f.cohorts))
    assert records[-1]["bytes_down"] == records[-1]["bytes_up"] == used * NET.size * 8


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_a_resumed_run_counts_the_bytes_that_clients_are_sent(seed, config, base):
    schedule = {"name": "buffered", "buffer_size": 1, "concurrency": 5}
    schedule |= {"client_dropout": {"rate": 0.6}}
    given = base | config(server="FILE:TwoModels", schedule=schedule, rounds=8) | {"seed": seed}
    whole = raysim.run(given | {"run_dir": base["run_dir"] + "-whole"})
    stopped = raysim.run(given | {"rounds": 4})
    resumed = raysim.resume(stopped.run_dir, {"rounds": 8})
    sent = [[record["bytes_down"] for record in r.history[1:]] for r in (whole, resumed)]
    assert sent[0] == sent[1]


def test_the_start_of_each_client_is_its_base(config, engine):
    _, records = engine(config(client="FILE:Starts", server="FILE:Based"))
    assert records[-1]["server/far"] == 0


def test_personal_parameters_are_put_into_the_model_that_is_sent(config, engine):
    local = {"steps": 2, "batch_size": 16, "lr": LR, "personal": "classifier"}
    done, _ = engine(config(server="FILE:TwoModels", local=local), states=True)
    body = 64 * 8 + 8
    models = done.executor.states[-1]["state/models"].numpy()
    assert np.array_equal(models[1][body:], 0.5 * done.executor.xs[0][body:])
    assert (models[1][:body] != 0.5 * done.executor.xs[0][:body]).any()


def test_asynchronous_clients_train_the_model_of_their_version(config, engine):
    schedule = {"name": "kasync", "k": 2, "concurrency": 4}
    runs = [
        engine(config(mode, server="FILE:TwoModels", schedule=schedule), states=True)[0]
        for mode in MODES
    ]
    looped, several = [
        [state["state/models"].numpy() for state in run.executor.states] for run in runs
    ]
    assert distance(several, looped) < 1e-9 and (looped[-1] != looped[0]).any(1).all()


@pytest.mark.parametrize("mode", MODES)
def test_what_the_start_has_found_is_carried(mode, config, engine):
    done, records = engine(config(mode, client="FILE:Scaled"))
    f = feed(done)
    factors, xs = [], [f.x0]
    for t, cohort in enumerate(f.cohorts):
        deltas = []
        for i in cohort:
            factors.append(generator(2, "client rule factor", t, i).uniform(0.5, 1.0))
            w = factors[-1] * xs[-1]
            x, y = f.data[i]
            for b in f.batches[t][i]:
                w = w - LR * factors[-1] * NET.grad(w, x[b], y[b])
            deltas.append(factors[-1] * xs[-1] - w)
        xs.append(xs[-1] - np.mean(deltas, axis=0))
    assert distance(done.executor.xs, xs) < 1e-9
    assert records[-1]["client/factor"] == pytest.approx(np.mean(factors[-4:]))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"server": "FILE:NoX"}, r"sent_to of server rule 'nox' returns no 'x'"),
        ({"server": "FILE:All"}, r"sent_to of server rule 'all' returns 'x' as torch.float64 \[2, 610\]"),
        ({"client": "FILE:BadThird"}, r"client\.name: begin of client rule 'badthird' returns a list"),
        ({"client": "FILE:CarriesW"}, r'client\.name: begin of client rule .* returns "w" in its third'),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_the_run(sections, message, config, base):
    with pytest.raises(RaysimError, match=message):
        prepare({**base, **config(**sections)})


@pytest.mark.parametrize("sections", [{"server": "FILE:TwoModels"}, {"client": "FILE:Scaled"},
                                      {"local": {"steps": 1, "personal": "classifier"}}])  # fmt: skip
def test_updates_from_models_of_their_own_are_not_recorded(sections, config, base):
    given = config(**sections, record_updates={"rounds": [0]})
    with pytest.raises(ConfigError, match=r"record_updates: .* models of their own"):
        prepare({**base, **given})


@pytest.mark.ray
def test_two_actors_give_the_same(config, base, tmp_path, recycled_actors):
    given = {**base, **config(client="fedprox", server="FILE:TwoModels")}
    ray = {"executor": "ray", "actors": 2, "threads": 1}
    one = raysim.run(given, run_dir=str(tmp_path / "one"), tracking=False)
    two = raysim.run({**given, "resources": ray}, run_dir=str(tmp_path / "two"), tracking=False)
    assert one.digest == two.digest


def test_models_per_client_cannot_be_pooled(config, base):
    local = {"steps": 1, "batch_size": 16, "lr": LR}
    given = config("pooled", server="FILE:TwoModels", local=local)
    with pytest.raises(
        ConfigError, match=r"server rule 'twomodels' sends clients different models"
    ):
        prepare({**base, **given})
