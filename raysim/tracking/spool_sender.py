"""The thread that sends spooled records to a tracking store.

It sends many rounds in one batch, about once a second, with increasing pauses while the server is
down. A process of its own calls MLflow (`raysim.tracking.mlflow_process`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config.tracking_uri import mask_secrets
from raysim.tracking.mlflow_process.connection import Connection
from raysim.tracking.mlflow_process.run_client import RunClient
from raysim.tracking.spool import Tail
from raysim.tracking.store_errors import FileRefused, Refused, RunDeleted, brief

logger = logging.getLogger("raysim.tracking")

FLUSH_INTERVAL_S = 1.0
"""Seconds between two batches."""
START_TIMEOUT_S = {"http": 30.0, "database": 60.0}
"""Seconds without a sign of life after which `start` gives up. To open a run takes several calls,
and MLflow itself ends one that is not answered; to create a database takes a few seconds."""
DRAIN_TIMEOUT_S = {"up": 20.0, "down": 5.0}
"""Seconds that `finish` gives the writer, by the last known state of the server."""
SILENT_DRAIN_S = 3.0
"""Seconds after which `finish` says that it waits."""
MAX_RETRY_PAUSE_S = 15.0
"""Seconds between two attempts when the server has been down for a while."""


class Writer:
    """Sends the spools of runs to a tracking store, in a thread of its own.

    Args:
        uri: absolute tracking URI.
        experiment: name of the experiment of the runs.
        kept: sentence for the warning that the store is down: what happens to the records.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        kept: str = "The runs continue; their records are kept in their folders",
    ) -> None:
        self._uri, self._experiment, self._kept = uri, experiment, kept
        self.connection = Connection()
        """The writer's connection to the process that calls MLflow."""
        self._followed: list[tuple[Tail, RunClient]] = []
        self._folders: list[Path] = []
        self.error: Exception | None = None
        """Why the last attempt failed; None after a success."""
        self.quiet = False
        """Whether an outage is not logged, because somebody else reports it."""
        self._down_since: float | None = None
        self._attempts = self._sent = self._beats = 0
        self._news = threading.Condition()
        self._hurry = threading.Event()
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="raysim-tracking", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether the writer was told to send nothing more."""
        return self._stop.is_set()

    def follow(self, run_dir: Path) -> None:
        """Send what is spooled in a folder, beginning with what was left there.

        Args:
            run_dir: folder of a run; another process may write its spool.
        """
        tail = Tail(run_dir)
        self._folders.append(run_dir)
        client = RunClient(self.connection, self._uri, self._experiment, tail.run_id, run_dir)
        self.send(tail, client)

    def send(self, spool: Tail, client: RunClient) -> None:
        """Send a spool, beginning with what was left in it. The writer closes it at the end.

        Args:
            spool: the spool.
            client: client of the run in the store.
        """
        self._followed.append((spool, client))
        self._hurry.set()

    def await_opening(self, client: RunClient, key: str) -> Exception | None:
        """Wait until a run is open; time spent on sending old records does not count.

        Args:
            client: client of the run.
            key: key of the run in its start record.

        Returns:
            Why it cannot be opened; None if it is open.
        """
        patience = START_TIMEOUT_S["http" if self._uri.startswith("http") else "database"]
        with self._news:
            # Importing MLflow is not the server's fault.
            self._news.wait_for(lambda: self._beats, START_TIMEOUT_S["database"])
            locked_until = time.monotonic() + START_TIMEOUT_S["database"]
            while client.key != key:
                # Another process may hold a SQLite file for a while.
                locked = "database is locked" in str(self.error)
                if self.error is not None and not (locked and time.monotonic() < locked_until):
                    return self.error
                before = self._beats
                if not self._news.wait_for(lambda: self._beats > before, patience):  # noqa: B023
                    return TimeoutError(f"no answer within {patience:g} s")
        return None

    def finish(self, limit_s: float = math.inf) -> None:
        """Send the remaining records, for as long as sending makes progress.

        Records that cannot be sent stay in the spools. A warning is logged for those of followed
        folders.

        Args:
            limit_s: seconds after which it ends in any case.
        """
        deadline = time.monotonic() + limit_s
        self._closing.set()
        self._hurry.set()
        before = -1
        self._thread.join(min(SILENT_DRAIN_S, limit_s))
        if self._thread.is_alive() and not self._is_over(deadline) and self._down_since is None:
            uri = mask_secrets(self._uri)
            logger.warning("waiting for %s, which takes the last records slowly", uri)
        while self._thread.is_alive() and before != self._sent and not self._is_over(deadline):
            before = self._sent
            patience = DRAIN_TIMEOUT_S["up" if self._down_since is None else "down"]
            self._thread.join(min(patience, deadline - time.monotonic()))
        self.stop()
        self._thread.join(0.5)
        if left := [folder for folder in self._folders if Tail(folder).pending]:
            logger.warning(
                "the records of %d runs were not all sent to %s (%s); they are kept in their "
                "folders. To send them, "
                "give the same command again, or for each: raysim tracking sync %s%s",
                len(left),
                mask_secrets(self._uri),
                brief(self.error or TimeoutError("it is too slow")),
                shlex.quote(str(left[0])),
                new_run_option(self.error),
            )

    def _is_over(self, deadline: float) -> bool:
        return self._stop.is_set() or time.monotonic() >= deadline

    def stop(self) -> None:
        """End without sending more."""
        self._stop.set()
        self._hurry.set()

    def _write(self) -> None:
        """Send the records until the end."""
        with contextlib.suppress(Exception):  # reported when it is needed
            # While the executor opens.
            self.connection.request({"call": "import", "uri": self._uri})
        self._beat()
        while not self._stop.is_set():
            closing = self._closing.is_set()
            pause = FLUSH_INTERVAL_S
            try:
                sent = self._send_all()
                if closing and not sent:
                    self._send_files()
                    break
            except Exception as error:
                self._down(error)
                pause = min(MAX_RETRY_PAUSE_S, 0.5 * 2 ** min(self._attempts - 1, 9))
            else:
                if closing:
                    continue
            self._hurry.wait(min(pause, 1.0) if closing else pause)
            self._hurry.clear()
        for spool, _ in self._followed:
            spool.close()
        self.connection.close()

    def _send_all(self) -> bool:
        """Send the pending records of all runs once; return whether there were any."""
        before = self._sent
        for spool, client in list(self._followed):
            while not self._stop.is_set() and (count := advance(spool, client)):
                self._sent += count
                self._up()
        return self._sent > before

    def _send_files(self) -> None:
        """Send the files that the store refused before, of all runs."""
        for spool, client in list(self._followed):
            try:
                send_postponed(spool, client)
            except FileRefused as refusal:
                self.error = refusal

    def _beat(self, error: Exception | None = None) -> None:
        with self._news:
            self._beats += 1
            self.error = error
            self._news.notify_all()

    def _down(self, error: Exception) -> None:
        self._attempts += 1
        if self._down_since is None:
            self._down_since = time.monotonic()
            if not self.quiet:
                problem = _problem(self._uri, error)
                logger.warning("%s. %s until it is back", problem, self._kept)
        self._beat(error)

    def _up(self) -> None:
        if self._down_since is not None:
            logger.warning(
                "tracking is back: %s, after %.0f s and %d failed attempts; %d records to send",
                mask_secrets(self._uri),
                time.monotonic() - self._down_since,
                self._attempts,
                sum(spool.pending for spool, _ in self._followed),
            )
            self._down_since = None
            self._attempts = 0
        self._beat()


def advance(spool: Tail, server: RunClient) -> int:
    """Send the next records of a spool.

    Args:
        spool: the spool.
        server: client of its run.

    Returns:
        The number of records that are done; 0 at the end of the spool.

    Raises:
        Exception: the server fails.
    """
    if not (records := spool.head()):
        return 0
    first = records[0]
    is_file = first["kind"] == "artifact"
    if is_file and (server.refuses_files or not (server.run_dir / first["path"]).exists()):
        # Each attempt may last until a time limit; and a resumed run writes its files once more.
        spool.postpone(first)
        return 1
    try:
        count = server.send(records)
    except Refused as refusal:
        _send_parts(server, first, refusal)
        count = 1
    except FileRefused as refusal:
        logger.warning(
            "tracking: %s takes no files (%s). It gets the metrics, parameters, tags and the "
            "status; the files are tried again at the end of the run",
            mask_secrets(server.uri),
            refusal,
        )
        server.refuses_files = True
        spool.postpone(first)
        return 1
    spool.acknowledge(count, server.run_id)
    return count


def send_postponed(spool: Tail, server: RunClient) -> None:
    """Send the files that the store refused before.

    Args:
        spool: the spool that has postponed them.
        server: client of its run.

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


