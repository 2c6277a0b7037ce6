"""Outputs of nets are the same in all processes, or the net is refused when workers start."""

from __future__ import annotations

import pytest
from support.plain_fedavg import blobs, cut, run
from support.programs import program

from raysim.errors import ConfigError

pytestmark = pytest.mark.ray

NETS = program("same_outputs_nets")


def test_a_variable_that_only_this_process_has(local_ray, tmp_path, monkeypatch):
    (tmp_path / "scaled.py").write_text(NETS)
    keys = {"resources": {"executor": "ray", "actors": 1}, "run_dir": str(tmp_path / "run")}
    net, data, parts = f"{tmp_path}/scaled.py:Scaled", blobs(), cut([60, 60])
    assert run(net, data, parts, 1, **keys).history
    monkeypatch.setenv("SCALE_OF_THIS_TEST", "2")
    keys["run_dir"] = str(tmp_path / "refused")
    with pytest.raises(ConfigError, match="other outputs in a worker"):
        run(net, data, parts, 1, **keys)


def test_outputs_of_several_forms(local_ray, tmp_path):
    (tmp_path / "two_heads.py").write_text(program("two_heads"))
    net, task = f"{tmp_path}/two_heads.py:TwoHeads", f"{tmp_path}/two_heads.py:loss"
    digests = [
        run(
            net,
            blobs(),
            cut([60, 60]),
            2,
            task={"name": task, "like": "any"},
            resources=resources,
            run_dir=str(tmp_path / resources["executor"]),
        ).digest
        for resources in ({"executor": "inline"}, {"executor": "ray", "actors": 2})
    ]
    assert digests[0] == digests[1]
