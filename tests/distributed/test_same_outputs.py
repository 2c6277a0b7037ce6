"""A net whose outputs depend on something that workers do not have is refused when they start."""

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
