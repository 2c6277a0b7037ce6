"""Calls of Python that train: where they are refused, how they end, and how they are continued."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from raysim.config.objects.python_objects import noting_changes
from raysim.config.references import load_file, load_object
from raysim.engine.state import checkpoint
from raysim.errors import ConfigError
from raysim.runs.given_again import call_with, given_objects
from raysim.runs.run_dir import TEMPORARY_PREFIX, is_closed
from raysim.system import files
from raysim.system.global_generators import one_thread

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def trains(call: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a function of the API that trains.

    It is refused while raysim imports the file that calls it. It waits for another thread that
    trains, see `one_thread`. If a signal stops it, it raises a KeyboardInterrupt with one line on
    what is left, without the frames of what was interrupted.

    Args:
        call: the function.
    """

    @functools.wraps(call)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        _refuse_inside_import(call.__name__)
        try:
            with one_thread(), noting_changes():
                return call(*args, **kwargs)
        except KeyboardInterrupt as stop:
            if not stop.args:  # nothing had begun
                raise
            left = stop.args[0]
        raise KeyboardInterrupt(left)

    return wrapped


def _refuse_inside_import(call: str) -> None:
    """Raise ConfigError if raysim itself imports the module that calls a function."""
    frame, in_module = sys._getframe(), False
    while frame is not None:
        in_module = in_module or frame.f_code.co_name == "<module>"
        if in_module and frame.f_code in (load_object.__code__, load_file.__code__):
            raise ConfigError(
                f"raysim.{call} would train while raysim imports the file, of which it needs a "
                'class or a function; put the call below `if __name__ == "__main__":`'
            )
        frame = frame.f_back


def how_to_continue(folder: Path, in_python: bool = False) -> str:
    """Return a text on what a stopped run has left, with what continues it.

    Args:
        folder: the folder of the run.
        in_python: whether the text names calls of Python also for a run without objects of Python,
            which commands continue, too.
    """
    saved, objects = files.of_rounds(checkpoint.checkpoints_folder(folder)), {}
    with suppress(Exception):  # the text is a part of another error
        objects = given_objects(folder)
    quoted = shlex.quote(str(folder))
    resume, fork = f"`raysim resume {quoted}`", f"`raysim resume {quoted} --fork KEY=VALUE`"
    if in_python or objects:
        resume = call_with("resume", folder, objects)
        fork = f"raysim.fork({str(folder)!r}, {{KEY: VALUE}})"
    kept = f"what was done is kept in {folder}"
    if folder.name.startswith(TEMPORARY_PREFIX):
        kept += ", which is removed when Python exits"
    if is_closed(folder):
        return f"{kept}; the run is finished, and raysim.load({str(folder)!r}) gives its result"
    if not saved:
        return f"{kept}, without a checkpoint; {resume} continues from the beginning"
    return (
        f"{kept}; {resume} continues after round {max(saved)}, and {fork} does so as a new run "
        "with other keys or changed code"
    )
