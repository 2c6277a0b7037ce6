"""Clusters whose nodes come when they are asked for, beginning with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.autoscaling import autoscaling
from support.processes import basic, start, written

pytestmark = pytest.mark.ray

NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


def run_on(address: str, folder: Path, uri: str, **more: Any) -> tuple[int, str]:
    """Run two rounds on two actors; return the exit code and the output."""
    config = basic(folder, uri) | {"rounds": 2, "resources": {"actors": 2, **more}}
    process = start("run", written(folder, config), cwd=folder, RAY_ADDRESS=address, **NO_TOKEN)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def test_a_run_waits_for_the_nodes_that_it_asks_for(tmp_path: Path, uri: str) -> None:
    """From zero workers; and it is refused where the autoscaler has nothing like it."""
    with autoscaling(tmp_path, 2, CPU=1) as address:
        code, output = run_on(address, tmp_path, uri)
        assert code == 0 and "2 rounds in" in output, output
        assert "waiting for the autoscaler to add nodes: 1 there" in output
        (tmp_path / "gpus").mkdir()
        code, output = run_on(address, tmp_path / "gpus", uri, gpus=1, timeout=3)
        assert code == 2 and "2 actors want 2 GPUs" in output, output
        assert "autoscaler has not added them in 3 s" in output and "resources.timeout" in output


@pytest.mark.long
def test_a_cluster_without_an_autoscaler_is_not_waited_for(tmp_path: Path, uri: str) -> None:
    with autoscaling(tmp_path, 0) as address:
        code, output = run_on(address, tmp_path, uri)
    assert code == 2 and "2 actors want 2 CPUs, the cluster has 0; lower" in output, output
    assert "autoscaler" not in output
