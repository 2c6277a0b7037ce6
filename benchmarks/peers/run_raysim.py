"""raysim: the engine on an open executor, as in `raysim.run`, without the tracker.

`--processes 0` uses the inline executor.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import numpy as np
from measure import Meter
from workloads import CLASSES, LR, WORKLOADS, Workload, arguments, pixels

import raysim
from raysim.data import Dataset
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.prepare.resolve import resolve_plan


def dataset(work: Workload) -> Dataset:
    """Return the data of a workload as raysim stores them: pixels, normalised batch by batch."""
    x, y = pixels(work)
    scale, shift = (np.full(work.shape[0], value, np.float32) for value in (1 / 255, -0.5))
    return Dataset("random", x, y, x[:100], y[:100], tuple(map(str, range(CLASSES))), scale, shift)


def configuration(work: Workload, actors: int, mode: str | None = None) -> dict[str, Any]:
    split = {"name": "virtual", "samples": work.samples} if work.virtual else {"name": "iid"}
    return {
        "data": {"name": "digits"},  # the loader returns random images
        "rounds": 1_000_000,
        "partition": {**split, "clients": work.clients},
        "model": {"name": work.net, **({"dropout": 0.0} if work.net == "lenet5" else {})},
        "algorithm": {"name": "fedavg"},
        "local": {"steps": work.steps, "batch_size": work.batch, "lr": LR},
        "batching": {"mode": mode or "auto"},
        "schedule": {"name": "sync", "cohort": work.cohort},
        "resources": {"executor": "ray", "actors": actors, "cpus": 1}
        if actors
        else {"executor": "inline"},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
    }


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each run."""
    for work in WORKLOADS.values():
        yield work.shape, configuration(work, actors=0)
    yield WORKLOADS["w3"].shape, configuration(WORKLOADS["w3"], actors=2, mode="loop")


def plan(work: Workload, actors: int, mode: str | None = None) -> Plan:
    return resolve_plan(configuration(work, actors, mode), load=lambda _: dataset(work))


def main() -> None:
    work, given = arguments()
    meter = Meter(given.seconds)
    if given.processes:
        from raysim.distributed.ray_executor import RayExecutor

        executor = RayExecutor(lambda line: print(line, file=sys.stderr))
    else:
        executor = Inline()
    made = plan(work, given.processes, given.mode)
    executor.open(made)
    overhead = []
    for record in Engine(made, executor).rounds():  # record 0 is complete after round 1
        overhead.append(record.get("system/overhead_seconds", 0.0))
        if record["round"] != 1 and not meter.round(record.get("system/round_seconds")):
            break
    meter.report(f"raysim {raysim.__version__}", overhead=statistics.median(overhead))
    executor.close()


if __name__ == "__main__":
    main()
