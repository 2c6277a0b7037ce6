"""Users' code that names no device, on a pretended GPU: the bits of a CPU, or refused before a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.pretend_gpu import pretended_gpu
from support.programs import program

import raysim
from raysim.errors import ConfigError


@pytest.fixture(autouse=True)
def rehearsed() -> None:
    """Rehearse nothing: the pretended GPU is one."""


@pytest.fixture
def configured(base, source, monkeypatch) -> Callable[..., dict[str, Any]]:
    """configured(gpus, **sections) -> a configuration; "FILE:NAME" in it is an object of the file."""
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS"):
        # A first setting, which is undone, so that those that a run makes are undone too.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    file = source("habits", program("cpu_habits"))

    def make(gpus: float, **sections: Any) -> dict[str, Any]:
        config = {
            **base, "algorithm": None, "client": "fedavg", "server": "fedavg", "rounds": 2,
            "local": {"steps": 3, "batch_size": 6, "lr": 0.05},
            "resources": {"executor": "inline", "threads": 1, "gpus": gpus},
            "batching": {"mode": "lanes" if gpus else "loop", "size": 3},
            "model": {"name": "mlp", "hidden": [12]}, "checkpoint": {"every": 0},
            "schedule": {"name": "sync", "cohort": 4},
            "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.5},
            "evaluate": {"every": 2}, "run_dir": f"{base['run_dir']}{gpus:g}", **sections,
        }  # fmt: skip
        return eval(repr(config).replace("FILE:", f"{file}:"))

    return make


@pytest.mark.parametrize(
    "sections",
    [
        {"client": "FILE:Habits", "server": "FILE:Table"},
        {
            "model": "FILE:Positions", "task": "FILE:Smooth",
            "evaluate": {"every": 1, "metrics": ["accuracy", "FILE:largest"]},
        },
    ],
    ids=["rules", "net, loss and metric"],
)  # fmt: skip
def test_tensors_come_to_the_gpu(sections, configured):
    on_cpu = raysim.run(configured(0.0, **sections), tracking=False)
    with pretended_gpu() as gpu:
        on_gpu = raysim.run(configured(1.0, **sections), tracking=False)
    assert gpu.replays and not gpu.faults
    assert on_gpu.history[-1].get("system/uncaptured_steps", 0) == 0
    assert on_gpu.digest == on_cpu.digest
    names = [name for name in on_cpu.history[-1] if not name.startswith("system/")]
    assert [on_gpu.history[-1][name] for name in names] == [
        on_cpu.history[-1][name] for name in names
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"client": "FILE:ArraysOfClient"}, "client.name: .*same device.*write a.to"),
        ({"server": "FILE:ArraysOfServer"}, r"server.name: .*to numpy.*t.cpu\(\).numpy"),
        ({"model": "FILE:Constant"}, "model: .*same device"),
    ],
)
def test_what_pytorch_does_not_move_is_refused_before_a_run(sections, message, configured):
    with pretended_gpu(), pytest.raises(ConfigError, match=message):
        raysim.run(configured(1.0, **sections), tracking=False)
