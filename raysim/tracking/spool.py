"""Spool of a run: its records on disk until the tracking server has received them.

A run's metrics, tags, data sets and files are appended to a spool in the run's folder, which takes
a few microseconds per record:

    spool.jsonl   all records in order, one line of JSON each; append-only
    spool.sent    number of acknowledged records, the run that received them, and postponed files

The sender (`raysim.tracking.spool_sender`) reads the spool in the same process or in another one.
Further trackers (`raysim.tracking.followers`) read it too, each with a mark of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from raysim.errors import ConfigError, RaysimError
from raysim.system import files
from raysim.system.json_files import parsed, read_json
from raysim.system.lock import lock_file

logger = logging.getLogger("raysim.tracking")

SPOOL_FILE = "spool.jsonl"
"""Name of the spool in a run's folder."""

SENT_FILE = "spool.sent"
"""Name of the file that holds the number of records that MLflow has received."""


FIRST_BYTES = b'{"kind": "'
"""How each record begins."""


class _Record(TypedDict):
    """Keys that all records have."""

    time: int


class _Start(_Record):
    kind: Literal["start"]
    key: str
    run_id: str | None
    name: str
    parent: str | None
    required: bool
    uri: str
    experiment: str


class _Texts(_Record):
    kind: Literal["params", "tags"]
    values: dict[str, str]


class _Metrics(_Record):
    kind: Literal["metrics"]
    step: int
    values: dict[str, float]


class _Inputs(_Record):
    kind: Literal["inputs"]
    name: str
    digest: str
    source: str
    context: str
    profile: dict[str, Any]


class _Artifact(_Record):
    kind: Literal["artifact"]
    path: str
    folder: str | None


class _Parent(_Record):
    kind: Literal["parent"]
    parent: str


class _Finish(_Record):
    kind: Literal["finish"]
    status: Literal["FINISHED", "FAILED", "KILLED"]


RECORD = Annotated[
    _Start | _Texts | _Metrics | _Inputs | _Artifact | _Parent | _Finish,
    Field(discriminator="kind"),
]
"""Type of a record of the spool."""


class _Mark(TypedDict):
    """Content of the file that marks how many records have been sent."""

    records: Annotated[int, Field(ge=0)]
    run_id: str | None


def plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy and PyTorch values to numbers or lists, others to text.

    Args:
        value: a value that the JSON encoder cannot convert.
    """
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Tail:
    """Reader of a spool, which tracks the records that have been sent.

    Args:
        folder: the run's folder.
        mark: name of the file in that folder that holds the number of sent records.
    """

    def __init__(self, folder: Path, mark: str = SENT_FILE) -> None:
        self.path = Path(folder).absolute() / SPOOL_FILE
        self._sent_path = self.path.with_name(mark)
        self._window: list[int] = []
        latest = self._read_mark()
        self.run_id: str | None = latest["run_id"]
        """Run that received the last acknowledged record."""
        self.postponed: list[dict[str, Any]] = latest.get("postponed", [])
        """Records of files that the store refused; those after them were sent."""
        self._sent = 0
        self._offset = 0
        for length in islice(map(len, self._whole_lines()), latest["records"]):
            self._sent += 1
            self._offset += length

    @property
    def pending(self) -> int:
        """Number of unacknowledged records."""
        return len(self._whole_lines(self._offset)) + len(self.postponed)

    def head(self) -> list[dict[str, Any]]:
        """Return the next unsent records, at most about 250 kB."""
        lines = self._whole_lines(self._offset, 1 << 18)
        self._window = [len(line) for line in lines]
        return [self._record(line, self._sent + i) for i, line in enumerate(lines, 1)]

    def acknowledge(self, count: int, run_id: str | None) -> None:
        """Mark the first `count` records of the last `head` as received by this run.

        Args:
            count: number of records.
            run_id: MLflow's id of the run that received them; None for other trackers.
        """
        self._sent += count
        self._offset += sum(self._window[:count])
        self._mark(run_id)

    def postpone(self, record: dict[str, Any]) -> None:
        """Keep the first record of the last `head` for later, and acknowledge it.

        Args:
            record: that record.
        """
        self.postponed.append(record)
        self.acknowledge(1, self.run_id)

    def acknowledge_postponed(self) -> None:
        """Remove the first of the postponed records, which was sent or can never be."""
        del self.postponed[0]
        self._mark(self.run_id)

    def place(self, path: Path) -> str:
        """Return a path as records hold it: relative to the run's folder if it is below that.

        The folder may be moved before a record is sent.

        Args:
            path: a file or a folder.
        """
        path, home = Path(path).absolute(), self.path.parent
        return str(path.relative_to(home) if path.is_relative_to(home) else path)

    def rewind(self) -> None:
        """Mark all records as unsent, because the store that acknowledged them is lost."""
        self._sent = 0
        self._offset = 0
        self.postponed = []
        self._mark(None)

    def last(self, *kinds: str) -> dict[str, Any] | None:
        """Return the newest record of these kinds, sent or not; None if there is none.

        Args:
            *kinds: kinds of records, such as "start" and "metrics".
        """
        lines = self._lines_of(*kinds)
        return self._record(*lines[-1]) if lines else None

    def close(self) -> None:
        """Do nothing: a reader keeps no file open."""

    def tags(self) -> dict[str, str]:
        """Return the newest value of each tag that was recorded, sent or not."""
        values: dict[str, str] = {}
        for line, number in self._lines_of("tags"):
            values |= self._record(line, number)["values"]
        return values

    def _lines_of(self, *kinds: str) -> list[tuple[bytes, int]]:
        """Return the lines with records of these kinds, each with its number."""
        starts = tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds)
        lines = enumerate(self._whole_lines(), 1)
        return [(line, i) for i, line in lines if line.startswith(starts)]

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        """Return the record that a line holds; raise ConfigError if it is damaged."""
        try:
            return parsed(line, RECORD)
        except ValueError as error:
            raise ConfigError(
                f"{self.path}: line {number} is not a record of a run: {error}; put the file back "
                "from a copy, or remove that line, whose record is then lost"
            ) from None

    def _whole_lines(self, offset: int = 0, size: int = -1) -> list[bytes]:
        """Return the complete lines from `offset` on, at most about `size` bytes."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                lines = file.readlines(size)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be read: {error.strerror}; remove it, or put it back from a "
                "copy"
            ) from None
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def _mark(self, run_id: str | None) -> None:
        """Write how many records have been sent, and to which run."""
        self.run_id = run_id
        # If the disk is full, a crash causes these records to be sent again, which is harmless.
        with contextlib.suppress(OSError):
            mark: dict[str, Any] = {"records": self._sent, "run_id": run_id}
            if self.postponed:
                mark["postponed"] = self.postponed
            files.write_file(self._sent_path, json.dumps(mark))

    def _read_mark(self) -> dict[str, Any]:
        """Return the content of the file that marks how many records have been sent."""
        unsent = {"records": 0, "run_id": None}
        if not self._sent_path.exists():
            return unsent
        if self._sent_path.is_dir():
            raise files.is_a_folder(self._sent_path)
        try:
            return read_json(self._sent_path, _Mark, "all records are sent again")
        except ConfigError as error:
            # Sending all records again is harmless.
            logger.warning("%s", error)
            return unsent


