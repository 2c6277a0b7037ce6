"""Cost of the virtual clock: time per event, and memory of a run with 10,000 clients in flight.

    python benchmarks/virtual_clock.py [--rounds 400] [--repeats 5]

An event is the end of a task with its consequences (the draw and the heap entry of its successor),
with 10,000 clients in flight of which 100 arrive in a round. The script prints medians relative to
a heap that only pops and pushes as often, and the memory: the largest resident size of a process
that runs K-async FedAvg on 10,000 clients of MNIST with a net of 13,525 parameters, and the number
of versions of the model in memory. It asserts nothing.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import raysim
from raysim.prepare.resolve import prepare
from raysim.schedule import make_schedule

CLIENTS, ARRIVALS = 10_000, 100
CONFIG = {
    "data": "mnist",
    "rounds": 1,
    "partition": {"name": "virtual", "clients": CLIENTS, "samples": 20},
    "model": {"name": "mlp", "hidden": [17]},
    "algorithm": "fedavg",
    "local": {"steps": 1, "batch_size": 20, "lr": 0.05},
    "schedule": {"name": "kasync", "k": ARRIVALS},
    "resources": {"executor": "inline"},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
}
CLOCKS = {
    "uniform arrival": {},
    "lognormal": {"client_speeds": {"name": "lognormal"}},
    "lognormal, drop-outs, windows": {
        "client_speeds": {"name": "lognormal"},
        "client_dropout": {"rate": 0.1},
        "availability": {"period": 10, "open": 5},
    },
    "buffered, half in flight": {
        "name": "buffered",
        "k": None,
        "buffer_size": ARRIVALS,
        "concurrency": CLIENTS // 2,
    },
}


def configuration(how: dict[str, Any]) -> dict[str, Any]:
    schedule = {**CONFIG["schedule"], **how}
    return {**CONFIG, "schedule": {k: v for k, v in schedule.items() if v is not None}}


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each run."""
    for how in CLOCKS.values():
        yield (1, 28, 28), configuration(how)


def clock(how: dict[str, Any], rounds: int) -> float:
    """Return the seconds per event of a schedule with the settings `how`."""
    plan = prepare(configuration(how))
    made = make_schedule(plan.config, plan.clients.sizes)
    before, began = made._events_added, time.perf_counter()
    for t in range(rounds):
        made.next_round(t)
    return (time.perf_counter() - began) / (made._events_added - before)


def bare(rounds: int) -> float:
    """Return the seconds per event of as many pops and pushes on a heap of the same size."""
    times = np.random.default_rng(0).random(CLIENTS + rounds * ARRIVALS)
    heap = [(t, i, 0, i, 0, 0.0) for i, t in enumerate(times[:CLIENTS])]
    heapq.heapify(heap)
    began = time.perf_counter()
    for t in times[CLIENTS:]:
        time_, *rest = heapq.heappop(heap)
        heapq.heappush(heap, (time_ + t, *rest))
    return (time.perf_counter() - began) / (rounds * ARRIVALS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    of_heap = statistics.median(bare(args.rounds) for _ in range(args.repeats))
    print(f"{'a bare heap':32s}{of_heap * 1e6:6.1f} µs an event")
    for name, how in CLOCKS.items():
        cost = statistics.median(clock(how, args.rounds) for _ in range(args.repeats))
        print(f"{name:32s}{cost * 1e6:6.1f} µs an event, {cost / of_heap:.1f} times the heap's")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "run_dir": str(Path(folder) / "run"),
            "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        }
        done = raysim.run(CONFIG, {"rounds": args.rounds, **quiet})
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    alive = [record["system/versions_in_memory"] for record in done.history[1:]]
    last = done.history[-1]
    print(
        f"{CLIENTS} clients in flight, {args.rounds} rounds of {ARRIVALS}: {after:.0f} MB at most "
        f"({before:.0f} MB before the run); versions alive: {max(alive):.0f} at most, "
        f"{last['system/versions_bytes'] / 1e6:.0f} MB at the end"
    )


if __name__ == "__main__":
    main()
