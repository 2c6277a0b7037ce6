"""`raysim submit | job`: commands for jobs of a cluster."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from raysim.cli.base import app, job_app, print_table
from raysim.cli.terminal import say

if TYPE_CHECKING:
    from raysim.distributed.cluster.jobs import JobClient

_Address = Annotated[
    str | None,
    typer.Option(
        help="address of the cluster's dashboard; default $RAY_API_SERVER_ADDRESS, else http://127.0.0.1:8265"
    ),
]


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
    from raysim.cli.job_commands import checked_command
    from raysim.distributed.cluster.jobs import JobClient

    command = checked_command(command, working_dir, requirements)
    cluster = JobClient(address)
    job = cluster.submit(command, working_dir, requirements)
    say(f"job {job.id}  (raysim job logs {job.id}, raysim job stop {job.id})", file=sys.stderr)
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


def _follow_job(cluster: JobClient, number: str) -> None:
    """Print the output of a job until it ends; exit with its exit code if it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for piece in cluster.follow(number):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        say(
            f"\nthe job goes on; raysim job logs {number} follows it, and raysim job stop {number} "
            "ends it",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.SIGINT) from None
    done = cluster.job(number)
    if done.state == "SUCCEEDED":
        return
    say(f"error: job {number} has {done.state.lower()}: {done.message}", file=sys.stderr)
    raise typer.Exit(done.exit_code or 1)
