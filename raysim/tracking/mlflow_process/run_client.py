"""Calls of MLflow by a process that does not import it: records of a run, and facts about one."""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from raysim.config.sections.storage import Tracking
from raysim.config.tracking_uri import absolute_uri, database_of, mask_secrets
from raysim.errors import ConfigError
from raysim.tracking.mlflow_process.connection import Connection, check
from raysim.tracking.mlflow_process.run_in_store import RunInStore
from raysim.tracking.store_errors import brief

MAX_METRICS_PER_REQUEST = 1000
"""MLflow's limit of metrics in a request."""


class RunClient(RunInStore):
    """Client of an MLflow server or database for one run.

    Args:
        connection: the thread's connection to the process that calls MLflow.
        arguments: those of `RunInStore`.
    """

    def __init__(self, connection: Connection, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connection = connection
        self.refuses_files = False
        """True if the store has refused a file."""

    def send(self, records: list[dict[str, Any]]) -> int:
        """Send the first record, or as many metric records as fit in one batch.

        Args:
            records: the oldest unsent records of the spool, at least one.

        Returns:
            The number of records that were sent.

        Raises:
            Refused: the server will never accept the first record.
            FileRefused: the store does not accept the file of the first record.
            RunDeleted: the run was deleted; the records belong to it or to a new one.
            ProcessFailed: the process that calls MLflow does not answer.
            Exception: any error of MLflow or the network. The record may or may not have arrived;
                try again.
        """
        together = records[: _together(records)]
        reply = self.connection.request(
            {"call": "send", "run": self.arguments(), "records": together}
        )
        # A process that was started again knows of the opened run by its id only.
        self.run_id, self.key = reply["run_id"], reply["key"] or self.key
        check(reply)
        return reply["sent"]


def _together(records: list[dict[str, Any]]) -> int:
    """Return how many of the first records fit in one request.

    Metrics go together up to MLflow's limit; every other kind goes alone.
    """
    sizes = (
        len(record["values"])
        for record in takewhile(lambda record: record["kind"] == "metrics", records)
    )
    return max(1, sum(total <= MAX_METRICS_PER_REQUEST for total in accumulate(sizes)))


def find_run(uri: str, run_id: str) -> tuple[str, dict[str, str]]:
    """Return the id of a run's experiment, and the run's tags.

    Args:
        uri: absolute tracking URI.
        run_id: MLflow's id of the run.

    Raises:
        Exception: any error of MLflow or the network, or there is no such run.
    """
    with closing(Connection()) as connection:
        reply = connection.request({"call": "find", "uri": uri, "run_id": run_id})
    check(reply)
    return reply["experiment_id"], reply["tags"]


def folder_of_tracked_run(run_id: str, uri: str | None = None) -> str:
    """Return the folder of a run that MLflow knows by this id.

    Args:
        run_id: MLflow's id of the run.
        uri: tracking URI; None: the default of `tracking.uri`.

    Raises:
        ConfigError: the store cannot be read or has no such run, or its folder is not on this
            machine.
    """
    address = absolute_uri(uri or Tracking().uri)
    database = database_of(address)
    if database and not database.exists():
        raise ConfigError(
            f"there is no {database} to look run {run_id} up in; say tracking.uri=…, or give its "
            "folder"
        )
    try:
        _, tags = find_run(address, run_id)
    except Exception as error:
        raise ConfigError(
            f"run {run_id} is not found in {mask_secrets(address)}: {brief(error)}; say "
            "tracking.uri=…, or give its folder"
        ) from None
    if not (folder := tags.get("run_dir")) or not Path(folder).is_dir():
        raise ConfigError(
            f"run {run_id} was made in {folder or 'an unknown folder'}, which is not on this "
            "machine"
        )
    return folder
