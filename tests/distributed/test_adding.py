"""What must hold where a node's sums are added up before they travel: nothing of it shows in the
result, only in the bytes between nodes; nor does it show when they are lost just then."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import SOON, SUPPORT, basic, written
from support.programs import program

import raysim

pytestmark = [pytest.mark.ray, pytest.mark.long]
"""In less time: a job on three nodes, in test_jobs.py."""

WORDS = 64 * 8 + 8 + 8 * 10 + 10  # of the net: 64 pixels, 8 hidden units, 10 classes


def config(folder: Path, uri: str) -> dict[str, Any]:
    """A run in this process, without checkpoints; its folder is in `folder`."""
    return basic(folder, uri) | {
        "rounds": 6,
        "model": {"name": "mlp", "hidden": [8]},
        "schedule": {"cohort": 12},
        "checkpoint": {"every": 0},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, uri) -> raysim.RunResult:
    return raysim.run(config(tmp_path_factory.mktemp("inline"), uri))


KASYNC = {"name": "kasync", "k": 8, "concurrency": 20, "client_speeds": {"name": "lognormal"}}


@pytest.fixture(scope="module")
def configs(tmp_path_factory, uri) -> dict[str, dict[str, Any]]:
    """The runs, by what befalls them: see `support/three_nodes.py`."""
    folder = tmp_path_factory.mktemp("nodes")
    hanging = {"rounds": 8, "checkpoint": {"every": 1}, "schedule": KASYNC}
    more = {
        "sums": {},
        "alone": {},
        "mixed": mixed(folder),
        "adder": {},
        "hang": hanging | {"algorithm": {"name": "fedhist", "length": 4}},
        "raylet": {},
        "node": {},
    }
    return {case: config(folder / case, uri) | own for case, own in more.items()}


TIMEOUTS = {"hang": 5, "raylet": 60}
"""Of runs in which somebody falls silent."""


@pytest.fixture(scope="module")
def found(configs, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What came of them, one after the other on three nodes, the first of which has no ClientActor;
    four actors share the others."""
    folder = tmp_path_factory.mktemp("files")
    resources = {"executor": "ray", "actors": 4, "cpus": 1, "threads": 1, "server_node": "head"}
    files = [
        written(
            folder,
            {**one, "resources": {**resources, "timeout": TIMEOUTS.get(case, 120)}},
            f"{case}.yaml",
        )
        for case, one in configs.items()
    ]
    cases = [{"mixed": "sums"}.get(case, case) for case in configs]
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "three_nodes.py"), *map(str, files), *cases],
        env={**os.environ, "RAY_ADDRESS": "", **SOON},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(zip(configs, json.loads(ran.stdout.splitlines()[-1]), strict=True))


def test_a_node_sends_one_sum(found, whole):
    sums = found["sums"]
    assert sums["digest"] == whole.digest and not sums["said"]
    for record in sums["history"][1:]:
        assert record["system/network/bytes_up"] == 2 * 8 * WORDS
        assert record["system/network/bytes_down"] == 2 * 4 * WORDS
        for name in ("second", "third"):
            assert record[f"system/node/{name}/bytes_up"] == 8 * WORDS
            assert record[f"system/node/{name}/busy_seconds"] > 0
        assert (
            record["system/node/second/clients"] + record["system/node/third/clients"]
            == record["clients/used"]
        )
        assert 0 < record["system/worker_utilization"] <= 1


def test_without_that_every_actor_sends_one(found, whole):
    alone = found["alone"]
    assert alone["digest"] == whole.digest
    assert {record["system/network/bytes_up"] for record in alone["history"][1:]} == {4 * 8 * WORDS}


def test_single_rows_travel_alone(found, configs, tmp_path):
    """Where a rule wants every client's upload, its mean is added up on the way, the rows are not."""
    whole = raysim.run(configs["mixed"] | {"run_dir": str(tmp_path / "inline")})
    mixed = found["mixed"]
    assert mixed["digest"] == whole.digest
    for record in mixed["history"][1:]:
        assert (
            record["system/network/bytes_up"] == 2 * 8 * WORDS + record["clients/used"] * 4 * WORDS
        )


MIXED = program("adding_mixed")


def mixed(folder: Path) -> dict[str, Any]:
    (folder / "mixed.py").write_text(MIXED)
    return {"rounds": 3, "algorithm": f"{folder / 'mixed.py'}:pair"}


@pytest.mark.parametrize("case", ["node", "adder"])
def test_sums_that_are_lost_are_made_again(found, whole, case):
    """By training again what they were made of; nothing goes back to a checkpoint (there is none)."""
    lost = found[case]
    assert lost["digest"] == whole.digest
    last = lost["history"][-1]
    said = re.findall(
        r"the NodeAggregator of node third failed \(in round \d, with (\d+) blocks?: ",
        "\n".join(lost["said"]),
    )
    assert len(said) == 1 and last["system/blocks_retried"] >= int(said[0]) >= 2, lost["said"]
    assert last["system/server_restarts"] == 0 and last["system/actors_failed"] >= 1
    for mine, other in zip(lost["history"], whole.history, strict=True):
        for key in ("accuracy", "loss", "train_loss", "bytes_up", "clients"):
            assert mine.get(key) == other.get(key)


def test_actors_that_hang_are_replaced(found, configs, tmp_path):
    """One of each kind, on three nodes: nothing of it shows, and the log names who hung."""
    hung = found["hang"]
    whole = raysim.run(configs["hang"] | {"run_dir": str(tmp_path / "inline")})
    assert hung["digest"] == whole.digest
    last, said = hung["history"][-1], "\n".join(hung["said"])
    assert (
        last["system/actors_failed"] == 3
        and last["system/server_restarts"] == 1
        and last["system/blocks_retried"] >= 2
    ), said
    why = r"no sign of life for 5 s \(resources\.timeout\)"
    for who in (
        rf"ClientActor \d failed \(in round \d, with \d+ blocks?: {why}\)",
        rf"the NodeAggregator of node third failed \(in round \d, with \d+ blocks?: {why}\)",
        rf"the EvalActor failed \(.*{why}\)",
    ):
        assert re.search(f"^{who}", said, re.M), said


def test_a_node_whose_raylet_is_stopped_does_not_show(found, whole):
    raylet = found["raylet"]
    assert raylet["digest"] == whole.digest
    said = "\n".join(raylet["said"])
    assert (
        re.search(r"ClientActor \d failed", said)
        and raylet["history"][-1]["system/actors_failed"] >= 2
    ), said
