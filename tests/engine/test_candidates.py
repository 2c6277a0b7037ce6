"""Losses of candidates: power-of-choice against NumPy, whose model is evaluated, resume, and
errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.nets import Softmax
from support.documents import blocks
from support.oracle_cases import feed
from support.stopped_runs import stopped_and_resumed

import raysim
from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.metrics import find_metric
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.rules import ClientPool
from raysim.schedule import Arrival, ScheduledRound
from raysim.server.selection import ClientHistory
from raysim.training.messages import ClientResult

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "selection.md"
SIZES = [4, 9, 14, 6, 20, 11]
NET = Softmax(64, 10)
LR, ROUNDS, COHORT, D = 0.5, 4, 2, 4

RULES = """
from dataclasses import dataclass

import numpy as np
import torch

from raysim import ClientRule
from raysim.algorithms.fedavg import FedAvgServer


@dataclass(frozen=True)
class Digits(FedAvgServer):
    '''Selects by the last digits of the losses, and by a state that `before_round` changes.'''

    def init(self, x0, problem):
        return {"x": x0, "count": torch.zeros((), dtype=torch.float64)}

    def before_round(self, state, cohort):
        return {**state, "count": 0.7 * state["count"] + sum(cohort.ids)}

    def candidates(self, state, pool, rng):
        start = int(1000 * state["count"]) % 3
        return rng.permutation(pool.ids)[start : start + 3]

    def select(self, state, pool, rng):
        score = np.sin(1e14 * pool.current_loss + float(state["count"]))
        return pool.ids[np.argsort(score)[: pool.size]]


@dataclass(frozen=True)
class Checks(FedAvgServer):
    '''Clients 1 and 4 are candidates; a check of the losses that it gets.'''

    def candidates(self, state, pool, rng):
        pool.ids[:1] = pool.ids[1:2]  # a copy
        return np.array([4, 1])

    def select(self, state, pool, rng):
        assert pool.ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert np.isnan(pool.current_loss[[0, 2, 3, 5]]).all()
        loss = pool.current_loss[[1, 4]].tolist()
        assert CHECK, loss
        return [1]


@dataclass(frozen=True)
class Answers(FedAvgServer):
    def candidates(self, state, pool, rng):
        return ANSWER

    def select(self, state, pool, rng):
        assert np.isnan(pool.current_loss).all()
        return [0, 1]


@dataclass(frozen=True)
class Unkeyed(FedAvgServer):
    def select(self, state, pool, rng):
        return np.random.permutation(pool.ids)[: pool.size]


@dataclass(frozen=True)
class NoSelect(FedAvgServer):
    def candidates(self, state, pool, rng):
        return [0]


@dataclass(frozen=True)
class Zero(ClientRule):
    '''A client's own model has all parameters 0.'''

    def evaluated(self, shared, client_state, data, task):
        return 0 * shared["x"]


@dataclass(frozen=True)
class Odd(ClientRule):
    '''Clients with an odd number of examples cannot be evaluated.'''

    def evaluated(self, shared, client_state, data, task):
        if data.n % 2:
            raise ValueError("an odd client")
        return 0 * shared["x"]
