"""Functions of files whose variables a script or a notebook has set after the import.

A run loads the file, so that it would compute with other values than the user's own calls.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from support.programs import program

import raysim
from raysim.errors import ConfigError

FILES = "changed_settings", "changed_globals"


@pytest.fixture
def module(source, tmp_path, monkeypatch) -> ModuleType:
    for name in FILES:
        source(name, program(name))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("changed_globals")


def run(module: Any) -> raysim.RunResult:
    config = {
        "data": module.data, "model": module.Net, "task": module.loss, "rounds": 1,
        "evaluate": {"metrics": [module.metric, "accuracy"]}, "partition": {"clients": 3},
        "schedule": {"cohort": 3}, "algorithm": "fedavg", "resources": {"executor": "inline"},
    }  # fmt: skip
    return raysim.run(config, tracking=False)


def test_variables_that_runs_or_nobody_changed_are_no_harm(module):
    """A run fills the table of the file that it has loaded, and the next one finds it filled."""
    assert run(module).digest == run(module).digest
    assert not module.TABLES
    module.TABLES["ones"] = torch.ones(())
    module.new_ones = 2
    assert run(module).digest == run(module).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: setattr(m, "WIDTH", 9),
            "^model: 'Net' .* and 'WIDTH', which Net uses, is anoth",
        ),
        (lambda m: m.SCALES.update(loss=3.0), "^task: 'loss' .* 'SCALES', which factor uses"),
        (lambda m: setattr(m, "factor", lambda: 2.0), "^task: 'loss' .* and 'factor', which loss"),
        (
            lambda m: setattr(m.changed_settings, "GAMMA", 0.5),
            r"'changed_settings\.GAMMA', which me",
        ),
        (lambda m: setattr(m, "N", 60), "^data: 'data' .* 'N', which data uses"),
        (
            lambda m: setattr(m.Net, "forward", lambda self, x: super(m.Net, self).forward(2 * x)),
            "^model: 'Net' .* and 'forward', which Net uses, is another",
        ),
    ],
    ids=["net", "mapping", "function", "settings", "data", "method"],
)
def test_a_variable_that_a_script_has_set_is_named(module, change, message):
    change(module)
    with pytest.raises(ConfigError, match=message):
        run(module)


PACKAGE = {
    "__init__": "",
    "helper": "GAMMA = 1.0",
    "losses": """from torch.nn import functional as F


def loss(outputs, y):
    {}
    return GAMMA * F.cross_entropy(outputs, y)
""",
}


@pytest.mark.parametrize(
    "line", ["from .helper import GAMMA", "from own_losses.helper import GAMMA", "GAMMA = 1.0"]
)
def test_a_function_of_a_package_may_import_from_it_when_it_is_called(
    line, module, tmp_path, monkeypatch
):
    folder = tmp_path / "own_losses"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text.replace("{}", line))
    for name in ("own_losses", "own_losses.helper", "own_losses.losses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plain = run(module).digest
    monkeypatch.setattr(module, "loss", importlib.import_module("own_losses.losses").loss)
    assert run(module).digest == plain
    helper = importlib.import_module("own_losses.helper")
    monkeypatch.setattr(helper, "GAMMA", 2.0)
    if "import" in line:
        with pytest.raises(ConfigError, match=r"GAMMA', which loss uses, is another"):
            run(module)
