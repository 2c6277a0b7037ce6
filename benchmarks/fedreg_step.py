"""Cost of FedReg's local step and of preparing its data, relative to FedAvg's step.

    python benchmarks/fedreg_step.py [--repeats 5]

The net is FedReg's CNN on MNIST, with batches of 10. One client with 100 examples trains for one
local epoch and for three in this process. The difference is the time of the steps alone; the rest
of the shorter run is the time before the steps. The script prints medians and ratios. It asserts
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from raysim.engine.process_setup import configure_process, make_trainer
from raysim.prepare.resolve import prepare
from raysim.training.messages import Block, Broadcast, ClientTask

CONFIG = {
    "rounds": 1,
    "data": {"name": "mnist", "scaling": "unit"},
    "partition": {"name": "iid", "clients": 600},
    "model": "mnist_cnn",
    "schedule": {"cohort": 1},
    "batching": {"mode": "loop"},
    "resources": {"executor": "inline"},
}
METHODS = {"fedavg": {}, "fedreg": {}, "fedreg_mg": {}, "fedreg_mg, fresh": {"fresh": True}}


def configuration(algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
    name = algorithm.partition(",")[0]
    local = {"epochs": 1, "batch_size": 10, "lr": 0.1}
    return {**CONFIG, "algorithm": {"name": name, **options}, "local": local}


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each run."""
    for name, options in METHODS.items():
        yield (1, 28, 28), configuration(name, options)


class Client:
    """Repeated local training of one client."""

    def __init__(self, algorithm: str, options: dict[str, Any]):
        plan = prepare(configuration(algorithm, options))
        self.trainer = make_trainer(plan, "cpu")
        x, buffers = plan.initial
        self.broadcast = Broadcast({"x": x}, buffers)

    def seconds(self, epochs: int) -> float:
        task = ClientTask(client=0, base=0, cursor=0, weight=1.0, steps=10 * epochs)
        began = time.perf_counter()
        (one,) = self.trainer.train({0: self.broadcast}, [Block(0, [task])]).clients
        assert one.error is None, one.error
        return time.perf_counter() - began


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repeats", type=int, default=5)
    repeats = arguments.parse_args().repeats
    configure_process(1)
    clients = {name: Client(name, options) for name, options in METHODS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for _ in range(repeats):
        for name, client in clients.items():
            taken[name].append((client.seconds(1), client.seconds(3)))
    steps = {
        name: statistics.median((long - short) / 20 for short, long in t)
        for name, t in taken.items()
    }
    for name, t in taken.items():
        arrival = statistics.median(short for short, _ in t) - 10 * steps[name]
        print(
            f"{name:18}  {1e3 * steps[name]:6.1f} ms a step, "
            f"{steps[name] / steps['fedavg']:.2f} times FedAvg's; arrival {1e3 * arrival:6.0f} ms, "
            f"as much as {arrival / steps['fedavg']:.0f} of its steps"
        )


if __name__ == "__main__":
    main()
