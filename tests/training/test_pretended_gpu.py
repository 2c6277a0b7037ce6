"""Runs on a GPU that is pretended on this CPU (tests/support/pretend_gpu.py): tensors of two devices
never meet, streams wait for each other, nothing waits in a captured step, and the host waits once
for a block. It takes the place of a card, and does not replace one."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batteries import algorithm_of_each_client_rule, small
from support.pretend_gpu import GPUTensor, PretendGPU, pretended_gpu
from support.programs import program

from raysim import algorithms
from raysim.data import examples as examples_module
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.state.gpu_store import GpuStateStore
from raysim.errors import ClientError
from raysim.prepare.resolve import prepare
from raysim.training.trainers import group_trainer
from raysim.training.trainers.cuda_graphs import CudaGraphs
from raysim.training.trainers.lane_trainer import LaneTrainer

METHODS = Path(algorithms.__file__).parent
NET = program("lanes_net")
RULES = program("lanes_rules")
KEEPING_NETS = program("keeping_nets")
ON_GPU = {"executor": "inline", "gpus": 1.0, "threads": 1}
TRAINING = ("training/trainers", "training/tasks", "training/batches", "training/uploads",
            "training/client_start", "training/personal", "numerics/host_copies", "data/examples")  # fmt: skip
"""Code in which the host could wait for the GPU during a round of training."""


@pytest.fixture(autouse=True)
def rehearsed() -> None:
    """Rehearse nothing: the pretended GPU is one."""


@pytest.fixture
def trained(base, source, monkeypatch) -> Any:
    """trained(algorithm, resources, **sections) -> final parameters, the trainer and the GPU."""
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS"):
        # A first setting, which is undone, so that those that a run makes are undone too.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)

    def run(algorithm: str | None, resources: Any = ON_GPU, rounds: int = 2, **more: Any) -> Any:
        given = {
            **base, "algorithm": algorithm and small(algorithm), "rounds": rounds, "resources": resources,
            "model": {"name": f"{source('net', NET)}:net", "norm": algorithm != "dpsgd"},
            "local": {"steps": 3, "batch_size": 6, "lr": 0.05},
            "batching": {"mode": "lanes", "size": 3}, "checkpoint": {"every": 0},
            "schedule": {"name": "sync", "cohort": 6},
            "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}, **more,
        }  # fmt: skip
        with pretended_gpu() as gpu:
            plan, executor = prepare(given), Inline()
            executor.open(plan)
            try:
                setup = Counter(gpu.waits)
                list(Engine(plan, executor).rounds())
                x = executor.server.snapshot()["state/x"]
                trainer = executor.trainer.trainers[0]
            finally:
                executor.close()
            gpu.waits -= setup
        return x.numpy().tobytes(), trainer, gpu

    return run


ON_CPU = {"executor": "inline", "threads": 1}
FEW = ("fedavg", "scaffold", "moon", "fedreg", "fedhist", "dpsgd")


def in_training(gpu: PretendGPU) -> int:
    return sum(n for (_, line), n in gpu.waits.items() if line.startswith(TRAINING))


@pytest.mark.parametrize(
    "algorithm",
    [*FEW, *(pytest.param(name, marks=pytest.mark.long)
             for name in algorithm_of_each_client_rule() if name not in FEW)],
)  # fmt: skip
def test_a_method_on_a_gpu(algorithm, trained):
    """Its steps are captured, and give the bits of a CPU, which computes here."""
    on_cpu, *_ = trained(algorithm, ON_CPU, batching={"mode": "loop", "size": 3})
    x, trainer, gpu = trained(algorithm)
    assert not gpu.faults
    assert isinstance(trainer, LaneTrainer) and trainer.has_captured and not trainer.refusals
    if algorithm.startswith("gradma"):
        a, b = (np.frombuffer(of, np.float32) for of in (x, on_cpu))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    else:
        assert x == on_cpu


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("fedavg", {"optimizer": {"name": "adam", "state": "keep"}}),
        ("fedprox", {"personal": ["2.*"]}),
        ("scaffold", {}),
    ],
)
def test_the_host_waits_once_for_each_block(algorithm, changes, trained):
    """Beside the captures, which wait for all lanes before."""
    blocks, rounds = 2, 3
    local = {"steps": 2, "batch_size": 6, "lr": 0.05, **changes}
    _, _, gpu = trained(algorithm, rounds=rounds, local=local)
    captures = sum(n for (_, line), n in gpu.waits.items() if "cuda_graphs" in line)
    assert captures == 2 * gpu.graphs > 0
    found_once = 2 if "personal" in changes else 0  # how many parameters are personal, and where
    assert in_training(gpu) - captures == blocks * rounds + found_once, gpu.waits


@pytest.mark.parametrize("free", [10_000_000, 1_000])
def test_what_clients_keep_stays_on_the_gpu_if_it_fits(trained, monkeypatch, free):
    """Its bits are those of a CPU: see above."""
    rows: list[Any] = []
    put = GpuStateStore.put

    def noted(store: GpuStateStore, client: int, row: Any) -> None:
        rows.append(row)
        put(store, client, row)

    monkeypatch.setattr(GpuStateStore, "put", noted)
    monkeypatch.setattr(group_trainer, "free_bytes", lambda gpus: free)
    trained("scaffold")
    kinds = {type(value) for row in rows for value in row.values()}
    assert len(rows) == 12 and kinds == {GPUTensor if free > 1_000 else np.ndarray}


def test_no_method_takes_an_array_of_a_tensor_that_may_be_on_a_gpu():
    """On a GPU run the tensors that a rule creates are GPU tensors."""
    paths = sorted(METHODS.rglob("*.py"))
    assert len(paths) > 50
    for path in paths:
        found = re.findall(r".*(?<!\.cpu\(\))\.numpy\(\).*", path.read_text())
        assert not found, (path, found)


@pytest.mark.parametrize("left_out", ["fork", "join"])
def test_streams_that_do_not_wait_for_each_other_are_noticed(left_out, trained, monkeypatch):
    monkeypatch.setattr(CudaGraphs, left_out, lambda self, stream: None)
    assert trained("fedavg")[2].faults


@pytest.mark.parametrize("rule", ["Remembers", "Masks", "Copies"])
def test_a_step_is_not_captured_if_it_waits_or_copies_twice(rule, trained, source):
    """The first time, a table may come to the GPU that later steps find there."""
    _, trainer, gpu = trained(None, client=f"{source('rules', RULES)}:{rule}", server="fedavg")
    assert trainer.has_captured == (rule == "Remembers") == (not trainer.refusals)
    assert not gpu.faults


def test_cuda_gets_its_variables_before_anything_computes_there(trained):
    gpu = trained("fedavg", rounds=1)[2]
    assert gpu.repeats and gpu.queues == "32"


@pytest.mark.parametrize("augment", [False, True])
def test_examples_that_do_not_fit_stay_in_the_hosts_memory(augment, trained, monkeypatch, caplog):
    more = {"data": {"name": "digits", "augment": augment}, "evaluate": {"every": 2}}
    expected, trainer, of_gpu = trained("fedavg", **more)
    assert trainer.parts.examples.stored_on.type == "cuda"
    monkeypatch.setattr(examples_module, "free_bytes", lambda gpus: 1000)
    caplog.set_level("INFO", "raysim")
    x, trainer, gpu = trained("fedavg", **more)
    assert trainer.parts.examples.stored_on.type == "cpu" and not trainer.parts.examples.x.is_cuda
    assert x == expected and not gpu.faults
    assert "stay in the host's memory, because the GPU has 0.00 GB left" in caplog.text
    assert in_training(gpu) == in_training(of_gpu)


def test_a_captured_step_leaves_out_no_dropout(trained, source):
    model = {"name": f"{source('keeping', KEEPING_NETS)}:DropsLater"}
    with pytest.raises(ClientError, match="calls dropout drop"):
        trained("fedavg", model=model)


@pytest.mark.parametrize("net", ["Replaces", "Prepares"])
def test_a_net_that_keeps_tensors_of_its_own(net, trained, source):
    """A graph reads them later, and each lane has a copy of the net."""
    model = {"name": f"{source('keeping', KEEPING_NETS)}:{net}"}
    expected, *_ = trained("fedavg", ON_CPU, rounds=3, model=model)
    x, trainer, gpu = trained("fedavg", rounds=3, model=model)
    assert x == expected and not gpu.faults
    assert trainer.has_captured and not trainer.refusals
