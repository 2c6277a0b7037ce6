"""Server rules that select clients: power-of-choice against NumPy, what a rule sees, resume, and
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
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "selection.md"
SIZES = [4, 9, 14, 6, 20, 11]
NET = Softmax(64, 10)
LR, STEPS, ROUNDS, COHORT, D = 0.5, 3, 9, 2, 4

RULES = """
from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.fedavg import FedAvgServer


@dataclass(frozen=True)
class Uniform(FedAvgServer):
    def select(self, state, pool, rng):
        return pool.ids[rng.choice(len(pool.ids), pool.size, replace=False)]


@dataclass(frozen=True)
class Turns(FedAvgServer):
    '''Client t mod N in round t; checks what it is shown. Two of the clients take 3 units of time.'''

    def init(self, x0, problem):
        return {"x": x0, "updates": torch.tensor(0), "admitted": torch.tensor(0)}

    def before_round(self, state, cohort):
        return {**state, "admitted": state["admitted"] + 1}

    def update(self, state, reports):
        return {**super().update(state, reports), "updates": state["updates"] + 1}

    def select(self, state, pool, rng):
        t, n = pool.round, 6
        assert pool.ids.tolist() == list(range(n)) and pool.samples.tolist() == SIZES
        used = sum(s % n < 4 for s in range(t))
        assert int(state["updates"]) == used == int(state["admitted"]), "the state after the update"
        last = [max((s for s in range(t) if s % n == i and i < 4), default=-1) for i in range(n)]
        assert pool.last_round.tolist() == last, "the slow clients miss the deadline"
        seen = np.array(last) >= 0
        assert np.isfinite(pool.loss[seen]).all() and np.isnan(pool.loss[~seen]).all()
        assert (pool.duration[seen] == 1).all() and np.isnan(pool.duration[~seen]).all()
        pool.loss[:], pool.ids[:] = 0, -1  # copies
        return [np.int64(t % n)]


@dataclass(frozen=True)
class Worst(FedAvgServer):
    '''The largest loss by a state that is not the same before and after `before_round`.'''

    def init(self, x0, problem):
        return {"x": x0, "count": torch.zeros((), dtype=torch.float64)}

    def before_round(self, state, cohort):
        return {**state, "count": 0.7 * state["count"] + sum(cohort.ids)}

    def select(self, state, pool, rng):
        late = pool.round - pool.last_round + np.nan_to_num(pool.duration)
        noise = float(torch.sin(100 * state["count"] + 1000 * state["x"].sum().double()))
        score = np.nan_to_num(pool.loss, nan=2.0) + 0.1 * late + noise * rng.random(len(pool.ids))
        return pool.ids[np.argsort(-score)[: pool.size]].tolist()


@dataclass(frozen=True)
class Prepares(FedAvgServer):
    '''Expects updates of the clients of the last `before_round`, which runs once for each round.'''

    def init(self, x0, problem):
        return {"x": x0, "cohort": torch.zeros(6), "rounds": torch.tensor(0)}

    def before_round(self, state, cohort):
        ones = torch.zeros(6).index_fill(0, torch.tensor(cohort.ids), 1.0)
        return {**state, "cohort": ones, "rounds": state["rounds"] + 1}

    def update(self, state, reports):
        assert state["cohort"].nonzero().flatten().tolist() == sorted(reports.ids)
        assert int(state["rounds"]) == reports.round + 1
        return {**state, **super().update(state, reports)}


@dataclass(frozen=True)
class PreparesFirst(Prepares):
    def select(self, state, pool, rng):
        return pool.ids[: pool.size]


@dataclass(frozen=True)
class Twice(FedAvgServer):
    selects_with_replacement = True

    def select(self, state, pool, rng):
        return [1, 1, 3]


@dataclass(frozen=True)
class NobodyInRound1(FedAvgServer):
    def select(self, state, pool, rng):
        return [] if pool.round == 1 else pool.ids[:1]


