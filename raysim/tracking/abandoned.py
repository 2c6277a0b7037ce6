"""Runs whose processes died are marked as FAILED, and their remaining records are sent."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raysim.errors import RaysimError
from raysim.system import lock
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.recorder import Recorder
from raysim.tracking.spool import SPOOL_FILE, Tail

logger = logging.getLogger("raysim.tracking")

DIED_MESSAGE = "its process died without a word: killed, out of memory, or with its Ray"

MAX_WATCHED_FOLDERS = 32
"""Folders that are checked at one time. It takes a while until another host's lock is known as
stale."""


def finish_abandoned(folders: Iterable[Path]) -> list[Path]:
    """Mark runs whose processes died as FAILED, and send their remaining records.

    A run whose process is alive is left alone, on whatever host it is: the process holds or touches
    the run's lock. Records that cannot be sent stay in the spool, and a warning is logged.

    Args:
        folders: folders of runs.

    Returns:
        The folders of the runs that were marked, or had records left.
    """

    def end(folder: Path) -> bool:
        # A process that ends by itself removes its lock.
        if not all((folder / name).is_file() for name in (lock.LOCK_FILE, SPOOL_FILE)):
            return False
        with (
            contextlib.suppress(RaysimError),
            lock.alone(folder),
        ):  # at work after all, or just being ended by another
            ended = Recorder("", "", folder).end("FAILED", DIED_MESSAGE)
            # It may have died after it recorded its end, while that was being sent.
            return ended or Tail(folder).pending > 0
        return False

    folders = list(folders)
    with ThreadPoolExecutor(MAX_WATCHED_FOLDERS) as pool:
        ended = [
            folder for folder, died in zip(folders, pool.map(end, folders), strict=True) if died
        ]
    for folder in ended:
        try:
            replay_spool(folder)
        except RaysimError as error:
            logger.warning(
                "%s; to send them later: raysim tracking sync %s", error, shlex.quote(str(folder))
            )
    return ended


def folders_below(root: Path) -> list[Path]:
    """Return the folders of runs that a process is training, or whose process has died.

    Args:
        root: folder to search, with all folders below it.
    """
    folders = []
    for place, below, names in os.walk(root):
        if SPOOL_FILE in names:
            below.clear()  # nothing in a run's folder is another run's
            if lock.LOCK_FILE in names:
                folders.append(Path(place))
    return folders
