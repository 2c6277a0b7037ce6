"""A process that trains trials one after the other: `python -m raysim.sweeps.trials SOCKET PARENT`.

SOCKET is the number of an open socket to the process of the sweep, PARENT. This process ends when
that one is gone, whatever it is doing: a trial continues from its last checkpoint.
`local_processes` starts it and has the messages.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

import cloudpickle

from raysim.imports import uncollected

with uncollected():
    from raysim.models.checks.against_pytorch import comparing_once
    from raysim.sweeps.trials.trial import train_trial
    from raysim.system import output
    from raysim.system.processes import end_with


@comparing_once()
def main() -> None:
    """Train the trials that the sweep's process names until it closes the connection."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    output.make_lasting()
    # So that the output of a process that is killed is in the file.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    end_with(parent, _end)

    def report(figures: dict[str, float]) -> str:
        with _ending_with_the_sweep():
            connection.send(("reported", figures))
            return connection.recv()

    def received() -> bytes:
        with _ending_with_the_sweep():
            return connection.recv_bytes()

    cloudpickle.loads(received())  # the users' files and objects, which register themselves
    job = cloudpickle.loads(received())
    while True:
        with _ending_with_the_sweep():
            place = connection.recv()
        trial = job.trials[place]
        error = train_trial(trial, job.uri, job.experiment, job.parent, job.stopping, report)
        with _ending_with_the_sweep():
            connection.send(("ended", error))


@contextmanager
def _ending_with_the_sweep() -> Iterator[None]:
    """End this process if the connection is closed; that is no error of a trial."""
    try:
        yield
    except (EOFError, OSError):
        _end()


def _end() -> None:
    """End this process and those that a user's code has started in it; it leads their session."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
