"""Checks of a raysim command before it is submitted to a cluster as a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysim.config import explain
from raysim.config.loading import parse_overrides
from raysim.config.schema import Config
from raysim.config.tracking_uri import MLFLOW_VARIABLES, mask_secrets, redacted_uri
from raysim.distributed.cluster.jobs import is_excluded
from raysim.errors import ConfigError, did_you_mean
from raysim.prepare import resolve
from raysim.rules.methods import pairs
from raysim.sweeps.definition import read_sweep

SUBMITTABLE_COMMANDS = ("run", "sweep", "resume")
"""Commands that can be submitted as a job."""


def checked_command(
    command: Sequence[str], working_dir: Path, requirements: Path | None = None
) -> list[str]:
    """Check a raysim command that is to be submitted as a job.

    Args:
        command: the words of the command without "raysim".
        working_dir: the folder that is uploaded with the job.
        requirements: pip's file of the packages that nodes install; None: they install none.

    Returns:
        The command with paths relative to the working directory.

    Raises:
        ConfigError: the command is invalid, it names files that are not uploaded, or its tracking
            store would be lost with the job.
    """
    name, *arguments = command or ("",)
    if name not in SUBMITTABLE_COMMANDS:
        raise ConfigError(
            f"submit: '{name}' cannot run as a job{did_you_mean(name, SUBMITTABLE_COMMANDS)}; "
            "write: submit -- run my.yaml"
        )
    words = [argument for argument in arguments if not argument.startswith("-")]
    if not words:
        raise ConfigError(f"submit: raysim {name} needs a configuration, or a run's folder")
    if not working_dir.is_dir():
        raise ConfigError(f"--working-dir: there is no folder {working_dir}")
    if requirements is not None and not requirements.is_file():
        raise ConfigError(f"--requirements: there is no file {requirements}")
    source, *options = words
    if name == "resume":
        _check_resumed(source, options, working_dir)
        return [name, *arguments]
    with _inside(working_dir):
        _check_configurations(name, source, options)
    relative = _relative_to(working_dir, source)
    if is_excluded(working_dir, relative):
        raise ConfigError(
            f"submit: {relative} is not uploaded with the job, because .gitignore or .rayignore "
            f"of {working_dir.resolve()} names it; take it out there, or move the file"
        )
    return [name, *(relative if argument == source else argument for argument in arguments)]


def _check_resumed(run_dir: str, options: Sequence[str], working_dir: Path) -> None:
    """Raise ConfigError if a job cannot resume a run."""
    _refuse_secrets(str(parse_overrides(options).get("tracking.uri", "")))
    if not Path(run_dir).is_absolute() and (working_dir / run_dir).exists():
        raise ConfigError(
            f"submit: {run_dir} is not uploaded with the job; resume needs the absolute path "
            "of a folder on a disk that all nodes see"
        )


def _check_configurations(name: str, source: str, options: Sequence[str]) -> None:
    """Raise ConfigError if a run, or a trial of a sweep, is invalid or cannot run in a job."""
    overrides = [option for option in options if "=" in option]
    for raw in _configurations(name, source, overrides):
        config = explain.validate(raw)
        pairs.resolve_rules(config)
        _check_places(config)


def _configurations(name: str, source: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the configuration of a run, or those of a sweep's trials."""
    if name == "sweep":
        described = read_sweep(source, overrides)
        return [described.raw(point) for point in described.points]
    return [resolve.read_run_config(source, overrides)]


def _check_places(config: Config) -> None:
    """Raise ConfigError if the tracking store or the user's code is not available to a job."""
    uri = config.tracking.uri
    _refuse_secrets(uri)
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ConfigError(
            f"tracking.uri: {uri} would be deleted with the job's folder; use a server, "
            "http://HOST:5000, or a file on a shared disk, sqlite:////shared/mlflow.db"
        )
    for section in ("algorithm", "client", "server", "model"):
        named = getattr(config, section)
        if named is None or ".py:" not in f"{named.name}:":
            continue
        path = Path(named.name.rpartition(":")[0] or named.name)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"{section}: {path} is not uploaded with the job; put it into --working-dir "
                "and name it relative to that folder"
            )


def _refuse_secrets(uri: str) -> None:
    """Raise ConfigError for a URI with a password, because Ray's dashboard shows it."""
    if redacted_uri(uri) != uri:
        raise ConfigError(
            f"tracking.uri: the password of {mask_secrets(uri)} would be shown with the job; leave "
            "it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
            "MLFLOW_TRACKING_TOKEN) on the cluster's nodes"
        )


def _relative_to(working_dir: Path, source: str) -> str:
    """Return the path of a file relative to the working directory; other names unchanged."""
    path = (working_dir / source).resolve()
    if not path.is_file():
        # The name of a shipped configuration.
        return source
    try:
        return str(path.relative_to(working_dir.resolve()))
    except ValueError:
        raise ConfigError(
            f"{source}: is outside of --working-dir {working_dir}, so it would not be uploaded"
        ) from None


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Change the current directory, as the job will, until the block is left."""
    before = Path.cwd()
    os.chdir(folder)
    # The job has the variables of its nodes, not those of this machine.
    variables = {name: os.environ.pop(name, None) for name in MLFLOW_VARIABLES}
    try:
        yield
    finally:
        os.chdir(before)
        os.environ |= {name: value for name, value in variables.items() if value is not None}