def _send_parts(server: RunClient, record: Mapping[str, Any], refusal: Refused) -> None:
    """Send the metrics of a record that was refused one by one; report what is refused again."""
    values = record["values"] if record["kind"] == "metrics" else {}
    if len(values) < 2:
        _report_refusal(server, record, refusal)
        return
    for name, value in values.items():
        part = {**record, "values": {name: value}}
        try:
            server.send([part])
        except Refused as refused:
            _report_refusal(server, part, refused)


def _report_refusal(server: RunClient, record: Mapping[str, Any], refusal: Refused) -> None:
    """Log a record that the server will never accept."""
    logger.error("tracking: %s refuses %s: %s", mask_secrets(server.uri), record["kind"], refusal)


def _problem(uri: str, error: Exception) -> str:
    """Return why a store cannot be used, as the beginning of a warning."""
    if isinstance(error, RunDeleted):
        return f"tracking: {mask_secrets(uri)}: {brief(error)}"
    return f"tracking is down: {mask_secrets(uri)} ({brief(error)})"


def new_run_option(error: Exception | None) -> str:
    """Return the option of `raysim tracking sync` for a run that was deleted, else "".

    Args:
        error: why records were not sent.
    """
    return ", or add --new-run to send all records to a new run" * isinstance(error, RunDeleted)
