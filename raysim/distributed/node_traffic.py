"""Metrics of a round per node and GPU, and the bytes between nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from raysim.distributed.cluster import nodes
from raysim.training.messages import WorkerResult

MAX_LISTED_NODES = 16
"""Largest number of nodes or GPUs with separate metrics; beyond it only minimum and maximum."""


@dataclass
class ClusterTopology:
    """Nodes of a run."""

    names: dict[str, str]
    """Name of each node for messages and metrics, by node id."""

    server: str = ""
    """Id of the server's node."""

    mark: float = field(default_factory=time.monotonic)
    """Time at which the training of the last round ended, in seconds (monotonic clock)."""

    def name(self, node: str) -> str:
        """Return the name of the node with id `node`, also if it joined after the start.

        Args:
            node: id of the node.
        """
        if node not in self.names:
            self.names |= {known.id: known.names[0] for known in nodes.alive_nodes()}
        return self.names.get(node, node[:6])


class RoundTraffic:
    """Work per node and GPU in one round, and the bytes between nodes.

    Bytes down count each model version once per node, because the actors of a node share it. Bytes
    up count sums and uploads per client.

    Args:
        topology: the nodes of the run.
    """

    def __init__(self, topology: ClusterTopology):
        self.topology = topology
        self.nodes: dict[str, Counter[str]] = {}
        """Busy seconds, clients and bytes up of each node, by its name."""
        self.gpus: dict[str, Counter[str]] = {}
        """Busy seconds and clients of each GPU, by names of node and GPU."""
        self.down: set[tuple[str, int]] = set()
        """Pairs of a node's id and the number of a model version that was sent there."""
        self.versions: dict[int, int] = {}
        """Size of each version that an actor received, in bytes."""

    def sent(self, node: str, versions: Iterable[int]) -> None:
        """Record that an actor on `node` starts from the model versions with these numbers.

        Args:
            node: id of the node.
            versions: numbers of the versions.
        """
        self.down |= {(node, version) for version in versions if node != self.topology.server}

    def trained(self, node: str, gpus: list[str], outcome: WorkerResult) -> None:
        """Record the result of an actor on `node` that has a share of `gpus`.

        Args:
            node: id of the node.
            gpus: ids of the GPUs of which the actor has a share.
            outcome: result of the blocks that the actor trained in one call.
        """
        self.versions |= outcome.versions
        work = {"busy_seconds": outcome.seconds, "clients": len(outcome.ids)}
        name = self.topology.name(node)
        self.nodes.setdefault(name, Counter(bytes_up=0)).update(work)
        for gpu in gpus:
            self.gpus.setdefault(f"{name}/gpu{gpu}", Counter()).update(work)

    def up(self, node: str, size: int) -> None:
        """Record an upload of `size` bytes from `node`.

        Args:
            node: id of the node.
            size: size of the upload, in bytes.
        """
        if node != self.topology.server:
            self.nodes.setdefault(self.topology.name(node), Counter()).update(bytes_up=size)

    def figures(self, actors: int) -> dict[str, float]:
        """Return the metrics of the round, and set the start of the next one.

        Args:
            actors: number of ClientActors that are ready; the utilization is a mean over them.

        Returns:
            Worker utilization since the end of the last round. With several nodes also the bytes
            between them and metrics per node; with several GPUs also metrics per GPU.
        """
        now = time.monotonic()
        busy = sum(counter["busy_seconds"] for counter in self.nodes.values())
        metrics = {"system/worker_utilization": busy / (now - self.topology.mark) / max(actors, 1)}
        self.topology.mark = now
        if len(self.topology.names) > 1:
            metrics["system/network/bytes_down"] = float(
                sum(self.versions.get(version, 0) for _, version in self.down)
            )
            metrics["system/network/bytes_up"] = float(
                sum(counter["bytes_up"] for counter in self.nodes.values())
            )
            metrics |= _metrics_of_each(self.nodes, "node")
        if len(self.gpus) > 1:
            metrics |= _metrics_of_each(self.gpus, "gpu")
        return metrics


def _metrics_of_each(counters: Mapping[str, Counter[str]], level: str) -> dict[str, float]:
    """Return metrics of each node or GPU; of many, the smallest and largest values."""
    metrics = {}
    for kind in dict.fromkeys(chain.from_iterable(counters.values())):
        values = {name: float(counter[kind]) for name, counter in counters.items()}
        if len(counters) <= MAX_LISTED_NODES:
            metrics |= {f"system/node/{name}/{kind}": value for name, value in values.items()}
        else:
            metrics[f"system/{level}/least/{kind}"] = min(values.values())
            metrics[f"system/{level}/most/{kind}"] = max(values.values())
    return metrics
