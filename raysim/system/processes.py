"""Processes that work for this one, time limits for calls, and the end of processes that hang.

Ray's own calls can block forever when one of its processes hangs. Therefore every call that closes
something has a time limit (`limited`), and started processes that are still alive afterwards are
killed. If this process itself hangs inside Ray, another thread performs the last steps (it marks
the run as FAILED) and ends the process.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from raysim.imports import python_path

LAST_STEP_TIMEOUT_S = 30.0
"""Time limit in seconds of each last step before a process that hangs is ended."""

END_TIMEOUT_S = 5.0
"""Seconds that an idle child of this process gets to end before it is killed."""

PARENT_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a child whether its parent lives."""

KILL_TIMEOUT_S = 10.0
"""Time limit in seconds for a killed process to end."""

_last: list[Callable[[str], None]] = []
"""Calls to make before this process is ended because it hangs."""

_abandoned: list[list[Process]] = []
"""Processes to kill at the end of this process; one list for each call of `abandon`."""


@dataclass(frozen=True)
class Process:
    """Process of this machine.

    The start time distinguishes it from a later process with the same id.
    """

    pid: int
    """Process id."""
    started: int
    """Start time in clock ticks since the machine was booted, from /proc."""

    @classmethod
    def this(cls) -> Process:
        """Return the current process."""
        process = cls.at(os.getpid())
        assert process is not None
        return process

    @classmethod
    def at(cls, pid: int) -> Process | None:
        """Return the process with this id; None if there is none or it is a zombie.

        Args:
            pid: id of a process of this machine.
        """
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Process:
        """Return the process that `facts` described.

        Args:
            facts: a mapping that `facts` returned; the process may have ended.
        """
        return cls(facts["pid"], facts["started"])

    def facts(self) -> dict[str, int]:
        """Return the id and the start time as a mapping for JSON."""
        return {"pid": self.pid, "started": self.started}

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        return Process.at(self.pid) == self

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        with suppress(OSError):
            if self.alive:
                os.kill(self.pid, signal.SIGKILL)


@contextmanager
def variables_kept(names: Iterable[str]) -> Iterator[None]:
    """Put environment variables back at the end to what they are at the beginning.

    Args:
        names: names of the variables, which the block may set or remove.
    """
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Child:
    """A process of Python that works for this one, which is connected to it by a socket.

    It leads a session of its own, so that Ctrl-C is for this process alone.

    Args:
        module: module that it executes. Its arguments are the number of the child's end of the
            socket, and the id of this process.
        environment: its environment variables, except PYTHONPATH.
        output: file, or its descriptor, for what the process prints.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], output: int | IO[bytes]
    ) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                env={**environment, "PYTHONPATH": python_path()},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()

    def end(self, limit_s: float = END_TIMEOUT_S) -> None:
        """Let the process end, and wait for it.

        Args:
            limit_s: seconds after which its session is killed.
        """
        self.socket.close()
        try:
            self.popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            # With what a user's code has started there.
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def end_with(parent: int, end: Callable[[], None]) -> None:
    """End this process as soon as its parent is another one, whatever it is doing.

    Args:
        parent: process id of the parent.
        end: ends this process.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_INTERVAL_S)
        end()

    threading.Thread(target=watch, daemon=True).start()


def descendants(processes: Iterable[Process]) -> list[Process]:
    """Return these processes, followed by all their descendants.

    Args:
        processes: processes of this machine.
    """
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    family = list(processes)
    # The list grows during the loop, so that children of children are visited too.
    for process in family:
        family += filter(None, map(Process.at, children.get(process.pid, ())))
    return family


def kill(processes: Iterable[Process]) -> bool:
    """Kill processes and wait until they have ended.

    Args:
        processes: processes of this machine; stopped ones are killed too.

    Returns:
        Whether all have ended within KILL_TIMEOUT_S.
    """
    killed = list(processes)
    for process in killed:
        process.kill()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while any(process.alive for process in killed) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(process.alive for process in killed)


def limited(call: Callable[[], Any], limit_s: float) -> bool:
    """Make a call that may never return, in another thread.

    Args:
        call: the function to call.
        limit_s: time limit in seconds.

    Returns:
        Whether the call has returned within the limit.

    Raises:
        BaseException: the call raised it within the limit.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    for error in errors:
        raise error
    return not thread.is_alive()


@contextmanager
def at_last(call: Callable[[str], None]) -> Iterator[None]:
    """Register a call that `end_process` makes with its reason, until the block is left.

    Args:
        call: called with the reason for the end; it must return soon.
    """
    _last.append(call)
    try:
        yield
    finally:
        _last.remove(call)


def end_process(why: str, started: Iterable[Process]) -> None:
    """End this process, whose main thread hangs, and the processes that it has started.

    Args:
        why: the reason; it is printed and passed to the calls of `at_last`.
        started: the processes that this process has started.
    """
    for call in reversed(_last):
        # The process must end even if a last step fails.
        with suppress(Exception):
            limited(lambda call=call: call(why), LAST_STEP_TIMEOUT_S)
    print(f"error: {why}", file=sys.stderr)
    abandon(started)
    leave(1)


def abandon(processes: Iterable[Process]) -> None:
    """Give up closing something for which Python would wait at exit.

    This process then ends at once at exit and kills `processes`. It does not kill them earlier,
    because Ray may end a process whose raylet is killed.

    Args:
        processes: processes that would stay behind, parents before children.
    """
    if not _abandoned:
        atexit.register(leave, 1)
    _abandoned.append(list(processes))


def leave(code: int) -> None:
    """End this process at once with an exit code if it has abandoned something.

    Args:
        code: exit code.
    """
    if _abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        for process in reversed(list(chain(*_abandoned))):  # children first
            process.kill()
        os._exit(code)
