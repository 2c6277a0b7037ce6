"""Trials of a sweep in processes of this machine, as many at once as there are cores, without Ray.

For trials that train inline on CPUs. Ray would need seconds to start, and Tune half a second for
each trial; `benchmarks/start.py` measures a sweep of short trials. A process imports torch
once and then trains trial after trial. Its output goes to a file in the sweep's folder.

Messages to a process: the code, the `Job`, then the position of a trial; from it: ("reported",
figures), to which the answer is the reason to stop the trial or "", and ("ended", error).
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import cloudpickle

from raysim.config.sections.execution import cluster_address
from raysim.config.tracking_uri import absolute_uri, redacted_uri
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.early_stopping import EarlyStopping
from raysim.sweeps.trials.trial_log import TrialLog
from raysim.system import machine
from raysim.system.processes import END_TIMEOUT_S, Child

OUTPUT_FILE = "output.txt"
"""Name of the file in the sweep's folder for what the processes of trials print."""

DEATH_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks whether the processes live."""


@dataclass(frozen=True)
class Job:
    """What the processes of a sweep have in common; arguments of `train_trial`."""

    trials: list[Trial]
    uri: str
    experiment: str
    parent: str
    stopping: EarlyStopping | None


def suffices(trials: list[Trial]) -> bool:
    """Return whether trials need no Ray: all train inline, on CPUs, and no cluster was named.

    Args:
        trials: trials of a sweep.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return False
    for trial in trials:
        resources = trial.config.resources
        on_gpu = resources.gpus or resources.server_on_gpu
        if resources.executor != "inline" or on_gpu or cluster_address(resources.address):
            return False
    return True


class LocalProcesses:
    """Processes of this machine that train trials.

    They are started at once, so that they import torch while this process prepares the sweep.

    Args:
        folder: folder of the sweep.
        trials: the trials that will run.
        code: the users' files and objects that they need, see `pickled_code`.
        parallel: largest number of processes; None: as many as there are cores for.
    """

    def __init__(self, folder: Path, trials: list[Trial], code: bytes, parallel: int | None):
        self.folder = folder
        self.code = code
        self.threads = max(trial.config.resources.threads for trial in trials)
        room = max(1, machine.cores() // self.threads)
        self.processes = [self._start() for _ in range(min(room, parallel or room, len(trials)))]

    def _start(self) -> _Process:
        return _Process(self.folder / OUTPUT_FILE, self.threads)

    def run(
        self, sweep: Sweep, missing: list[Trial], parent: str, watch: WatchCallback
    ) -> list[tuple[Trial, str]]:
        """Run trials.

        Args:
            sweep: the sweep.
            missing: the trials of the sweep to run.
            parent: id of the sweep's run in the tracking store.
            watch: called with each trial, its state, and its facts; see `WatchCallback`.

        Returns:
            The failed trials with their errors.

        Raises:
            BaseException: the sweep was interrupted, or `watch` has raised it; the trials have been
                killed.
        """
        log = TrialLog(sweep, missing, watch)
        job = cloudpickle.dumps(
            Job(
                missing,
                redacted_uri(absolute_uri(sweep.tracking.uri)),
                sweep.tracking.experiment,
                parent,
                sweep.settings.early_stopping,
            )
        )
        try:
            self._run(log, job, sweep.settings.retries)
        except BaseException:  # Ctrl-C, or an error of `watch`
            self.close(kill=True)
            log.killed()
            raise
        return log.failures

    def _run(self, log: TrialLog, job: bytes, retries: int) -> None:
        """Give the processes trials until none is left."""
        waiting = deque(range(len(log.trials)))
        retries_left = [retries] * len(log.trials)
        for process in self.processes:
            process.begin(self.code, job)
        while True:
            self._give_out(waiting, job, log)
            busy = [process for process in self.processes if process.place is not None]
            if not busy:
                return
            ready = wait([process.connection for process in busy], DEATH_CHECK_INTERVAL_S)
            for process in busy:
                # A child of a dead process may still hold the other end of the connection.
                if process.connection in ready or process.popen.poll() is not None:
                    self._hear(process, waiting, retries_left, log)

    def _hear(
        self, process: _Process, waiting: deque[int], retries_left: list[int], log: TrialLog
    ) -> None:
        """Hear what a process says of its trial: a report, or that it has ended."""
        place = cast(int, process.place)
        what, content = process.receive()
        if what == "reported":
            process.send(log.reported(place, content))
            return
        process.place = None
        if process.died:
            log.died(place, process.ending())
        if (process.died or content) and retries_left[place]:
            retries_left[place] -= 1
            log.again(place)
            waiting.appendleft(place)
        else:
            log.ended(place, died=process.died)

    def _give_out(self, waiting: deque[int], job: bytes, log: TrialLog) -> None:
        """Let each idle process train a trial that waits."""
        for i, process in enumerate(self.processes):
            if process.place is not None or not waiting:
                continue
            if process.popen.poll() is not None:  # it may have died while it was idle
                process.close()
                self.processes[i] = process = self._start()
                process.begin(self.code, job)
            process.place = waiting.popleft()
            process.send(process.place)
            log.started(process.place)

    def close(self, kill: bool = False) -> None:
        """End the processes.

        Args:
            kill: whether to end them in the middle of a trial.
        """
        for process in self.processes:
            process.close(kill)
        output = self.folder / OUTPUT_FILE
        if output.exists() and not output.stat().st_size:
            output.unlink()


class _Process(Child):
    """A process of this machine that trains trials one after the other.

    Args:
        output: file to which its output is appended.
        threads: threads of its computations.
    """

    def __init__(self, output: Path, threads: int):
        self.place: int | None = None
        """Position of the trial that it trains."""
        self.died = False
        """Whether it has ended by itself."""
        self.output = output
        # NumPy would take all cores for each trial.
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with output.open("ab") as file:
            super().__init__("raysim.sweeps.trials", environment, file)
        self.connection = Connection(self.socket.detach())

    def begin(self, code: bytes, job: bytes) -> None:
        """Send what the trials have in common.

        Args:
            code: the pickled files and objects of Python that the configurations name.
            job: the pickled `Job`.
        """
        with suppress(OSError):  # the process has died, which `receive` will report
            self.connection.send_bytes(code)
            self.connection.send_bytes(job)

    def send(self, message: Any) -> None:
        """Send a message.

        Args:
            message: what the process waits for.
        """
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> tuple[str, Any]:
        """Return the next message; ("ended", "") if the process has died."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return self.connection.recv()
        self.died = True
        return "ended", ""

    def ending(self) -> str:
        """Wait for the process, which has died, and return how it has ended."""
        self.close()
        code = self.popen.returncode
        if code == -signal.SIGKILL:
            return "its process was killed (out of memory?)"
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        return f"its process ended with {how}; its output is in {self.output}"

    def close(self, kill: bool = False) -> None:
        """End the process and wait for it.

        Args:
            kill: whether to end it at once.
        """
        self.connection.close()
        self.end(0 if kill else END_TIMEOUT_S)
