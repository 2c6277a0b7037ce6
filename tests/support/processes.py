"""Shared by the fault tests: small runs, processes on the command line, and the comparison of
histories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.stopped_runs import TIMES

SUPPORT = Path(__file__).parent
"""Where the scripts are that tests start as processes of their own."""

MENDED = (
    "system/actors_failed",
    "system/blocks_retried",
    "system/server_restarts",
    "system/checkpoints_failed",
)
"""Counters of recoveries, which an undisturbed run does not have."""

Record = Mapping[str, float]


SOON = {
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings by which Ray declares a node dead after seconds without an answer, not after a minute.
"""


def basic(folder: Path, uri: str) -> dict[str, Any]:
    """Return the configuration of a run with few parameters, unequal clients and six blocks a
    round."""
    return {
        "rounds": 60,
        "data": "digits",
        "partition": {"name": "dirichlet", "clients": 20, "alpha": 0.5, "min_samples": 2},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": {"name": "fedavgm"},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
        "schedule": {"cohort": 6},
        "batching": {"mode": "loop", "size": 1},
        "resources": {"executor": "inline", "threads": 1},
        "checkpoint": {"every": 5},
        "run_dir": str(folder / "run"),
        "tracking": {"uri": uri, "experiment": folder.name},
    }


def timeless(history: Iterable[Record]) -> list[dict[str, float]]:
    """Return a history without times and without counters of recoveries."""
    times = {*TIMES, *MENDED}
    return [{k: v for k, v in record.items() if k not in times} for record in history]


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until a condition holds; fail after the given seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def pid_of(pool: Any, actor: Any) -> int:
    """Return the process of an actor, which its first heartbeat names; wait for that one."""
    monitor, address = pool.supervisor.monitor, pool.supervisor._addresses[actor]
    until(lambda: monitor.process(address), 60, "an actor sends no heartbeat")
    return monitor.process(address)[1].pid


def processes_with_mark(mark: str) -> list[int]:
    """Return the processes that have this mark in their environment; zombies have none."""
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                marked.append(int(folder.name))
        except OSError:
            continue
    return marked


def client_of(uri: str) -> Any:
    from raysim.tracking import mlflow_client

    return mlflow_client.import_mlflow(uri).MlflowClient(tracking_uri=uri)


def run_in(uri: str, experiment: str) -> Any:
    """Return the only run of an experiment."""
    found = client_of(uri).get_experiment_by_name(experiment)
    (run,) = client_of(uri).search_runs([found.experiment_id])
    return run


def steps_of(uri: str, run_id: str) -> dict[str, list[int]]:
    """Return the steps of each round metric in MLflow, in order, with repetitions."""
    client = client_of(uri)
    keys = [key for key in client.get_run(run_id).data.metrics if not key.startswith("best_")]
    return {key: sorted(m.step for m in client.get_metric_history(run_id, key)) for key in keys}


def each_step_once(uri: str, run_id: str, history: Iterable[Record]) -> None:
    """Assert that MLflow has each figure of each round of the history once."""
    history, found = list(history), steps_of(uri, run_id)
    wanted = {
        key: [int(r["round"]) for r in history if key in r]
        for r in history
        for key in r
        if key != "round"
    }
    assert found == wanted


def start(*arguments: object, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `raysim ...` in a new process and process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", *map(str, arguments)],
        env={**os.environ, "RAY_ADDRESS": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the whole process group, if it still exists."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def written(folder: Path, config: Mapping[str, Any], name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    return path