@dataclass(frozen=True)
class Answers(FedAvgServer):
    def select(self, state, pool, rng):
        return ANSWER


@dataclass(frozen=True)
class Fails(FedAvgServer):
    def select(self, state, pool, rng):
        return [pool.length]
"""


@pytest.fixture
def rules(source):
    """rules(name, ANSWER): a server rule of RULES, by path."""
    written: list[str] = []

    def write(name: str, answer: str = "None") -> str:
        written.append(RULES.replace("ANSWER", answer).replace("SIZES", repr(SIZES)))
        return f"{source(f'rules{len(written)}', written[-1])}:{name}"

    return write


@pytest.fixture
def power_of_choice(source) -> str:
    """The rule of the how-to page, by path."""
    block = next(block for block in blocks(PAGE) if block.file == "power_of_choice.py")
    return f"{source('power_of_choice', block.text)}:PowerOfChoiceServer"


@pytest.fixture
def config(base, ragged):
    """config(server, **sections): six clients with softmax regression and full batches."""

    def make(server: Any, **sections: Any) -> dict[str, Any]:
        return {
            **base, "rounds": ROUNDS, "dtype": "float64", "model": "logistic", "client": "fedavg", "server": server,
            "partition": ragged(SIZES), "schedule": {"cohort": COHORT},
            "local": {"steps": STEPS, "batch_size": "full", "lr": LR}, "batching": {"mode": "loop"}, **sections,
        }  # fmt: skip

    return make


def local_sgd(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, float]:
    """STEPS of gradient descent on softmax regression; the result and the mean loss."""
    losses = []
    for _ in range(STEPS):
        losses.append(NET.loss(w, x, y))
        w = w - LR * NET.grad(w, x, y)
    return w, float(np.mean(losses))


def test_power_of_choice_is_rpow_d_of_its_paper(config, power_of_choice, engine):
    """Cho 2022: d candidates by their samples, then those of the largest last known loss, infinite
    before the first."""
    run, _ = engine(config({"name": power_of_choice, "d": D}, seed=3))
    data = feed(run, []).data
    w = run.executor.xs[0]
    loss = np.full(6, np.inf)
    by_loss = 0
    for t in range(ROUNDS):
        p = np.array(SIZES) / sum(SIZES)
        candidates = generator(3, "cohort", t).choice(6, D, replace=False, p=p)
        cohort = sorted(candidates, key=lambda i: -loss[i])[:COHORT]
        by_loss += set(cohort) != set(candidates[:COHORT]) and np.isfinite(loss[candidates]).all()
        ends = []
        for i in cohort:
            end, loss[i] = local_sgd(*data[i], w)
            ends.append(end)
        w = np.mean(ends, axis=0)
        assert np.allclose(run.executor.xs[t + 1], w, rtol=0, atol=1e-10)
    assert by_loss > 1  # known losses decided


def test_a_rule_that_samples_uniformly_is_the_uniform_sampling(config, rules, here):
    plain = raysim.run(config("fedavg", run_dir=None))
    assert raysim.run(config(rules("Uniform"), run_dir=None)).digest == plain.digest


def test_a_rule_sees_the_state_after_the_update_and_the_last_round_of_each_client(
    config, rules, engine
):
    slow = {"name": "two_speed", "slow": 0.3, "factor": 3.0, "jitter": 0.0}
    schedule = {"cohort": 1, "client_speeds": slow, "deadline": 2.0}
    _, records = engine(config(rules("Turns"), schedule=schedule))
    assert [record["clients/used"] for record in records[1:7]] == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("stop", [1, 5])
def test_a_run_that_stops_and_resumes_selects_the_same_clients(
    every, stop, config, rules, tmp_path
):
    """Stopped between two checkpoints or at one; the stop itself writes one, after the next round
    was selected."""
    clock = {
        "client_speeds": {"name": "lognormal", "sigma": 1.0},
        "client_dropout": {"rate": 0.3, "rejoin_after": 2.0},
    }
    given = config(
        rules("Worst"), checkpoint={"every": every}, schedule={"cohort": COHORT, **clock}
    )
    whole = raysim.run(given, run_dir=str(tmp_path / "whole"))
    part = tmp_path / "part"
    raysim.run(given, run_dir=str(part), progress=lambda record: record["round"] == stop)
    assert raysim.resume(part).state_digest == whole.state_digest


@pytest.mark.parametrize("rule", ["Prepares", "PreparesFirst"])
def test_a_fork_prepares_its_own_first_round(rule, config, rules, tmp_path):
    """The checkpoint was written when the parent's next round was prepared already."""
    given = config(rules(rule), checkpoint={"every": 1}, run_dir=str(tmp_path / "parent"))
    raysim.run(given, progress=lambda record: record["round"] == 3)
    changes = {"schedule.cohort": 3, "rounds": 5, "run_dir": str(tmp_path / "fork")}
    done = raysim.fork(tmp_path / "parent", changes)
    assert [record.get("clients/used") for record in done.history[3:]] == [COHORT, 3, 3]
    assert raysim.resume(tmp_path / "parent").rounds == ROUNDS


