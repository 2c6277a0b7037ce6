"""Standard output and standard error of a command, whose failures never end a run.

The reader of the output may go away (`| head`), a disk may be full, a stream may be closed, and its
encoding may lack a character. Whatever a stream does not take goes to a file of the run's folder.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

REST_FILE = "output.txt"
"""Name of the file in a run's folder for output that could not be written."""


class _LastingFile(io.FileIO):
    """File descriptor 1 or 2. After an error it writes to the rest file, or to nothing."""

    def __init__(self, number: int):
        super().__init__(number, "wb", closefd=False)
        self.error: OSError | None = None
        """Error of the first write that failed."""

    def write(self, data: Any) -> int:
        """Write bytes and return how many were written; see `io.RawIOBase.write`."""
        try:
            while (count := super().write(data)) is None:
                select.select([], [self], [])  # the descriptor does not block
        except OSError as error:
            if self.error is not None:
                return len(memoryview(data))  # the rest file fails as well
            self.divert(error)
            return self.write(data)
        return count

    def divert(self, error: OSError) -> None:
        """Replace the descriptor by the rest file, or by nothing while there is no folder."""
        self.error = error
        path = os.devnull if _folder is None else _folder / REST_FILE
        try:
            rest = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError:
            rest = os.open(os.devnull, os.O_WRONLY)
        os.dup2(rest, self.fileno())
        os.close(rest)
        if self.fileno() == 1:
            report(self)


_files: dict[int, _LastingFile] = {}
"""The two streams by descriptor; empty in a process that is no command."""

_folder: Path | None = None
"""Folder of the present run."""


def make_lasting() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams whose writes never fail."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
            closed = False
        except OSError:
            closed = True
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if number == 0:
            continue
        name = ("stdin", "stdout", "stderr")[number]
        before = getattr(sys, name)
        if before is not None and not _is_own(before, number):
            continue  # a test or a notebook has replaced it
        if before is not None:
            with suppress(OSError):
                before.flush()
        _files[number] = file = _LastingFile(number)
        if closed:
            file.error = OSError(errno.EBADF, "it is closed")
        stream = io.TextIOWrapper(
            io.BufferedWriter(cast(io.RawIOBase, file)),
            encoding=getattr(before, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=number == 2 or file.isatty(),
        )
        setattr(sys, name, stream)


def _is_own(stream: Any, number: int) -> bool:
    """Return whether a stream writes to this descriptor."""
    try:
        return stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


def keep_rest_in(folder: Path) -> None:
    """Write to this folder from now on what the streams do not take.

    Args:
        folder: folder of the run or the sweep.
    """
    global _folder
    _folder = folder.absolute()
    for file in _files.values():
        if file.error is not None:
            file.divert(file.error)


def report(file: _LastingFile) -> None:
    """Print on standard error where the output goes that standard output does not take."""
    if file.error is None or (file.error.errno == errno.EPIPE and _folder is None):
        return
    place = "" if _folder is None else f"; the rest is in {_folder / REST_FILE}"
    with suppress(OSError, ValueError, AttributeError):
        print(
            f"WARNING: standard output cannot be written ({file.error.strerror}){place}",
            file=sys.stderr,
        )


def flushed() -> bool:
    """Write what is buffered; return whether all output of the command has reached somebody.

    A reader that has gone away, and a run's folder, count as such.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    lost = [f for f in _files.values() if f.error is not None and f.error.errno != errno.EPIPE]
    return _folder is not None or not any(file.fileno() == 1 for file in lost)
