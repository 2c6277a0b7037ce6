"""Cost of GradMA: a round relative to FedAvg's, and the server's update to a full Gram product.

    python benchmarks/gradma_cost.py [--models tinynn lenet5] [--repeats 5]

Random images; 10 of 100 clients, five steps of 64, inline, on one core except for the server's
inner products, which use both. The memory has a row for every client and is nearly full before the
measurement starts. The methods take turns. The script prints medians and ratios. It asserts
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from raysim.data import Dataset
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.numerics import gram, use_threads
from raysim.numerics.gradient_memory import admit, memory_init, project_on_memory, remember
from raysim.prepare.resolve import resolve_plan

METHODS = ("fedavg", "gradma_s", "gradma_w", "gradma")
SHAPES = {"tinynn": (1, 28, 28), "lenet5": (3, 32, 32), "mlp": (1, 28, 28), "lenet": (3, 32, 32)}
N, S = 100, 10


def dataset(shape: tuple[int, int, int]) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (30_000, *shape), dtype=np.uint8), rng.integers(0, 10, 30_000)
    scale, shift = (np.full(shape[0], value, np.float32) for value in (1 / 255, -0.5))
    return Dataset("random", x, y, x[:100], y[:100], tuple(map(str, range(10))), scale, shift)


def configuration(model: str, method: str) -> dict[str, Any]:
    return {
        "data": {"name": "digits"},  # the loader returns random images
        "rounds": 1_000_000,
        "partition": {"name": "iid", "clients": N},
        "model": model,
        "algorithm": {
            "name": method,
            **({"memory": N} if method in ("gradma", "gradma_s") else {}),
        },
        "local": {"steps": 5, "batch_size": 64, "lr": 0.01},
        "schedule": {"name": "sync", "cohort": S},
        "resources": {"executor": "inline"},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
    }


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each run."""
    for method in METHODS:
        yield SHAPES["tinynn"], configuration("tinynn", method)
    for model in ("mlp", "lenet", "lenet5"):
        yield SHAPES[model], configuration(model, "gradma")


def rounds(model: str, method: str, data: Dataset) -> Iterator[dict[str, float]]:
    """Return the rounds of an endless run."""
    plan = resolve_plan(configuration(model, method), load=lambda _: data)
    executor = Inline()
    executor.open(plan)
    return Engine(plan, executor).rounds()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def methods(model: str, repeats: int, n: int, warm_up: int) -> None:
    data = dataset(SHAPES[model])
    runs = {method: rounds(model, method, data) for method in METHODS}
    for method, run in runs.items():
        for _ in range(warm_up if method in ("gradma_s", "gradma") else 3):
            next(run)
    taken: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(repeats):
        for method, run in runs.items():
            taken[method].append(timed(lambda run=run: [next(run) for _ in range(n)]) / n)
    medians = {method: statistics.median(values) for method, values in taken.items()}
    for method, seconds in medians.items():
        ratio = statistics.median(
            a / b for a, b in zip(taken[method], taken["fedavg"], strict=True)
        )
        print(f"{model:8} {method:9} {1e3 * seconds:8.1f} ms a round, {ratio:.2f} times FedAvg's")


def server(m: int, P: int, repeats: int) -> None:
    """Print the time of the server's update for S uploads, relative to a full Gram product."""
    use_threads(None)
    rng = torch.Generator().manual_seed(0)
    memory, momentum = memory_init(m, P), torch.zeros(P)
    ids = [list(range(k * S, (k + 1) * S)) for k in range(m // S)]
    uploads = [torch.randn(P, generator=rng) + 0.1 for _ in range(S)]
    mean = torch.stack(uploads).mean(0)

    def update(t: int) -> None:
        nonlocal momentum
        cohort = ids[t % len(ids)]
        admit(memory, cohort, t)
        p = 0.5 * momentum + mean
        momentum, _ = project_on_memory(memory, p, remember(memory, cohort, uploads, 0.5))

    for t in range(len(ids) + 1):
        update(t)
    rows, updates, products = memory["rows"][:, :P], [], []
    for k in range(repeats):
        updates.append(timed(lambda k=k: update(len(ids) + 1 + k)))
        products.append(timed(lambda: gram(rows)))
    ratio = statistics.median(a / b for a, b in zip(updates, products, strict=True))
    print(
        f"server   P = {P:,}, m = {m}, S = {S}: update "
        f"{1e3 * statistics.median(updates):.0f} ms, full Gram product "
        f"{1e3 * statistics.median(products):.0f} ms: {ratio:.2f} of it"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--models", nargs="*", choices=SHAPES, default=["tinynn", "lenet5"])
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=4, help="in each measurement")
    arguments.add_argument(
        "--warm-up", type=int, default=60, help="rounds in which the memory fills"
    )
    given = arguments.parse_args()
    for model in given.models:
        methods(model, given.repeats, given.rounds, given.warm_up)
    for m, P in ((100, 1_000_000), (500, 1_000_000)):
        server(m, P, given.repeats)


if __name__ == "__main__":
    main()