"""


@pytest.fixture
def rules(source):
    """rules(name, ANSWER, CHECK): a rule of RULES, by path."""
    written: list[str] = []

    def write(name: str, answer: str = "None", check: str = "True") -> str:
        written.append(RULES.replace("ANSWER", answer).replace("CHECK", check))
        return f"{source(f'rules{len(written)}', written[-1])}:{name}"

    return write


@pytest.fixture
def pow_d(source) -> str:
    """The rule of the how-to page, by path."""
    block = next(block for block in blocks(PAGE) if block.file == "pow_d.py")
    return f"{source('pow_d', block.text)}:PowDServer"


@pytest.fixture
def config(base, ragged):
    """config(server, **sections): six clients with softmax regression and full batches."""

    def make(server: Any, **sections: Any) -> dict[str, Any]:
        return {
            **base, "rounds": ROUNDS, "dtype": "float64", "model": "logistic", "client": "fedavg", "server": server,
            "partition": ragged(SIZES), "schedule": {"cohort": COHORT},
            "local": {"steps": 1, "batch_size": "full", "lr": LR}, "batching": {"mode": "loop"}, **sections,
        }  # fmt: skip

    return make


def test_power_of_choice_is_pow_d_of_its_paper(config, pow_d, engine):
    """Cho 2022: d candidates by their samples; of them those with the largest loss of the current
    model."""
    pools = []

    def spy(run):
        select = run.executor.select
        run.executor.select = lambda pool, rng: pools.append(pool) or select(pool, rng)

    run, records = engine(config({"name": pow_d, "d": D}, seed=3), before=spy)
    data = feed(run, []).data
    xs = run.executor.xs[::2]  # every round but the last is broadcast twice: to candidates too
    w, by_loss = xs[0], 0
    for t in range(ROUNDS):
        p = np.array(SIZES) / sum(SIZES)
        candidates = generator(3, "candidates", t).choice(6, D, replace=False, p=p)
        mine = {i: data[i] for i in candidates}
        losses = [NET.loss(w, *mine[i]) if i in mine else np.nan for i in range(6)]
        assert np.allclose(pools[t].current_loss, losses, rtol=1e-10, equal_nan=True)
        cohort = sorted(candidates, key=lambda i: -losses[i])[:COHORT]
        by_loss += set(cohort) != set(candidates[:COHORT])
        w = w - LR * np.mean([NET.grad(w, *mine[i]) for i in cohort], axis=0)
        assert np.allclose(xs[t + 1], w, rtol=0, atol=1e-10)
        assert records[t + 1]["clients/candidates"] == D
        # D - COHORT candidates receive the model for nothing; a client of the cohort receives it
        # once.
        assert records[t + 1]["bytes_down"] == (t + 1) * D * len(w) * 8
    assert by_loss > 1
    assert all(find_metric(name) for name in records[-1])


def test_a_resumed_run_selects_the_same_clients(config, rules, tmp_path):
    clock = {"client_speeds": "lognormal", "client_dropout": {"rate": 0.3, "rejoin_after": 2.0}}
    schedule = {"cohort": COHORT, **clock}
    given = config(rules("Digits"), rounds=6, checkpoint={"every": 2}, schedule=schedule)
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    part = tmp_path / "part"
    raysim.run(given, run_dir=str(part), progress=lambda record: record["round"] == 3)
    resumed = raysim.resume(part)
    assert resumed.state_digest == whole.state_digest
    for key in ("clients/candidates", "bytes_down"):
        assert [r.get(key) for r in resumed.history] == [r.get(key) for r in whole.history]


@pytest.mark.parametrize(
    ("client", "check"),
    [("fedavg", "loss[0] != loss[1]"), ("Zero", "np.allclose(loss, np.log(10), atol=1e-12)")],
)
def test_a_candidate_evaluates_the_model_that_it_would_use(client, check, config, rules):
    client = client if client == "fedavg" else rules(client)
    raysim.run(config(rules("Checks", check=check), client=client, rounds=1))


@pytest.mark.parametrize("answer", ["None", "[]"])
def test_a_round_without_candidates_measures_nothing(answer, config, rules, engine):
    _, records = engine(config(rules("Answers", answer), rounds=1))
    assert records[1]["clients/candidates"] == 0


def test_a_candidate_that_cannot_be_evaluated_ends_the_run_or_has_no_loss(config, rules, tmp_path):
    given = config(rules("Checks", check="np.isnan(loss[0]) and loss[1] > 0"), client=rules("Odd"))
    with pytest.raises(
        RaysimError, match=r"round 1: the evaluation of candidate 1 failed: .*odd"
    ) as e:
        raysim.run(given)
    assert not isinstance(e.value, ClientError), "it would write a checkpoint between two rounds"
    raysim.run(given, rounds=1, faults={"on_client_error": "drop"}, run_dir=str(tmp_path / "2"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("3", "returns a int; return a list"),
        ("[0.0]", "returns 0.0 as a client; return whole numbers"),
        ("[2, 6]", "returns client 6, which is not in pool.ids"),
        ("[2, 2]", "returns client 2 more than once; return each client once"),
    ],
)
def test_wrong_candidates_are_refused_before_the_run(answer, message, config, rules):
    with pytest.raises(ConfigError, match=f"candidates of server rule 'answers' {message}"):
        prepare(config(rules("Answers", answer)))


def test_a_selection_with_numbers_of_a_global_generator_is_refused_before_the_run(config, rules):
    message = "select of server rule 'unkeyed' draws from NumPy's global generator.* `rng`"
    with pytest.raises(ConfigError, match=message):
        prepare(config(rules("Unkeyed")))


def test_what_clients_reported_is_known_after_a_checkpoint():
    history = ClientHistory(3)
    scheduled = ScheduledRound(4, [Arrival(1, 4, start=1.0, finish=3.5)], 3.5)
    history.record(scheduled, [ClientResult(1, 0.5, metrics={"U": 7.0})])
    restored = ClientHistory(3)
    restored.unpack(history.pack())
    pool = restored.pool(ClientPool(np.arange(3), np.array([2, 3, 0])), size=2, t=5)
    assert np.array_equal(pool.metric("U"), [np.nan, 7.0], equal_nan=True)
    assert np.array_equal(pool.duration, [np.nan, 2.5], equal_nan=True)
    assert pool.n_rounds.tolist() == [0, 1]
    assert np.isnan(pool.metric("V")).all() and len(pool.metric("V")) == 2


def test_candidates_without_a_selection_are_refused(config, rules):
    with pytest.raises(ConfigError, match=r"server rule 'noselect' defines `candidates`.*`select"):
        prepare(config(rules("NoSelect")))
    with pytest.raises(ConfigError, match=r"schedule\.name: server rule 'digits' selects"):
        prepare(config(rules("Digits"), schedule={"name": "kasync", "k": 2}))


@pytest.mark.ray
def test_two_actors_measure_the_same_losses(config, rules, recycled_actors, tmp_path):
    given = config(rules("Digits"))
    inline = raysim.run(given, run_dir=str(tmp_path / "inline"))
    assert stopped_and_resumed(given, tmp_path / "part").state_digest == inline.state_digest
