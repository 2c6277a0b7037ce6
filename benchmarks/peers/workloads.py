"""The workloads of the comparison: five on random data, the same for all frameworks.

Client i has `samples` of 60,000 examples, from number i * samples on (modulo 60,000). A round is
FedAvg with uniform weights: `cohort` clients make `steps` steps of plain SGD on batches of `batch`
examples, shuffled anew each round.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

EXAMPLES, CLASSES, LR = 60_000, 10, 0.01


@dataclass(frozen=True)
class Workload:
    """A net, N clients, S of them in a round, and the local steps of each."""

    net: str
    clients: int
    samples: int
    cohort: int
    steps: int
    batch: int
    virtual: bool = False
    """True: clients share examples, because the data set is too small for all of them."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return (1, 28, 28) if self.net == "mlp" else (3, 32, 32)

    def __str__(self) -> str:
        names = {
            "mlp": "MLP 784-200-200-10",
            "lenet": "LeNet 3x32x32",
            "lenet5": "LeNet-5 with BatchNorm 3x32x32",
        }
        net = names[self.net]
        steps = f"{self.steps} step{'s' * (self.steps > 1)} of {self.batch}"
        return (
            f"{net}, N = {self.clients:,} of {self.samples} samples, S = {self.cohort:,}, {steps}"
        )


WORKLOADS = {
    "w1": Workload("mlp", clients=100, samples=600, cohort=10, steps=5, batch=64),
    "w2": Workload("lenet", clients=100, samples=600, cohort=10, steps=5, batch=64),
    "w3": Workload("mlp", clients=10_000, samples=6, cohort=1_000, steps=1, batch=6),
    "w4": Workload("mlp", clients=100_000, samples=60, cohort=100, steps=5, batch=10, virtual=True),
    "w5": Workload("lenet5", clients=100, samples=600, cohort=10, steps=5, batch=64),
}


def pixels(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Return random images, uint8 [60000, C, H, W], and labels, int64 [60000]."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (EXAMPLES, *work.shape), dtype=np.uint8)
    return x, rng.integers(0, CLASSES, EXAMPLES)


class Clients:
    """Data of all clients in memory, ready for the net."""

    def __init__(self, work: Workload, seed: int = 0):
        self.work, self.rng = work, np.random.default_rng(seed)
        x, y = pixels(work)
        self.x, self.y = torch.from_numpy(x).float().div_(255).sub_(0.5), torch.from_numpy(y)

    def sample(self) -> list[int]:
        """Return the clients of a round."""
        return self.rng.choice(self.work.clients, self.work.cohort, replace=False).tolist()

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the examples of a client's batches in a round: x [n, C, H, W] and y [n]."""
        work = self.work
        chosen = self.rng.permutation(work.samples)[: work.steps * work.batch]
        where = torch.from_numpy((client * work.samples + chosen) % EXAMPLES)
        return self.x.index_select(0, where), self.y.index_select(0, where)

    def batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of a client in a round."""
        x, y = self.examples(client)
        return zip(x.split(self.work.batch), y.split(self.work.batch), strict=True)


@cache
def clients(work: Workload) -> Clients:
    """Return the data of a workload, which each process makes once."""
    torch.set_num_threads(1)
    return Clients(work)


def make_net(work: Workload) -> nn.Sequential:
    """Return the net of a workload, with ReLU as activation."""
    torch.manual_seed(0)
    if work.net == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(200, CLASSES))
    if work.net == "lenet5":
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(1600, 512), nn.BatchNorm1d(512), nn.ReLU()),
            *(nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES)),
        )
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def arguments() -> tuple[Workload, argparse.Namespace]:
    """Parse the arguments of a framework's script; return its workload and all arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--clients", type=int, help="instead of the workload's own")
    parser.add_argument("--mode", help="raysim's batching.mode")
    parser.add_argument("--cohort", type=int, help="instead of the workload's own")
    given = parser.parse_args()
    changes = {key: value for key in ("clients", "cohort") if (value := getattr(given, key))}
    return replace(WORKLOADS[given.workload], **changes), given
