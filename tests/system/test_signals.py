"""A signal ends a run wherever it arrives, and leaves no lock taken behind it."""

from __future__ import annotations

import _imp
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raysim.system.signals import Stopped, stoppable

IMPORTING = compile(
    """
def release_later():
    _imp.acquire_lock()
    signal.raise_signal(signal.SIGINT)  # before `try`, as in the callback of a module's lock
    try:
        pass
    finally:
        _imp.release_lock()
""",
    "<frozen importlib._bootstrap>",
    "exec",
)


def test_a_signal_does_not_leave_the_import_lock_taken():
    system: dict[str, Any] = {"_imp": _imp, "signal": signal}
    exec(IMPORTING, system)
    with stoppable(), pytest.raises(Stopped) as stopped:
        system["release_later"]()
        assert not _imp.lock_held()
        for _ in range(1000):
            time.sleep(0.01)
    assert stopped.value.signal == signal.SIGINT and not _imp.lock_held()


def test_a_signal_that_a_destructor_swallows_is_not_lost(monkeypatch):
    class Swallowing:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: ignored.append(seen.exc_type))
    with stoppable() as signals:
        Swallowing()
        assert ignored == [Stopped]
        with pytest.raises(Stopped):
            signals.install()


def test_ray_does_not_replace_the_handler_of_a_run(monkeypatch):
    import ray
    from ray._private import utils

    from raysim.distributed.cluster import connection

    def init(**options: Any) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with stoppable():
        before = signal.getsignal(signal.SIGTERM)
        connection.connect(None, 1, print)
        assert signal.getsignal(signal.SIGTERM) == before
    before = signal.getsignal(signal.SIGTERM)
    try:
        connection.connect(None, 1, print)
        assert signal.getsignal(signal.SIGTERM) != before, "without a run, Ray's handler stays"
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def no_nohup() -> Iterator[None]:
    """SIGHUP is not ignored, as it is where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
def test_a_closed_terminal_ends_a_run_gracefully():
    """The kernel and the shell may both send SIGHUP: the second one does not kill."""
    with stoppable(), pytest.raises(Stopped) as stopped:
        signal.raise_signal(signal.SIGHUP)
    assert stopped.value.signal == signal.SIGHUP
    with stoppable() as signals, signals.held():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Stopped), signals.allowed():
            pass
        signals._received = None


def test_nohup_keeps_its_meaning():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
