"""Speed of blocks of clients on a GPU, relative to loop mode and to the device's peak.

    python benchmarks/gpu.py [--models lenet5 resnet20] [--blocks 1 8 32 128] [--repeats 5]

FedAvg on random 3×32×32 images, 128 of 1,000 clients, five steps of 64, all in this process. Each
block size is trained on lanes, with and without captured steps. The peak is the speed of a product
of two large float32 matrices in the same run. `--device cpu` tries the script without a GPU. The
modes take turns. The script prints medians and ratios. It asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from gradma_cost import dataset
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from raysim.data import Dataset
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.errors import RaysimError
from raysim.prepare.resolve import resolve_plan
from raysim.system.deterministic_kernels import set_cuda_variables

STEPS, BATCH, SHAPE = 5, 64, (3, 32, 32)


def configuration(model: str, cohort: int, block: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        "data": {"name": "digits"},  # the loader returns random images
        "rounds": 1_000_000,
        "partition": {"name": "virtual", "clients": 1000, "samples": 400},
        "model": {"name": model, **({"dropout": 0.0} if model == "lenet5" else {})},
        "algorithm": "fedavg",
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": 0.01},
        "batching": block,
        "schedule": {"name": "sync", "cohort": cohort},
        "resources": {"executor": "inline", "gpus": float(device == "cuda")},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
    }


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each kind of run."""
    for model in ("lenet5", "resnet20"):
        for block in ways([8], "cuda").values():
            yield SHAPE, configuration(model, 128, block, "cpu")


def plan(model: str, cohort: int, block: dict[str, Any], device: str, data: Dataset) -> Plan:
    return resolve_plan(configuration(model, cohort, block, device), load=lambda _: data)


def ways(sizes: list[int], device: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"loop": {"mode": "loop"}}
    for size in sizes:
        for capture in (True, False) if device == "cuda" else (False,):
            name = f"lanes, blocks of {size}{', captured' * capture}"
            found[name] = {"mode": "lanes", "size": size, "capture": capture}
    return found


def wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak(device: str, n: int, repeats: int) -> float:
    """Return the floating-point operations per second of a product of two n × n matrices."""
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    taken = []
    for _ in range(repeats + 1):
        began = wait(device)
        a @ b
        taken.append(wait(device) - began)
    return 2 * n**3 / min(taken)


def operations(one: Plan) -> int:
    """Return the floating-point operations of the gradients of a round, as torch counts them."""
    net = one.model().module
    counter = FlopCounterMode(display=False)
    with counter:
        F.cross_entropy(
            net(torch.zeros(BATCH, *SHAPE)), torch.zeros(BATCH, dtype=torch.long)
        ).backward()
    return counter.get_total_flops() * STEPS * one.config.schedule.size


def started(one: Plan) -> Iterator[dict[str, float]]:
    executor = Inline()
    executor.open(one)
    rounds = Engine(one, executor).rounds()
    for _ in range(3):
        next(rounds)
    return rounds


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--models", nargs="*", default=["lenet5", "resnet20"])
    arguments.add_argument("--blocks", nargs="*", type=int, default=[1, 8, 32, 128])
    arguments.add_argument("--cohort", type=int, default=128)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = arguments.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        arguments.error("there is no GPU here; --device cpu tries the script without one")
    # The product below is the first that cuBLAS computes, which then fixes its setting.
    set_cuda_variables(deterministic=True)
    data, most = (
        dataset(SHAPE),
        peak(given.device, 8192 if given.device == "cuda" else 1024, given.repeats),
    )
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}: {most / 1e12:.3g} TFLOP/s\n")
    print("| net | way | rounds/s | of the loop's | of the peak |\n|---|---|---:|---:|---:|")
    for model in given.models:
        runs, taken, refused = {}, {}, {}
        for name, block in ways(given.blocks, given.device).items():
            try:
                runs[name] = started(one := plan(model, given.cohort, block, given.device, data))
            except RaysimError as error:
                refused[name] = str(error).splitlines()[0]
        for _ in range(given.repeats):
            for name, rounds in runs.items():
                began = wait(given.device)
                next(rounds)
                taken.setdefault(name, []).append(wait(given.device) - began)
        work = operations(one)
        for name, seconds in taken.items():
            rate = 1 / statistics.median(seconds)
            ratio = statistics.median(a / b for a, b in zip(taken["loop"], seconds, strict=True))
            print(
                f"| {model} | {name} | {rate:.3g} | {ratio:.3g} | {work * rate / most:.2g} |",
                flush=True,
            )
        for name, why in refused.items():
            print(f"| {model} | {name} | {why} | | |")


if __name__ == "__main__":
    main()
