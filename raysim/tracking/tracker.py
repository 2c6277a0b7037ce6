"""MLflow, without the engine ever waiting for it.

The engine writes its records to a spool in the run's folder (`raysim.tracking.spool`). One writer
thread follows that file and sends the records: many rounds in one batch, about once a second, with
increasing pauses while the server is down. In a sweep each trial's process only spools, and one
`Forwarder` sends the records of all.

No record is lost: after a crash of the run or of the server, `replay_spool` (on the command line:
raysim tracking sync RUN_DIR) sends exactly the records that are missing. Records may be sent twice
without harm: each has its time, a run has the key under which it was created, and a reopened run
is asked which steps it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets, restored_uri
from raysim.errors import ConfigError, RaysimError
from raysim.tracking.mlflow_client import (
    FileRefused,
    Refused,
    RunClient,
    RunDeleted,
    brief,
)
from raysim.tracking.recorder import Clock, Recorder, Status, legal
from raysim.tracking.spool import SPOOL_FILE, Spool, Tail

logger = logging.getLogger("raysim.tracking")

FLUSH_INTERVAL_S = 1.0
"""Seconds between two batches."""
START_TIMEOUT_S = {"http": 7.0, "database": 60.0}
"""Seconds without a sign of life after which `start` gives up. To create a database takes a few."""
DRAIN_TIMEOUT_S = {"up": 20.0, "down": 5.0}
"""Seconds that `finish` gives the writer, by the last known state of the server."""
MAX_RETRY_PAUSE_S = 15.0
"""Seconds between two attempts when the server has been down for a while."""


class Tracker(Recorder):
    """One run in MLflow. Only `start` and `finish` wait; the rest appends to the spool and returns.

    Args:
        tracking: section of the configuration: the store, the experiment, and whether the run
            may start without the store.
        run_dir: the folder of the run, which contains the spool.
        parent: id of the run in MLflow under which this one is shown; None: none.

    Raises:
        ConfigError: `tracking.uri` is not usable, or lacks its credentials.
        RaysimError: another process tracks a run in this folder.
    """

    def __init__(self, tracking: Tracking, run_dir: Path, parent: str | None = None) -> None:
        super().__init__(
            absolute_uri(restored_uri(tracking.uri)), tracking.experiment, run_dir, parent
        )
        self.required = tracking.required
        self._server = RunClient(self._uri, self._experiment, self._spool.run_id, run_dir)
        self._error: Exception | None = None
        self._down_since: float | None = None
        self._attempts = 0
        self._failures = 0
        self._beats = 0
        self._news = threading.Condition()
        self._imported, self._started, self._hurry, self._stop = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._writer = threading.Thread(target=self._write, name="raysim-tracking", daemon=True)
        self._writer.start()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; provisional until the server is reached, "" before `start`."""
        sent = self._server.run_id if self._server.key == self._key else None
        return sent or self._key

    @property
    def pending(self) -> int:
        """Number of records that are not sent yet."""
        return self._spool.pending

    @property
    def failures(self) -> int:
        """Number of failed attempts, plus that of records that the server refused for good."""
        return self._failures + self._server.refused

    def start(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        run_id: str | None = None,
    ) -> str:
        """Create the run in its experiment, or reopen `run_id`.

        Records that are left in the spool are sent first.

        Returns:
            The run id. It is provisional if the server is down and `tracking.required` is false.

        Raises:
            RaysimError: `tracking.required` is true, and the server has no such run or cannot be
                reached within `START_TIMEOUT_S`.

        See `Recorder.start`.
        """
        begin = self._spool.size
        super().start(name, params, tags, run_id)
        self._started.set()
        self._hurry.set()
        if (error := self._await_opening()) is not None and self.required:
            self._stop.set()
            self._hurry.set()
            self._closing.set()
            self._spool.close(begin)
            self._key = ""  # there is no run
            raise RaysimError(
                f"tracking.uri: {mask_secrets(self._server.uri)} cannot be used: {brief(error)}. "
                f"{self._server.remedy(error)}, "
                "or set tracking.required=false to run without it (what is tracked is then kept "
                "and sent later)"
            ) from None
        return self.run_id

    def finish(self, status: Status) -> None:
        """Send the remaining records and end the run, in 20 s (5 s if the server is down).

        See `Recorder.finish`.
        """
        if self._closing.is_set():
            return
        if self._started.is_set() and not self._stop.is_set():
            self._record("finish", status=status)
        elif not self.pending:  # nothing was begun, and the writer may still be importing
            self._stop.set()
            self._spool.close()
        self._closing.set()
        self._started.set()
        self._hurry.set()
        if self.pending and self._down_since is not None:
            self._writer.join(DRAIN_TIMEOUT_S["down"])
        if self.pending and self._down_since is None:
            self._writer.join(DRAIN_TIMEOUT_S["up"])
        self._stop.set()
        self._hurry.set()
        # Python may abort if it exits while a thread imports.
        self._writer.join(0.5 if self._imported.is_set() else START_TIMEOUT_S["database"])
        if self.pending:
            logger.warning(
                "%d records were not sent to %s (%s); they are kept in %s; to send them: raysim "
                "tracking sync %s%s",
                self.pending,
                mask_secrets(self._server.uri),
                brief(self._error or TimeoutError("it is too slow")),
                self._spool.path,
                shlex.quote(str(self._spool.path.parent)),
                _to_a_new_run(self._error),
            )
            error, database = self._error, database_of(self._server.uri)
            refused = isinstance(error, FileRefused | RunDeleted)
            if self.required and database and error is not None and not refused:
                self.failure = (
                    f"tracking.uri: {self.pending} records of this run are not in "
                    f"{self._server.uri}: {brief(error)}. The run itself is complete in "
                    f"{self._spool.path.parent}. {self._server.remedy(error)}, then: raysim "
                    f"tracking sync {shlex.quote(str(self._spool.path.parent))}"
                )
        if lost := self._spool.homeless:
            logger.error("%d of them are lost: the disk of %s is full", lost, self._spool.path)

    def _await_opening(self) -> Exception | None:
        """Wait until the run is open; time spent on sending old records does not count."""
        patience = START_TIMEOUT_S["http" if self._server.uri.startswith("http") else "database"]
        with self._news:
            self._news.wait_for(
                lambda: self._beats, START_TIMEOUT_S["database"]
            )  # importing MLflow is not the server's fault
            locked_until = time.monotonic() + START_TIMEOUT_S["database"]
            while self._server.key != self._key:
                # Another process may hold a SQLite file for a while.
                locked = "database is locked" in str(self._error)
                if self._error is not None and not (locked and time.monotonic() < locked_until):
                    return self._error
                before = self._beats
                if not self._news.wait_for(lambda: self._beats > before, patience):  # noqa: B023
                    return TimeoutError(f"no answer within {patience:g} s")
        return None

    def _write(self) -> None:
        """Send the records until the run ends. Only this thread imports and calls MLflow."""
        with contextlib.suppress(Exception):  # reported when it is needed
            self._server.import_mlflow()  # while the executor opens
        self._imported.set()
        self._started.wait()
        self._beat()
        while not self._stop.is_set() and (self.pending or not self._closing.is_set()):
            try:
                while not self._stop.is_set() and _advance(self._spool, self._server):
                    self._up()
                    self._beat()
                if self._closing.is_set():
                    _send_postponed(self._spool, self._server)
                pause = FLUSH_INTERVAL_S
            except FileRefused as refusal:
                self._error = refusal
                break
            except Exception as error:
                self._down(error)
                pause = min(MAX_RETRY_PAUSE_S, 0.5 * 2 ** min(self._attempts - 1, 9))
            if self.pending or not self._closing.is_set():
                self._hurry.wait(min(pause, 1.0) if self._closing.is_set() else pause)
                self._hurry.clear()
        self._spool.close()

    def _beat(self, error: Exception | None = None) -> None:
        with self._news:
            self._beats += 1
            self._error = error
            self._news.notify_all()

    def _down(self, error: Exception) -> None:
        self._failures += 1
        self._attempts += 1
        opened = self._server.key == self._key
        if self._down_since is None:
            self._down_since = time.monotonic()
            if opened or not self.required:  # otherwise `start` raises, which reports it
                logger.warning(
                    "%s. The run continues; records are kept in %s until it is back",
                    _problem(self._server.uri, error),
                    self._spool.path,
                )
        self._beat(error)

    def _up(self) -> None:
        if self._down_since is not None:
            logger.warning(
                "tracking is back: %s, after %.0f s and %d failed attempts; %d records to send",
                mask_secrets(self._server.uri),
                time.monotonic() - self._down_since,
                self._attempts,
                self.pending,
            )
            self._down_since, self._attempts = None, 0


