"""Gain of each remaining optimisation alone: rounds with it compared with rounds without it.

    python benchmarks/earns_its_place.py [gradient memory sockets]
        [--workloads w1 w2 w5 gradma]

All are measured by default, each on W1, W2, LeNet-5 (w5) and GradMA:

- `gradient`: the hand-written backward pass (`raysim.training.tasks.fast_gradient`) and autograd,
  CPU time of a round in loop mode in this process. It exists for chains of dense layers only.
- `memory`: `raysim.distributed.transport.shared_memory` and Ray's object store, CPU time of a round
  of all processes (this one, Ray's and its two actors).
- `sockets`: `raysim.distributed.transport.actor_calls`, calls over sockets and through Ray, both
  with shared memory; CPU time as for `memory`, and in a second line wall time.

Further workloads: `w3`; `tinynn` and `mlp5e5`, other dense nets; `trip2e5` and `trip1e6`, in which
two clients make one step on one example, so that a round takes little more than its round trip
from the server to the actors and back.

Runs with and without an optimisation take turns. The script prints the median, the smallest and the
largest ratio. It asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from measure import tree
from run_raysim import dataset
from workloads import WORKLOADS, Workload

from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.prepare.resolve import resolve_plan

WARM_UP = 3
"""Rounds in this process that are not counted."""

DEFAULT_WORKLOADS = ("w1", "w2", "w5", "gradma")

MODELS: dict[str, dict[str, Any]] = {
    "w5": {"name": "lenet5", "dropout": 0.0},
    "mlp5e5": {"name": "mlp", "hidden": [550, 150]},
    "trip2e5": {"name": "mlp", "hidden": [200, 200]},
    "trip1e6": {"name": "mlp", "hidden": [1000, 210]},
    "tinynn": {"name": "tinynn"},
    "gradma": {"name": "tinynn"},
}

INLINE = {"resources": {"executor": "inline"}}
TWO_ACTORS = {"resources": {"executor": "ray", "actors": 2, "cpus": 0.5, "threads": 1}}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gradient": [{**INLINE, "batching": {"mode": "loop"}}],
    "memory": [TWO_ACTORS],
    "sockets": [TWO_ACTORS],
}
"""Configurations of each optimisation, first with it; only one if it is switched off otherwise."""

Rounds = Iterator[dict[str, float]]


class NotMeasured(Exception):
    """The optimisation cannot be measured; the message says why."""


def configuration(name: str, **more: Any) -> dict[str, Any]:
    """Return a run of a workload of the peers' benchmark, or of one of `MODELS`."""
    work = work_of(name)
    trip = name.startswith("trip")
    return {
        "data": {"name": "digits"},  # the loader returns the workload's images
        "rounds": 1_000_000,
        "partition": {"name": "iid", "clients": work.clients},
        "model": MODELS.get(name, {"name": work.net}),
        "algorithm": "gradma" if name == "gradma" else "fedavg",
        "local": {
            "steps": 1 if trip else work.steps,
            "batch_size": 1 if trip else work.batch,
            "lr": 0.01,
        },
        "schedule": {"name": "sync", "cohort": 2 if trip else work.cohort},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 0},
        **more,
    }


def work_of(name: str) -> Workload:
    return WORKLOADS.get(name, WORKLOADS["w1"])


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of each run that can be measured."""
    for variants in VARIANTS.values():
        for name in (*DEFAULT_WORKLOADS, "trip2e5"):
            for variant in variants:
                yield work_of(name).shape, configuration(name, **variant)


def plans(name: str, what: str, **more: Any) -> list[Plan]:
    """Return the runs of a workload for an optimisation."""
    data = dataset(work_of(name))
    return [
        resolve_plan(configuration(name, **variant, **more), load=lambda _: data)
        for variant in VARIANTS[what]
    ]


def report(what: str, name: str, size: int, ours: list[float], theirs: list[float]) -> None:
    """Print one line of the table; `ours` and `theirs` are the seconds per round of each turn."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    milliseconds = [f"{1e3 * statistics.median(seconds):.4g}" for seconds in (ours, theirs)]
    spread = f"{statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f}"
    print(f"| {what} | {name} | {size:,} | {' | '.join(milliseconds)} | {spread} |", flush=True)


