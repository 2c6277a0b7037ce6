"""What must hold of a run's lock: it outlives clocks that jump, and not its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import lock_descriptor

from raysim.errors import ConfigError
from raysim.system import lock
from raysim.tracking.spool import Spool

HOURS = 5 * 3600


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of milliseconds."""
    monkeypatch.setattr(lock, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(lock, "STALE_WATCH_S", 1.0)


def foreign(folder: Path) -> Path:
    """The lock of a process on another host."""
    (folder / lock.LOCK_FILE).write_text(json.dumps({"pid": 4711, "host": "elsewhere"}))
    return folder / lock.LOCK_FILE


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_a_clock_that_jumps_ends_no_lock_of_another_host(tmp_path, monkeypatch, brisk, jump):
    """Neither the jump of the clock here nor of that by which the file is touched."""
    file, ended = foreign(tmp_path), threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(file)

    process = threading.Thread(target=touch)
    process.start()
    try:
        wall = time.time
        with monkeypatch.context() as jumped:
            jumped.setattr(time, "time", lambda: wall() + jump)
            assert "process 4711 on elsewhere" in (lock.running(tmp_path) or "")
            with (
                pytest.raises(ConfigError, match=r"process 4711 on elsewhere .*is at work"),
                lock.alone(tmp_path),
            ):
                pass
    finally:
        ended.set()
        process.join()


@pytest.mark.parametrize("jump", [HOURS, -HOURS])
def test_the_lock_of_a_host_that_died_is_taken_over(tmp_path, brisk, monkeypatch, jump):
    """Also one whose clock was ahead: its last touch lies in the future."""
    monkeypatch.setattr(lock, "STALE_WATCH_S", 0.2)
    file = foreign(tmp_path)
    os.utime(file, (time.time() + jump,) * 2)
    assert lock.running(tmp_path) is None
    with lock.alone(tmp_path):
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_a_lock_is_touched_while_it_is_held(tmp_path, brisk):
    with lock.alone(tmp_path):
        file = tmp_path / lock.LOCK_FILE
        os.utime(file, (1, 1))
        end = time.monotonic() + 20
        while file.stat().st_mtime == 1:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_to_look_at_a_lock_does_not_keep_a_run_from_starting(tmp_path):
    """Whoever looks holds the file for a moment."""
    handle = os.open(foreign(tmp_path), os.O_RDWR)
    assert lock_descriptor(handle)
    (tmp_path / lock.LOCK_FILE).write_text("")
    threading.Timer(0.1, os.close, (handle,)).start()
    with lock.alone(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def unknown(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    for use in (lock.alone, Spool):
        with (
            pytest.raises(ConfigError, match=rf"^run_dir: the file system of {tmp_path} has no"),
            contextlib.closing(Spool(tmp_path)) if use is Spool else use(tmp_path),
        ):
            pass
    assert not (tmp_path / "lock").exists()
