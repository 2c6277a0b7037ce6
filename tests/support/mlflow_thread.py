"""MLflow, called by a thread of the tests' process in place of a process of its own.

A process imports MLflow, which takes seconds; and the errors of MLflow that tests provoke are
patched in their own process. The messages are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from raysim.tracking.mlflow_process import calls, connection

START, CONNECT = connection.start, connection.connect
"""What starts the process, and connects to it."""


def call_mlflow_here(replace: Callable[[Any, str, Any], None]) -> None:
    """Answer requests for MLflow by threads of this process.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(connection, "start", lambda: None)
    replace(connection, "connect", _connect)


def call_mlflow_in_a_process(replace: Callable[[Any, str, Any], None]) -> None:
    """Undo `call_mlflow_here`.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(connection, "start", START)
    replace(connection, "connect", CONNECT)


def _connect() -> Connection:
    ours, theirs = Pipe()
    threading.Thread(target=calls.serve, args=(theirs,), daemon=True).start()
    return ours
