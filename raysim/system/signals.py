"""Handling of SIGINT, SIGTERM and SIGHUP, which a terminal that is closed sends.

The first signal ends a run gracefully, as soon as no finished work is lost. A second one ends it at
once.
"""

from __future__ import annotations

import _thread
import dis
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from raysim.errors import with_users_line

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
"""Name of the file of Python's import locks, in its frames."""


def handled() -> list[signal.Signals]:
    """Return the signals of `HANDLED_SIGNALS`, without a SIGHUP that `nohup` has disabled."""
    return [
        n for n in HANDLED_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
    ]


class Stopped(KeyboardInterrupt):
    """Exception that SIGINT, SIGTERM or SIGHUP raises; `signal` is the signal's number."""

    def __init__(self, number: int):
        super().__init__()
        self.signal = number


class Signals:
    """Response to the first signal.

    It raises `Stopped` at once. Inside `held` it raises `Stopped` only inside `allowed`, or when
    `held` is left.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._hold = False
        self._open = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal until the next `allowed` block, or until this block is left."""
        self._hold = True
        try:
            yield
        finally:
            self._hold = False
        self._raise()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal interrupt this block at any point."""
        self._open = True
        try:
            self._raise()
            yield
        except KeyboardInterrupt:
            # While Ray waits, it turns a `Stopped` into a plain KeyboardInterrupt.
            self._raise()
            raise
        finally:
            self._open = False

    def close(self) -> None:
        """Ignore a first signal from now on, because the run is closing; a second one ends it."""
        self._hold = True
        self._open = False

    def _raise(self) -> None:
        """Raise `Stopped` if a signal has been received."""
        if self._received is not None:
            raise Stopped(self._received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal and leave a second one to the default handlers."""
        if _holds_an_import_lock(frame):
            _send_again_soon(number)
            return
        self._received = number
        for n in handled():
            # A terminal that is closed may send SIGHUP twice: the kernel and the shell do.
            second = signal.SIG_IGN if n == signal.SIGHUP else signal.SIG_DFL
            signal.signal(n, second)
        if self._open or not self._hold:
            self._raise()

    def install(self) -> None:
        """Install the handlers, or raise `Stopped` if a signal has been received.

        Call it again after Ray has started, because Ray installs its own handlers. A `Stopped` that
        was raised in a destructor or in a callback of a weak reference is lost, but not the signal.
        """
        self._raise()
        if threading.current_thread() is threading.main_thread():
            for n in handled():
                signal.signal(n, self._handle)


def a_run_handles(number: int) -> bool:
    """Return whether the handler of a run responds to a signal.

    Args:
        number: number of the signal.
    """
    return isinstance(getattr(signal.getsignal(number), "__self__", None), Signals)


def _holds_an_import_lock(frame: FrameType | None) -> bool:
    """Return whether a signal has interrupted Python's import system itself.

    An exception there may leave the lock of all imports taken, and every other thread that imports
    a module would wait for ever.
    """
    return frame is not None and frame.f_code.co_filename == _IMPORT_SYSTEM


def _send_again_soon(number: int) -> None:
    """Simulate the arrival of a signal in a few milliseconds."""
    timer = threading.Timer(0.005, _thread.interrupt_main, (number,))
    timer.daemon = True
    timer.start()


def reraise_stop(error: BaseException) -> None:
    """Raise an exception again if a signal to this process caused it, or a GPU that failed.

    It is meant for an `except BaseException` around a user's code, which may raise anything:
    `sys.exit()` in a rule is an error of the rule, but Ctrl-C while the rule runs is not. After an
    error of CUDA all later calls of the process fail, so it says nothing about the rule either.

    Args:
        error: the caught exception.

    Raises:
        BaseException: a signal or a GPU caused the exception; it is `error`.
    """
    if isinstance(error, Stopped) or _came_from_a_handler(error) or _gpu_failed(error):
        raise error


def _gpu_failed(error: BaseException) -> bool:
    """Return whether an exception is an error of CUDA after which this process has no GPU.

    After others, such as that of a device that does not exist, the GPU goes on.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.AcceleratorError):
        return False
    try:
        torch.cuda.synchronize()
    except Exception as later:
        return isinstance(later, torch.AcceleratorError)
    return False


@contextmanager
def failing_as(
    error_of: Callable[[str], Exception], passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn everything that a user's code raises in this block into one error.

    Signals that end the run pass unchanged.

    Args:
        error_of: returns the error for the reason, in one line that names the user's line.
        passing: exceptions that pass unchanged too.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        reraise_stop(error)
        raise error_of(with_users_line(error)) from None


def _came_from_a_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal raised an exception."""
    handlers = [signal.getsignal(n) for n in HANDLED_SIGNALS]
    is_default = handlers[0] is signal.default_int_handler
    if isinstance(error, KeyboardInterrupt) and is_default:
        # Python's own handler leaves no frame in the traceback.
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and not _by_a_raise_statement(error)
    codes = [getattr(handler, "__code__", None) for handler in handlers]
    frames = traceback.walk_tb(error.__traceback__)
    return not isinstance(error, Exception) and any(frame.f_code in codes for frame, _ in frames)


def _by_a_raise_statement(error: BaseException) -> bool:
    """Return whether Python code raised an exception; a signal interrupts other instructions."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        trace is not None
        and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    )


def leave_at_once() -> None:
    """Let a signal end the process at once, because no run is active and no work can be lost."""
    for n in handled():
        signal.signal(n, lambda number, frame: os._exit(128 + number))


@contextmanager
def stoppable() -> Iterator[Signals]:
    """Install the handlers of a run and restore the former ones at the end.

    Inside the block, the first signal ends the work gracefully and a second one at once.
    Outside the main thread no handlers are installed.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {n: signal.getsignal(n) for n in handled()}
    signals.install()
    try:
        yield signals
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
