"""The process that calls MLflow: `python -m raysim.tracking.mlflow_process SOCKET PARENT`.

SOCKET is the number of an open socket, by which the process that started this one, PARENT, sends
one end of each connection. This process ends when that socket is closed, or when its parent is
gone, whatever it is doing: what is not acknowledged is sent again.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from raysim.system.processes import end_with


def main() -> None:
    """Accept connections until the parent ends."""
    # The parent decides when this process ends; a terminal or a cluster signals both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # A process that the parent has forked may hold the socket open.
    end_with(parent, lambda: os._exit(0))
    threading.Thread(target=_import_mlflow, daemon=True).start()
    while True:
        sent, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not sent:
            os._exit(0)
        for handle in handles:
            pipe = Connection(handle)
            threading.Thread(target=_serve, args=(pipe,), daemon=True).start()


def _import_mlflow() -> None:
    """Import MLflow before it is needed. The first call reports an error."""
    from raysim.tracking import mlflow_client

    with suppress(Exception):
        mlflow_client.import_mlflow("http:")


def _serve(connection: Connection) -> None:
    """Answer the requests of one connection, with the parent's environment variables."""
    from raysim.tracking.mlflow_process import calls

    with connection, suppress(OSError, EOFError):
        environment = connection.recv()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        calls.serve(connection)


if __name__ == "__main__":
    main()
