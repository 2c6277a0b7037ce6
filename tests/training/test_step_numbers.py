"""Random numbers of local steps: the same on every device, in every mode and block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.batteries import NETS, SIZES
from support.normal_numbers import normal_numbers
from support.programs import program

from raysim.randomness import generator
from raysim.training.batches import step_numbers
from raysim.training.batches.step_numbers import StepNumbers
from raysim.training.messages import ClientTask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


KINDS = {
    "uniform": lambda rng, shape: rng.random(shape, dtype=np.float32),
    "uniform64": lambda rng, shape: rng.random(shape),
    "normal": normal_numbers,
}


@pytest.fixture
def computed(monkeypatch):
    """Let a CPU compute its numbers, as a GPU does."""
    monkeypatch.setattr(step_numbers, "NUMPY_DEVICES", frozenset())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("limit", [1, 100, 1000])
@pytest.mark.parametrize("distribution", KINDS)
def test_tasks_take_the_numbers_of_their_generators(
    distribution, limit, ahead, device, monkeypatch, computed
):
    """Also if several tasks are computed together, and if they take turns."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(step_numbers, "NUMBERS_PER_CALL", limit)
    tasks = [ClientTask(client, 2, cursor=0, weight=1, steps=4) for client in range(5)]
    counts = [12, 0, 40, 8, 20]
    numbers = StepNumbers(7, "dice", distribution, tasks, counts, torch.device(device))
    streams = [generator(7, "dice", 2, client) for client in range(5)]
    if ahead:
        numbers.compute_all()
    for _ in range(4):
        for k, count in enumerate(counts):
            taken = numbers.take(k, count // 4, 1).cpu().numpy()
            expected = KINDS[distribution](streams[k], (count // 4, 1))
            assert taken.dtype == expected.dtype and np.array_equal(taken, expected)
    assert not numbers._computed, "numbers that all tasks have taken free their memory"


def test_a_single_number_has_no_dimension(computed):
    tasks = [ClientTask(0, 0, cursor=0, weight=1, steps=2)]
    numbers = StepNumbers(0, "one", "uniform", tasks, [2], torch.device("cpu"))
    expected = generator(0, "one", 0, 0).random(2, dtype=np.float32)
    assert [numbers.take(0).item(), numbers.take(0).item()] == expected.tolist()
    assert numbers.take(0, 0, 3).shape == (0, 3)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_device_computes_the_numbers_that_numpy_draws(mode, ragged, source, engine, monkeypatch):
    """Dropout masks, crops and a rule's own numbers, whatever the block: every bit of the model."""
    rules, nets = source("rules", program("chance_rules")), source("nets", NETS)

    def final(size: int) -> dict[str, torch.Tensor]:
        run, _ = engine({
            "rounds": 2, "seed": 4, "data": {"name": "digits", "augment": True},
            "model": {"name": f"{nets}:Net", "norm": False}, "partition": ragged(SIZES),
            "client": f"{rules}:Noisy", "server": f"{rules}:Shaken", "schedule": {"cohort": 8},
            "local": {"epochs": 2, "batch_size": 6, "lr": 0.05},
            "batching": {"mode": mode, "size": size},
        })  # fmt: skip
        return run.final

    drawn = final(3)
    monkeypatch.setattr(step_numbers, "NUMPY_DEVICES", frozenset())
    for size in (1, 3, 8):
        found = final(size)
        assert torch.equal(found["state/drawn"], drawn["state/drawn"])
    assert torch.equal(final(3)["state/x"], drawn["state/x"])


def test_pooled_clients_have_the_masks_and_crops_of_their_own(ragged, source, engine, monkeypatch):
    def final() -> torch.Tensor:
        run, _ = engine({
            "rounds": 2, "data": {"name": "digits", "augment": True}, "algorithm": "fedavg",
            "model": {"name": f"{source('nets', NETS)}:Net", "norm": False},
            "partition": ragged(SIZES), "schedule": {"cohort": 8},
            "local": {"steps": 1, "batch_size": 6, "lr": 0.05}, "batching": {"mode": "pooled"},
        })  # fmt: skip
        return run.final["state/x"]

    drawn = final()
    monkeypatch.setattr(step_numbers, "NUMPY_DEVICES", frozenset())
    assert torch.equal(final(), drawn)
