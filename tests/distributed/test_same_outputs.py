"""A net whose outputs depend on something that workers do not have is refused when they start."""

from __future__ import annotations

import pytest
from support.plain_fedavg import blobs, cut, run

from raysim.errors import ConfigError

pytestmark = pytest.mark.ray

NETS = """
import os

from torch import nn


class Scaled(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) * float(os.environ.get("SCALE_OF_THIS_TEST", "1"))
"""


def test_a_variable_that_only_this_process_has(local_ray, tmp_path, monkeypatch):
    (tmp_path / "scaled.py").write_text(NETS)
    keys = {"resources": {"executor": "ray", "actors": 1}, "run_dir": str(tmp_path / "run")}
    net, data, parts = f"{tmp_path}/scaled.py:Scaled", blobs(), cut([60, 60])
    assert run(net, data, parts, 1, **keys).history
    monkeypatch.setenv("SCALE_OF_THIS_TEST", "2")
    keys["run_dir"] = str(tmp_path / "refused")
    with pytest.raises(ConfigError, match="other outputs in a worker"):
        run(net, data, parts, 1, **keys)
