"""What must hold of a long run: it takes no more memory with every round than its history needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.common import basic
from raysim import experiment
from raysim.plan import prepare
from raysim.ray_executor import RayExecutor

BOUND = {"driver": 20_000, "actor": 2_000}
"""Bytes a round. The driver keeps the history, some forty figures of each round."""


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["gradma", "fedhist"])
def test_memory_does_not_grow_in_three_thousand_rounds(local_ray, uri, tmp_path, monkeypatch, algorithm):
    """Of the driver and of each actor: the slope over the second half of the run, by least squares."""
    import ray

    made: list[RayExecutor] = []
    pids: dict[str, int] = {}
    seen: dict[str, list[tuple[int, int]]] = {}

    def choose(plan: Any, log: Any) -> RayExecutor:
        made.append(RayExecutor(log))
        return made[0]

    def progress(record: dict[str, float]) -> None:
        t = int(record["round"])
        if not pids:
            actors = {f"client {i}": worker.actor for i, worker in made[0].workers.items()}
            actors |= {"server": made[0].server, "eval": made[0].eval}
            here = {name: a.__ray_call__.remote(lambda self: os.getpid()) for name, a in actors.items()}
            pids.update({name: ray.get(pid, timeout=60) for name, pid in here.items()} | {"driver": os.getpid()})
        if t % 20 == 0:
            for name, pid in pids.items():
                seen.setdefault(name, []).append((t, rss(pid)))

    monkeypatch.setattr(experiment, "choose", choose)
    config = basic(tmp_path, uri) | {"rounds": 3000, "algorithm": algorithm, "checkpoint": {"every": 250}}
    if algorithm == "gradma":
        config["algorithm"] = {"name": "gradma", "memory": 9}
    else:
        config["schedule"] = {"name": "kasync", "arrivals": 5, "concurrency": 12}
    config["resources"] = {"executor": "ray", "actors": 2, "cpus": 0.5}
    done = experiment.execute(prepare(config), progress=progress)
    assert done.rounds == 3000 and len(seen) == 5
    slopes = {}
    for name, points in seen.items():
        rounds, sizes = np.array(points[len(points) // 2 :], float).T
        slopes[name] = np.polyfit(rounds, sizes, 1)[0]
        print(f"{algorithm} {name}: {slopes[name]:.0f} bytes a round, {points[-1][1] / 1e6:.0f} MB at the end")
    for name, slope in slopes.items():
        assert slope < BOUND["driver" if name == "driver" else "actor"], slopes
