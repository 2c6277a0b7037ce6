"""Two nodes on this machine: one fails in the middle of a round, another one joins later. `python
two_nodes.py CONFIG VICTIM ...`, where VICTIM, client or server, says who must live on the node that
is lost. The last line of standard output is a JSON list with what came of each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "180"  # noqa: SIM112  # Ray's own spelling

import ray
import yaml
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.distributed.ray_executor import RayExecutor
from raysim.distributed.worker_pool import WorkerPool
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment

LOST, ADDED = 4, 8
"""Rounds in which a node is lost, and one is added."""


class SpreadPool(WorkerPool):
    """A worker pool that starts the victim on the second node."""

    second: Any
    victim: str
    lost = False

    def _start(self, kind: Any, *arguments: Any, **more: Any) -> Any:
        server = kind.__name__ == "ServerActor"
        if not self.lost and (server or kind.__name__ == "EvalActor"):
            there = self.second.node_id if server and self.victim == "server" else self.home
            more["scheduling_strategy"] = NodeAffinitySchedulingStrategy(there, soft=False)
        return super()._start(kind, *arguments, **more)


class Spread(RayExecutor):
    """The Ray executor on a cluster that changes."""

    cluster: Cluster

    def __init__(self, log: Callable[[str], None]):
        super().__init__(log, SpreadPool(log))
        self.added = False
        self.at_first: list[str] = []
        self.at_last: list[str] = []

    def training(self, t: int) -> Any:
        training = super().training(t)
        add = training.add

        def watched(broadcasts: Any, blocks: Any) -> None:
            add(broadcasts, blocks)
            if t == LOST and not self.pool.lost:
                self.at_first = [worker.node for worker in self.pool.workers.values()]
                self.pool.lost = True
                self.cluster.remove_node(self.pool.second, allow_graceful=False)
            if t == ADDED and not self.added:
                self.added = True
                self.third = self.cluster.add_node(num_cpus=1)
                self.cluster.wait_for_nodes()
            if self.added and self.pool.joining:  # the run is not over before they are there
                ray.wait(
                    [word for _, word in self.pool.joining.values()],
                    num_returns=len(self.pool.joining),
                    timeout=60,
                )
            self.at_last = [worker.node for worker in self.pool.workers.values()]

        training.add = watched
        return training


def main(config: dict[str, Any], victims: list[str]) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    SpreadPool.second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    Spread.cluster = cluster
    try:
        found = [lost_and_added(config, victim) for victim in victims]
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(found))


def lost_and_added(config: dict[str, Any], victim: str) -> dict[str, Any]:
    """Run once. The node that joins is the second node of the next run."""
    SpreadPool.victim = victim
    made: list[Spread] = []
    said: list[str] = []

    def choose(plan: Any, log: Any) -> Spread:
        made.append(Spread(log))
        return made[0]

    experiment.choose = choose
    told: list[float] = []
    second = SpreadPool.second.node_id
    done = experiment.execute(
        prepare({**config, "run_dir": f"{config['run_dir']}-{victim}"}),
        progress=lambda record: told.append(record["round"]),
        log=said.append,
    )
    SpreadPool.second = made[0].third
    return {
        "digest": done.digest,
        "history": done.history,
        "told": told,
        "said": said,
        "home": made[0].pool.home,
        "second": second,
        "third": made[0].third.node_id,
        "at_first": made[0].at_first,
        "at_last": made[0].at_last,
    }


if __name__ == "__main__":
    main(yaml.safe_load(Path(sys.argv[1]).read_text()), sys.argv[2:])
