"""Command line of raysim; each module of this package adds its commands.

Exit codes: 0 success, 1 failed run, 2 invalid input, 130 ended by Ctrl-C, 143 ended by SIGTERM, 129
ended by SIGHUP.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import re
import sys
from typing import Any

import typer

from raysim.cli.base import app
from raysim.cli.terminal import LogFormatter, aside, say
from raysim.distributed.cluster import versions
from raysim.errors import ConfigError, RaysimError, shortened
from raysim.system import output, processes
from raysim.system.signals import leave_at_once

# isort: off
# Each module adds its commands when it is imported. `raysim --help` lists them in this order.
from raysim.cli import run_resume, sweep, jobs, report, ledger  # noqa: F401
from raysim.cli import bench_theory_attacks, list_data_doctor, ui  # noqa: F401
from raysim.cli.pages import authoring  # noqa: F401

UsageError: Any = typer.BadParameter.__base__
"""Mistake on the command line; a class of Click, or of the copy of Click in newer Typers."""


def main() -> None:
    """Execute the command line and print errors without a traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    try:
        versions.check_versions()
        _warn_of_repeated_keys(sys.argv[1:])
        # Typer would print its own errors in a box.
        code = app(standalone_mode=False)
    except UsageError as error:
        if text := _usage_text(error):
            aside(f"error: {text}")
        sys.exit(ConfigError.exit_code)
    except RaysimError as error:
        # How to go on stands with the run's folder; standard error has the error alone.
        for note in getattr(error, "__notes__", ()):
            say(note, file=sys.stderr if "--json" in sys.argv else sys.stdout)
        aside(f"error: {error}")
        if _folder_is_gone():
            aside(FOLDER_IS_GONE)
        sys.exit(error.exit_code)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            aside(f"error: {FOLDER_IS_GONE}")
            sys.exit(RaysimError.exit_code)
        if error.errno != errno.ENAMETOOLONG:
            raise
        aside(
            f"error: {shortened(repr(error.filename))} is too long for a path; give a shorter one"
        )
        sys.exit(ConfigError.exit_code)
    sys.exit(code or 0)


def _usage_text(error: Any) -> str:
    """Return a mistake on the command line in one line; "" if the help was printed instead."""
    if key := _key_with_dashes(sys.argv[1:]):
        return f"--{key} is a key of the configuration; write {key}=VALUE"
    text = error.format_message().rstrip(".").replace(". Did you mean", "; did you mean")
    text = re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1?", text)
    help_command = f" (`{error.ctx.command_path} --help`)" if error.ctx else ""
    return f"{text[0].lower()}{text[1:]}{help_command}" if text else ""


FOLDER_IS_GONE = (
    "the folder from which this command was started no longer exists; start it from another one. "
    "If it was that of a job of a cluster, two nodes of one machine share Ray's temporary folder, "
    "and one of them has removed the job's: start each node with a --temp-dir of its own"
)
"""Message of a command that cannot work because its current folder was removed."""


def _folder_is_gone() -> bool:
    """Return whether the current folder of this process no longer exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


WITH_OVERRIDES = ("run", "resume", "sweep", "bench")
"""Commands that take key=value."""


def _warn_of_repeated_keys(arguments: list[str]) -> None:
    """Warn of a key that is given twice with different values: the last one counts."""
    if next(iter(arguments), "") not in WITH_OVERRIDES:
        return
    seen: dict[str, str] = {}
    for key, equals, value in (word.partition("=") for word in arguments[1:]):
        if equals and not key.startswith("-"):
            if seen.get(key, value) != value:
                logging.warning(f"{key} is given twice; the last value counts: {key}={value}")
            seen[key] = value


def _key_with_dashes(arguments: list[str]) -> str:
    """Return the key that is written like an option, --KEY; "" if there is none."""
    if next(iter(arguments), "") not in WITH_OVERRIDES:
        return ""
    from raysim.config.schema import Config  # most commands do not need it

    keys = (word[2:].partition("=")[0] for word in arguments if word.startswith("--"))
    return next((key for key in keys if key.partition(".")[0] in Config.model_fields), "")


def console() -> None:
    """Execute the command line as the console script."""
    # raysim reports the first error of a round; Ray would log the same error for other calls.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # At its end Python would go through all objects of torch to free them, for half a second.
    atexit.register(gc.freeze)
    leave_at_once()
    output.make_lasting()
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not output.flushed():
            code = code or RaysimError.exit_code
        processes.leave(code)
        sys.exit(code)
