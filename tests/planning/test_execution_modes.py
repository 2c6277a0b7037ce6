"""`raysim doctor` compares loop and lanes, with and without captures. On a CPU a stand-in takes the
place of CUDA graphs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from raysim.planning import doctor, execution_modes
from raysim.planning.execution_modes import LANES, MODES, UNCAPTURED, Comparison, compare_modes
from raysim.training.trainers.host_graphs import HostGraphs
from raysim.training.trainers.lane import CapturedStep, LaneSteps

SMALL_ERROR = 1e-6


def test_all_modes_agree():
    comparison = compare_modes(gpus=0, rounds=2)
    assert comparison.agrees and comparison.repeats
    assert comparison.captured and comparison.captures_equal
    assert comparison.difference < 1e-4
    assert set(comparison.clients_per_second) == set(MODES)
    assert all(speed > 0 for speed in comparison.clients_per_second.values())
    assert "the same bits" in str(comparison)


def test_other_bits_are_found(monkeypatch):
    capture = CapturedStep._capture

    def inexactly(self: CapturedStep, steps: LaneSteps) -> Any:
        result = capture(self, steps)
        replay = self.replay
        assert replay is not None

        def replay_inexactly() -> None:
            replay()
            steps.task.local_params.mul_(1 + SMALL_ERROR)

        self.replay = replay_inexactly
        return result

    monkeypatch.setattr(CapturedStep, "_capture", inexactly)
    comparison = compare_modes(gpus=0, rounds=1)
    assert comparison.captured and not comparison.captures_equal and not comparison.agrees
    assert "OTHER BITS" in str(comparison) and "report" in comparison.advice


def test_runs_that_do_not_repeat_are_found(monkeypatch):
    """As on a GPU whose kernels add in another order each time."""
    train, count = execution_modes._train, itertools.count()

    def unsteady(settings: Any, gpus: float, rounds: int) -> Any:
        params, *others = train(settings, gpus, rounds)
        if "model" in settings:
            params = params * (1 + 1e-7 * next(count))
        return params, *others

    monkeypatch.setattr(execution_modes, "_train", unsteady)
    comparison = compare_modes(gpus=0, rounds=1)
    assert not comparison.repeats and not comparison.agrees
    assert "a repeated run gives OTHER BITS" in str(comparison)


def test_a_capture_that_fails_is_told_and_the_block_trains_again(monkeypatch, caplog):
    def failing(self: HostGraphs, run: Any, stream: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(HostGraphs, "capture", failing)
    comparison = compare_modes(gpus=0, rounds=1)
    assert comparison.agrees and not comparison.captured and "not permitted" in caplog.text
    assert "trains again without captures" in caplog.text
    assert "no step could be captured" in comparison.advice


@pytest.mark.parametrize(
    ("speed", "advice"), [(200.0, "leave batching.mode at auto"), (50.0, "set batching.mode=loop")]
)
def test_advice_follows_the_speed(speed, advice):
    speeds = {"loop": 100.0, UNCAPTURED: 100.0, LANES: speed}
    comparison = Comparison(speeds, 0.0, True, True)
    assert comparison.advice.startswith(advice)
    assert not replace(comparison, difference=0.1).agrees


def test_doctor_compares_on_a_gpu_only(monkeypatch):
    speeds = {"loop": 1.0, UNCAPTURED: 100.0, LANES: 200.0}
    comparison = Comparison(speeds, 0.0, False, True)
    monkeypatch.setattr("raysim.planning.execution_modes.compare_modes", lambda: comparison)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert doctor._modes() == (True, "modes of training are not compared: no GPU")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert doctor._modes() == (False, str(comparison))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_modes_of_a_gpu_agree():
    comparison = compare_modes()
    assert comparison.agrees and comparison.captured