def test_a_client_that_is_selected_twice_counts_twice(config, rules, engine):
    once = {"rounds": 1, "schedule": {"cohort": 3}}
    ends = []
    for rule in (rules("Twice"), rules("Answers", "[1]"), rules("Answers", "[3]")):
        run, _ = engine(config(rule, **once, run_dir=None))
        ends.append(run.executor.xs[-1])
    assert np.allclose(ends[0], (2 * ends[1] + ends[2]) / 3, atol=1e-12)


def test_a_round_may_be_empty(config, rules, engine):
    run, records = engine(config(rules("NobodyInRound1"), rounds=3))
    xs = run.executor.xs
    assert [record["clients/used"] for record in records[1:]] == [1, 0, 1]
    assert np.array_equal(xs[1], xs[2]) and not np.array_equal(xs[2], xs[3])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("None", "returns nothing; return a list"),
        ("3", "returns a int; return a list"),
        ("[0.0]", "returns 0.0 as a client; return whole numbers"),
        ("[True]", "returns True as a client"),
        ("pool.loss[:1]", "returns nan as a client"),
        ("[2, 6]", "returns client 6, which is not in pool.ids"),
        ("[2, 2]", "returns client 2 more than once; .*selects_with_replacement"),
        ("pool.ids", r"returns 6 clients; return at most pool\.size \(2\)"),
    ],
)
def test_a_rule_that_selects_wrongly_is_told_so(answer, message, config, rules):
    with pytest.raises(RaysimError, match=f"select of server rule 'answers' {message}"):
        raysim.run(config(rules("Answers", answer)))


def test_a_rule_that_fails_is_named_with_its_line(config, rules):
    with pytest.raises(RaysimError, match=r"no attribute 'length' .*rules1\.py, line"):
        raysim.run(config(rules("Fails")))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"schedule": {"name": "kasync", "k": 2}}, r"schedule\.name: server rule 'uniform'"),
        ({"schedule": {"cohort": 2, "sampling": "poisson"}}, r"schedule\.sampling: server rule 'uniform'"),
        (
            {"privacy": {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0}},
            r"privacy\.unit: server rule 'uniform'",
        ),
        ({"evaluate": {"every": 1, "forgetting": {}}}, r"evaluate\.forgetting: server rule 'uniform'"),
    ],
)  # fmt: skip
def test_what_excludes_a_selection_refuses_it_by_name(sections, message, config, rules):
    with pytest.raises(ConfigError, match=message):
        prepare(config(rules("Uniform"), **sections))


@pytest.mark.ray
def test_two_actors_select_the_same_clients(config, rules, recycled_actors, tmp_path):
    given = config(rules("Worst"), rounds=4)
    inline = raysim.run(given, run_dir=str(tmp_path / "inline"))
    assert stopped_and_resumed(given, tmp_path / "part").state_digest == inline.state_digest
