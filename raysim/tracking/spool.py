"""Spool of a run: its records on disk until the tracking server has received them.

A run's metrics, tags, data sets and files are appended to a spool in the run's folder, which takes
a few microseconds per record:

    spool.jsonl   all records in order, one line of JSON each; append-only
    spool.sent    number of acknowledged records, and the run that received them

The sender (`raysim.tracking.mlflow`) reads the spool in the same process or in another one.
Further trackers (`raysim.tracking.followers`) read it too, each with a mark of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from filelock import lock_descriptor

from raysim.config.tracking_uri import mask_secrets, redacted_uri
from raysim.errors import RaysimError
from raysim.system import files

logger = logging.getLogger("raysim.tracking")

SPOOL_FILE = "spool.jsonl"
"""Name of the spool in a run's folder."""

SENT_FILE = "spool.sent"
"""Name of the file that says how many records MLflow has received."""

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""Status of a run in MLflow."""


def flatten_parameters(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested mapping as a flat one with dotted keys and text.

    Args:
        nested: the mapping.
        prefix: text before each key.

    Returns:
        Strings unchanged and all other values as JSON (true, null, [0.1, 2]).
    """
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_parameters(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = (
                value if isinstance(value, str) else json.dumps(value, default=plain)
            )
    return flat


def plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy and PyTorch values to numbers or lists, others to text.

    Args:
        value: what the JSON encoder cannot convert itself.
    """
    return value.tolist() if hasattr(value, "tolist") else str(value)


def legal(key: str) -> str:
    """Return a name that MLflow accepts: letters, digits and _ - . space : /, at most 250.

    Args:
        key: name of a parameter, metric or tag; other characters become _.
    """
    return re.sub(r"[^\w.\- :/]", "_", str(key))[:250]


class Clock:
    """Clock that never goes back, in milliseconds since 1970.

    It adds the elapsed time to the system's time at its start, so changes of the system's clock do
    not affect it.

    Args:
        least: earliest start in milliseconds since 1970.
    """

    def __init__(self, least: int = 0) -> None:
        self._start = max(time.time_ns() // 1_000_000, least)
        self._began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def now(self) -> int:
        """Return the current time in milliseconds since 1970."""
        return self._start + (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self._began) // 1_000_000


class Recorder:
    """Recorder of one run that only writes the spool; another process sends the records.

    Args:
        uri: absolute URI of the tracking store.
        experiment: name of the MLflow experiment.
        run_dir: the run's folder, which contains the spool.
        parent: the parent run in MLflow.
        labels: tags in addition to those of `start`.

    Raises:
        RaysimError: another process tracks a run in this folder.
    """

    required = False
    """Whether the run fails if the tracking server is not available."""

    tracks = True
    """Whether anything is recorded."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_dir: Path,
        parent: str | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._uri = uri
        self._experiment = experiment
        self._parent = parent
        self._labels = labels
        self._spool = Spool(run_dir)
        self._clock = Clock(self._spool.latest)
        self._key = ""
        self._closing = threading.Event()

    @property
    def run_id(self) -> str:
        """Provisional id of the run; "" before `start`."""
        return self._key

    @property
    def earlier(self) -> str | None:
        """Id of the run that this folder already contains; None if it contains none."""
        start = self._spool.last("start")
        return start["key"] if start else None

    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> str:
        """Record the start of the run, or that it resumes.

        Args:
            name: name of the run.
            params: the nested configuration, logged with dotted keys. MLflow never changes a
                parameter: if a resumed run has another value, the new one becomes the tag
                `resumed.<key>`.
            tags: tags of the run.
            run_id: id of the run to resume, which may be provisional; None starts a new run.

        Returns:
            `run_id`, or a new provisional id, which `resume` and `start(run_id=...)` accept.
        """
        self._key = run_id or uuid.uuid4().hex
        self._record(
            "start",
            key=self._key,
            run_id=run_id,
            name=name,
            parent=self._parent,
            required=self.required,
            uri=redacted_uri(self._uri),
            experiment=self._experiment,
        )
        self._record(
            "params", values={k: mask_secrets(v) for k, v in flatten_parameters(params).items()}
        )
        self.tags({**tags, **self._labels})
        return self.run_id

    def adopt(self, parent: str, labels: Mapping[str, str]) -> None:
        """Move an existing run to another parent run and set tags, unless it is there already.

        Args:
            parent: id of the parent run.
            labels: tags that the parent gives its runs.
        """
        before = self._spool.last("start", "parent")
        if before and before["parent"] != parent:
            self._record("parent", parent=parent)
            self.tags(labels)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step.

        MLflow keeps NaN and replaces infinities by the largest double.

        Args:
            values: value of each metric by name.
            step: number of the step.
        """
        self._record(
            "metrics", step=int(step), values={legal(k): float(v) for k, v in values.items()}
        )

    def inputs(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Any]
    ) -> None:
        """Record a data set or a partition as an input of the run.

        Args:
            name: name of the data set.
            digest: identifies its contents; MLflow keeps the first 36 characters.
            source: a path or an address.
            context: its purpose, for example "training".
            profile: description as JSON: sizes, classes.
        """
        self._record(
            "inputs",
            name=name,
            digest=digest,
            source=source,
            context=context,
            profile=dict(profile),
        )

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Record a file or folder as an artifact under `folder`; it must exist until it is sent.

        Args:
            path: the file or folder.
            folder: folder within the run's artifacts; None: the topmost.
        """
        self._record("artifact", path=str(Path(path).absolute()), folder=folder)

    def tags(self, values: Mapping[str, Any]) -> None:
        """Record tags of the run; they replace older values.

        Args:
            values: value of each tag by name; secrets in them are masked.
        """
        self._record("tags", values={legal(k): mask_secrets(str(v)) for k, v in values.items()})

    def finish(self, status: Status) -> None:
        """Record the end of the run and close the spool. A second call has no effect.

        Args:
            status: how the run ended, as MLflow calls it.
        """
        if self._closing.is_set():
            return
        if self._key:
            self._record("finish", status=status)
        self.close()

    def end(self, status: Status, why: str = "") -> bool:
        """Record the end of a run whose process has died, at the time of its last record.

        Args:
            status: status of the run in MLflow.
            why: reason, which becomes the tag `error`.

        Returns:
            Whether the end was still missing.
        """
        last = self._spool.last("start", "finish")
        ended = bool(last and last["kind"] == "start")
        if ended:
            at = self._spool.latest
            if why:
                self.tags({"error": why})
            self._record("finish", status=status, time=at)
        self.close()
        return ended

    def close(self) -> None:
        """Close the spool."""
        self._closing.set()
        self._spool.close()

    def _record(self, kind: str, **content: Any) -> None:
        """Append a record with the current time."""
        if self._closing.is_set():
            raise RuntimeError("this run is finished, nothing more can be tracked")
        self._spool.append({"kind": kind, "time": self._clock.now(), **content})


class Untracked(Recorder):
    """Recorder of a run that is not tracked. It records nothing and has no id."""

    tracks = False

    def __init__(self) -> None:
        self._key = ""
        self._closing = threading.Event()

    @property
    def earlier(self) -> str | None:
        """None: no run was tracked."""
        return None

    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> str:
        """Return "", the id of a run that is not tracked. See `Recorder.start`."""
        return ""

    def close(self) -> None:
        """Refuse further records, as every recorder does."""
        self._closing.set()

    def _record(self, kind: str, **content: Any) -> None:
        """Record nothing."""


class Tail:
    """Reader of a spool, which tracks the records that have been sent.

    Args:
        folder: the run's folder.
        mark: name of the file that says how many records have been sent.
    """

    def __init__(self, folder: Path, mark: str = SENT_FILE) -> None:
        self.path = Path(folder).absolute() / SPOOL_FILE
        self._sent_path = self.path.with_name(mark)
        self._window: list[int] = []
        latest = self._read_mark()
        self.run_id: str | None = latest["run_id"]
        """Run that received the last acknowledged record."""
        self._sent = 0
        self._offset = 0
        for length in islice(map(len, self._whole_lines()), latest["records"]):
            self._sent += 1
            self._offset += length

    @property
    def pending(self) -> int:
        """Number of unacknowledged records."""
        return len(self._whole_lines(self._offset))

    def head(self) -> list[dict[str, Any]]:
        """Return the next unsent records, at most about 250 kB."""
        lines = self._whole_lines(self._offset, 1 << 18)
        self._window = [len(line) for line in lines]
        return [json.loads(line) for line in lines]

    def acknowledge(self, count: int, run_id: str | None) -> None:
        """Mark the first `count` records of the last `head` as received by this run.

        Args:
            count: number of records.
            run_id: id of the run that received them; None if no run has.
        """
        self._sent += count
        self._offset += sum(self._window[:count])
        self._mark(run_id)

    def rewind(self) -> None:
        """Mark all records as unsent, because the store that acknowledged them is lost."""
        self._sent = 0
        self._offset = 0
        self._mark(None)

    def last(self, *kinds: str) -> dict[str, Any] | None:
        """Return the newest record of these kinds, sent or not; None if there is none.

        Args:
            *kinds: kinds of records, such as "start" and "metrics".
        """
        starts = tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds)
        return next(
            (json.loads(line) for line in reversed(self._whole_lines()) if line.startswith(starts)),
            None,
        )

    def tags(self) -> dict[str, str]:
        """Return the newest value of each tag that was recorded, sent or not."""
        values: dict[str, str] = {}
        for line in self._whole_lines():
            if line.startswith(b'{"kind": "tags"'):
                values |= json.loads(line)["values"]
        return values

    def _whole_lines(self, offset: int = 0, size: int = -1) -> list[bytes]:
        """Return the complete lines from `offset` on, at most about `size` bytes."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                lines = file.readlines(size)
        except FileNotFoundError:
            return []
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]

    def _mark(self, run_id: str | None) -> None:
        """Write how many records have been sent, and to which run."""
        self.run_id = run_id
        # If the disk is full, a crash causes these records to be sent again, which is harmless.
        with contextlib.suppress(OSError):
            files.write_file(self._sent_path, json.dumps({"records": self._sent, "run_id": run_id}))

    def _read_mark(self) -> dict[str, Any]:
        """Return the content of the file that marks how many records have been sent."""
        try:
            return json.loads(self._sent_path.read_text())
        except (FileNotFoundError, ValueError, RecursionError):
            # The file is missing or incomplete. Sending all records again is harmless.
            return {"records": 0, "run_id": None}


class Spool(Tail):
    """Writer and reader of a spool, safe for one writer thread and one reader thread.

    While the disk is full, records stay in memory (`homeless`). They are written as soon as there
    is space.

    Args:
        folder: the run's folder.

    Raises:
        RaysimError: another process has this spool open.
    """

    def __init__(self, folder: Path) -> None:
        files.make_private(Path(folder))
        path = Path(folder).absolute() / SPOOL_FILE
        try:
            handle = files.open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise RaysimError(f"{path} cannot be written: {error.strerror}") from None
        self._file = open(handle, "ab+", buffering=0)  # noqa: SIM115
        if not lock_descriptor(self._file.fileno(), blocking=False):
            self._file.close()
            raise RaysimError(
                f"{folder}: another process is tracking a run here; wait for it or end it"
            ) from None
        super().__init__(folder)
        self._lock = threading.Lock()
        self._memory: deque[bytes] = deque()
        self._full = False
        lines = self._whole_lines()
        self._total = len(lines)
        self.size = sum(map(len, lines))
        """Size of the spool in bytes."""
        self.latest: int = json.loads(lines[-1])["time"] if lines else 0
        """Time of the last record when the spool was opened, in milliseconds since 1970."""
        # Remove an incomplete last line, which a crash may have left.
        os.ftruncate(self._file.fileno(), self.size)

    @property
    def pending(self) -> int:
        """Number of unacknowledged records, including those in memory."""
        return self._total - self._sent + len(self._memory)

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
