"""An autoscaling Ray cluster on this machine, which begins without a worker node.

It is Ray's own fake of a cloud, as in `ray.cluster_utils.AutoscalingCluster`, which ends every Ray
of this machine when it starts. This one leaves the others alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from ray.autoscaler._private.monitor import BASE_READONLY_CONFIG

from raysim.system import processes
from support.processes import SUPPORT, until


def _configuration(port: int, max_workers: int, resources: dict[str, int]) -> dict[str, Any]:
    """Return the file for `ray start --autoscaling-config`."""
    return {
        **BASE_READONLY_CONFIG,
        "max_workers": max_workers,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 10.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,  # there is no ssh
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": max_workers,
            },
        },
        "head_node_type": "ray.head.default",
    }


@contextmanager
def autoscaling(folder: Path, max_workers: int, **resources: int) -> Iterator[str]:
    """Yield the address of a head without CPUs; workers with `resources` come when asked for.

    If `max_workers` is 0, the cluster has no autoscaler, as one that was started by hand.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = folder / "autoscaling.json"
    configuration.write_text(json.dumps(_configuration(port, max_workers, resources)))
    with (folder / "ray.txt").open("w") as output:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--num-cpus=0", f"--port={port}", "--node-ip-address=127.0.0.1"),
                *("--include-dashboard=false", "--disable-usage-stats"),
                "--dashboard-agent-listen-port=0",
                *([f"--autoscaling-config={configuration}"] if max_workers else []),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "disabled",
                "RAY_FAKE_CLUSTER": "1",
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
                "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), *sys.path]),
            },
        )
    try:
        address = f"127.0.0.1:{port}"
        until(
            lambda: "Ray runtime started" in (folder / "ray.txt").read_text(),
            120,
            (folder / "ray.txt").read_text(),
        )
        yield address
    finally:
        started = processes.Process.at(head.pid)
        family = processes.descendants([started]) if started else []
        os.killpg(head.pid, signal.SIGKILL)
        processes.kill(family)
        head.wait(30)