class Forwarder:
    """Sends the spools of many runs over one thread.

    Only this process writes to the store, whichever processes train the runs.

    Args:
        uri: absolute tracking URI.
        experiment: name of the experiment of all these runs.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri, self._experiment = uri, experiment
        self._followed: dict[Path, tuple[Tail, RunClient]] = {}
        self._sent = self._attempts = 0
        self._error: Exception | None = None
        self._hurry, self._closing, self._stop = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._writer = threading.Thread(target=self._write, name="raysim-forwarding", daemon=True)
        self._writer.start()

    def follow(self, run_dir: Path) -> None:
        """Send what is spooled in a folder, beginning with what was left there.

        Args:
            run_dir: folder of a run; the run itself writes the spool.
        """
        tail = Tail(run_dir)
        self._followed[run_dir] = (
            tail,
            RunClient(self._uri, self._experiment, tail.run_id, run_dir),
        )
        self._hurry.set()

    def finish(self) -> None:
        """Send the remaining records, for as long as sending makes progress.

        Records that cannot be sent stay in the spool, and a warning is logged.
        """
        self._closing.set()
        self._hurry.set()
        before = -1
        while self._writer.is_alive() and before != self._sent:
            before = self._sent
            self._writer.join(DRAIN_TIMEOUT_S["down" if self._error else "up"])
        self._stop.set()
        self._hurry.set()
        self._writer.join(0.5)
        if left := [folder for folder in self._followed if Tail(folder).pending]:
            logger.warning(
                "the records of %d runs were not all sent to %s (%s); they are kept in their "
                "folders. To send them, "
                "give the same command again, or for each: raysim tracking sync %s%s",
                len(left),
                mask_secrets(self._uri),
                brief(self._error or TimeoutError("it is too slow")),
                shlex.quote(str(left[0])),
                _to_a_new_run(self._error),
            )

    def _write(self) -> None:
        while not self._stop.is_set():
            closing, pause = self._closing.is_set(), FLUSH_INTERVAL_S
            try:
                if not self._send() and closing:
                    self._send_files()
                    return
            except Exception as error:
                self._down(error)
                pause = min(MAX_RETRY_PAUSE_S, 0.5 * 2 ** min(self._attempts - 1, 9))
            self._hurry.wait(min(pause, 1.0) if closing else pause)
            self._hurry.clear()

    def _send(self) -> bool:
        """Send the pending records of all runs once; return whether there were any."""
        before = self._sent
        for tail, server in list(self._followed.values()):
            while not self._stop.is_set() and (count := _advance(tail, server)):
                self._sent += count
                if self._error:
                    logger.warning(
                        "tracking is back: %s, after %d failed attempts",
                        mask_secrets(self._uri),
                        self._attempts,
                    )
                    self._error, self._attempts = None, 0
        return self._sent > before

    def _send_files(self) -> None:
        """Send the files that the store refused before, of all runs."""
        for tail, server in list(self._followed.values()):
            try:
                _send_postponed(tail, server)
            except FileRefused as refusal:
                self._error = refusal

    def _down(self, error: Exception) -> None:
        if self._error is None:
            logger.warning(
                "%s. The runs continue; their records are kept in their folders until it is back",
                _problem(self._uri, error),
            )
        self._error = error
        self._attempts += 1


def replay_spool(run_dir: Path, to_a_new_run: bool = False) -> int:
    """Send the records that are still in a run's spool.

    Each record reaches the store exactly once, also if an earlier attempt sent a part of them.

    Args:
        run_dir: the run's folder.
        to_a_new_run: whether a new run receives all records, because the former one was deleted.

    Returns:
        The number of records that were sent; 0 if nothing was left.

    Raises:
        ConfigError: there is no spool, or the store's address lacks its credentials.
        RaysimError: the run is still training, or the server cannot be reached.
    """
    if not (Path(run_dir) / SPOOL_FILE).is_file():
        raise ConfigError(
            f"{run_dir}: nothing was tracked here (there is no {SPOOL_FILE}); give a run's folder"
        )
    spool = Spool(run_dir)
    with contextlib.closing(spool):
        start = spool.last("start")
        uri = _where_it_is(start, spool.path.parent) if start else ""
        database = database_of(uri)
        replaces = None
        if to_a_new_run or (database and not database.exists()):
            replaces = spool.run_id
            spool.rewind()  # what was sent was deleted: a new run gets all records
        if not (left := spool.pending):
            return 0
        if start is None:
            raise ConfigError(
                f"{run_dir / SPOOL_FILE} has no record of the start of a run; put the file back "
                "from a copy"
            )
        server = RunClient(restored_uri(uri), start["experiment"], spool.run_id, run_dir, replaces)
        try:
            while _advance(spool, server):
                pass
            _send_postponed(spool, server)
        except Exception as error:
            raise RaysimError(
                f"{run_dir}: {spool.pending} of {left} records still cannot be sent to "
                f"{mask_secrets(server.uri)}: "
                f"{brief(error)}. {_remedy(server, error)}, then try again{_to_a_new_run(error)}"
            ) from None
    return left


def add_to(
    run_dir: Path, metrics: Mapping[str, float], step: int, artifacts: Path, place: str
) -> None:
    """Add metrics and a folder of files to the run of a folder, finished or not.

    Args:
        run_dir: the run's folder.
        metrics: values by name. A metric that the run already has at this step is not changed.
        step: step of the metrics, a number of completed rounds.
        artifacts: folder whose files are logged as artifacts of the run.
        place: folder for them within the run's artifacts.

    Raises:
        ConfigError: the run was not tracked.
        RaysimError: the run is still training, or the server cannot be reached. In the last case
            `replay_spool` can send the metrics later.
    """
    if not (Path(run_dir) / SPOOL_FILE).is_file():
        raise ConfigError(
            f"{run_dir}: nothing was tracked here (there is no {SPOOL_FILE}); give a run's folder"
        )
    spool = Spool(run_dir)
    now = Clock(spool.latest).now()
    with contextlib.closing(spool):
        if metrics:
            values = {legal(key): float(value) for key, value in metrics.items()}
            spool.append({"kind": "metrics", "time": now, "step": step, "values": values})
        spool.append(
            {
                "kind": "artifact",
                "time": now,
                "path": spool.place(artifacts),
                "folder": place,
            }
        )
    replay_spool(run_dir)


def _where_it_is(start: Mapping[str, Any], run_dir: Path) -> str:
    """Return the tracking URI of a run, also if its SQLite database was moved with its folder."""
    database = database_of(start["uri"])
    if database and not database.exists() and start.get("database"):
        moved = Path(os.path.normpath(run_dir / start["database"]))
        if moved.exists():
            return start["uri"].replace(str(database), str(moved), 1)
    return start["uri"]


def _advance(spool: Tail, server: RunClient) -> int:
    """Send the next records; return how many are done, 0 at the end of the spool."""
    if not (records := spool.head()):
        return 0
    first = records[0]
    if first["kind"] == "artifact" and server.refuses_files:
        spool.postpone(first)  # each attempt may last until a time limit
        return 1
    try:
        count = server.send(records)
    except Refused as refusal:
        _report_refusal(server, first, refusal)
        count = 1
    except FileRefused as refusal:
        logger.warning(
            "tracking: %s takes no files (%s). It gets the metrics, parameters, tags and the "
            "status; the files are tried again at the end of the run",
            mask_secrets(server.uri),
            refusal,
        )
        spool.postpone(first)
        return 1
    spool.acknowledge(count, server.run_id)
    return count


def _send_postponed(spool: Tail, server: RunClient) -> None:
    """Send the files that the store refused before.

    Raises:
        FileRefused: the store refuses one of them again; it and those after it stay postponed.
        Exception: the server fails.
    """
    while spool.postponed:
        try:
            server.send(spool.postponed[:1])
        except Refused as refusal:
            _report_refusal(server, spool.postponed[0], refusal)
        spool.acknowledge_postponed()


def _report_refusal(server: RunClient, record: Mapping[str, Any], refusal: Refused) -> None:
    """Log and count a record that the server will never accept."""
    server.refused += 1
    logger.error("tracking: %s refuses %s: %s", mask_secrets(server.uri), record["kind"], refusal)


def _problem(uri: str, error: Exception) -> str:
    """Return why a store cannot be used, as the beginning of a warning."""
    if isinstance(error, RunDeleted):
        return f"tracking: {mask_secrets(uri)}: {brief(error)}"
    return f"tracking is down: {mask_secrets(uri)} ({brief(error)})"


def _remedy(server: RunClient, error: Exception) -> str:
    """Return advice for records that cannot be sent."""
    if isinstance(error, FileRefused):
        return "Make the artifact store of the run usable from here"
    return "Restore the run" if isinstance(error, RunDeleted) else server.remedy(error)


def _to_a_new_run(error: Exception | None) -> str:
    """Return the option of `raysim tracking sync` for a run that was deleted, else ""."""
    return ", or add --new-run to send all records to a new run" * isinstance(error, RunDeleted)
