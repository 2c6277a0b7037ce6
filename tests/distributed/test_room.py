"""What is said, before anything starts, of a cluster that cannot give what is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.forked import call

from raysim.config.explain import checked_section
from raysim.config.sections.execution import Resources
from raysim.distributed.cluster.nodes import Node, check_cluster_resources, find_node, idle_gpus
from raysim.distributed.ray_executor import RayExecutor
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

pytestmark = pytest.mark.ray


def cluster(*offers: tuple[int, int]) -> list[Node]:
    """Nodes of so many CPUs and GPUs, called node0, node1, … on hosts host0, host1, …"""
    return [
        Node(
            f"{i}" * 56,
            (f"node{i}", f"host{i}", "10.0.0.1", f"{i}" * 56),
            {"CPU": cpus, "GPU": gpus},
        )
        for i, (cpus, gpus) in enumerate(offers)
    ]


def resources(**given: Any) -> Resources:
    return checked_section(Resources, given)


@pytest.mark.parametrize(
    "offers, cpus, gpus, room",
    [
        ((8, 0), 1, 0, 8),
        ((8, 0), 3, 0, 2),
        ((8, 4), 1, 1, 4),
        ((8, 4), 4, 1, 2),
        ((64, 8), 1, 0.3, 24),  # three on each, and no actor on parts of two
        ((64, 8), 1, 0.1, 64),
        ((64, 0), 1, 0.25, 0),
        ((0, 0), 0, 0, float("inf")),
    ],
)
def test_room(offers, cpus, gpus, room):
    assert cluster(offers)[0].room(cpus, gpus) == room


ENOUGH = [
    ({"actors": 4}, [(2, 0), (2, 0)]),
    ({"actors": 8, "gpus": 0.5}, [(4, 2), (4, 2)]),
    ({"actors": 2, "gpus": 0.5, "server_gpus": 0.5}, [(4, 2)]),
    ({"actors": 1, "server_node": "host1"}, [(4, 0), (0, 0)]),
    ({"actors": 1, "server_gpus": 1}, [(4, 1), (4, 1), (1, 0)]),
    ({"actors": 2, "gpus": 0.5, "server_node": "node1"}, [(4, 0), (4, 1)]),  # the card is full
    ({"actors": 2, "gpus": 1, "server_gpus": 0, "server_node": "node0"}, [(4, 0), (4, 2)]),
]


@pytest.mark.parametrize("given, offers", ENOUGH)
def test_enough(given, offers):
    check_cluster_resources(resources(**given), cluster(*offers))


TOO_LITTLE = [
    (
        {"actors": 5},
        [(2, 0), (2, 0)],
        "resources: 5 actors want 5 CPUs, the cluster has 4; lower resources.actors or",
    ),
    ({"actors": 2, "gpus": 1}, [(8, 1)], "resources: 2 actors want 2 GPUs, the cluster has 1"),
    (
        {"actors": 1, "gpus": 1, "cpus": 3},
        [(2, 1), (2, 1), (4, 0)],
        "resources: no node offers 3 CPUs and 1 GPUs to one actor (there are 2 nodes of 2 CPUs and 1 GPUs, 1 node of 4 "
        "CPUs); lower resources.cpus or resources.gpus",
    ),
    (
        {"actors": 4, "gpus": 0.6},
        [(8, 3)],
        "resources.actors: 4 actors with 1 CPUs and 0.6 GPUs each, the nodes have room for 3 (1 node of 8 CPUs and 3 "
        "GPUs); lower it, or the share of each",
    ),
    (
        {"actors": 3, "cpus": 3},
        [(5, 0), (5, 0)],
        "resources.actors: 3 actors with 3 CPUs each, the nodes have room for 2",
    ),
    (
        {"actors": 1, "server_gpus": 1, "server_node": "node1"},
        [(4, 2), (4, 0)],
        "resources.server_gpus: node 'node1' does not offer 1 GPUs; lower it",
    ),
    (
        {"actors": 2, "gpus": 0.5, "server_node": "node0"},
        [(4, 0), (4, 1)],
        "resources.server_node: node 'node0' has no GPU, and the server computes on one as the clients do",
    ),
    (
        {"actors": 1, "server_node": "nod1"},
        [(4, 0), (4, 0)],
        "resources.server_node: no node is called 'nod1'; did you mean 'node1'? (known: host0, host1, node0, node1)",
    ),
    (
        {"actors": 1, "server_node": "10.0.0.1"},
        [(4, 0), (4, 0)],
        "resources.server_node: 2 nodes are called '10.0.0.1'; say 'node0' and 'node1'",
    ),
]


@pytest.mark.parametrize("given, offers, said", TOO_LITTLE)
def test_too_little(given, offers, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_cluster_resources(resources(**given), cluster(*offers))


def test_a_node_by_any_of_its_names():
    nodes = cluster((1, 0), (1, 0))
    assert [find_node(name, nodes) for name in ("node1", "host1", "1" * 56)] == [nodes[1]] * 3


@pytest.mark.parametrize("key", ["gpus", "server_gpus"])
def test_no_process_has_more_than_one_gpu(key):
    with pytest.raises(ConfigError, match=rf"{key}: .*1.*1.5"):
        resources(**{key: 1.5})


@pytest.mark.parametrize(
    "given, said",
    [({"server_node": "nowhere"}, "no node is called 'nowhere'"), ({"cpus": 5}, "want 5 CPUs")],
)
def test_it_is_said_before_an_actor_starts(local_ray, base, monkeypatch, given, said):
    monkeypatch.setenv(
        "RAY_ADDRESS", "the one that is there"
    )  # so that it is not this machine that is asked
    config = {
        **base,
        "rounds": 1,
        "algorithm": "fedavg",
        "resources": {"executor": "ray", "actors": 1, **given},
    }
    plan, executor = prepare(config), RayExecutor(lambda text: None)
    monkeypatch.setattr(executor.pool, "_start", None)
    with pytest.raises(ConfigError, match=said):
        executor.open(plan)
    executor.close()


def test_the_server_starts_where_it_finds_its_device(monkeypatch):
    """Ray is told the node: it does not know that an actor without a share needs a GPU."""
    pool = RayExecutor(lambda text: None).pool
    nodes = cluster((4, 0), (4, 1))
    monkeypatch.setattr("raysim.distributed.worker_pool.nodes.alive_nodes", lambda: nodes)
    pool.server_node = nodes[0].id
    for given, expected in (
        ({"gpus": 0.5}, nodes[1].id),
        ({"gpus": 0.5, "server_gpus": 0}, nodes[0].id),
        ({"gpus": 0.5, "server_gpus": 0.25}, None),  # Ray finds the share
        ({}, nodes[0].id),
    ):
        pool.resources = resources(**given)
        assert pool._node_for_server() == expected


def test_gpus_that_nobody_will_use():
    """Four quarters fill one of four GPUs; the server and the evaluator share another one."""
    assert idle_gpus(resources(actors=4, gpus=0.25), cluster((8, 4))) == 3
    assert idle_gpus(resources(actors=4, gpus=0.25, server_gpus=0.5), cluster((8, 4))) == 2
    assert idle_gpus(resources(actors=4, gpus=1), cluster((8, 4))) == 0
    assert idle_gpus(resources(actors=4), cluster((8, 4))) == 0


def test_actors_that_ray_kills_for_memory_are_told_what_to_take(tmp_path):
    """Ray's own words say how full the memory was, raysim's which key takes less."""
    code, said = call(
        *("run", "quickstart", "rounds=1", "resources.executor=ray"),
        cwd=tmp_path,
        RAY_memory_usage_threshold="0.001",
        RAY_memory_monitor_refresh_ms="50",
    )
    assert code == 1 and "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert "low on memory" in last and last.endswith(
        "; take fewer actors (resources.actors), or smaller blocks (batching.size)"
    )
