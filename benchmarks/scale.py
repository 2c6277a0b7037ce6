"""Utilization of 32 actors with 10,000 clients per round.

    python benchmarks/scale.py [--rounds 6] [--blocks 12] [key=value ...]

Four Ray nodes run on this machine, each with 8 CPUs and 8 GPUs that do not exist, and 32 actors
that do not import torch. First some real blocks are trained here, one after the other. Then every
block of every round sleeps for the time of one of them. Everything else is as in a real run: the
engine, the block scheduling, sums of the model's size through the object stores, a NodeAggregator
for each node, the server's update. The script prints the utilization of the actors and the time of
a round. It asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112  # Ray's own spelling

import numpy as np
import ray
from ray.cluster_utils import Cluster

from raysim.distributed.cluster.versions import source_code
from raysim.distributed.heartbeats import Address, Heartbeat
from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.worker_pool import WorkerPool
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.process_setup import configure_process, make_trainer
from raysim.engine.round_clients import make_cohort, make_tasks
from raysim.prepare.resolve import prepare
from raysim.training.messages import Block, Broadcast, ClientResult, WorkerResult, cut_blocks

NODES, ACTORS = 4, 8


def noise() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images of the shape of MNIST's; what they show does not change the times."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (7_000, 1, 28, 28), np.uint8)
    y = rng.integers(0, 10, 7_000)
    return {"train": (x[1_000:], y[1_000:]), "test": (x[:1_000], y[:1_000])}


CONFIG: dict[str, Any] = {
    "data": f"{__file__}:noise",
    "rounds": 6,
    "partition": {"name": "virtual", "clients": 1_000_000, "samples": 320},
    "model": "lenet",
    "algorithm": "fedavg",
    "local": {"steps": 5, "batch_size": 64, "lr": 0.05},
    "schedule": {"cohort": 10_000},
    "batching": {"mode": "loop"},
    "resources": {"actors": NODES * ACTORS, "cpus": 1, "gpus": 1, "threads": 1},
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
}


def configurations() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Yield image shape and configuration of the run."""
    yield (1, 28, 28), CONFIG


def measure(plan: Plan, count: int) -> list[float]:
    """Train `count` real blocks here; return the CPU seconds of this process for each."""
    configure_process(1)
    trainer, inline = make_trainer(plan, "cpu"), Engine(plan, Inline())
    x0, buffers = plan.initial
    round = make_cohort(plan, inline.schedule.next_round(0))
    blocks = cut_blocks(make_tasks(plan, inline.store, round), plan.block_size)[: count + 1]
    broadcast = {0: Broadcast({key: x0 for key in plan.server.provides}, buffers)}
    times = []
    for block in blocks:
        began = time.process_time()
        trainer.train(broadcast, [block])
        times.append(time.process_time() - began)
    return times[1:]  # the first one warms up


class Sleeper:
    """A ClientActor that trains nothing: each block takes one of `times`, in seconds."""

    def __init__(self, heartbeat: Address, times: list[float], size: int):
        self.heartbeat, self.times, self.size = Heartbeat(heartbeat), times, size

    def where(self) -> SimpleNamespace:
        """Return what `raysim.distributed.actors.Place` holds, whose module imports torch."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return SimpleNamespace(node=context.get_node_id(), gpus=gpus, code=source_code())

    @ray.method(num_returns=3)
    def train(
        self, blocks: list[Block], again: bool, states: None, bases: list[int], *broadcasts: Any
    ) -> tuple:
        assert "torch" not in sys.modules
        with self.heartbeat.working():
            return self._sleep(blocks, bases)

    def _sleep(self, blocks: list[Block], bases: list[int]) -> tuple:
        began = time.perf_counter()
        full = max(len(block.tasks) for block in blocks)
        for block in blocks:
            drawn = np.random.default_rng((bases[0], block.tasks[0].client)).choice(self.times)
            time.sleep(drawn * len(block.tasks) / full)
        ids = [job.client for block in blocks for job in block.tasks]
        sums = {"mean delta/0": np.zeros((1, self.size), np.int64)}
        done = [ClientResult(client, 0.0, bytes=4 * self.size) for client in ids]
        word = WorkerResult(
            done, ids, seconds=time.perf_counter() - began, bytes=(8 * self.size, 0)
        )
        return {"sums": sums}, {"rows": {}}, (word, None)


class Sleeping(WorkerPool):
    """A pool of actors whose ClientActors sleep."""

    times: list[float]
    size: int

    def _start_client(self, number: int) -> Any:
        r = self.resources
        how = {"num_cpus": r.cpus, "num_gpus": r.gpus, "scheduling_strategy": "SPREAD"}
        return self._start(Sleeper, self.times, self.size, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=12, help="real blocks that are measured")
    parser.add_argument("--times", type=float, nargs="*", help="take these instead, in seconds")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    os.environ["RAY_ADDRESS"] = "later"  # so that this machine is not checked for 32 GPUs
    plan = prepare(CONFIG, [*given.overrides, f"rounds={given.rounds}"])
    times = given.times or measure(plan, given.blocks)
    spread = statistics.pstdev(times) / statistics.fmean(times)
    print(
        f"{plan.config.model.name}, {plan.problem.size:,} parameters; "
        f"{plan.config.schedule.size} clients a round in blocks of {plan.block_size} "
        f"({plan.mode}), {statistics.fmean(times):.3f} s ± {100 * spread:.1f} % each"
    )
    del os.environ["RAY_ADDRESS"]
    small = {"object_store_memory": 400 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8,
            "num_gpus": 8,
            "node_name": "node0",
            "include_dashboard": False,
            **small,
        },
    )
    for i in range(1, NODES):
        cluster.add_node(num_cpus=8, num_gpus=8, node_name=f"node{i}", **small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    Sleeping.times, Sleeping.size = times, plan.problem.size
    executor = RayExecutor(print, Sleeping(print))
    try:
        executor.open(plan)
        records = []
        for record in Engine(plan, executor).rounds():
            if record["round"]:
                records.append(record)
                print(
                    f"round {record['round']:.0f}: {record['system/round_seconds']:.2f} s, "
                    f"busy {100 * record['system/worker_utilization']:.1f} %, "
                    f"longest actor {record['system/train_seconds']:.2f} s, to the server "
                    f"{record['system/network/bytes_up'] / 1e6:.1f} MB, "
                    + ", ".join(
                        f"{record[f'system/node/node{i}/clients']:.0f}" for i in range(NODES)
                    )
                    + " clients a node"
                )
    finally:
        executor.close()
        ray.shutdown()
        cluster.shutdown()
    later = records[1:]
    took = statistics.fmean(record["system/round_seconds"] for record in later)
    busy = statistics.fmean(record["system/worker_utilization"] for record in later)
    print(f"rounds 2 to {given.rounds}: {took:.3f} s, busy {busy:.1%}")


if __name__ == "__main__":
    main()
