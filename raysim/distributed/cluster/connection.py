"""Connect to a Ray cluster, or start and end Ray on this machine."""

from __future__ import annotations

import logging
import re
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Any, cast

import ray
from ray._private import utils
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config.sections.execution import cluster_address
from raysim.distributed.cluster import loopback, versions
from raysim.errors import ConfigError, RaysimError
from raysim.system import machine
from raysim.system import processes as ending
from raysim.system.processes import Process
from raysim.system.signals import a_run_handles

logger = logging.getLogger("raysim")

VERSION_TIMEOUT_S = 120
"""Time limit for the cluster to report its versions, in seconds."""

KNOCK_TIMEOUT_S = 20.0
"""Time limit for the head of a cluster to accept a connection, in seconds."""

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable: seconds after which Ray ends a driver without a head, 60 if unset."""

DEATH_MESSAGES = (
    "Raylet is terminated",
    "has been marked dead",
    "A worker died or was killed while executing a task",
)
"""Parts of Ray's own messages about what died, one of which has the end of its log."""

UNREAD_RESULT = re.compile(
    r"Unhandled error .*ray::(ClientActor|ServerActor|EvalActor|NodeAggregator)\b", re.DOTALL
)
"""Ray's message about the failure of a call whose result nobody reads, as in an abandoned round."""

SHUTDOWN_TIMEOUT_S = 30.0
"""Time limit for Ray to shut down, in seconds; it usually needs one or two."""

QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": "ERROR",
    "configure_logging": True,
}
"""Arguments of `ray.init` that keep Ray from printing."""


def connect(address: str | None, cpus: float, log: Callable[[str], None]) -> bool:
    """Connect to a Ray cluster, or start Ray on this machine, on the loopback interface only.

    If this process is connected already, do nothing.

    Args:
        address: address of the cluster; None uses RAY_ADDRESS (set in a submitted job). If that is
            not set either, or the address is "local", Ray is started on this machine.
        cpus: smallest number of CPUs of a Ray that is started.
        log: called with a line of text if `cpus` exceeds the cores of this machine.

    Returns:
        Whether this call connected or started Ray, so that `leave_cluster` must follow.

    Raises:
        ConfigError: no cluster answers at the address, it requires another token, its versions
            differ, Ray's temporary folder on this machine cannot be written, or this process is a
            fork of one that uses Ray.
        RaysimError: Ray cannot be started on this machine.
    """
    if ray.is_initialized():
        _refuse_fork()
        return False
    _print_no_deaths()
    key = "resources.address" if address else "RAY_ADDRESS"
    address = cluster_address(address)
    if address:
        _check_address(key, address)
        _join(key, address)
    else:
        _start_here(cpus, log)
    # A submitted job has compared its versions already.
    if address and not versions.has_expected_versions():
        _compare(address)
    return True


def _join(key: str, address: str) -> None:
    """Connect to the cluster at an address.

    Args:
        key: the configuration key or environment variable that has the address.
        address: the address.

    Raises:
        ConfigError: no cluster answers there, it requires another token, or its versions differ.
    """
    try:
        knock(address, KNOCK_TIMEOUT_S)
        with loopback.private_token(), _handler_of_a_run_kept():
            ray.init(address=address, **QUIET)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        if lines[0].startswith("Version mismatch"):
            reason = " ".join(" ".join(lines).split())
            raise ConfigError(
                f"cannot join Ray at {address}: {reason}; install the same on both"
            ) from None
        raise ConfigError(
            f"{key}: cannot join Ray at {address}: {lines[0]} (is it running? A cluster that asks "
            "for tokens wants RAY_AUTH_MODE=token and its ~/.ray/auth_token here; "
            "RAY_ADDRESS=local, or none, starts Ray on this machine)"
        ) from None


def _start_here(cpus: float, log: Callable[[str], None]) -> None:
    """Start Ray on this machine.

    Raises:
        ConfigError: Ray's temporary folder cannot be written.
        RaysimError: Ray cannot be started.
    """
    cores = machine.cores()
    wanted = ceil(cpus)
    if wanted > cores:
        log(f"resources: {cpus:g} CPUs are asked for, they share {cores} cores")
    loopback.check_temporary_folder()
    try:
        with (
            loopback.only(),
            loopback.few_processes(),
            loopback.patient_start(),
            loopback.own_process_group(),
            loopback.private_token(),
            _handler_of_a_run_kept(),
        ):
            # Ray starts no actor without free CPUs; it counts those that it is given here.
            ray.init(address="local", num_cpus=max(cores, wanted), include_dashboard=False, **QUIET)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "AF_UNIX path length" in str(error):
            reason += (
                ". The folder for temporary files (TMPDIR) is too deep for the paths of Ray's "
                "sockets; set RAY_TMPDIR=/tmp"
            )
        if "timed out" in str(error):
            reason += (
                f" It had {loopback.START_TIMEOUT_S:g} s: start again when CPUs and memory are "
                "free (`raysim doctor` shows them). A single run needs no Ray: "
                "resources.executor=inline"
            )
        raise RaysimError(f"cannot start Ray on this machine: {reason}") from None


def _check_address(key: str, address: str) -> None:
    """Raise ConfigError for an address that Ray would try for half a minute in vain.

    Args:
        key: the configuration key or environment variable that has the address.
        address: the address.
    """
    if address == "auto":
        return
    scheme, separator, _ = address.partition("://")
    if scheme in ("http", "https") and separator:
        raise ConfigError(
            f"{key}: {address} is the address of a dashboard, to which jobs are sent: raysim "
            f"submit --address {address} -- run …; for a run from here, give HEAD:6379"
        )
    if separator:
        raise ConfigError(
            f"{key}: {address} is an address of Ray Client, which has no actors on other nodes for "
            "a run; give HEAD:6379, or send the run as a job (raysim submit)"
        )
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise ConfigError(
            f"{key}: '{address}' is not HOST:PORT, such as HEAD:6379; `ray start --head` prints it"
        )


