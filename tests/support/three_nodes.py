"""Three nodes on this machine, the server on one of its own: `python three_nodes.py CONFIG ... CASE
...`, as many cases as configurations. The last line of standard output is a JSON list with what
came of each. A node that is lost is followed by another third one. CASE says what happens:

    sums     nothing
    alone    nothing is added up on the way
    hang     one after the other a ClientActor of the third node, its NodeAggregator, the server and the evaluator are stopped
    raylet   the third node's raylet is stopped, and the run waits until Ray takes the node for dead
    adder    when the third node's NodeAggregator is to add up a round, it dies
    node     while the third node's NodeAggregator adds up a round, it dies with its node
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112  # Ray's own spelling

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
import yaml
from ray.cluster_utils import Cluster

from raysim.distributed.actors import NodeAggregator
from raysim.distributed.heartbeats import Address
from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.worker_pool import WorkerPool
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment
from support.processes import pid_of
from support.recycled import Recycling

STRUCK = 3
"""The round whose sums are lost, by their number."""


class Doomed(NodeAggregator):
    """Kills its node's raylet when it aggregates for the `STRUCK`-th time, and never returns."""

    def __init__(self, heartbeat: Address, plan: Any, raylet: int):
        super().__init__(heartbeat, plan)
        self.raylet, self.left = raylet, STRUCK

    @ray.method(num_returns=2)
    def add(self, bound: float, *posts: Any) -> Any:
        self.left -= 1
        if not self.left:
            os.kill(self.raylet, signal.SIGKILL)
            time.sleep(600)
        return super().add(bound, *posts)


class StruckPool(WorkerPool):
    """A worker pool in which the case happens to NodeAggregators."""

    case: str
    third: Any
    t = -1
    """Round that is trained."""

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        if (
            kind is NodeAggregator
            and self.case == "node"
            and more["scheduling_strategy"].node_id == self.third.node_id
        ):
            (raylet,) = self.third.all_processes["raylet"]
            return super()._start(Doomed, *arguments, raylet.process.pid, **more)
        return super()._start(kind, *arguments, **more)

    def aggregates_on_node(self, node: str, uploads: int) -> bool:
        return self.case != "alone" and super().aggregates_on_node(node, uploads)

    def aggregator(self, node: str) -> Any:
        aggregator = super().aggregator(node)
        if (
            self.workers
            and self.t >= STRUCK
            and node == self.third.node_id
            and self.case == "adder"
        ):
            self.case = "sums"
            ray.kill(aggregator.handle)
        return aggregator

    def stop(self, actor: Any) -> None:
        os.kill(pid_of(self, actor), signal.SIGSTOP)


class Struck(RayExecutor):
    """The Ray executor to which the case happens."""

    victims = ((1, "client"), (2, "adder"), (3, "server"), (5, "eval"))
    """By the rounds in which they are stopped."""

    def __init__(self, log: Any):
        super().__init__(log, StruckPool(log))

    def training(self, t: int) -> Any:
        self.pool.t = t - 1  # a round's training is made while the one before it is still trained
        training = super().training(t)
        add = training.add

        def watched(broadcasts: Any, blocks: Any) -> None:
            add(broadcasts, blocks)
            self.strike(t)

        training.add = watched
        return training

    def strike(self, t: int) -> None:
        """Called when the blocks of round t have been dispatched."""
        pool = self.pool
        (raylet,) = pool.third.all_processes["raylet"]
        if pool.case == "raylet" and t == STRUCK:
            pool.case = "sums"
            os.kill(raylet.process.pid, signal.SIGSTOP)
            while (
                pool.third.node_id not in pool.supervisor.monitor.dead_nodes()
            ):  # the run is not over before Ray knows of it
                time.sleep(0.1)
        elif pool.case == "hang" and self.victims and t >= self.victims[0][0]:
            (_, victim), *self.victims = self.victims
            if victim == "client":
                pool.stop(
                    next(
                        one.actor for one in pool.workers.values() if one.node == pool.third.node_id
                    )
                )
            else:
                pool.stop(
                    pool.aggregators[pool.third.node_id]
                    if victim == "adder"
                    else getattr(pool, victim)
                )


def main(configs: list[dict[str, Any]], cases: list[str]) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "node_name": "head", "include_dashboard": False},
    )
    cluster.add_node(num_cpus=2, node_name="second")
    StruckPool.third = cluster.add_node(num_cpus=2, node_name="third")
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    experiment.choose = lambda plan, log: Struck(log)
    Recycling(reserve=True).begin(setattr)
    found: list[dict[str, Any]] = []
    try:
        for config, case in zip(configs, cases, strict=True):
            StruckPool.case = case
            said: list[str] = []
            done = experiment.execute(prepare(config), log=said.append)
            found.append({"digest": done.digest, "history": done.history, "said": said})
            if case in ("raylet", "node"):
                cluster.remove_node(StruckPool.third, allow_graceful=False)
                StruckPool.third = cluster.add_node(num_cpus=2, node_name="third")
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    count = len(sys.argv) // 2
    files, cases = sys.argv[1 : 1 + count], sys.argv[1 + count :]
    main([yaml.safe_load(Path(file).read_text()) for file in files], cases)
