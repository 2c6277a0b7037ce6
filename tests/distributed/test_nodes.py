"""What must hold when a cluster loses a node in the middle of a round and gains one later: nothing
of it shows in the result, and whoever joins gets work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import SOON, SUPPORT, basic, written

import raysim

pytestmark = pytest.mark.ray

VICTIMS = ["server", pytest.param("client", marks=pytest.mark.long)]
"""Who lives on the node that is lost, beside a ClientActor."""


@pytest.fixture(scope="module")
def config(tmp_path_factory, uri) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nodes")
    return basic(folder, uri) | {
        "rounds": 14,
        "algorithm": {"name": "gradma", "memory": 9},
        "checkpoint": {"every": 3},
    }


@pytest.fixture(scope="module")
def whole(config) -> raysim.RunResult:
    return raysim.run(config)


def run_of(victim: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What came of a run on a cluster that loses a node with this victim."""
    resources = {"executor": "ray", "actors": 2, "cpus": 1, "timeout": 120}
    path = written(folder, config | {"resources": resources})
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "two_nodes.py"), str(path), victim],
        env={**os.environ, "RAY_ADDRESS": "", **SOON},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_node_lost_and_a_node_added_do_not_show(config, whole, tmp_path, victim):
    found = run_of(victim, config, tmp_path)
    assert found["digest"] == whole.digest and found["told"] == list(range(15))
    assert sorted(found["at_first"]) == sorted([found["home"], found["second"]])
    assert sorted(found["at_last"]) == sorted([found["home"], found["third"]])
    last = found["history"][-1]
    assert last["system/actors_failed"] >= 1 and last["system/blocks_retried"] >= 1
    restarts = last[
        "system/server_restarts"
    ]  # more than one where Ray put the new server on the lost node too
    assert restarts >= 1 if victim == "server" else restarts == 0, found["said"]
    for mine, other in zip(found["history"], whole.history, strict=True):
        for key in ("accuracy", "loss", "train_loss", "bytes_up", "clients"):
            assert mine.get(key) == other.get(key)
