"""One process at a time in a run's folder: `<run_dir>/lock` names it, by its number and its host.

On one machine the kernel knows whether that process still lives (the file is flocked). Seen from another machine, where
that may not show, it lives as long as it touches the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from raysim.errors import ConfigError

FILE = "lock"

BEAT = 10.0
"""Seconds between two touches."""

SILENCE = 6 * BEAT
"""Without a touch for so long, a process of another machine is gone."""


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """While open, this process is the only one at work in a run's folder. A lock that a process which is gone has left
    behind is taken over.

    Raises ConfigError with the other process's number and host.
    """
    file = _take(run_dir)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(file, ended), name="raysim-lock", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        Path(file.name).unlink(missing_ok=True)
        file.close()


def running(run_dir: Path) -> str | None:
    """The process that is at work in a run's folder, in words; None if there is none."""
    try:
        with open(run_dir / FILE, "r+b") as file:
            return _holder(file)
    except FileNotFoundError:
        return None


def _take(run_dir: Path) -> IO[bytes]:
    path = run_dir / FILE
    while True:
        try:
            file = open(path, "a+b")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"run_dir: {path} cannot be written: {error.strerror}; choose another folder") from None
        if other := _holder(file):
            file.close()
            raise ConfigError(f"{run_dir}: {other} is at work on this run; wait for it or end it")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # it was removed in between, by who held it
    file.seek(0)
    file.truncate()
    file.write(json.dumps({"pid": os.getpid(), "host": platform.node()}).encode())
    with suppress(OSError):  # a full disk: the lock holds, but cannot say whose it is
        file.flush()
    return file


def _holder(file: IO[bytes]) -> str | None:
    """Whoever holds an open lock; if nobody, it is ours now."""
    file.seek(0)
    try:
        facts = json.loads(file.read())
    except ValueError:  # just made, or torn
        facts = None
    if not isinstance(facts, dict):
        facts = {}
    who = f"process {facts.get('pid', '(unknown)')} on {facts.get('host', 'this machine')}"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return who
    silent = time.time() - os.fstat(file.fileno()).st_mtime
    elsewhere = facts.get("host", platform.node()) != platform.node()
    return f"{who} (last heard of {silent:.0f} s ago)" if elsewhere and silent < SILENCE else None


def _beat(file: IO[bytes], ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError, ValueError):  # a full disk, or closed just now
            os.utime(file.fileno())
