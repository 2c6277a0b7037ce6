"""MLflow's web pages: links to its model-training view, and a server for a database."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, mask_secrets, restored_uri
from raysim.errors import ConfigError, RaysimError
from raysim.spelling import did_you_mean
from raysim.tracking import charts
from raysim.tracking.mlflow_client import open_store
from raysim.tracking.mlflow_process.run_client import find_run

if TYPE_CHECKING:
    from mlflow.entities import Experiment

VIEW = "workflowType=machine_learning"
"""Query of a link. Without it, MLflow 3 opens its pages for language models without metrics."""

CHARTS = "compareRunsMode=CHART"
"""Query of a link that shows charts beside the list of runs."""

PORT = 5000
"""Default port of the server."""

START_LIMIT_S = 120.0
"""Time limit in seconds for the server to start."""

SERVER_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the server answers."""


def link(address: str, experiment: Experiment | None = None) -> str:
    """Return the link to the charts of an experiment's runs, or to all experiments.

    Args:
        address: address of the MLflow server.
        experiment: the experiment; None links to all experiments. Its runs are in the order of
            `raysim.tracking.charts`, and if raysim created it, its charts too.
    """
    if experiment is None:
        return f"{address}/#/experiments?{VIEW}"
    # A stored view has the order too. MLflow ignores the view if the link also has an order.
    order = {"viewStateShareKey": charts.VIEW_KEY}
    if charts.VIEW_TAG not in experiment.tags:
        order = {key: str(value).lower() for key, value in charts.ORDER.items()}
    page = f"{address}/#/experiments/{experiment.experiment_id}/runs"
    return f"{page}?{VIEW}&{CHARTS}&{urlencode(order)}"


def hint(tracking: Tracking, run_id: str = "") -> str:
    """Return the way to open a run: the command for a database, or the link for a server.

    Args:
        tracking: the section `tracking`.
        run_id: MLflow's id of the run, which may be provisional.
    """
    uri = absolute_uri(tracking.uri)
    if not uri.startswith("http"):
        words = ["raysim", "ui", tracking.experiment]
        if uri != absolute_uri(Tracking().uri):
            words += ["--uri", mask_secrets(uri)]
        return f"{shlex.join(words)}   (run {run_id})"
    address = mask_secrets(uri)
    try:
        experiment_id, _ = find_run(restored_uri(uri), run_id)
    except Exception:
        # The server is down, or it has not received the run yet.
        return f"{link(address)}   (run {run_id})"
    return f"{address}/#/experiments/{experiment_id}/runs/{run_id}?{VIEW}"


def find_experiment(uri: str, name: str) -> Experiment | None:
    """Return an experiment of a tracking store.

    Args:
        uri: absolute URI of the tracking store.
        name: name of the experiment; "" only checks that the store can be read, and returns None.

    Raises:
        ConfigError: there is no such database or experiment.
        RaysimError: the store cannot be read.
    """
    with open_store(uri) as client:
        if not name:
            return None
        experiment = client.get_experiment_by_name(name)
        known = [] if experiment else [other.name for other in client.search_experiments()]
    if experiment is None:
        raise ConfigError(
            f"there is no experiment '{name}' in {mask_secrets(uri)}{did_you_mean(name, known)}"
        )
    return experiment


def free_port(wanted: int | None) -> int:
    """Return a free port of this machine.

    Args:
        wanted: number of the port to use; None: PORT, or any free port if PORT is taken.

    Raises:
        ConfigError: `wanted` is taken.
    """
    for port in (wanted,) if wanted else (PORT, 0):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(("127.0.0.1", port))
            return candidate.getsockname()[1]
    raise ConfigError(f"--port: {wanted} is taken; give another one, or none")


@contextlib.contextmanager
def served(uri: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Serve a tracking store at http://127.0.0.1:`port` until the block is left.

    Args:
        uri: absolute URI of the tracking store.
        port: a free port.

    Raises:
        RaysimError: the server does not start.
    """
    # The host is named, because $MLFLOW_HOST would open the database to other machines.
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    environment = {
        **os.environ,
        # Other users of the machine can see arguments, but not the environment.
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            if not _answers(process, port):
                output.seek(0)
                printed = output.read().decode(errors="replace").strip()
                why = printed.rpartition("\n")[2] or "it prints no reason"
                raise RaysimError(
                    f"MLflow's server for {mask_secrets(uri)} does not start: {mask_secrets(why)}"
                )
            yield process
        finally:
            # The server has nothing to finish: databases roll back what was not written whole.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers or ends; return whether it answers."""
    deadline = time.monotonic() + START_LIMIT_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            direct.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            return answer.status == 200
        time.sleep(SERVER_POLL_INTERVAL_S)
    return False
