"""Submit a raysim command as a job of a Ray cluster, and follow it.

Ray uploads the working directory, without the files that `.gitignore` names, and installs the
packages of a requirements file for the job. raysim itself must be installed on the cluster's nodes.
Ray deletes its copy of the working directory after the job, with everything written into it; files
written elsewhere remain.
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
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raysim.distributed.cluster import versions
from raysim.errors import ConfigError, RaysimError

STOP_GRACE_S = 60
"""Time that a stopped job has to save its progress before Ray kills it, in seconds."""

MAX_MESSAGE_CHARACTERS = 500
"""Longer messages of Ray about a job begin with pip's last error, if they have one."""

EXCLUDED_FILES = [".git", "runs", "mlruns", "*.db", ".venv*", "__pycache__"]
"""Patterns of files that are not uploaded."""


@dataclass
class Job:
    """Job on a cluster."""

    id: str
    """Ray's submission id."""

    state: str
    """Ray's state of the job: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""

    command: str
    """Command line that the job runs."""

    exit_code: int | None = None
    """Exit code of the command; None until it has ended."""

    message: str = ""
    """Ray's message about the state, without log lines."""


class JobClient:
    """Client for the jobs of a cluster.

    Args:
        address: URL of the cluster's dashboard; None uses RAY_API_SERVER_ADDRESS, or port 8265 of
            this machine.

    Raises:
        ConfigError: the address is not a URL, no cluster answers there, or the token is wrong.
    """

    def __init__(self, address: str | None = None):
        self.address = (
            address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
        )
        if urlsplit(self.address).scheme not in ("http", "https"):
            raise ConfigError(
                f"--address: '{self.address}' is not the dashboard's; write http://HEAD:8265"
            )
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray").setLevel(logging.WARNING)
        with self._asking():
            self.client = JobSubmissionClient(self.address)

    def submit(
        self, command: Sequence[str], working_dir: Path, requirements: Path | None = None
    ) -> Job:
        """Submit a raysim command as a job.

        Args:
            command: arguments of `raysim`, already checked.
            working_dir: directory to upload; the job runs in a copy of it.
            requirements: requirements file of pip, whose packages the nodes install for the job;
                None: they install none.

        Returns:
            The job.

        Raises:
            ConfigError: no cluster answers, or the token is wrong.
            RaysimError: Ray refuses the job.
        """
        variables = {**versions.as_variable(), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S)}
        environment: dict[str, Any] = {
            "working_dir": str(working_dir),
            "excludes": EXCLUDED_FILES,
            "env_vars": variables,
        }
        if requirements is not None:
            environment["pip"] = str(requirements)
        entrypoint = f"python -m raysim {shlex.join(command)}"
        with self._asking():
            number = self.client.submit_job(entrypoint=entrypoint, runtime_env=environment)
        return self.job(number)

    def job(self, number: str) -> Job:
        """Return the state of a job.

        Args:
            number: id of the job.

        Raises:
            ConfigError: the cluster has no such job, or does not answer.
        """
        with self._asking(number):
            return _job(self.client.get_job_info(number))

    def jobs(self) -> list[Job]:
        """Return the submitted jobs of the cluster, newest first.

        Raises:
            ConfigError: no cluster answers, or the token is wrong.
        """
        with self._asking():
            # Ray also lists drivers that joined by themselves; they have no submission id.
            submitted = [details for details in self.client.list_jobs() if details.submission_id]
        submitted.sort(key=lambda details: -(details.start_time or 0))
        return [_job(details) for details in submitted]

    def follow(self, number: str) -> Iterator[str]:
        """Yield the output of the job with id `number` in pieces until the job ends.

        Args:
            number: id of the job.

        Raises:
            ConfigError: the cluster has no such job.
        """
        self.job(number)
        pieces = self.client.tail_job_logs(number)
        loop = asyncio.new_event_loop()
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
        """Stop the job with id `number` with SIGTERM, so that a run saves its progress.

        Args:
            number: id of the job.

        Raises:
            ConfigError: the cluster has no such job, or does not answer.
        """
        self.job(number)
        with self._asking(number):
            self.client.stop_job(number)

    @contextmanager
    def _asking(self, number: str = "") -> Iterator[None]:
        """Return a context that turns Ray's errors about job `number` into raysim's errors."""
        from ray.exceptions import AuthenticationError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except RaysimError:
            raise
        except ConnectionError:
            raise ConfigError(
                f"--address: no cluster answers at {self.address}; start one (cluster/head.sh), "
                "or correct the address"
            ) from None
        except Exception as error:
            message = " ".join(str(error).split())
            if "413" in message or "exceeds the maximum size" in message:
                raise ConfigError(
                    "--working-dir: the folder is too large to be uploaded; name large files and "
                    "folders in its .rayignore (written like .gitignore), and keep data on a disk "
                    "that all nodes see"
                ) from None
            if isinstance(error, AuthenticationError):
                raise ConfigError(
                    f"--address: {self.address} needs its token: set RAY_AUTH_MODE=token, and "
                    "have the head's ~/.ray/auth_token here too"
                ) from None
            if number and ("404" in message or "does not exist" in message):
                raise ConfigError(
                    f"there is no job '{number}' at {self.address}; see raysim job list"
                ) from None
            raise RaysimError(f"{self.address}: {message[:300]}") from None


def is_excluded(working_dir: Path, path: str) -> bool:
    """Return whether a file is left out of the upload, by raysim, .gitignore or .rayignore.

    Args:
        working_dir: the folder that is uploaded.
        path: path of the file, relative to the folder.
    """
    for part in Path(path).parts:
        if any(fnmatch(part, pattern) for pattern in EXCLUDED_FILES):
            return True
    from ray._private.runtime_env import packaging

    read = getattr(packaging, "get_excludes_from_ignore_files", None)
    if read is None:  # another version of Ray
        return False
    # It tells on standard error that it leaves out .gitignore itself.
    logging.getLogger(packaging.__name__).setLevel(logging.WARNING)
    excludes = read(working_dir.resolve(), include_gitignore=True)
    return any(exclude((working_dir / path).resolve()) for exclude in excludes)


def _job(details: Any) -> Job:
    """Return the job that Ray's `details` describe."""
    message = " ".join((details.message or "").partition(", last available logs")[0].split())
    if len(message) > MAX_MESSAGE_CHARACTERS and (start := message.rfind("ERROR: ")) > 0:
        message = message[start:]  # of pip, whose first lines are the command and its progress
    return Job(
        details.submission_id,
        str(details.status),
        details.entrypoint,
        details.driver_exit_code,
        message,
    )
