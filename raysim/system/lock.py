"""Exclusive lock of a run's folder: `<run_dir>/lock` holds the id and host of the process.

On one machine, filelock locks the open file in the kernel. The kernel releases the lock when the
process ends for any reason. This module adds two things:

- The file is removed at the end of a run. A remaining file shows that a process has died.
- On a network file system, other machines may not see the kernel's lock. For them, a process is
  alive as long as it touches the file (heartbeat). Clocks of two machines may differ or jump, so a
  file that looks old is watched for a while with a monotonic clock.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import lock_descriptor, unlock_descriptor

from raysim.errors import ConfigError
from raysim.system import files
from raysim.system.json_files import parsed

LOCK_FILE = "lock"
"""Name of the lock file in a run's folder."""

HEARTBEAT_INTERVAL_S = 10.0
"""Seconds between two heartbeats."""

STALE_AFTER_S = 6 * HEARTBEAT_INTERVAL_S
"""Age in seconds, by this machine's clock, below which another machine's lock is in use."""

STALE_WATCH_S = 2.5 * HEARTBEAT_INTERVAL_S
"""Seconds for which an older lock is watched; without a heartbeat its process has died."""

RETRY_TIMEOUT_S = 0.5
"""Seconds for which a busy lock is retried; `running` holds it for a moment."""


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Lock the run's folder for this process, also if the process that locked it before has died.

    Args:
        run_dir: the run's folder.

    Raises:
        ConfigError: another process uses the folder, or its lock file cannot be written; the
            message contains the id and host of the process.
    """
    handle = _take(run_dir)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(handle, ended), name="raysim-lock", daemon=True).start()
    try:
        yield
    finally:
        # An unmounted disk must not hide the reason for which the run ended.
        with suppress(OSError):
            (run_dir / LOCK_FILE).unlink(missing_ok=True)
        unlock_descriptor(handle)
        ended.set()


def running(run_dir: Path) -> str | None:
    """Return a description of the process that uses a run's folder; None if there is none.

    Args:
        run_dir: the run's folder.

    Raises:
        ConfigError: the lock file is a symbolic link.
    """
    try:
        handle = files.open_own(run_dir / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return _holder(handle, run_dir / LOCK_FILE)
    finally:
        os.close(handle)


def _take(run_dir: Path) -> int:
    """Lock the folder and return the descriptor of its lock file."""
    path = run_dir / LOCK_FILE
    while True:
        try:
            handle = files.open_own(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(
                f"run_dir: {path} cannot be written: {error.strerror}; make it writable, or "
                "choose another folder (for a stopped run: resume it with --fork run_dir=FOLDER)"
            ) from None
        try:
            other = _holder(handle, path)
        except ConfigError:  # nobody can lock it
            if not _facts(handle):  # else a process that could lock it is at work
                path.unlink(missing_ok=True)
            os.close(handle)
            raise
        if other:
            os.close(handle)
            raise ConfigError(f"{run_dir}: {other} is at work on this run; wait for it or end it")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                break
        # The process that held the lock has removed the file in the meantime.
        os.close(handle)
    # On a full disk the lock is valid, but does not name its process.
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode(), 0)
    return handle


def _holder(handle: int, path: Path) -> str | None:
    """Return the process that holds an open lock; None if this process has acquired it now."""
    facts = _facts(handle)
    host = facts.get("host", platform.node())
    process = f"process {facts.get('pid', '(unknown)')} on {facts.get('host', 'this machine')}"
    if not _lock(handle, path):
        return process
    if host == platform.node():
        return None
    unlock_descriptor(handle)
    if _touched(path):
        return f"{process} (seen from here by its heartbeat)"
    return None if _lock(handle, path) else process


def _facts(handle: int) -> dict[str, Any]:
    """Return the content of the lock file; {} if it is empty or incomplete."""
    try:
        return parsed(os.pread(handle, 4096, 0), dict[str, Any])
    except ValueError:
        return {}


def lock_file(handle: int, path: Path) -> bool:
    """Lock an open file in the kernel, without waiting.

    Args:
        handle: descriptor of the file.
        path: the file.

    Returns:
        Whether no other process holds the lock.

    Raises:
        ConfigError: the file system has no locks.
    """
    try:
        return lock_descriptor(handle, blocking=False)
    except OSError as error:
        raise ConfigError(
            f"run_dir: the file system of {path.parent} has no locks ({error.strerror}); mount it "
            "with flock, or choose another folder"
        ) from None


def _lock(handle: int, path: Path) -> bool:
    """Lock the open file in the kernel, which may be busy for a moment; see `lock_file`."""
    end = time.monotonic() + RETRY_TIMEOUT_S
    while not lock_file(handle, path):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _touched(path: Path) -> bool:
    """Return whether a process of another machine still touches its lock."""
    before = _modified(path)
    if before is None or abs(time.time() - before / 1e9) < STALE_AFTER_S:
        return before is not None
    end = time.monotonic() + STALE_WATCH_S
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE_WATCH_S / 10))
        if _modified(path) != before:
            return True
    return False


def _modified(path: Path) -> int | None:
    """Return the modification time of the file in nanoseconds; None if it does not exist.

    The file is opened again for each call, because a network file system may cache its attributes.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _beat(handle: int, ended: threading.Event) -> None:
    """Touch the file until the run has ended, then close it."""
    while not ended.wait(HEARTBEAT_INTERVAL_S):
        # A full disk must not end the heartbeat.
        with suppress(OSError):
            os.utime(handle)
    os.close(handle)
