"""What asynchronous runs need beside a clock: rules that weigh early or late, FedHist's memory, a
slow class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.programs import program

import raysim
from raysim.config.sections.data import Data
from raysim.data import load_dataset
from raysim.engine.process_setup import make_trainer
from raysim.engine.round_clients import make_cohort, make_tasks
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.rules.reports import Reports
from raysim.runs.artifacts.plots import plot_virtual_clock
from raysim.schedule import preview, synchronous_round
from raysim.training.messages import Block, Broadcast

STALE = {"name": "kasync", "k": 4}
RULES = program("asynchronous_rules")
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, classes))
"""
SIZES = [30, 12, 17, 20, 45, 0, 8, 23, 16, 5, 33, 12]


@pytest.fixture
def given(ragged, source):
    """given(server, ...): ten K-async rounds of a net with BatchNorm, under one of the rules above."""
    rules = source("late", RULES)

    def make(server: str, **more):
        return {
            "rounds": 10, "model": source("net", NET) + ":Net", "partition": ragged(SIZES), "schedule": STALE,
            "algorithm": {"name": f"{rules}:{server}", **more}, "local": {"steps": 2, "batch_size": 16, "lr": 0.1},
            "dtype": "float64",
        }  # fmt: skip

    return make


def test_weights_may_depend_on_staleness(given, engine):
    """A weight of 0 leaves a client out: of the parameters, of BatchNorm's statistics, and of the
    entropy."""
    run, records = engine(given("Youngest"))
    plain, _ = engine({**given("Youngest"), "algorithm": "fedavg"})
    assert np.abs(run.executor.xs[-1] - plain.executor.xs[-1]).max() > 1e-3
    assert np.abs(run.executor.statistics[-1] - plain.executor.statistics[-1]).max() > 1e-3
    turns = preview(run.config, run.plan.clients.sizes, 10)
    young = [sum(s == min(turn.staleness) for s in turn.staleness) for turn in turns]
    assert min(young) < 4
    assert [r["server/weights_entropy"] for r in records[1:]] == pytest.approx(np.log(young))


def test_the_model_of_one_client_is_base_minus_update(given, engine):
    """Taking over the last arrival whole, with its statistics. Two that take one step each of all
    their data from version 0, in different rounds, are what one round of each of them from version
    0 gives, however stale they are."""
    alone = {**given("Last"), "local": {"steps": 1, "batch_size": "full", "lr": 0.1}}
    run, _ = engine(alone)
    turns = preview(run.config, run.plan.clients.sizes, 10)
    late = [turn for turn in turns if turn.t > 0 and turn.arrivals[-1].base == 0]
    assert late
    x0, buffers = run.plan.initial
    for turn in late:
        [job] = make_tasks(
            run.plan,
            run.store,
            make_cohort(run.plan, synchronous_round(0, [turn.arrivals[-1].client])),
        )
        trainer = make_trainer(run.plan, "cpu")
        outcome = trainer.train(
            {0: Broadcast({"x": x0}, buffers)},
            [Block(0, [replace(job, cursor=0, client_state=None)])],
        )
        np.testing.assert_allclose(
            run.executor.xs[turn.t + 1], x0 - outcome.rows["delta"][0], rtol=0, atol=1e-12
        )
        np.testing.assert_allclose(
            run.executor.statistics[turn.t + 1], outcome.rows["buffers"][0], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        *[(how, "weigh of server rule 'bad' must give a number for each of 2 clients")
          for how in ("short", "negative", "nan")],
        ("zero", "server rule 'bad': weigh gave 0 for all of 4 clients"),
    ],
)  # fmt: skip
def test_weights_that_are_none_are_refused(how, message, given, engine):
    """Three of them in the trial of two clients before the run; zero may depend on the clients."""
    with pytest.raises(RaysimError, match=message):
        engine(given("Bad", how=how))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("Early", "update calls reports.set_weights; set weights_after_training = True"),
        ("Short", "got 1 weights for 2 clients; pass one weight per client"),
        ("Heavy", r"weights that sum to 2, .* by their sum, raysim\.rules\.normalised\(weights\)"),
    ],
)
def test_a_rule_that_weighs_late_says_so(rule, message, given, engine):
    with pytest.raises(RaysimError, match=message):
        engine(given(rule))


def test_weights_that_are_set_are_not_negative(given, engine):
    with pytest.raises(RaysimError, match=r"set_weights got \[-0.5, 1.0\]; .* none is negative"):
        engine(given("Heavy", first=-0.5))


@pytest.mark.parametrize("mode", ["mean", "per_client"])
def test_the_mean_has_the_weights_that_were_set(mode):
    """A mean that was taken before the update cannot have them."""
    uploads = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 0.0])]
    rows = {"u": uploads} if mode == "per_client" else {}
    total = {("mean", "u"): torch.stack(uploads).mean(0)}
    reports = Reports(0, [4, 7], 9, totals=total, rows=rows)
    assert torch.equal(reports.mean("u"), torch.tensor([3.0, 1.0]))
    reports.set_weights([0.75, 0.25])
    if mode == "mean":
        with pytest.raises(RaysimError, match="taken with the weights of `weigh`"):
            reports.mean("u")
    else:
        assert torch.equal(reports.mean("u"), torch.tensor([2.0, 1.5]))


