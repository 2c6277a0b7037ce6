"""A command as a job of a Ray cluster: checked here, sent there with the files it needs, followed to its end.

The working directory travels (Ray packs it and leaves out what `.gitignore` names), and what a file of requirements
names is installed for the job; raysim and its packages must be on the cluster's nodes. What a job writes beside its own
copy of that directory outlasts it, the copy does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raysim import plan, rules, validation, versions
from raysim.config import Config
from raysim.credentials import masked, redacted
from raysim.errors import ConfigError, RaysimError, did_you_mean
from raysim.layers import parse_overrides
from raysim.sweep.definition import describe

COMMANDS = ("run", "sweep", "resume")
PATIENCE = 60
"""Seconds that a job which is stopped has to keep what is done, before Ray kills it."""
LEFT_OUT = [".git", "runs", "mlruns", "*.db", ".venv*", "__pycache__"]


@dataclass
class Job:
    """A job on a cluster. `state` is Ray's: PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED."""

    id: str
    state: str
    command: str
    exit_code: int | None = None
    message: str = ""


class Cluster:
    """The jobs of a cluster, by the address of its dashboard.

    Raises:
        ConfigError: the address is none, nobody answers there, or the token is wrong.
    """

    def __init__(self, address: str | None = None):
        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
        if urlsplit(self.address).scheme not in ("http", "https"):
            raise ConfigError(f"--address: '{self.address}' is not the dashboard's; write http://HEAD:8265")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray").setLevel(logging.WARNING)
        with self._asking():
            self.client = JobSubmissionClient(self.address)

    def submit(self, command: Sequence[str], working_dir: Path, requirements: Path | None = None) -> Job:
        """Sends off a raysim command that was `checked`. The nodes install `requirements`, pip's file, for it."""
        variables = {**versions.as_variable(), "RAY_JOB_STOP_WAIT_TIME_S": str(PATIENCE)}
        environment: dict[str, Any] = {"working_dir": str(working_dir), "excludes": LEFT_OUT, "env_vars": variables}
        if requirements is not None:
            environment["pip"] = str(requirements)
        entrypoint = f"python -m raysim.cli {shlex.join(command)}"
        with self._asking():
            number = self.client.submit_job(entrypoint=entrypoint, runtime_env=environment)
        return self.job(number)

    def job(self, number: str) -> Job:
        with self._asking(number):
            return _job(self.client.get_job_info(number))

    def jobs(self) -> list[Job]:
        """The newest first."""
        with self._asking():
            found = [each for each in self.client.list_jobs() if each.submission_id]
        return [_job(each) for each in sorted(found, key=lambda each: -(each.start_time or 0))]

    def follow(self, number: str) -> Iterator[str]:
        """What a job says, piece by piece, until it has ended."""
        self.job(number)
        pieces, loop = self.client.tail_job_logs(number), asyncio.new_event_loop()
        try:
            with self._asking(number):
                while True:
                    try:
                        yield loop.run_until_complete(anext(pieces))
                    except StopAsyncIteration:
                        return
        finally:
            loop.close()

    def stop(self, number: str) -> None:
        """Ends a job: its process is sent SIGTERM, so a run keeps what is done."""
        self.job(number)
        with self._asking(number):
            self.client.stop_job(number)

    @contextmanager
    def _asking(self, number: str = "") -> Iterator[None]:
        from ray.exceptions import AuthenticationError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except RaysimError:
            raise
        except ConnectionError:
            raise ConfigError(
                f"--address: no cluster answers at {self.address}; start one (cluster/head.sh), or correct the address"
            ) from None
        except Exception as error:
            said = " ".join(str(error).split())
            if isinstance(error, AuthenticationError):
                raise ConfigError(
                    f"--address: {self.address} wants its token: set RAY_AUTH_MODE=token, and have the head's "
                    "~/.ray/auth_token here too"
                ) from None
            if number and ("404" in said or "does not exist" in said):
                raise ConfigError(f"there is no job '{number}' at {self.address}; see raysim job list") from None
            raise RaysimError(f"{self.address}: {said[:300]}") from None


def _job(details: Any) -> Job:
    said = " ".join((details.message or "").partition(", last available logs")[0].split())
    return Job(details.submission_id, str(details.status), details.entrypoint, details.driver_exit_code, said)


def checked(command: Sequence[str], working_dir: Path, requirements: Path | None = None) -> list[str]:
    """A raysim command that can work as a job, its files named as seen from the working directory.

    Raises ConfigError for one that cannot: a mistake in it, files that would not travel, a tracking store that would be
    lost with the job.
    """
    name, *arguments = command or ("",)
    if name not in COMMANDS:
        raise ConfigError(
            f"submit: '{name}' is no command for a job{did_you_mean(name, COMMANDS)}; write: submit -- run my.yaml"
        )
    given = [each for each in arguments if not each.startswith("-")]
    if not given:
        raise ConfigError(f"submit: raysim {name} wants a configuration, or a run's folder")
    if not working_dir.is_dir():
        raise ConfigError(f"--working-dir: there is no folder {working_dir}")
    if requirements is not None and not requirements.is_file():
        raise ConfigError(f"--requirements: there is no file {requirements}")
    if name == "resume":
        _refuse_secrets(str(parse_overrides(given[1:]).get("tracking.uri", "")))
        return [name, *arguments]
    source, overrides = given[0], [each for each in given[1:] if "=" in each]
    with _inside(working_dir):
        for raw in _configurations(name, source, overrides):
            config = validation.validate(raw)
            rules.resolve(config)
            _check_places(config)
    return [name, *(_seen_from(working_dir, each) if each == source else each for each in arguments)]


def _configurations(name: str, source: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """That of a run, or those of a sweep's trials."""
    if name == "sweep":
        described = describe(source, overrides)
        return [described.raw(point) for point in described.points]
    return [plan.read(source, overrides)]


def _check_places(config: Config) -> None:
    uri = config.tracking.uri
    _refuse_secrets(uri)
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ConfigError(
            f"tracking.uri: {uri} would be lost with the job's folder; give a server, http://HOST:5000, or a file that "
            "stays, sqlite:////shared/mlflow.db"
        )
    for section in ("algorithm", "client", "server", "model"):
        named = getattr(config, section)
        path = Path(named.name.rpartition(":")[0]) if named is not None and ".py:" in named.name else None
        if path is not None and (path.is_absolute() or ".." in path.parts):
            raise ConfigError(f"{section}: {path} does not travel; put it into --working-dir and name it from there")


def _refuse_secrets(uri: str) -> None:
    """A job's command, and what it brings along, are shown to everybody who can open the dashboard."""
    if redacted(uri) != uri:
        raise ConfigError(
            f"tracking.uri: the password of {masked(uri)} would be shown with the job; leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) on the cluster's nodes"
        )


def _seen_from(working_dir: Path, source: str) -> str:
    path = (working_dir / source).resolve()
    if not path.is_file():
        return source  # the name of a shipped one
    try:
        return str(path.relative_to(working_dir.resolve()))
    except ValueError:
        raise ConfigError(f"{source}: lies outside of --working-dir {working_dir}, so it would not travel") from None


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """With this as the current directory, as it will be in the job."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
