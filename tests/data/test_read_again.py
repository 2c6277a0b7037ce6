"""Data sets that give another example when they are read again are refused, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from raysim.data import import_torchvision
from raysim.data.own.reading import make_dataset
from raysim.errors import ConfigError

N = 60
X, Y = np.random.default_rng(4).normal(size=(N, 6)), np.arange(N) % 3


class Read(Dataset):
    """Examples that a function of their position returns."""

    def __init__(self, read: Callable[[int], Any], n: int = N):
        self.read, self.n = read, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> Any:
        return self.read(k)


PLAIN = Read(lambda k: (X[k], int(Y[k])))
GENERATOR = np.random.default_rng(5)
memory = torch.tensor(X)


def in_place(k: int) -> Any:
    memory[k] += 1
    return memory[k], int(Y[k])


def flipped(k: int) -> Any:
    return (X[k][::-1].copy() if random.random() < 0.5 else X[k]), int(Y[k])


RANDOM = {
    "python": Read(flipped),
    "numpy": Read(lambda k: (X[k] + np.random.normal(size=6), int(Y[k]))),
    "torch": Read(lambda k: (torch.tensor(X[k]) + torch.rand(6), int(Y[k]))),
    "own generator": Read(lambda k: {"x": X[k] + GENERATOR.random(), "y": int(Y[k])}),
    "one example": Read(lambda k: (X[k] + (k == 41) * GENERATOR.random(), int(Y[k]))),
    "one class, one time in two": Read(lambda k: (X[k] * (1 + Y[k] * (random.random() < 0.5)), 0)),
    "labels": Read(lambda k: (X[k], int(GENERATOR.integers(3)) if k % 4 == 0 else 0)),
    "users": Read(lambda k: {"x": X[k], "y": int(Y[k]), "user": int(GENERATOR.integers(9))}),
    "shapes": Read(lambda k: ([1] * int(GENERATOR.integers(1, 9)), int(Y[k]))),
    "memory": Read(in_place),
    "the process's seed": Read(
        lambda k: (X[k] + np.random.default_rng(torch.initial_seed() + k).random(), int(Y[k]))
    ),
    "a part": Subset(Read(flipped), range(40)),
    "one of several": ConcatDataset([PLAIN, Read(flipped)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("split", ["training", "test"])
def test_examples_that_differ_when_they_are_read_again_are_refused(kind, split):
    halves = (RANDOM[kind], PLAIN) if split == "training" else (PLAIN, RANDOM[kind])
    with pytest.raises(ConfigError, match=rf"^data: {split} example \d+ differs .*data.augment=tr"):
        make_dataset("mine", halves, "data")


def test_a_rare_change_in_a_large_data_set_is_found():
    rng = np.random.default_rng(6)
    rare = Read(lambda k: (X[k % N] * (1 + (rng.random() < 0.02)), 0), 20_000)
    with pytest.raises(ConfigError, match="differs when it is read again"):
        make_dataset("mine", (rare, PLAIN), "data")


@pytest.mark.parametrize(("n", "most"), [(N, 2 * N), (20_000, 1.2 * 20_000)])
def test_only_some_examples_of_a_large_data_set_are_read_again(n, most):
    read = []
    counted = Read(lambda k: read.append(k) or (X[k % N], 0), n)
    make_dataset("mine", (counted, PLAIN), "data")
    assert set(read) == set(range(n)) and n < len(read) <= most


def seeded(k: int) -> Any:
    torch.manual_seed(k)
    np.random.seed(k)
    return torch.tensor(X[k]) + torch.rand(6) + np.random.rand(), int(Y[k])


STEADY = {
    "seeded by position": Read(seeded),
    "views": Read(lambda k: (X[k : k + 1, ::-1], np.int64(Y[k]))),
    "bfloat16": Read(lambda k: (torch.tensor(X[k]).bfloat16(), torch.tensor(int(Y[k])))),
    "sparse": Read(lambda k: (torch.tensor(X[k]).to_sparse(), int(Y[k]))),
    "gradients": Read(lambda k: (torch.tensor(X[k], requires_grad=True) * 2, int(Y[k]))),
    "lists": Read(lambda k: [X[k].tolist(), int(Y[k])]),
}


@pytest.mark.parametrize("kind", STEADY)
def test_steady_examples_are_read_and_the_generators_are_as_before(kind):
    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]

    rows = [STEADY[kind][k][0] for k in range(N)]
    expected = [row.to_dense().tolist() if torch.is_tensor(row) else row for row in rows]
    before = states()
    dataset = make_dataset("mine", (STEADY[kind], STEADY[kind]), "data")
    assert np.array_equal(dataset.x, np.array(expected, dtype=dataset.x.dtype))
    if kind != "seeded by position":  # it leaves the state of the last example by itself
        assert states() == before


def test_a_transform_of_hugging_face_is_applied_and_may_not_draw():
    import_torchvision()  # datasets imports it, and its operators may not load
    datasets = pytest.importorskip("datasets")
    half = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), "z": ["a"] * N})

    def doubled(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "x": [2 * np.array(row) for row in rows["x"]]}

    def noisy(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "x": [np.array(row) + np.random.normal(size=6) for row in rows["x"]]}

    dataset = make_dataset("mine", {"train": half.with_transform(doubled), "test": half}, "data")
    assert np.array_equal(dataset.x, 2 * X) and np.array_equal(dataset.x_test, X)
    for content in ((half.with_transform(noisy), half), (half, half.with_transform(noisy))):
        with pytest.raises(ConfigError, match=r"^data: (training|test) example \d+ differs"):
            make_dataset("mine", content, "data")


def test_random_transforms_of_torchvision_are_refused(tmp_path):
    torchvision = import_torchvision()
    from PIL import Image
    from torchvision.datasets import ImageFolder

    rng = np.random.default_rng(8)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(15):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{k}.png")
    t = torchvision.transforms

    def made(*first: Any) -> Any:
        half = ImageFolder(str(tmp_path), t.Compose([*first, t.ToTensor()]))
        return make_dataset("mine", (half, half), "data")

    assert made().x.shape == made(t.RandomHorizontalFlip(1.0), t.CenterCrop(8)).x.shape
    for drawn in (t.RandomHorizontalFlip(), t.RandomCrop(8, 2), t.ColorJitter(0.5)):
        with pytest.raises(ConfigError, match="differs when it is read again"):
            made(drawn)
