"""What must hold when Ray itself dies: raysim says so in one line before Ray does, and how to go on."""

from __future__ import annotations

import socket
import subprocess

import pytest
import ray

from raysim.distributed.cluster import connection
from raysim.distributed.heartbeats import Monitor
from raysim.system.processes import Process

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("setting", "limit_s"), [(None, 30), ("400", 200)])
def test_a_head_that_is_gone_breaks_ray_before_ray_ends_the_process(monkeypatch, setting, limit_s):
    monkeypatch.delenv(connection.RECONNECT_VARIABLE, raising=False)
    if setting:
        monkeypatch.setenv(connection.RECONNECT_VARIABLE, setting)
    monitor = Monitor.__new__(Monitor)
    monitor.broken, monitor.advice, monitor._gone_s = "", "start again", 0.0
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monitor._head = address
        assert monitor._head_listens(1e9) and not monitor.broken
    assert not monitor._head_listens(limit_s - 1) and not monitor.broken
    with socket.create_server(("127.0.0.1", head_port(address))):  # it has restarted
        assert monitor._head_listens(1.0)
    assert not monitor._head_listens(limit_s - 1) and not monitor.broken
    assert not monitor._head_listens(1.0)
    assert monitor.broken == (
        f"the head node of Ray is gone: nothing has listened at {address} for {limit_s} s; "
        "start again"
    )


def test_a_raylet_that_has_ended_breaks_ray_at_once():
    monitor = Monitor.__new__(Monitor)
    monitor.broken, monitor.advice = "", "start again"
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        process = Process.at(sleeping.pid)
        assert process is not None
        monitor._vital = {"GCS": Process.this(), "raylet": process}
        assert monitor._has_vital_processes() and not monitor.broken
        sleeping.kill()
    assert not monitor._has_vital_processes()
    assert monitor.broken == "Ray on this machine has ended: its raylet died; start again"


def head_port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_ray_does_not_print_deaths_that_raysim_reports(monkeypatch):
    printed: list[str] = []
    worker = ray._private.worker
    monkeypatch.setattr(
        worker, "print_to_stdstream", lambda data, ignore_prefix: printed.extend(data["lines"])
    )
    connection._print_no_deaths()
    replaced = worker.print_to_stdstream
    connection._print_no_deaths()
    assert worker.print_to_stdstream is replaced
    for line in (
        "Raylet is terminated. Termination is unexpected. Last 20 lines of the Raylet logs: …",
        "The node with node id: d4a6 and address: 127.0.0.1 has been marked dead because …",
        "1 Workers (tasks / actors) killed due to memory pressure (OOM)",
    ):
        replaced({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert printed == ["1 Workers (tasks / actors) killed due to memory pressure (OOM)"]
