"""Records of a run that has ended, sent from its spool later; figures and files added to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config.tracking_uri import database_of, mask_secrets, restored_uri
from raysim.errors import ConfigError, RaysimError
from raysim.tracking.mlflow_process.connection import Connection
from raysim.tracking.mlflow_process.run_client import RunClient
from raysim.tracking.recorder import Clock, legal_metrics
from raysim.tracking.spool import SPOOL_FILE, Spool
from raysim.tracking.spool_sender import advance, new_run_option, send_postponed
from raysim.tracking.store_errors import brief, remedy


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
    spool = _existing_spool(run_dir)
    with contextlib.closing(spool), contextlib.closing(Connection()) as connection:
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
        server = RunClient(
            connection, restored_uri(uri), start["experiment"], spool.run_id, run_dir, replaces
        )
        try:
            while advance(spool, server):
                pass
            send_postponed(spool, server)
        except Exception as error:
            raise RaysimError(
                f"{run_dir}: {spool.pending} of {left} records still cannot be sent to "
                f"{mask_secrets(server.uri)}: {brief(error)}. "
                f"{remedy(server.uri, error)}, then try again{new_run_option(error)}"
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
    spool = _existing_spool(run_dir)
    now = Clock(spool.latest).now()
    with contextlib.closing(spool):
        if metrics:
            values = legal_metrics(metrics)
            spool.append({"kind": "metrics", "time": now, "step": step, "values": values})
        spool.append(
            {"kind": "artifact", "time": now, "path": spool.place(artifacts), "folder": place}
        )
    replay_spool(run_dir)


def _existing_spool(run_dir: Path) -> Spool:
    """Return the spool of a run, which must have one."""
    if not (Path(run_dir) / SPOOL_FILE).is_file():
        raise ConfigError(
            f"{run_dir}: nothing was tracked here (there is no {SPOOL_FILE}); give a run's folder"
        )
    return Spool(run_dir)


def _where_it_is(start: Mapping[str, Any], run_dir: Path) -> str:
    """Return the tracking URI of a run, also if its SQLite database was moved with its folder."""
    database = database_of(start["uri"])
    if database and not database.exists() and start.get("database"):
        moved = Path(os.path.normpath(run_dir / start["database"]))
        if moved.exists():
            return start["uri"].replace(str(database), str(moved), 1)
    return start["uri"]
