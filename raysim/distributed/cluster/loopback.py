"""A Ray that raysim starts on this machine: loopback only, few processes, own signals and token."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import parameter, ray_constants, services

from raysim.errors import ConfigError
from raysim.system.files import free_space
from raysim.system.processes import variables_kept

CLUSTER_SWITCH_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that, set to 0, makes all processes of Ray listen on 127.0.0.1 only.

This is Ray's default on systems where it does not support clusters."""


UNUSED_PARTS: dict[str, Any] = {
    "dashboard_agent_listen_port": None,
    "include_log_monitor": False,
    "no_monitor": True,
}
"""Ray's private parameters without an option of `ray.init`: the agent's port, of which None means
any free one; the monitor of logs, which a run does not show; the autoscaler's monitor."""

START_TIMEOUT_S = 120.0
"""Time limit for a Ray started here to register its node, in seconds."""


TEMPORARY_BYTES = 16_000_000
"""Bytes that a Ray started here needs in its temporary folder, for logs and sockets."""


def check_temporary_folder() -> None:
    """Check that Ray can write to its temporary folder; otherwise it tries for minutes.

    Raises:
        ConfigError: a file of `TEMPORARY_BYTES` cannot be written there.
    """
    folder = Path(get_default_ray_temp_dir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, TEMPORARY_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot start Ray on this machine: its temporary folder {folder} cannot be written: "
            f"{error.strerror} ({free_space(folder)}); make room there, or set RAY_TMPDIR to "
            "another folder"
        ) from None


@contextmanager
def only() -> Iterator[None]:
    """Return a context in which a Ray started here listens on the loopback interface only."""
    # The variable is for the processes that Ray starts; this process read it during the import.
    listens = replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)
    with variables_kept([CLUSTER_SWITCH_VARIABLE]), listens:
        os.environ[CLUSTER_SWITCH_VARIABLE] = "0"
        yield


@contextmanager
def few_processes() -> Iterator[None]:
    """Return a context in which a Ray started here starts only the processes that a run needs.

    Ray waits for its dashboard's process even if the dashboard is off, and ends each process at
    the end of the run: that is two seconds of a run. And every Ray of a machine wants the same port
    for its agent; the second one tries for seconds, then starts without it. A Ray whose private
    parameters are others is left alone.
    """

    def no_dashboard(*arguments: Any, **options: Any) -> tuple[None, None]:
        return None, None  # neither an address nor a process

    with ExitStack() as changed:
        parameters = getattr(parameter, "RayParams", None)
        if parameters is not None:
            known = UNUSED_PARTS.keys() & signature(parameters).parameters
            fixed = partial(parameters, **{name: UNUSED_PARTS[name] for name in known})
            changed.enter_context(replaced(parameter, "RayParams", fixed))
        if hasattr(services, "start_api_server"):
            changed.enter_context(replaced(services, "start_api_server", no_dashboard))
        yield


def patient_start() -> AbstractContextManager[None]:
    """Return a context in which a Ray started here has `START_TIMEOUT_S` to register its node.

    Ray itself waits for half a minute, which is too short on a busy machine and which no option
    changes. A Ray without the private function that asks for the node is left alone.
    """
    get_node = getattr(services, "get_node", None)
    if get_node is None:
        return nullcontext()
    end = time.monotonic() + START_TIMEOUT_S

    def patient(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    return replaced(services, "get_node", patient)


def own_process_group() -> AbstractContextManager[None]:
    """Return a context in which a Ray started here is in other process groups than this process.

    A signal to the group of this process (a terminal, `timeout`, a batch system) then reaches this
    process alone, which saves the progress of a run with the help of Ray before it ends Ray. A Ray
    without the private class that starts its processes is left alone.
    """
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        return nullcontext()
    return replaced(services, "ConsolePopen", partial(popen, process_group=0))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context in which an attribute of a module of Ray has another value.

    Args:
        module: the module.
        name: name of the attribute; one that is missing is None afterwards.
        value: its value in the context.
    """
    original = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def private_token() -> Iterator[None]:
    """Return a context that makes Ray's token file readable by its owner only.

    Ray writes the file inside the context if there is none.
    """
    path = token_file()
    with suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        if token_is_open():
            # The file may belong to another user; `raysim doctor` reports that.
            with suppress(OSError):
                path.chmod(0o600)


def token_file() -> Path:
    """Return the path of Ray's token file, which may not exist."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def token_is_open() -> bool:
    """Return whether users other than its owner can access the token file."""
    try:
        return bool(token_file().stat().st_mode & 0o077)
    except OSError:
        return False


def asks_for_token() -> bool:
    """Return whether the connected Ray requires a token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def reached_from_outside() -> bool:
    """Return whether the connected Ray is reachable at this machine's network address."""
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting UDP to an address reserved for documentation sends nothing, but selects
            # the network interface and thereby this machine's address.
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        # Without a network nobody outside can connect.
        except OSError:
            return False
    if address.startswith("127."):
        return False
    try:
        socket.create_connection((address, int(port)), timeout=5).close()
    except OSError:
        return False
    return True
