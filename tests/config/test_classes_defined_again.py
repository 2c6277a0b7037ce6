"""Classes of one name in one file are told apart, also by what is not in their methods."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from support.programs import program

import raysim
from raysim.config.objects import python_objects


@pytest.fixture
def module(source, monkeypatch) -> ModuleType:
    path = source("defined_again", program("defined_again"))
    spec = importlib.util.spec_from_file_location("defined_again", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "defined_again", made)
    spec.loader.exec_module(made)
    return made


def test_each_has_a_name_of_its_own(module):
    classes = [
        module.FIRST,
        module.SECOND,
        module.WIDE,
        module.WIDER,
        *module.LOOPED,
        module.SLOW,
        module.FAST,
    ]
    names = [python_objects.reference(cls) for cls in classes]
    assert len(set(names)) == 8
    assert [python_objects.find(name, "model").value for name in names] == classes
    assert names == [python_objects.reference(cls) for cls in classes]


def test_a_run_trains_the_one_that_it_was_given(module, base):
    for cls, layers in ((module.FIRST, 2), (module.SECOND, 4)):
        run_dir = f"{base['run_dir']}{layers}"
        result = raysim.run(
            {**base, "algorithm": "fedavg", "model": cls, "run_dir": run_dir, "rounds": 1},
            tracking=False,
        )
        assert len(result.state_dict) == layers
