"""`raysim submit | job`: commands for jobs of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table
from typer.core import TyperGroup

from raysim.cli.base import app, job_app, print_table
from raysim.cli.terminal import aside
from raysim.config.loading import configuration_files
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean

if TYPE_CHECKING:
    from raysim.config.schema import Config
    from raysim.distributed.cluster.jobs import JobClient

_Address = Annotated[
    str | None,
    typer.Option(
        help="address of the cluster's dashboard; default $RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265"
    ),
]


SUBMITTABLE_COMMANDS = ("run", "sweep", "resume")
"""Commands that can be submitted as a job."""


@app.command()
def submit(
    command: Annotated[
        list[str], typer.Argument(help="after --: run, sweep or resume, with its arguments")
    ],
    address: _Address = None,
    working_dir: Annotated[Path, typer.Option(help="folder to upload with the job")] = Path(),
    requirements: Annotated[
        Path | None,
        typer.Option(help="requirements file for pip; the nodes install it for the job"),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="follow the job and exit with its exit code")
    ] = False,
) -> None:
    """Submit a command to a cluster as a job: raysim submit --wait -- run my.yaml rounds=100."""
    from raysim.distributed.cluster.jobs import JobClient

    command = checked_command(command, working_dir, requirements)
    cluster = JobClient(address)
    job = cluster.submit(command, working_dir, requirements)
    aside(f"job {job.id}  (raysim job logs {job.id}, raysim job stop {job.id})")
    if wait:
        _follow_job(cluster, job.id)


@job_app.command("list")
def job_list(address: _Address = None) -> None:
    """List the jobs of a cluster, newest first."""
    from raysim.distributed.cluster.jobs import JobClient

    table = Table("job", "state", "command", box=None)
    for job in JobClient(address).jobs():
        table.add_row(job.id, job.state.lower(), job.command.removeprefix("python -m raysim "))
    print_table(table)


@job_app.command("logs")
def job_logs(
    job: Annotated[str, typer.Argument(help="id printed by raysim submit")],
    address: _Address = None,
) -> None:
    """Print the output of a job until it ends, and exit with its exit code."""
    from raysim.distributed.cluster.jobs import JobClient

    _follow_job(JobClient(address), job)


@job_app.command("stop")
def job_stop(
    job: Annotated[str, typer.Argument(help="id printed by raysim submit")],
    address: _Address = None,
) -> None:
    """Stop a job gracefully: a run keeps its completed rounds."""
    from raysim.distributed.cluster.jobs import JobClient

    JobClient(address).stop(job)
    aside(f"job {job} is stopping  (raysim job logs {job})")


def _follow_job(cluster: JobClient, number: str) -> None:
    """Print the output of a job until it ends; exit with its exit code if it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for piece in cluster.follow(number):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        aside(
            f"\nthe job goes on; raysim job logs {number} follows it, and raysim job stop {number} "
            "ends it"
        )
        raise typer.Exit(128 + signal.SIGINT) from None
    done = cluster.job(number)
    if done.state == "SUCCEEDED":
        return
    aside(f"error: job {number} has {done.state.lower()}: {done.message}")
    raise typer.Exit(done.exit_code or 1)


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
        ConfigError: the configuration is invalid, it names files that are not uploaded, or its
            tracking store would be lost with the job.
        UsageError: the command has unknown options, or lacks an argument.
    """
    name, *arguments = command or ("",)
    if name not in SUBMITTABLE_COMMANDS:
        raise ConfigError(
            f"submit: '{name}' cannot run as a job{did_you_mean(name, SUBMITTABLE_COMMANDS)}; "
            "write: submit -- run my.yaml"
        )
    _check_files(working_dir, requirements)
    commands = cast(TyperGroup, typer.main.get_command(app)).commands
    parsed = commands[name].make_context(f"raysim {name}", [*arguments]).params
    overrides = parsed["overrides"]
    if name == "resume":
        _check_resumed(parsed["run"], overrides, working_dir)
        return [name, *arguments]
    source = parsed["config"]
    relative = _relative_to(working_dir, source)
    with _inside(working_dir):
        _check_configurations(name, source, overrides)
        files = configuration_files(relative)
    for file in files:
        if not file.is_absolute():  # as of raysim, or on a disk that all nodes see
            _check_uploaded(working_dir, _relative_to(working_dir, str(file)))
    _check_results("--dir", parsed.get("folder"))
    for ledger in parsed.get("ledgers", ()):
        _check_results("--ledger", str(ledger))
    return [name, *(relative if argument == source else argument for argument in arguments)]


def _check_files(working_dir: Path, requirements: Path | None) -> None:
    """Raise ConfigError if a file or folder of an option does not exist."""
    if not working_dir.is_dir():
        raise ConfigError(f"--working-dir: there is no folder {working_dir}")
    if requirements is not None and not requirements.is_file():
        raise ConfigError(f"--requirements: there is no file {requirements}")


def _check_results(key: str, path: str | None) -> None:
    """Raise ConfigError if a key or an option names a place in the job's own folder."""
    if path is not None and not Path(path).is_absolute():
        raise ConfigError(
            f"{key}: {path} would be deleted with the job's folder; give an absolute path on "
            "a disk that all nodes see"
        )


