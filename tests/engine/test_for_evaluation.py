"""`ServerRule.for_evaluation`: what is evaluated in place of the broadcast, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import raysim
from raysim.engine.state import checkpoint
from raysim.errors import RaysimError

EVALUATED = "accuracy", "loss", "clients/accuracy", "clients/loss"
"""First parts of the names of what is evaluated."""

RULES = """
from dataclasses import dataclass

from raysim import ServerRule


@dataclass(frozen=True)
class Plain(ServerRule):
    '''FedAvg that keeps the initial model.'''

    def init(self, x0, problem):
        return {"x": x0, "first": x0}

    def update(self, state, reports):
        return {**state, "x": state["x"] - self.lr * reports.mean("delta")}


@dataclass(frozen=True)
class First(Plain):
    '''Evaluates the initial model.'''

    def for_evaluation(self, state):
        return {"x": state["first"]}


@dataclass(frozen=True)
class Keys(Plain):
    def for_evaluation(self, state):
        return {"y": state["first"]}


@dataclass(frozen=True)
class Shape(Plain):
    def for_evaluation(self, state):
        return {"x": state["first"][:3]}


@dataclass(frozen=True)
class Nothing(Plain):
    def for_evaluation(self, state):
        pass
"""


@pytest.fixture
def setup(tmp_path) -> dict[str, Any]:
    """A small run on the digits, of rule `Plain`; its global model and its clients are evaluated."""
    file = tmp_path / "for_evaluation_rules.py"
    file.write_text(RULES)
    return {
        "rounds": 3,
        "data": "digits",
        "partition": {"name": "iid", "clients": 6, "test": {"fraction": 0.2}},
        "model": {"name": "mlp", "hidden": [8]},
        "client": "fedavg",
        "server": f"{file}:Plain",
        "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
        "schedule": {"name": "sync", "cohort": 3},
        "evaluate": {"every": 1, "clients": {"every": 1}},
        "checkpoint": {"every": 1},
        "resources": {"executor": "inline"},
        "run_dir": str(tmp_path / "run"),
    }


def trained(setup: dict[str, Any], name: str, **keys: Any) -> raysim.RunResult:
    """Return the result of a run with a server rule."""
    server = setup["server"].replace("Plain", name)
    return raysim.run({**setup, "server": server, **keys}, run_dir=f"{setup['run_dir']}-{name}")


def figures(result: raysim.RunResult, *parts: str) -> list[list[float]]:
    """Return the metrics of each round whose names begin with one of these."""
    return [
        [v for k, v in sorted(record.items()) if k.startswith(parts)] for record in result.history
    ]


def test_evaluation_has_it_and_training_does_not(setup):
    """The initial model is evaluated in all rounds; clients train as with FedAvg."""
    plain, first = trained(setup, "Plain"), trained(setup, "First")
    evaluated = figures(first, *EVALUATED)
    assert evaluated == [evaluated[0]] * 4
    assert evaluated[0] == figures(plain, *EVALUATED)[0]
    assert figures(plain, *EVALUATED)[1] != evaluated[0]
    assert figures(first, "train_loss", "bytes_down") == figures(plain, "train_loss", "bytes_down")


def test_the_result_is_the_evaluated_model(setup):
    plain, first = trained(setup, "Plain"), trained(setup, "First", rounds=2)
    saved = checkpoint.read_latest(first.run_dir)
    assert saved is not None
    assert torch.equal(first.parameters, saved.server["state/first"])
    assert not torch.equal(first.parameters, saved.server["state/x"])
    assert torch.equal(raysim.load(first.run_dir).parameters, first.parameters)
    assert not torch.equal(plain.parameters, first.parameters)


@pytest.mark.parametrize("schedule", ["sync", "fedbuff"])
def test_a_resumed_run_evaluates_the_same(schedule, setup):
    """The mean of the last two models, in a whole run and in one that stops after two rounds."""
    if schedule == "fedbuff":
        setup["schedule"] = {"name": "buffered", "concurrency": 3, "buffer_size": 2}
    setup |= {"server": "fedexp", "rounds": 4}
    whole = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    folder = setup["run_dir"] + "1"
    stopped = raysim.run(setup, run_dir=folder, progress=lambda record: record["round"] == 2)
    assert stopped.stopped
    resumed = raysim.resume(folder)
    assert resumed.state_digest == whole.state_digest
    kinds = *EVALUATED, "server"
    assert figures(resumed, *kinds) == figures(whole, *kinds)
    pd.testing.assert_frame_equal(resumed.clients, whole.clients)


@pytest.mark.ray
def test_two_actors_evaluate_the_bits_of_this_process(setup, recycled_actors):
    setup["server"] = "fedexp"
    inline = raysim.run(setup, run_dir=setup["run_dir"] + "0")
    setup["resources"] = {"executor": "ray", "actors": 2, "cpus": 1}
    actors = raysim.run(setup, run_dir=setup["run_dir"] + "1")
    assert actors.state_digest == inline.state_digest
    kinds = *EVALUATED, "server", "train_loss"
    names = [k for k in inline.history[-1] if k.startswith(kinds)]
    for ours, theirs in zip(inline.history, actors.history, strict=True):
        assert np.array_equal(
            [ours.get(k, 0.0) for k in names], [theirs.get(k, 0.0) for k in names]
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Keys", r"must return tensors with the keys and shapes of broadcast; different: x, y"),
        ("Shape", r"must return tensors with the keys and shapes of broadcast; different: x"),
        ("Nothing", r"for_evaluation of server rule 'nothing' returns nothing"),
    ],
)
def test_a_wrong_value_is_an_error_before_the_run(name, message, setup):
    with pytest.raises(RaysimError, match=message):
        trained(setup, name)
