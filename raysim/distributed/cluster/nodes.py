"""Nodes of the connected Ray cluster, and the check that their resources suffice for a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor

import ray

from raysim.config.sections.execution import Resources
from raysim.errors import ConfigError, counted
from raysim.spelling import did_you_mean

SHARE_TOLERANCE = 1e-9
"""Tolerance for rounding errors in sums of CPU and GPU shares."""


@dataclass(frozen=True)
class Node:
    """Node that is alive."""

    id: str
    """Ray's id of the node."""

    names: tuple[str, ...]
    """Names by which a user may select the node; the first one appears in messages."""

    offers: Mapping[str, float]
    """Total amount of each Ray resource on the node, by the resource's name."""

    def room(self, cpus: float, gpus: float) -> float:
        """Return how many actors with `cpus` CPUs and `gpus` GPUs each fit on the node.

        Several actors can share a GPU, but an actor cannot have parts of two.

        Args:
            cpus: CPUs of an actor, also a fraction.
            gpus: share of a GPU of an actor; 0: none.
        """
        by_cpus = float("inf")
        if cpus:
            by_cpus = floor(self.offers.get("CPU", 0) / cpus + SHARE_TOLERANCE)
        if not gpus:
            return by_cpus
        whole_gpus = floor(self.offers.get("GPU", 0) + SHARE_TOLERANCE)
        return min(by_cpus, whole_gpus * floor(1 / gpus + SHARE_TOLERANCE))

    def can_serve(self, resources: Resources) -> bool:
        """Return whether the server may run on this node.

        Args:
            resources: the resources that the configuration asks for.
        """
        has_gpu = self.offers.get("GPU", 0) > 0
        return self.room(0, resources.server_share) > 0 and (has_gpu or not resources.server_on_gpu)


def alive_nodes() -> list[Node]:
    """Return the living nodes of the cluster, each with a unique first name."""
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    name_counts = Counter(node["NodeName"] for node in alive)
    nodes = []
    for node in alive:
        identity, name = node["NodeID"], node["NodeName"]
        unique = name if name_counts[name] == 1 else f"{name}-{identity[:6]}"
        names = (unique, name, node["NodeManagerHostname"], node["NodeManagerAddress"], identity)
        nodes.append(Node(identity, tuple(dict.fromkeys(names)), node["Resources"]))
    return nodes


def check_cluster_resources(resources: Resources, nodes: list[Node]) -> None:
    """Check that the nodes have room for all actors of a run.

    Args:
        resources: the resources that the configuration asks for.
        nodes: the nodes of the cluster.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs in total, or too few on single nodes.
    """
    _check_totals(resources, nodes)
    share = _share(resources.cpus, resources.gpus)
    room = sum(node.room(resources.cpus, resources.gpus) for node in nodes)
    if not room:
        raise ConfigError(
            f"resources: no node offers {share} to one actor (there are {_offers(nodes)}); "
            "lower resources.cpus or resources.gpus"
        )
    if room < resources.actors:
        raise ConfigError(
            f"resources.actors: {resources.actors} actors with {share} each, the nodes have room "
            f"for {room:g} ({_offers(nodes)}); lower it, or the share of each"
        )
    _check_server_gpus(resources, nodes)


def _check_totals(resources: Resources, nodes: list[Node]) -> None:
    """Raise ConfigError if the cluster has too few CPUs or GPUs in total."""
    for kind, wanted in (
        ("CPU", resources.actors * resources.cpus),
        # Twice, for the server and the evaluator.
        ("GPU", resources.actors * resources.gpus + 2 * resources.server_share),
    ):
        available = sum(node.offers.get(kind, 0) for node in nodes)
        if wanted > available + SHARE_TOLERANCE:
            raise ConfigError(
                f"resources: {resources.actors} actors want {wanted:g} {kind}s, the cluster has "
                f"{available:g}; lower resources.actors or the share of each"
            )


def _check_server_gpus(resources: Resources, nodes: list[Node]) -> None:
    """Raise ConfigError if no node, or not the chosen one, has room for the server."""
    candidates, no_offer = nodes, "no node offers"
    if resources.server_node is not None:
        candidates = [find_node(resources.server_node, nodes)]
        no_offer = f"node '{resources.server_node}' does not offer"
    if any(node.can_serve(resources) for node in candidates):
        return
    if not resources.server_share:
        raise ConfigError(
            f"resources.server_node: node '{resources.server_node}' has no GPU, and the server "
            "computes on one as the clients do; choose another node, or set resources.server_gpus=0"
        )
    raise ConfigError(
        f"resources.server_gpus: {no_offer} {resources.server_share:g} GPUs; lower it"
    )


def find_node(name: str, nodes: list[Node]) -> Node:
    """Return the node that a user selects.

    Args:
        name: name, host name, address or id of the node.
        nodes: the nodes of the cluster.

    Raises:
        ConfigError: no node, or more than one, has this name.
    """
    matches = [node for node in nodes if name in node.names]
    if not matches:
        names = (name for node in nodes for name in node.names[:2])
        raise ConfigError(
            f"resources.server_node: no node is called '{name}'{did_you_mean(name, set(names))}"
        )
    if len(matches) > 1:
        names = " and ".join(f"'{node.names[0]}'" for node in matches)
        raise ConfigError(
            f"resources.server_node: {len(matches)} nodes are called '{name}'; say {names}"
        )
    return matches[0]


def idle_gpus(resources: Resources, nodes: list[Node]) -> int:
    """Return the number of GPUs that no actor will use.

    Ray fills one GPU with actors before it uses another.

    Args:
        resources: the resources that the configuration asks for.
        nodes: the nodes of the cluster.
    """
    if not resources.gpus:
        return 0
    whole = sum(floor(node.offers.get("GPU", 0)) for node in nodes)
    used = ceil(resources.actors / floor(1 / resources.gpus + SHARE_TOLERANCE))
    return whole - used - ceil(2 * resources.server_share)


def _offers(nodes: Iterable[Node]) -> str:
    """Return the resources of the nodes in words: "2 nodes of 8 CPUs and 4 GPUs, 1 of 2 CPUs"."""
    kinds = Counter((node.offers.get("CPU", 0), node.offers.get("GPU", 0)) for node in nodes)
    parts = []
    for (cpus, gpus), n in kinds.items():
        parts.append(f"{counted(n, 'node')} of {_share(cpus, gpus)}")
    return ", ".join(parts)


def _share(cpus: float, gpus: float) -> str:
    """Return resources in words, such as "8 CPUs and 4 GPUs"."""
    return f"{cpus:g} CPUs and {gpus:g} GPUs" if gpus else f"{cpus:g} CPUs"