class Spool(Tail):
    """Writer and reader of a spool, safe for one writer thread and one reader thread.

    While the disk is full, records stay in memory (`homeless`). They are written as soon as there
    is space.

    Args:
        folder: the run's folder.

    Raises:
        ConfigError: the spool is a symbolic link or a folder, or damaged.
        RaysimError: another process has this spool open, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        files.make_private(Path(folder))
        path = Path(folder).absolute() / SPOOL_FILE
        try:
            handle = files.open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise RaysimError(f"{path} cannot be written: {error.strerror}") from None
        self._file = open(handle, "ab+", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._memory: deque[bytes] = deque()
        self._full = False
        self.latest: int = 0
        """Time of the last record when the spool was opened, in milliseconds since 1970."""
        try:
            if not lock_file(handle, path):
                raise RaysimError(
                    f"{folder}: another process is tracking a run here; wait for it or end it"
                )
            super().__init__(folder)
            lines = self._whole_lines()
            self._total = len(lines)
            self.size = sum(map(len, lines))
            """Size of the spool in bytes."""
            # The thread that sends the records could not report a damaged one.
            for number, line in enumerate(lines, 1):
                self.latest = self._record(line, number)["time"]
            self._remove_incomplete_line()
        except BaseException:
            self._file.close()
            raise

    @property
    def pending(self) -> int:
        """Number of unacknowledged records, including those in memory."""
        return self._total - self._sent + len(self._memory) + len(self.postponed)

    @property
    def homeless(self) -> int:
        """Number of records that are only in memory."""
        return len(self._memory)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; keep it in memory if the disk is full.

        Args:
            record: content for JSON; its first key is "kind".
        """
        line = json.dumps(record, default=plain).encode() + b"\n"
        with self._lock:
            self._memory.append(line)
            try:
                while self._memory:
                    self._put(self._memory[0])
                    self._memory.popleft()
                self._full = False
            except (OSError, ValueError) as error:
                if not self._full:
                    logger.warning(
                        "%s cannot be written (%s); records are kept in memory", self.path, error
                    )
                self._full = True

    def head(self) -> list[dict[str, Any]]:
        """Return the next unsent records, from the file or from memory; [] if closed."""
        with self._lock:
            if self._file.closed:
                return []
            if self._offset < self.size:
                return super().head()
            lines = list(islice(self._memory, 1000))
            self._window = [len(line) for line in lines]
        return [json.loads(line) for line in lines]

    def acknowledge(self, count: int, run_id: str | None) -> None:
        """Mark the first `count` records of the last `head` as received by this run.

        See `Tail.acknowledge`.
        """
        with self._lock:
            if self._file.closed:
                return
            for length in self._window[:count]:
                if self._offset < self.size:
                    self._offset += length
                    self._sent += 1
                else:
                    self._memory.popleft()
        self._mark(run_id)

    def close(self, size: int | None = None) -> None:
        """Close the file.

        Args:
            size: number of bytes to which the file is cut first; None: it stays as it is.
        """
        with self._lock:
            if not self._file.closed and size is not None:
                os.ftruncate(self._file.fileno(), size)
            self._file.close()

    def _remove_incomplete_line(self) -> None:
        """Remove the part of a last line that a crash has left; refuse anything else."""
        part = os.pread(self._file.fileno(), len(FIRST_BYTES), self.size)
        if not FIRST_BYTES.startswith(part):
            raise ConfigError(
                f"{self.path} does not end with a record of a run; put the file back from a copy, "
                f"or remove what follows byte {self.size}"
            )
        os.ftruncate(self._file.fileno(), self.size)

    def _put(self, line: bytes) -> None:
        """Write one line completely; otherwise restore the file and raise OSError."""
        try:
            if self._file.write(line) != len(line):
                raise OSError("no space left")
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self._total += 1
        self.size += len(line)