def test_fedhist_in_half_precision(engine, ragged):
    """LL takes half the room, LG what it took; the run is a little different, and no more. Its
    vectors are scaled: these updates are below half precision's smallest normal number."""
    runs = {}
    for history in ("float32", "float16"):
        algorithm = {"name": "fedhist", "length": 3, "b": 0.9, "kappa": 0.1, "history": history}
        runs[history] = engine({
            "rounds": 12, "model": "logistic", "partition": ragged(SIZES), "schedule": STALE, "algorithm": algorithm,
            "local": {"steps": 2, "batch_size": 16, "lr": 1e-6}, "seed": 2,
        })  # fmt: skip
    P, K, L = 650, 4, 3
    buffers = [
        runs[history][1][-1]["system/server_buffer_bytes"] for history in ("float32", "float16")
    ]
    assert buffers == [4 * L * P * (K + 1), 4 * L * P + 2 * L * P * K]
    utilities = [
        runs[history][0].executor.server.state["utility"] for history in ("float32", "float16")
    ]
    assert utilities[0].abs().max() > 0.1 and (utilities[0] - utilities[1]).abs().max() < 1e-3
    moved = [
        runs[history][0].executor.xs[-1] - runs[history][0].executor.xs[0]
        for history in ("float32", "float16")
    ]
    assert 0 < np.abs(moved[0] - moved[1]).max() < 0.05 * np.abs(moved[0]).max()


def test_a_slow_class_belongs_to_the_slow_clients(base):
    config = {
        "rounds": 3, "algorithm": "fedhist",
        "partition": {"name": "slow_class", "clients": 30, "alpha": 1.0, "label": 7},
        "schedule": {"name": "kasync", "k": 5, "client_speeds": {"name": "two_speed", "jitter": 0}},
    }  # fmt: skip
    plan = prepare({**base, **config})
    y = load_dataset(Data(name="digits")).y
    held = [np.bincount(y[plan.clients.client(i)], minlength=10) for i in range(30)]
    assert [counts[7] for counts in held[:27]] == [0] * 27
    of_slow = [counts[7] for counts in held[27:]]
    assert sum(of_slow) == (y == 7).sum() and max(of_slow) - min(of_slow) <= 1
    assert sum(map(sum, held)) == len(y)
    durations = {one.client: one.finish - one.start for turn in preview(plan.config, plan.clients.sizes, 30)
                 for one in turn.arrivals}  # fmt: skip
    assert {durations[i] for i in (27, 28, 29)} == {2.0} and {
        durations[i] for i in range(27) if i in durations
    } == {1.0}
    with pytest.raises(ConfigError, match=r"partition\.label: digits has classes 0 to 9"):
        prepare({**base, **config, "partition": {**config["partition"], "label": 10}})


def test_a_partition_is_drawn_until_everybody_has_enough(base):
    config = {"rounds": 1, "algorithm": "fedavg", "schedule": {"cohort": 2}}
    partition = {"name": "dirichlet", "clients": 20, "alpha": 0.3, "min_samples": 0}
    sizes = [
        prepare(
            {**base, **config, "partition": {**partition, "redraw_below": n}}
        ).clients.sizes.min()
        for n in (0, 40)
    ]
    assert sizes[0] < 40 <= sizes[1]
    with pytest.raises(
        ConfigError,
        match=r"partition\.redraw_below: in each of 1000 draws .* fewer than 60 examples",
    ):
        prepare({**base, **config, "partition": {**partition, "alpha": 0.05, "redraw_below": 60}})


@pytest.mark.usefixtures("pictures")
def test_the_clock_is_drawn_and_kept(base, tmp_path):
    """A run with a clock leaves a picture of it, one in step with constant times does not."""
    config = {
        **base,
        "rounds": 2,
        "algorithm": "fedavg",
        "partition": {"name": "iid", "clients": 50},
    }
    raysim.run({**config, "schedule": STALE, "run_dir": str(tmp_path / "stale")})
    raysim.run({**config, "schedule": {"cohort": 3}, "run_dir": str(tmp_path / "step")})
    assert (tmp_path / "stale" / "arrivals.png").stat().st_size > 5000
    assert not (tmp_path / "step" / "arrivals.png").exists()
    plan = prepare({**config, "schedule": {"cohort": 3, "client_speeds": "lognormal"}})
    turns = preview(plan.config, plan.clients.sizes, 5)
    plot_virtual_clock(turns[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").exists()


BROKEN = program("asynchronous_broken")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "Boom",
            r"round 1: weigh of server rule 'boom' failed: ZeroDivisionError: .*broken\.py, line \d+: `return",
        ),
        (
            "Bang",
            r"round 1: update of server rule 'bang' failed: ValueError: bang .*broken\.py, line \d+: `raise",
        ),
        ("Unasked", r"reports\.bases, for which its class must say needs_base_params = True"),
    ],
)
def test_a_server_rules_own_exception_has_its_name_and_round(rule, message, engine, source):
    algorithm = source("broken", BROKEN) + f":{rule}"
    with pytest.raises(RaysimError, match=message):
        engine({"rounds": 2, "model": "logistic", "algorithm": algorithm, "schedule": STALE})


@pytest.mark.parametrize("key", ["a", "length", "lr"])
def test_a_switch_is_no_number(key, base):
    with pytest.raises(
        ConfigError, match=rf"algorithm\.{key}: true is neither a number nor a word"
    ):
        prepare(
            {**base, "rounds": 1, "algorithm": {"name": "fedhist", key: True}, "schedule": STALE}
        )
    prepare({**base, "rounds": 1, "algorithm": {"name": "fedhist", "ina": True}, "schedule": STALE})
