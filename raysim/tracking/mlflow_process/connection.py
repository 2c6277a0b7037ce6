"""Connections to the process that calls MLflow, which is started when it is first needed.

All parts of this process that track a run share one process, each by a connection of its own. It
ends when this process ends, also when this one is killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection as PipeEnd
from typing import Any

from raysim.system.processes import Child
from raysim.tracking.mlflow_client import MLFLOW_ENVIRONMENT
from raysim.tracking.store_errors import ProcessFailed

logger = logging.getLogger("raysim.tracking")

DEATH_TIMEOUT_S = 1.0
"""Seconds until the system reports the end of a process whose connections are closed."""


class Connection:
    """Connection of one thread to the process that calls MLflow.

    It is made at the first request. If the process dies, another one is started, once a request.
    """

    def __init__(self) -> None:
        self._pipe: PipeEnd | None = None

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply, whose notes are logged.

        Args:
            message: a request of `raysim.tracking.mlflow_process.calls`.

        Returns:
            The reply. The error in it, if any, is not raised: see `check`.

        Raises:
            ProcessFailed: the process does not start, or died twice during the request.
        """
        try:
            reply = self._exchange(message)
        except (OSError, EOFError):
            # Every request can be repeated: a record that arrives twice is kept once.
            self.close()
            how = how_it_ended()
            try:
                reply = self._exchange(message)
            except (OSError, EOFError) as error:
                self.close()
                raise ProcessFailed(
                    "the process that calls MLflow ends without an answer: "
                    f"{how_it_ended() or error}"
                ) from None
            if how:
                logger.warning("the process that calls MLflow was started again: %s", how)
        for note in reply["notes"]:
            logger.warning("%s", note)
        return reply

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._pipe is None:
            self._pipe = connect()
        self._pipe.send(dict(message))
        return self._pipe.recv()

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def check(reply: Mapping[str, Any]) -> None:
    """Raise the error that is in a reply.

    Args:
        reply: what `Connection.request` returned.

    Raises:
        Refused, FileRefused, RunDeleted, RaysimError, ImportError, StoreError: the error.
    """
    if "error" in reply:
        raise reply["error"]


def start() -> None:
    """Start the process, so that it imports MLflow while this process does something else.

    An error is reported by the first request.
    """
    with suppress(ProcessFailed), _lock:
        _running()


def connect() -> PipeEnd:
    """Return a new connection to the process, which is started if it does not run.

    Raises:
        ProcessFailed: it cannot be started.
        OSError: it has just ended.
    """
    ours, theirs = Pipe()
    try:
        with theirs, _lock:
            socket.send_fds(_running().socket, [b"\n"], [theirs.fileno()])
        # Credentials may have changed since the process was started.
        ours.send({**MLFLOW_ENVIRONMENT, **os.environ})
    except BaseException:
        ours.close()
        raise
    return ours


def how_it_ended() -> str:
    """Return how the process has ended; "" if it runs or was never started.

    A process whose connections are closed may take a moment to end.
    """
    with _lock:
        return _process.how_it_ended() if _process else ""


class _Process(Child):
    """A process that calls MLflow. It prints to standard error: standard output is for results."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        module = __name__.rpartition(".")[0]
        super().__init__(module, {**MLFLOW_ENVIRONMENT, **os.environ}, output=2)

    def how_it_ended(self) -> str:
        """Return how the process has ended; "" if it runs."""
        try:
            code = self.popen.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        if code >= 0:
            return f"exit code {code}"
        return f"killed by signal {-code}"

    def leave(self) -> None:
        """Forget a process that a fork of this one has inherited."""
        self.socket.close()
        self.popen.returncode = 0  # it is nobody to wait for


_process: _Process | None = None
"""The process that was started last."""

_lock = threading.Lock()
"""Held while `_process` is used."""


def _running() -> _Process:
    """Return the process, which is started if it does not run."""
    global _process
    if _process is not None and _process.owner != os.getpid():
        _process.leave()
        _process = None
    if _process is not None and _process.popen.poll() is not None:
        _process.end()
        _process = None
    if _process is None:
        try:
            _process = _Process()
        except OSError as error:
            raise ProcessFailed(
                f"the process that calls MLflow cannot be started: {error}"
            ) from None
    return _process


@atexit.register
def _end() -> None:
    """End the process with this one."""
    if _process is not None and _process.owner == os.getpid():
        _process.end()
