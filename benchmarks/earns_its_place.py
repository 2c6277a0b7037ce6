"""Gain of each remaining optimisation alone: rounds with it beside rounds without it.

    python benchmarks/earns_its_place.py gradient [--workloads w1 w3 tinynn gradma mlp5e5]
    python benchmarks/earns_its_place.py memory [--workloads w1 w3 gradma trip2e5 trip1e6]

`gradient`: CPU time of a round in loop mode in this process, by autograd over that by
`raysim.training.fast_gradient`. `memory`: CPU time of a round of all processes (this one, Ray's and
its two actors), through Ray's object store over that through `raysim.distributed.shared_memory`. In
`trip…` two clients make one step on one example, so that a round is little but its round trip from
the server to the actors and back.

Both ways take turns. Prints the median of the ratios, the smallest and the largest; asserts none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from measure import tree
from run_raysim import dataset
from workloads import WORKLOADS

from raysim.engine.executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.resolve import resolve_plan

WARM_UP = 3
"""Rounds in this process that are not counted."""

ROUNDS = 20
"""Rounds of a turn on two actors."""

DEFAULTS = {
    "gradient": ["w1", "w3", "tinynn", "gradma", "mlp5e5"],
    "memory": ["w1", "w3", "gradma", "trip2e5", "trip1e6"],
}

MODELS: dict[str, dict[str, Any]] = {
    "mlp5e5": {"name": "mlp", "hidden": [550, 150]},
    "trip2e5": {"name": "mlp", "hidden": [200, 200]},
    "trip1e6": {"name": "mlp", "hidden": [1000, 210]},
    "tinynn": {"name": "tinynn"},
    "gradma": {"name": "tinynn"},
}


def plan(name: str, **more: Any) -> Plan:
    """Return the run of a workload of the peers' benchmark, or of one of `MODELS`."""
    work = WORKLOADS.get(name, WORKLOADS["w1"])
    trip = name.startswith("trip")
    config = {
        "data": {"name": "digits"},  # the loader below returns the workload's images
        "rounds": 1_000_000,
        "partition": {"name": "iid", "clients": work.clients},
        "model": MODELS.get(name, {"name": work.net}),
        "algorithm": "gradma" if name == "gradma" else "fedavg",
        "local": {
            "steps": 1 if trip else work.steps,
            "batch": 1 if trip else work.batch,
            "lr": 0.01,
        },
        "schedule": {"name": "sync", "cohort": 2 if trip else work.cohort},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        **more,
    }
    return resolve_plan(config, load=lambda _: dataset(work))


def report(name: str, size: int, ours: list[float], theirs: list[float]) -> None:
    """Print one line of the table; `ours` and `theirs` are seconds of a round, turn by turn."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    milliseconds = [f"{1e3 * statistics.median(seconds):.4g}" for seconds in (ours, theirs)]
    spread = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
    print(f"| {name} | {size:,} | {' | '.join(milliseconds)} | {spread} |", flush=True)


def take_turns(repeats: int, ways: list[Callable[[], float]]) -> list[list[float]]:
    """Call every way `repeats` times, in changing order; return what each call returned, by way."""
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats):
        order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
        for way in order:
            taken[way].append(ways[way]())
    return taken


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that come from it."""
    ticks = 0
    for process in tree(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_gradient(name: str, repeats: int) -> None:
    """Compare CPU times of rounds in this process."""
    one = plan(name, resources={"executor": "inline"}, block={"mode": "loop"})

    def rounds(fast: bool) -> Iterator[dict[str, float]]:
        executor = Inline()
        if fast:
            executor.open(one)
        else:
            with mock.patch("raysim.training.trainer.matches_autograd", lambda model: False):
                executor.open(one)
        assert (executor.trainer.loop.fast is not None) is fast
        running = Engine(one, executor).rounds()
        for _ in range(WARM_UP):
            next(running)
        return running

    def timed(running: Iterator[dict[str, float]]) -> float:
        count, began, wall = 0, time.process_time(), time.perf_counter()
        while time.perf_counter() - wall < 0.3:
            next(running)
            count += 1
        return (time.process_time() - began) / count

    ours, theirs = rounds(True), rounds(False)
    report(
        name, one.problem.size, *take_turns(repeats, [lambda: timed(ours), lambda: timed(theirs)])
    )


def measure_memory(name: str, repeats: int) -> None:
    """Compare CPU times of rounds on two actors."""
    from raysim.distributed.executor import RayExecutor
    from raysim.distributed.shared_memory import SharedBuffer

    one = plan(
        name, rounds=ROUNDS, resources={"executor": "ray", "actors": 2, "cpus": 0.5, "threads": 1}
    )

    def opened(shared: bool) -> RayExecutor:
        executor = RayExecutor(lambda line: None)
        with mock.patch.object(SharedBuffer, "new", SharedBuffer.new if shared else _no_memory):
            executor.open(one)
        assert bool(executor.pool.shared_buffers) is shared
        return executor

    def timed(executor: RayExecutor) -> float:
        began = cpu_seconds()
        for _ in Engine(one, executor).rounds():
            pass
        return (cpu_seconds() - began) / ROUNDS

    ours, theirs = opened(True), opened(False)
    timed(ours)
    timed(theirs)
    try:
        ways = [lambda: timed(ours), lambda: timed(theirs)]
        report(name, one.problem.size, *take_turns(repeats, ways))
    finally:
        ours.close()
        theirs.close()


def _no_memory(size: int) -> None:
    raise OSError("switched off")


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", choices=DEFAULTS)
    arguments.add_argument("--workloads", nargs="*")
    arguments.add_argument("--repeats", type=int, default=11)
    given = arguments.parse_args()
    print("| workload | P | ms | ms without | ratio | smallest | largest |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    measure = {"gradient": measure_gradient, "memory": measure_memory}[given.what]
    for name in given.workloads or DEFAULTS[given.what]:
        measure(name, given.repeats)


if __name__ == "__main__":
    main()
