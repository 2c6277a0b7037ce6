"""Clusters that add nodes while resources are asked for, perhaps from none.

Ray's autoscaler looks at what waits for resources. A placement group asks for all resources of a
run at once. It is removed as soon as the nodes are there, and the actors take its place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raysim.distributed.waiting import POLL_INTERVAL_S, PROGRESS_INTERVAL_S
from raysim.errors import ConfigError
from raysim.system import startup_stages

FIRST_REPORT_TIMEOUT_S = 10.0
"""Time limit for the autoscaler of a new cluster to report for the first time, in seconds."""

STATUS_KEYS = ("__autoscaling_status", "__autoscaling_status_legacy")
"""Keys under which Ray's autoscaler reports in the key-value store of the head."""

UNMANAGED_TYPE = "node_"
"""Beginning of a node's type in a cluster whose nodes were started by hand."""

Bundle = Mapping[str, float]
"""Resources of one actor, by Ray's names."""


def await_resources(
    bundles: Sequence[Bundle], enough: Callable[[], None], timeout_s: float
) -> None:
    """Return when the cluster has enough resources; ask its autoscaler for them if it has one.

    Args:
        bundles: resources of each actor that will start.
        enough: raises ConfigError while the cluster has too few resources.
        timeout_s: time limit in seconds for the nodes to join.

    Raises:
        ConfigError: the cluster has too few resources, and no autoscaler adds them in time.
    """
    try:
        return enough()
    except ConfigError:
        if not has_autoscaler():
            return enough()  # nodes may have joined meanwhile
    group = placement_group(cast(Any, [dict(bundle) for bundle in bundles if any(bundle.values())]))
    try:
        _await_nodes(group, enough, timeout_s)
    finally:
        # If Ray is lost, the group is too.
        with suppress(RayError):
            remove_placement_group(group)


def _await_nodes(group: PlacementGroup, enough: Callable[[], None], timeout_s: float) -> None:
    """Wait until `enough` passes, and report at intervals; see `await_resources`."""
    began, last_line = time.monotonic(), -PROGRESS_INTERVAL_S
    while True:
        try:
            return enough()
        except ConfigError as error:
            waited = time.monotonic() - began
            if waited > timeout_s:
                raise ConfigError(
                    f"{error}. The cluster's autoscaler has not added them in {timeout_s:g} s; "
                    "see its largest number of nodes, or raise resources.timeout"
                ) from None
        if waited - last_line >= PROGRESS_INTERVAL_S:
            nodes = sum(node["Alive"] for node in ray.nodes())
            startup_stages.begin(
                f"waiting for the autoscaler to add nodes: {nodes} there, {waited:.0f} of at "
                f"most {timeout_s:g} s"
            )
            last_line = waited
        group.wait(POLL_INTERVAL_S)


def has_autoscaler() -> bool:
    """Return whether the connected cluster can add nodes.

    A Ray on one machine, and a cluster whose nodes were started by hand, cannot.
    """
    if cast(Any, ray)._private.worker._global_node.head:
        return False  # started by this process
    deadline = time.monotonic() + FIRST_REPORT_TIMEOUT_S
    while (types := _node_types()) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    return any(not name.startswith(UNMANAGED_TYPE) for name in types or ())


def _node_types() -> set[str] | None:
    """Return the types of the nodes by the autoscaler's report; None before its first one."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2():
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        nodes = [*status.active_nodes, *status.idle_nodes]
        return {node.ray_node_type_name for node in nodes} or None
    for key in STATUS_KEYS:
        report = json.loads(_internal_kv_get(key) or "{}").get("autoscaler_report")
        if report and (types := {*report["active_nodes"], *report["node_type_mapping"].values()}):
            return types
    return None