def take_turns(repeats: int, ways: list[Callable[[], Any]]) -> list[list[Any]]:
    """Call each function `repeats` times in turns; return the results of each function's calls."""
    taken: list[list[Any]] = [[] for _ in ways]
    for turn in range(repeats):
        order = range(len(ways)) if turn % 2 == 0 else reversed(range(len(ways)))
        for way in order:
            taken[way].append(ways[way]())
    return taken


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its descendants, in seconds."""
    ticks = 0
    for process in tree(os.getpid()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def started(plan: Plan, executor: Inline) -> Rounds:
    """Return the rounds of a run in this process, after `WARM_UP` of them."""
    rounds = Engine(plan, executor).rounds()
    for _ in range(WARM_UP):
        next(rounds)
    return rounds


def take_turns_inline(given: argparse.Namespace, ours: Rounds, theirs: Rounds) -> list[list[float]]:
    """Return the CPU seconds per round of two runs in this process, by run and turn."""

    def timed(rounds: Rounds) -> float:
        count, began, wall = 0, time.process_time(), time.perf_counter()
        while not count or time.perf_counter() - wall < given.seconds:
            next(rounds)
            count += 1
        return (time.process_time() - began) / count

    return take_turns(given.repeats, [lambda: timed(ours), lambda: timed(theirs)])


def measure_gradient(name: str, given: argparse.Namespace) -> None:
    """Compare the hand-written backward pass with autograd."""
    (plan,) = plans(name, "gradient")
    ours, theirs = Inline(), Inline()
    ours.open(plan)
    if ours.trainer.trainers[0].task.fast is None:
        raise NotMeasured("this net is not a chain of dense layers, so autograd computes it")
    with mock.patch("raysim.training.trainers.trainer.matches_autograd", lambda model: False):
        theirs.open(plan)
    assert theirs.trainer.trainers[0].task.fast is None
    taken = take_turns_inline(given, started(plan, ours), started(plan, theirs))
    report("gradient", name, plan.problem.size, *taken)


def measure_memory(name: str, given: argparse.Namespace) -> None:
    """Compare shared buffers with the object store, on two actors."""

    def no_memory(size: int) -> None:
        raise OSError("switched off")

    without = mock.patch("raysim.distributed.transport.shared_memory.SharedBuffer.new", no_memory)
    cpu, _ = take_turns_on_actors(name, "memory", given, without)
    report("memory", name, *cpu)


def measure_sockets(name: str, given: argparse.Namespace) -> None:
    """Compare calls over sockets with calls through Ray, on two actors."""
    without = mock.patch(
        "raysim.distributed.transport.actor_calls.Actor.connect", lambda self, timeout: None
    )
    cpu, wall = take_turns_on_actors(name, "sockets", given, without)
    report("sockets", name, *cpu)
    report("sockets, wall", name, *wall)


def take_turns_on_actors(
    name: str, what: str, given: argparse.Namespace, without: Any
) -> list[tuple[int, list[float], list[float]]]:
    """Return P and the CPU, then the wall seconds per round of two runs on actors, by turn.

    In the context `without`, the actors of the second run start without the optimisation.
    """
    from raysim.distributed.ray_executor import RayExecutor

    (plan,) = plans(name, what, rounds=given.rounds)

    def opened() -> RayExecutor:
        executor = RayExecutor(lambda line: None)
        stack.callback(executor.close)
        executor.open(plan)
        return executor

    def timed(executor: RayExecutor) -> tuple[float, float]:
        began, wall = cpu_seconds(), time.perf_counter()
        for _ in Engine(plan, executor).rounds():
            pass
        elapsed = time.perf_counter() - wall
        return (cpu_seconds() - began) / given.rounds, elapsed / given.rounds

    with ExitStack() as stack:
        ours = opened()
        with without:
            theirs = opened()
        timed(ours)
        timed(theirs)
        taken = take_turns(given.repeats, [lambda: timed(ours), lambda: timed(theirs)])
    size = plan.problem.size
    return [(size, *[[turn[i] for turn in turns] for turns in taken]) for i in range(2)]


MEASURES = {
    "gradient": measure_gradient,
    "memory": measure_memory,
    "sockets": measure_sockets,
}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(MEASURES))
    arguments.add_argument(
        "--workloads",
        nargs="*",
        choices=sorted({*WORKLOADS, *MODELS} - {"w4"}),
        default=DEFAULT_WORKLOADS,
    )
    arguments.add_argument("--repeats", type=int, default=11)
    arguments.add_argument("--seconds", type=float, default=0.3, help="of a turn in this process")
    arguments.add_argument("--rounds", type=int, default=20, help="of a turn on two actors")
    given = arguments.parse_args()
    if unknown := set(given.what) - set(MEASURES):
        arguments.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(MEASURES)}")
    print("| optimisation | workload | P | ms | ms without | ratio | smallest | largest |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for what in given.what or MEASURES:
        for name in given.workloads:
            try:
                MEASURES[what](name, given)
            except NotMeasured as why:
                print(f"| {what} | {name} | {why} |||||", flush=True)


if __name__ == "__main__":
    main()
