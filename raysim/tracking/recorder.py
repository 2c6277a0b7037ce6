"""Recorder of a run: its start, metrics, data sets, files, tags and end, as records with a time.

The records go to the run's spool (`raysim.tracking.spool`), which another part sends.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from raysim.config.tracking_uri import database_of, mask_secrets, redacted_uri
from raysim.tracking.spool import Spool, plain

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""Status of a run in MLflow."""

POSITION = "raysim.position"
"""Tag of a trial with the number of trials before it in its sweep."""

FORK_ROUND = "fork.round"
"""Tag of a fork: the number of rounds before it."""

FORK_CHANGES = "fork.changes"
"""Tag of a fork: the keys that differ from those of the forked run."""

RESUMED_ROUNDS = "resumed.rounds"
"""Tag of a resumed run: its last `rounds`. MLflow keeps the first value of a parameter."""


def flatten_parameters(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested mapping as a flat one with dotted keys and text.

    Args:
        nested: mapping with string keys, such as a configuration.
        prefix: text before each key.

    Returns:
        Text by dotted key: strings as they are, other values as JSON (true, null, [0.1, 2]).
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


def differing(
    before: Mapping[str, str], after: Mapping[str, str], absent: str = "absent"
) -> dict[str, tuple[str, str]]:
    """Return the parameters that differ, with both values.

    Args:
        before: text by dotted key, as from `flatten_parameters`.
        after: the same of another configuration.
        absent: text for a parameter that one of both lacks.
    """
    return {
        key: (before.get(key, absent), after.get(key, absent))
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    }


def legal(key: str) -> str:
    """Return a name that MLflow accepts: letters, digits and _ - . space : /, at most 250.

    Args:
        key: name of a parameter, metric or tag; other characters become _. Parts between / that are
            empty, "." or ".." are left out.
    """
    parts = re.sub(r"[^\w.\- :/]", "_", str(key))[:250].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"


def legal_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under names that MLflow accepts, a further one of the same name with _.

    Args:
        values: value of each metric by name.
    """
    named: dict[str, float] = {}
    for key, value in values.items():
        name = legal(key)
        while name in named:
            name += "_"
        named[name] = float(value)
    return named


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

    After `finish`, `end` or `close` a further record raises RuntimeError.

    Args:
        uri: absolute URI of the tracking store.
        experiment: name of the MLflow experiment.
        run_dir: the run's folder, which contains the spool.
        parent: id of the parent run in MLflow; None: none.
        labels: tags in addition to those of `start`.

    Raises:
        RaysimError: another process tracks a run in this folder.
    """

    required = False
    """Whether the run fails if the tracking server is not available."""

    tracks = True
    """Whether anything is recorded."""

    draws = False
    """Whether the run's learning curve, partition and clock are drawn. Trials leave them out, since
    the sweep draws all of them."""

    failure = ""
    """After the end: why a required database lacks records of the run; "" if it does not."""

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

    @property
    def latest_step(self) -> int:
        """Step of the newest metrics in this folder; 0 if there are none."""
        record = self._spool.last("metrics")
        return record["step"] if record else 0

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
        database = database_of(self._uri)
        self._record(
            "start",
            key=self._key,
            run_id=run_id,
            name=name,
            parent=self._parent,
            required=self.required,
            uri=redacted_uri(self._uri),
            experiment=self._experiment,
            # Where a SQLite file is from the run's folder; both may be moved together.
            database=database and os.path.relpath(database, self._spool.path.parent),
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
            step: number of completed rounds.
        """
        self._record("metrics", step=int(step), values=legal_metrics(values))

    def inputs(
        self, name: str, digest: str, source: str, context: str, profile: Mapping[str, Any]
    ) -> None:
        """Record a data set or a partition as an input of the run.

        Args:
            name: name of the data set.
            digest: digest of its contents; MLflow keeps the first 36 characters.
            source: path or address from which it was loaded.
            context: its purpose, for example "training".
            profile: description, with values for JSON: sizes, classes.
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
            folder: folder within the run's artifacts; None: their top folder.
        """
        self._record("artifact", path=self._spool.place(path), folder=folder)

    def tags(self, values: Mapping[str, Any]) -> None:
        """Record tags of the run; they replace older values.

        Args:
            values: value of each tag by name; secrets in them are masked.
        """
        self._record("tags", values={legal(k): mask_secrets(str(v)) for k, v in values.items()})

    def finish(self, status: Status) -> None:
        """Record the end of the run and close the spool. A second call has no effect.

        Args:
            status: "FINISHED", "FAILED" or "KILLED".
        """
        if self._closing.is_set():
            return
        if self._key:
            self._record("finish", status=status)
        self.close()

    def end(self, status: Status, why: str = "") -> bool:
        """Record the end of a run whose process has died, at the time of its last record.

        Args:
            status: "FINISHED", "FAILED" or "KILLED".
            why: reason, which becomes the tag `error`; "" for no tag.

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

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Record nothing: there is no spool that places the file. See `Recorder.artifact`."""

    def close(self) -> None:
        """Refuse further records, as every recorder does."""
        self._closing.set()

    def _record(self, kind: str, **content: Any) -> None:
        """Record nothing."""
