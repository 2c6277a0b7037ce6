"""What must hold of a long run: it takes no more memory with every round than its history needs, no
more shared memory and no more files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import basic, pid_of

from raysim.distributed.ray_executor import RayExecutor
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment

pytestmark = pytest.mark.ray

BOUND = {"driver": 20_000, "actor": 2_000, "shared": 500, "files": 0.01}
"""Bytes of private and of shared memory a round, and open files. The driver keeps the history,
forty figures of each round."""


def used(pid: int) -> tuple[int, int, int]:
    """Private and shared memory in bytes, and open files."""
    _, resident, shared, *_ = (
        int(n) * os.sysconf("SC_PAGESIZE") for n in Path(f"/proc/{pid}/statm").read_text().split()
    )
    return resident - shared, shared, len(os.listdir(f"/proc/{pid}/fd"))


ROUNDS = 2000


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["gradma", "fedhist"])
def test_nothing_grows_in_two_thousand_rounds(local_ray, uri, tmp_path, monkeypatch, algorithm):
    """Of the driver, two ClientActors, the server, the evaluator and the raylet, which has the
    object store: the slopes over the second half of the run, by least squares."""
    made: list[RayExecutor] = []
    pids: dict[str, int] = {}
    seen: dict[str, list[tuple[int, ...]]] = {}

    def choose(plan: Any, log: Any) -> RayExecutor:
        made.append(RayExecutor(log))
        return made[0]

    def progress(record: dict[str, float]) -> None:
        t = int(record["round"])
        if not pids:
            actors = {f"client {i}": worker.actor for i, worker in made[0].pool.workers.items()}
            pool = made[0].pool
            actors |= {"server": pool.server, "eval": pool.eval}
            pids.update({name: pid_of(made[0].pool, a) for name, a in actors.items()})
            pids["driver"] = os.getpid()
            pids["raylet"] = int(
                Path(f"/proc/{pids['server']}/stat").read_text().rpartition(")")[2].split()[1]
            )
        if t % 20 == 0:
            for name, pid in pids.items():
                seen.setdefault(name, []).append((t, *used(pid)))

    monkeypatch.setattr(experiment, "choose", choose)
    config = basic(tmp_path, uri) | {
        "rounds": ROUNDS,
        "algorithm": algorithm,
        "checkpoint": {"every": 250},
    }
    if algorithm == "gradma":
        config["algorithm"] = {"name": "gradma", "memory": 9}
    else:
        config["schedule"] = {"name": "kasync", "k": 5, "concurrency": 12}
    config["resources"] = {"executor": "ray", "actors": 2, "cpus": 0.5}
    done = experiment.execute(prepare(config), progress=progress)
    assert done.rounds == ROUNDS and len(seen) == 6
    slopes = {}
    for name, points in seen.items():
        rounds, *columns = np.array(points[len(points) // 2 :], float).T
        slopes[name] = [np.polyfit(rounds, column, 1)[0] for column in columns]
        private, shared, files = points[-1][1:]
        ends = f"{private / 1e6:.0f} MB, shared {shared / 1e6:.0f} MB, {files} files"
        print(
            f"{algorithm} {name}: at the end {ends}; a round more: {', '.join(f'{s:.3g}' for s in slopes[name])}"
        )
    for name, (private, shared, files) in slopes.items():
        assert private < BOUND["driver" if name in ("driver", "raylet") else "actor"], slopes
        assert shared < BOUND["shared"] and files < BOUND["files"], slopes
