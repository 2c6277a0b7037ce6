"""Stages of a command before its first round, such as "loading mnist", "starting Ray".

Each stage is a record of the logger `raysim.system.startup_stages`, at level INFO, which nothing
shows unless a handler is added. Facts about a run that are no mistakes are records of the logger
`raysim.notes`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial

logger = logging.getLogger("raysim.system.startup_stages")
notes = logging.getLogger("raysim.notes")


def begin(stage: str) -> None:
    """Report that a stage begins; it lasts until the next one, or the first round.

    Args:
        stage: name of the stage.
    """
    logger.info("%s", stage)


@contextmanager
def shown_by(show: Callable[[str], object], logger: logging.Logger = logger) -> Iterator[None]:
    """Inside the block, call `show` with every stage that begins in this process.

    Args:
        show: the function to call with each stage.
        logger: `notes` for notes in place of stages.
    """
    handler = _Handler(show)
    level = logger.level
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def notes_shown_by(show: Callable[[str], object]) -> AbstractContextManager[None]:
    """Inside the block, call `show` with each note once, such as of the trials of a sweep.

    Args:
        show: the function to call with each note.
    """
    return shown_by(cache(show), notes)


def notes_logged() -> AbstractContextManager[None]:
    """Inside the block, log each note once as a warning, which Python shows without any setting."""
    return notes_shown_by(partial(logging.getLogger("raysim").warning, "note: %s"))


class _Handler(logging.Handler):
    def __init__(self, show: Callable[[str], object]):
        super().__init__()
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())
