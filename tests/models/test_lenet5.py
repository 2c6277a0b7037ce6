"""Luo 2023's LeNet-5 (convolutions, BatchNorm, dropout; d = 941 834) under every client rule, one
client after the other and side by side on lanes: the same x after two rounds.

In float64, on clients of four images and more, and with small steps: BatchNorm over four images,
four times in a row, passes a difference on enlarged by 1e4 a round at lr 0.02 (measured by moving
x_0), so there digits would be lost that have nothing to do with the modes. The images are noise
with a bright square at a place that depends on the class.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.batteries import algorithm_of_each_client_rule, small

STARTS = [0, 4, 9, 13, 18, 24]
"""Where clients begin in the list of 24 images: sizes 4, 5, 4, 5, 6."""


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """A folder of 32×32 colour images: ten classes, three in each for training, one for the test."""
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for half, each in (("train", 3), ("test", 1)):
        for label in range(10):
            (folder / half / f"class{label}").mkdir(parents=True)
            for k in range(each):
                pixels = rng.integers(0, 128, (32, 32, 3), dtype=np.uint8)
                pixels[3 * label : 3 * label + 5, 4:12] += 120
                Image.fromarray(pixels).save(folder / half / f"class{label}" / f"{k}.png")
    return folder


SHORT = ("fedmlb", "gradma")
"""Rules of the first tier: stages of the net, and three gradients in a step. Others take minutes."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long])
        for name in algorithm_of_each_client_rule()
    ],
)
def test_both_execution_modes_agree(name, images, engine, tmp_path):
    order = np.random.default_rng(1).permutation(30)
    clients = [[int(i) for i in order[start:stop]] for start, stop in pairwise(STARTS)]
    (tmp_path / "clients.json").write_text(str(clients))
    xs, statistics = [], []
    for mode in ("loop", "lanes"):
        run, records = engine({
            "rounds": 2, "seed": 2, "dtype": "float64", "model": "lenet5", "algorithm": small(name),
            "data": {"name": "folder", "path": str(images), "augment": True},
            "partition": {"name": "file", "path": str(tmp_path / "clients.json")},
            "schedule": {"name": "sync", "cohort": 4},
            "local": {"steps": 2, "batch_size": 4, "lr": 0.002} if name != "fedsgd" else {"lr": 0.002},
            "batching": {"mode": mode, "size": 2},
        })  # fmt: skip
        assert run.plan.problem.size == 941_834 and run.plan.mode == mode
        assert all(np.isfinite(record["train_loss"]) for record in records[1:])
        xs.append(run.executor.xs)
        statistics.append(run.executor.statistics)
    for ours, theirs in (xs, statistics):
        assert np.abs(ours[-1] - ours[0]).max() > 0
        for a, b in zip(ours, theirs, strict=True):
            assert np.abs(a - b).max() <= 1e-8 * np.abs(b).max()
