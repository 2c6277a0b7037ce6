"""`raysim doctor` compares loop, vmap and CUDA graphs. On a CPU a stand-in takes the graphs' place."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cuda_graphs import again
from torch.utils._pytree import tree_leaves

from raysim.planning import doctor, execution_modes
from raysim.planning.execution_modes import GRAPHS, MODES, VMAP, Comparison, compare_modes
from raysim.training.trainers.cuda_graphs import CudaGraphCache
from raysim.training.trainers.vmap import VmapTrainer

SMALL_ERROR = 1e-6


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(capture): a CPU records steps by `capture` where `batching.cuda_graphs` is on."""

    def use(capture: Any) -> None:
        monkeypatch.setattr(
            "raysim.training.trainers.vmap.CudaGraphCache", lambda: CudaGraphCache(capture)
        )
        monkeypatch.setattr(VmapTrainer, "_records", lambda self: self.config.batching.cuda_graphs)

    return use


def inexact(run: Any) -> Any:
    """A capture whose steps are off by a little."""
    output, repeat = again(run)

    def repeat_inexactly() -> None:
        repeat()
        for leaf in tree_leaves(output):
            if leaf.is_floating_point():
                leaf.mul_(1 + SMALL_ERROR)

    return output, repeat_inexactly


def failing(run: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_all_modes_agree(stand_in):
    stand_in(again)
    comparison = compare_modes(gpus=0, rounds=2)
    assert comparison.agrees and comparison.recorded and comparison.graphs_equal
    assert 0 < comparison.vmap_difference < 1e-4, "the modes round differently"
    assert set(comparison.clients_per_second) == set(MODES)
    assert all(speed > 0 for speed in comparison.clients_per_second.values())
    assert "the same bits" in str(comparison)


def test_other_bits_are_found(stand_in):
    stand_in(inexact)
    comparison = compare_modes(gpus=0, rounds=1)
    assert comparison.recorded and not comparison.graphs_equal and not comparison.agrees
    assert "OTHER BITS" in str(comparison) and "report" in comparison.advice


def test_runs_that_do_not_repeat_are_found(monkeypatch):
    """As on a GPU whose kernels add in another order each time."""
    train, count = execution_modes._train, itertools.count()

    def unsteady(settings: Any, gpus: float, rounds: int) -> Any:
        params, *others = train(settings, gpus, rounds)
        if "model" in settings:
            params = params * (1 + 1e-7 * next(count))
        return params, *others

    assert compare_modes(gpus=0, rounds=1).repeats
    monkeypatch.setattr(execution_modes, "_train", unsteady)
    comparison = compare_modes(gpus=0, rounds=1)
    assert not comparison.repeats and not comparison.agrees
    assert "a repeated run gives OTHER BITS" in str(comparison)


def test_steps_that_cannot_be_recorded(stand_in, caplog):
    stand_in(failing)
    comparison = compare_modes(gpus=0, rounds=1)
    assert comparison.agrees and not comparison.recorded and "not permitted" in caplog.text
    assert "leave batching.cuda_graphs off" in comparison.advice


@pytest.mark.parametrize(
    ("speed", "advice"), [(200.0, "set batching.cuda_graphs=true"), (105.0, "leave")]
)
def test_advice_follows_the_speed(speed, advice):
    comparison = Comparison({"loop": 1.0, VMAP: 100.0, GRAPHS: speed}, 0.0, True, True)
    assert comparison.advice.startswith(advice)
    assert not replace(comparison, vmap_difference=0.1).agrees


def test_doctor_compares_on_a_gpu_only(monkeypatch):
    comparison = Comparison({"loop": 1.0, VMAP: 100.0, GRAPHS: 200.0}, 0.0, False, True)
    monkeypatch.setattr("raysim.planning.execution_modes.compare_modes", lambda: comparison)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor._modes() == (True, "CUDA graphs are not compared with the other modes: no GPU")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert doctor._modes() == (False, str(comparison))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_modes_of_a_gpu_agree():
    comparison = compare_modes()
    assert comparison.agrees and comparison.recorded
