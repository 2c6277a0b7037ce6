"""Limits of time and memory for what a test calls in its own process."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Hangs(Exception):
    """It took longer than anything here may."""


@contextlib.contextmanager
def bounded(seconds: int, gigabytes: float, rang: list[bool] | None = None) -> Iterator[None]:
    """In time, and in memory beyond what is there; `rang` gets True if the time was over, whatever
    became of the exception."""

    def ring(*_: Any) -> None:
        if rang is not None:
            rang.append(True)
        raise Hangs

    before = signal.signal(signal.SIGALRM, ring)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + int(gigabytes * 2**30), limits[1])
    )
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
