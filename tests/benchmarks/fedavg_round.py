"""What a round costs beside a hand-written loop: FedAvg, MNIST, MLP 784-200-200-10, N = 100, S = 10, five steps of 64.

    python tests/benchmarks/fedavg_round.py [--rounds 40] [--repeats 5]

Both sides train the same clients on the same batches, without evaluation, on the same threads and allocator settings.
The hand-written loop is what a careful person would write for this one experiment: parameters as views of one flat
vector, images normalised once, `autograd.grad`, one concatenation, one in-place update. Its second form forks two
processes that share the parameters and add up their halves in shared memory. Prints medians and ratios; asserts none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import numpy as np
import torch
from torch.nn import functional as F

from raysim import nets
from raysim.data import Examples
from raysim.engine import Engine
from raysim.executor import Executor, Inline, settle
from raysim.plan import Plan, prepare

CONFIG = {
    "data": "mnist",
    "partition": {"name": "iid", "clients": 100},
    "model": {"name": "mlp", "hidden": [200, 200]},
    "local": {"steps": 5, "batch": 64, "lr": 0.05},
    "schedule": {"name": "sync", "cohort": 10},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
}


class Hand:
    """The hand-written loop over clients."""

    def __init__(self, plan: Plan):
        examples = Examples.of(plan.dataset, "train")
        self.x, self.y = examples.batch(np.arange(len(examples)))
        self.clients = [plan.clients.client(i) for i in range(len(plan.clients))]
        self.net = nets.mlp(plan.dataset.shape, plan.dataset.n_classes)
        self.parameters = list(self.net.parameters())
        self.w = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for p, view in zip(self.parameters, torch.split(self.w, [p.numel() for p in self.parameters]), strict=True):
            p.data = view.view(p.shape)
        self.rng = np.random.default_rng(0)

    def client(self, start: torch.Tensor, client: int, total: torch.Tensor, weight: float) -> None:
        """Five local steps from `start`; adds weight · (start - w) to `total`."""
        self.w.copy_(start)
        mine = self.clients[client]
        order = self.rng.permutation(mine)
        for step in range(5):
            batch = torch.from_numpy(order[64 * step : 64 * (step + 1)])
            loss = F.cross_entropy(self.net(self.x[batch]), self.y[batch])
            grads = torch.autograd.grad(loss, self.parameters)
            self.w.add_(torch.cat([g.reshape(-1) for g in grads]), alpha=-0.05)
        total.add_(start - self.w, alpha=weight)

    def rounds(self, n: int) -> float:
        x = self.w.clone()
        began = time.perf_counter()
        for _ in range(n):
            total = torch.zeros_like(x)
            for client in self.rng.choice(100, 10, replace=False):
                self.client(x, client, total, 0.1)
            x -= total
        return n / (time.perf_counter() - began)


class HandInTwo:
    """The same, the cohort split over two forked processes with parameters and sums in shared memory."""

    def __init__(self, plan: Plan):
        context = multiprocessing.get_context("fork")
        self.x, self.sums = torch.zeros(1).share_memory_(), []
        hand = Hand(plan)
        self.x = hand.w.clone().share_memory_()
        self.sums = [torch.zeros_like(self.x).share_memory_() for _ in range(2)]
        self.rng = np.random.default_rng(0)
        self.pipes, self.workers = [], []
        for total in self.sums:
            ours, theirs = context.Pipe()
            worker = context.Process(target=self._serve, args=(hand, total, theirs), daemon=True)
            worker.start()
            self.pipes.append(ours)
            self.workers.append(worker)

    def _serve(self, hand: Hand, total: torch.Tensor, pipe) -> None:
        torch.set_num_threads(1)
        while (clients := pipe.recv()) is not None:
            total.zero_()
            for client in clients:
                hand.client(self.x, client, total, 0.1)
            pipe.send(None)

    def rounds(self, n: int) -> float:
        began = time.perf_counter()
        for _ in range(n):
            cohort = self.rng.choice(100, 10, replace=False)
            for pipe, part in zip(self.pipes, (cohort[:5], cohort[5:]), strict=True):
                pipe.send(part)
            for pipe in self.pipes:
                pipe.recv()
            self.x -= self.sums[0] + self.sums[1]
        return n / (time.perf_counter() - began)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for worker in self.workers:
            worker.join()


class Ours:
    """A raysim run on an open executor, without the tracker."""

    def __init__(self, executor: Executor, algorithm: str, skip: int, n: int):
        self.executor = executor
        self.config = {**CONFIG, "algorithm": algorithm, "rounds": skip + n, "resources": {"executor": "inline"}}
        self.skip, self.plan = skip, prepare(self.config)
        executor.open(self.plan)
        self.engine_seconds: list[float] = []

    def rounds(self, n: int) -> float:
        """Rounds per second after `skip` rounds of warming up (GradMA's memory fills in these)."""
        began = 0.0
        for record in Engine(self.plan, self.executor).rounds():
            done = int(record["round"])
            if done == self.skip:
                began = time.perf_counter()
            if done > self.skip:
                self.engine_seconds.append(record["overhead_seconds"])
        return n / (time.perf_counter() - began)


def median_rates(contenders: dict[str, Callable[[int], float]], n: int, repeats: int) -> dict[str, float]:
    """Medians of rounds per second, the contenders taking turns."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, rounds in contenders.items():
            rates[name].append(rounds(n))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    n, repeats = given.rounds, given.repeats
    settle(1)
    plan = prepare({**CONFIG, "algorithm": "fedavg", "rounds": 1, "resources": {"executor": "inline"}})

    two = HandInTwo(plan)
    hand = Hand(plan)
    fedavg, gradma_s = Ours(Inline(), "fedavg", 5, n), Ours(Inline(), "gradma_s", 60, n)
    rates = median_rates({"hand": hand.rounds, "inline": fedavg.rounds, "gradma_s": gradma_s.rounds}, n, repeats)
    print(
        f"one core    hand-written {rates['hand']:.1f} rounds/s, raysim inline {rates['inline']:.1f}: "
        f"{rates['inline'] / rates['hand']:.2f} of it; the engine's own cost "
        f"{1e3 * statistics.median(fedavg.engine_seconds):.2f} ms a round"
    )
    cost = rates["inline"] / rates["gradma_s"]
    print(f"GradMA-S    {rates['gradma_s']:.1f} rounds/s, m = 100 full: {cost:.2f} times FedAvg's round")

    import ray

    from raysim.ray_executor import RayExecutor

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    on_ray = Ours(RayExecutor(print), "fedavg", 5, n)
    rates = median_rates({"hand": two.rounds, "ray": on_ray.rounds}, n, repeats)
    print(
        f"two cores   hand-written {rates['hand']:.1f} rounds/s, raysim on two Ray actors {rates['ray']:.1f}: "
        f"{rates['ray'] / rates['hand']:.2f} of it; the engine's own cost "
        f"{1e3 * statistics.median(on_ray.engine_seconds):.2f} ms a round"
    )
    ray.shutdown()
    two.close()


if __name__ == "__main__":
    main()
