"""MLflow, without the engine ever waiting for it.

The engine writes its records to a spool in the run's folder (`raysim.tracking.spool`). One writer
thread follows that file and sends the records (`raysim.tracking.spool_sender`) to a process that
calls MLflow (`raysim.tracking.mlflow_process`). In a sweep each trial's process only spools, and
one writer sends the records of all.

No record is lost: after a crash of the run or of the server, `replay_spool` (on the command line:
raysim tracking sync RUN_DIR) sends exactly the records that are missing. Records may be sent twice
without harm: each has its time, a run has the key under which it was created, and a reopened run
is asked which steps it has.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets, restored_uri
from raysim.errors import RaysimError
from raysim.tracking.mlflow_process.run_client import RunClient
from raysim.tracking.recorder import Recorder, Status
from raysim.tracking.spool_sender import DRAIN_TIMEOUT_S, Writer, new_run_option
from raysim.tracking.store_errors import FileRefused, RunDeleted, brief, remedy

logger = logging.getLogger("raysim.tracking")


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

    draws = True

    def __init__(self, tracking: Tracking, run_dir: Path, parent: str | None = None) -> None:
        super().__init__(
            absolute_uri(restored_uri(tracking.uri)), tracking.experiment, run_dir, parent
        )
        self.required = tracking.required
        kept = f"The run continues; records are kept in {self._spool.path}"
        self._writer = Writer(self._uri, self._experiment, kept)
        self._server = RunClient(
            self._writer.connection, self._uri, self._experiment, self._spool.run_id, run_dir
        )
        self._started = False

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; provisional until the server is reached, "" before `start`."""
        sent = self._server.run_id if self._server.key == self._key else None
        return sent or self._key

    @property
    def pending(self) -> int:
        """Number of records that are not sent yet."""
        return self._spool.pending

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
                reached within `spool_sender.START_TIMEOUT_S`.

        See `Recorder.start`.
        """
        begin = self._spool.size
        super().start(name, params, tags, run_id)
        self._writer.quiet = self.required  # an outage is then reported here
        self._send()
        error = self._writer.await_opening(self._server, self._key)
        self._writer.quiet = False
        if error is not None and self.required:
            self._writer.stop()
            self._closing.set()
            self._spool.close(begin)
            self._key = ""  # there is no run
            raise RaysimError(
                f"tracking.uri: {mask_secrets(self._server.uri)} cannot be used: {brief(error)}. "
                f"{remedy(self._uri, error)}, "
                "or set tracking.required=false to run without it (what is tracked is then kept "
                "and sent later)"
            ) from None
        return self.run_id

    def _send(self) -> None:
        """Have the spool sent from now on."""
        if not self._started:
            self._started = True
            self._writer.send(self._spool, self._server)

    def finish(self, status: Status) -> None:
        """Send the remaining records and end the run, in 20 s (5 s if the server is down).

        See `Recorder.finish`.
        """
        if self._closing.is_set():
            return
        if self._started and not self._writer.stopped:
            self._record("finish", status=status)
        self._closing.set()
        if self.pending:
            self._send()
        else:  # nothing was begun, and MLflow may still be imported
            self._writer.stop()
            self._spool.close()
        self._writer.finish(DRAIN_TIMEOUT_S["up"])
        if self.pending:
            self._report_unsent(self._writer.error)
        if lost := self._spool.homeless:
            logger.error("%d of them are lost: the disk of %s is full", lost, self._spool.path)

    def _report_unsent(self, error: Exception | None) -> None:
        """Warn of records that were not sent; a required database that lacks some is a failure."""
        if not self._spool.path.exists():
            uri = mask_secrets(self._server.uri)
            text = "%d records were not sent to %s and are lost: %s no longer exists"
            logger.error(text, self.pending, uri, self._spool.path)
            if self.required and database_of(self._server.uri):
                self.failure = text % (self.pending, uri, self._spool.path)
            return
        command = f"raysim tracking sync {shlex.quote(str(self._spool.path.parent))}"
        logger.warning(
            "%d records were not sent to %s (%s); they are kept in %s; to send them: %s%s",
            self.pending,
            mask_secrets(self._server.uri),
            brief(error or TimeoutError("it is too slow")),
            self._spool.path,
            command,
            new_run_option(error),
        )
        refused = isinstance(error, FileRefused | RunDeleted)
        if self.required and database_of(self._server.uri) and error is not None and not refused:
            advice = remedy(self._uri, error)
            self.failure = (
                f"tracking.uri: {self.pending} records of this run are not in "
                f"{self._server.uri}: {brief(error)}. The run itself is complete in "
                f"{self._spool.path.parent}. {advice}, then: {command}"
            )
