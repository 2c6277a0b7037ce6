"""What must hold of a client that takes the process it trains in down with it: it is named, or
dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import basic, timeless, written

import raysim
from raysim.engine.state import checkpoint
from raysim.errors import ClientError

pytestmark = pytest.mark.ray

SIZES = [20, 24, 31, 13, 22, 18]
"""Client 3 is known by how many examples it has."""

POISON = """
import os
from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient


def fail():
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


@dataclass(frozen=True)
class Poison(FedAvgClient):
    def init(self, shared, client_state, data, task):
        if int(data.n) == 13 and {when}:
            {how}
        return {{}}
"""


@pytest.fixture
def poisoned(uri, tmp_path, ragged, source):
    """poisoned(how, when): a run in which client 3 does this, when it comes to that."""

    def make(how: str, when: str = "True") -> dict:
        rule = source("poison", POISON.format(how=how, when=when))
        return basic(tmp_path, uri) | {
            "rounds": 4,
            "partition": ragged(SIZES),
            "algorithm": f"{rule}:Poison",
            "schedule": {"cohort": 5},
            "checkpoint": {"every": 50},
        }

    return make


FIRST = "int(task.t) == 0"
"""In the first round."""

RAY = {"executor": "ray", "actors": 2, "cpus": 0.5, "timeout": 120}


def test_the_run_stops_and_names_client_and_round(poisoned, recycled_actors):
    """And what was done before is kept."""
    config = poisoned("os._exit(9)", "int(task.t) >= 2")
    with pytest.raises(
        ClientError, match=r"round [34]: the actor that trained client 3 died, 3 times in turn"
    ) as stop:
        raysim.run(config, {"resources": RAY, "seed": 2})
    failed = int(str(stop.value).split("round ")[1][0])
    kept = checkpoint.read_latest(Path(config["run_dir"]))
    assert kept is not None
    assert [record["round"] for record in kept.facts["history"]] == [*range(failed)]


def test_a_dropped_client_is_as_one_that_raised(poisoned, tmp_path, recycled_actors):
    """To the bit, and counted; three actors are lost, and nobody else with them."""
    drop = {"faults.on_client_error": "drop", "rounds": 2}
    raised = raysim.run(
        poisoned("raise ValueError('poison')", FIRST), drop, run_dir=str(tmp_path / "inline")
    )
    done = raysim.run(poisoned("os._exit(9)", FIRST), drop, resources=RAY)
    assert done.state_digest == raised.state_digest and timeless(done.history) == timeless(
        raised.history
    )
    assert sum(record["clients/failed"] for record in done.history[1:]) == 1
    last = done.history[-1]
    assert last["system/actors_failed"] == 3 and last["system/server_restarts"] == 0


def test_a_gpu_that_fails_is_no_fault_of_its_client(
    poisoned, tmp_path, recycled_actors, monkeypatch
):
    """After an error of CUDA a process has lost its GPU: another one trains the client."""
    flag = tmp_path / "failed once"
    how = f"open({str(flag)!r}, 'w').close(); torch.cuda.synchronize = fail; fail()"
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)  # is restored
    config = poisoned(how, f"int(task.t) >= 1 and not os.path.exists({str(flag)!r})")
    done = raysim.run(config, resources=RAY)
    assert flag.exists() and done.history[-1]["system/actors_failed"] == 1
    again = raysim.run(config, run_dir=str(tmp_path / "inline"))
    assert again.digest == done.digest
    flag.unlink()
    with pytest.raises(torch.AcceleratorError):  # the process of an inline run has no other GPU
        raysim.run(config, run_dir=str(tmp_path / "lost"))


BROKEN = """
from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer


@dataclass(frozen=True)
class BrokenServer(FedAvgServer):
    def update(self, state, reports):
        if reports.round == 2:
            raise ValueError("not today")
        return super().update(state, reports)
"""


@pytest.mark.parametrize("resources", [RAY, {"executor": "inline"}])
def test_a_server_rule_that_raises_is_told_in_one_line_and_what_was_done_is_kept(
    resources, uri, tmp_path, source, raysim_, recycled_actors
):
    rule = source("broken", BROKEN)
    config = basic(tmp_path, uri) | {
        "algorithm": f"{rule}:BrokenServer",
        "resources": resources,
        "rounds": 5,
        "checkpoint": {"every": 2},
    }
    done = raysim_("run", written(tmp_path, config))
    assert done.code == 1
    line = len(BROKEN[: BROKEN.index("raise")].splitlines())
    message = "round 3: update of server rule 'broken' failed: ValueError: not today "
    message += f'({rule}, line {line}: `raise ValueError("not today")`)'
    message += " (the uploads were: mean of 'delta' float32 [1210])"
    assert done.err.splitlines()[-1] == f"error: {message}"
    assert (
        "Traceback" not in done.err and "ray::" not in done.err and len(done.err.splitlines()) < 5
    ), done.err
    assert checkpoint.checkpoint_name(2) in [
        path.name for path in checkpoint.available_checkpoints(tmp_path / "run")
    ]