def _check_uploaded(working_dir: Path, path: str) -> None:
    """Raise ConfigError if a file in the working directory is left out of the upload."""
    from raysim.distributed.cluster.jobs import EXCLUDED_FILES, is_excluded

    if is_excluded(working_dir, path):
        raise ConfigError(
            f"submit: {path} is not uploaded with the job, because .gitignore or .rayignore of "
            f"{working_dir.resolve()} names it, or it is one of {', '.join(EXCLUDED_FILES)}; take "
            "it out there, or move the file"
        )


def _check_resumed(run_dir: str, overrides: Sequence[str], working_dir: Path) -> None:
    """Raise ConfigError if a job cannot resume a run."""
    from raysim.config.loading import parse_overrides

    given = parse_overrides(overrides)
    if uri := given.get("tracking.uri"):
        _check_store(str(uri))
    _check_results("run_dir", given.get("run_dir"))
    if not Path(run_dir).is_absolute() and (working_dir / run_dir).exists():
        raise ConfigError(
            f"submit: {run_dir} is not uploaded with the job; resume needs the absolute path "
            "of a folder on a disk that all nodes see"
        )


def _check_configurations(name: str, source: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if a run, or a trial of a sweep, is invalid or cannot run in a job."""
    from raysim.config import explain
    from raysim.prepare import resolve
    from raysim.rules.methods import pairs
    from raysim.sweeps.preparation import read_sweep

    if name == "sweep":
        described = read_sweep(source, overrides)
        configurations = map(described.raw, described.points)
    else:
        configurations = iter([resolve.read_run_config(source, overrides)])
    for raw in configurations:
        config = explain.validate(raw)
        pairs.resolve_rules(config)
        _check_places(config)


def _check_places(config: Config) -> None:
    """Raise ConfigError if the tracking store or the user's files are not available to a job."""
    from raysim.prepare import file_digests
    from raysim.prepare.absolute_paths import named_paths

    _check_store(config.tracking.uri)
    _check_results("run_dir", config.run_dir)
    for key, reference in file_digests.references(config):
        path = reference.rpartition(":")[0]
        if path.endswith(".py"):
            _check_in_folder(key, path)
    for key, path in named_paths(config).items():
        # An absolute one may be on a disk that all nodes see.
        if not Path(path).expanduser().is_absolute():
            _check_in_folder(key, path)


def _check_in_folder(key: str, path: str) -> None:
    """Raise ConfigError if a file that a key names is not uploaded with the current folder."""
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise ConfigError(
            f"{key}: {path} is not uploaded with the job; put it into --working-dir "
            "and name it relative to that folder"
        )
    if not Path(path).exists():
        raise ConfigError(f"{key}: there is no file {path} in --working-dir")
    _check_uploaded(Path(), path)


def _check_store(uri: str) -> None:
    """Raise ConfigError if a job cannot use a tracking store."""
    from raysim.config.tracking_uri import absolute_uri, mask_secrets, redacted_uri

    if redacted_uri(uri) != uri:  # Ray's dashboard shows it
        raise ConfigError(
            f"tracking.uri: the password of {mask_secrets(uri)} would be shown with the job; leave "
            "it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or "
            "MLFLOW_TRACKING_TOKEN) on the cluster's nodes"
        )
    absolute_uri(uri)
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        raise ConfigError(
            f"tracking.uri: {uri} would be deleted with the job's folder; use a server, "
            "http://HOST:5000, or a file on a shared disk, sqlite:////shared/mlflow.db"
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
    from raysim.config.tracking_uri import MLFLOW_VARIABLES
    from raysim.system.processes import variables_kept

    with chdir(folder), variables_kept(MLFLOW_VARIABLES):
        # The job has the variables of its nodes, not those of this machine.
        for name in MLFLOW_VARIABLES:
            os.environ.pop(name, None)
        yield
