"""What must hold when Ray itself hangs: the run ends within a limit, with one clear message and as
FAILED in MLflow, and no process of it is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.forked import Forked
from support.processes import basic, run_in, until, written

from raysim.system import processes
from raysim.system.processes import Process, descendants

pytestmark = pytest.mark.ray

SOON = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray takes a node for dead after seconds without an answer, not after a minute."""


def name(process: Process) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text().strip()


@pytest.mark.parametrize(
    ("stopped", "code"), [("raylet", 1), pytest.param("gcs_server", 143, marks=pytest.mark.long)]
)
def test_a_process_of_ray_that_is_stopped_ends_the_run(uri, tmp_path, stopped, code):
    """Without a raylet nothing can go on. Without a GCS a run continues while nothing is lost; then
    SIGTERM ends it."""
    config = basic(tmp_path, uri) | {"rounds": 100_000, "checkpoint": {"every": 0}}
    started: list[Process] = []
    config["resources"] = {"executor": "ray", "actors": 1, "cpus": 0.5, "timeout": 10}
    driver = Forked("-m", "raysim", "run", written(tmp_path, config), cwd=tmp_path, **SOON)
    try:
        run = tmp_path / "run" / "spool.jsonl"
        until(lambda: run.exists() and '"step": 3' in run.read_text(), 200, "no round is done")
        there = Process.at(driver.pid)
        assert there is not None
        started = descendants([there])[1:]
        (victim,) = [process for process in started if name(process) == stopped]
        os.kill(victim.pid, signal.SIGSTOP)
        if stopped == "gcs_server":
            time.sleep(1)
            os.kill(driver.pid, signal.SIGTERM)
        assert driver.wait(200) == code, driver.output
        output = driver.output
        until(
            lambda: not [process for process in started if process.alive], 10, "a process is left"
        )
    finally:
        if driver.alive():
            driver.signal(signal.SIGKILL)
            driver.wait()
        processes.kill(started)
    found = run_in(uri, tmp_path.name)
    if code == 1:
        (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert "Ray on this machine" in error and "its raylet has died or hangs" in error
        assert found.info.status == "FAILED" and found.data.tags["error"] == error.removeprefix(
            "error: "
        )
    else:
        assert found.info.status == "KILLED" and "Ray has not shut down within" in output
    assert "Traceback" not in output


def test_a_call_without_end_is_limited():
    began = time.monotonic()
    assert not processes.limited(lambda: time.sleep(60), 0.1)
    assert time.monotonic() - began < 30
    assert processes.limited(lambda: None, 30)
    with pytest.raises(OSError, match="full"):
        processes.limited(lambda: (_ for _ in ()).throw(OSError("full")), 30)