def _refuse_fork() -> None:
    """Raise ConfigError in a fork of a process that uses Ray: Ray's threads are not in it."""
    listener = getattr(cast(Any, ray)._private.worker.global_worker, "listener_thread", None)
    if listener is not None and not listener.is_alive():
        raise ConfigError(
            "resources.executor: this process is a fork of one that uses Ray, and Ray does not "
            "work in a fork; start it with multiprocessing.get_context('spawn'), fork before Ray "
            "starts, or set resources.executor=inline"
        )


def _handler_of_a_run_kept() -> AbstractContextManager[None]:
    """Return a context in which Ray starts and leaves a run's handler of SIGTERM as it is.

    Ray would set its own, which raises SystemExit. If the signal interrupts a destructor, Python
    ignores that exception, and the run would go on. A run's handler remembers the signal.
    """
    if not hasattr(utils, "set_sigterm_handler") or not a_run_handles(signal.SIGTERM):
        return nullcontext()
    return loopback.replaced(utils, "set_sigterm_handler", lambda handler: None)


def leave_cluster(broken: bool = False) -> None:
    """Disconnect from Ray, and end the processes of a Ray that this process started.

    If Ray does not shut down within `SHUTDOWN_TIMEOUT_S`, its processes end with this process.

    Args:
        broken: whether Ray is known not to answer, so that waiting for it is useless.
    """
    # Before the shutdown, after which Ray does not name them any more.
    processes = started_here()
    if not broken and ending.limited(ray.shutdown, SHUTDOWN_TIMEOUT_S):
        ending.kill(processes)
        return
    if not broken:
        logger.warning(
            "Ray has not shut down within %g s; its processes are killed with this one",
            SHUTDOWN_TIMEOUT_S,
        )
    ending.abandon(processes)


def started_here() -> list[Process]:
    """Return the processes of the Ray that this process started: raylet, GCS, workers and others.

    The list is empty if this process connected to an existing cluster.
    """
    return ending.descendants(process for kind in _daemons().values() for process in kind)


def vital_processes() -> dict[str, Process]:
    """Return the raylet and the GCS of the Ray that this process started, by "raylet" and "GCS".

    Without one of them Ray cannot work. The mapping is empty if this process connected to an
    existing cluster.
    """
    daemons = _daemons()
    names = {"raylet": "raylet", "GCS": "gcs_server"}
    return {name: process for name, kind in names.items() for process in daemons.get(kind, [])}


def _daemons() -> dict[str, list[Process]]:
    """Return the living processes that Ray has started from this process, by Ray's type."""
    node = cast(Any, ray)._private.worker._global_node
    started = {} if node is None else node.all_processes
    return {
        kind: [process for info in infos if (process := Process.at(info.process.pid))]
        for kind, infos in started.items()
    }


def knock(address: str, timeout_s: float) -> None:
    """Check that a server listens at HOST:PORT; Ray itself needs minutes to notice.

    Args:
        address: the address; one that is not HOST:PORT is not checked.
        timeout_s: time limit in seconds.

    Raises:
        OSError: no server accepts a connection within the limit.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


def _print_no_deaths() -> None:
    """Keep Ray from printing messages about nodes that died; raysim reports them itself."""
    worker = cast(Any, ray)._private.worker
    worker.logger.addFilter(_is_read)
    print_lines = getattr(worker, "print_to_stdstream", None)
    if print_lines is None or print_lines.__module__ == __name__:  # it is replaced already
        return

    def print_others(data: dict[str, Any], ignore_prefix: bool) -> None:
        if not any(part in line for part in DEATH_MESSAGES for line in data["lines"]):
            print_lines(data, ignore_prefix)

    worker.print_to_stdstream = print_others


def _is_read(record: logging.LogRecord) -> bool:
    """Return whether a message of Ray's is no failure of an unread result of raysim's actors."""
    return not UNREAD_RESULT.search(record.getMessage())


def _compare(address: str) -> None:
    """Disconnect and raise ConfigError if the versions on the cluster's head node differ."""
    head = _head_node()
    if head is None:
        return
    on_head = NodeAffinitySchedulingStrategy(head, soft=True)
    ask = ray.remote(versions.installed_versions).options(
        num_cpus=0, max_retries=0, scheduling_strategy=on_head
    )
    try:
        head_versions: Any = ray.get(ask.remote(), timeout=VERSION_TIMEOUT_S)
    except GetTimeoutError:
        leave_cluster()
        raise RaysimError(
            f"waited {VERSION_TIMEOUT_S} s for the head of Ray at {address} to say its versions"
        ) from None
    except RayError as error:
        leave_cluster()
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"cannot use Ray at {address}: its head cannot run raysim: {reason}; install it there"
        ) from None
    for name, version in versions.installed_versions().items():
        if head_versions.get(name) != version:
            leave_cluster()
            raise ConfigError(
                f"cannot use Ray at {address}: it has {name} {head_versions.get(name)}, "
                f"here is {version}; install the same on both"
            )


def _head_node() -> str | None:
    """Return the id of the cluster's head node; None if Ray does not mark one."""
    for node in ray.nodes():
        if "node:__internal_head__" in node["Resources"]:
            return node["NodeID"]
    return None
