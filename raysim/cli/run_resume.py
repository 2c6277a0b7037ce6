"""`raysim run | resume`: commands that execute one experiment and show its progress."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.cli.base import (
    NONE_GIVEN,
    Configuration,
    JsonOption,
    Overrides,
    app,
    facts_table,
    print_table,
)
from raysim.cli.progress import RunProgress, notes_shown, preparing, summary
from raysim.cli.terminal import Terminal, aside, say
from raysim.errors import ClientError, ConfigError, counted, round_name
from raysim.imports import uncollected

if TYPE_CHECKING:
    from raysim.engine.plan import Plan
    from raysim.engine.state.checkpoint import Checkpoint
    from raysim.runs.tracked_start import ForkOrigin


@app.command()
def run(
    config: Configuration,
    overrides: Overrides = NONE_GIVEN,
    as_json: JsonOption = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved configuration, stop")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, train one client here, stop")
    ] = False,
) -> None:
    """Run one experiment."""
    from raysim.prepare.early_validation import validate_early
    from raysim.tracking.mlflow_process import connection

    console = Terminal(as_json)
    try:
        validate_early(config, overrides)
        if not (print_config or dry_run):
            connection.start()  # beside the import of torch
        with uncollected():
            from raysim.prepare.checks.machine import check_address
            from raysim.prepare.resolve import prepare

        with ExitStack() as shown:
            if not print_config:
                shown.enter_context(notes_shown(console))
                shown.enter_context(preparing(console, config))
            plan = prepare(config, overrides)
        check_address(plan.config)
    except ConfigError as error:
        if several := _keys_of_sweeps(overrides):
            raise ConfigError(
                f"{error} (several values of {several[0]} make a sweep: raysim sweep)"
            ) from None
        raise
    if print_config:
        say(plan.config.dump(), end="")
        return
    if dry_run:
        _dry_run(plan, console)
        return
    _execute_and_print(as_json, console, plan)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="folder of the run, or its MLflow id")],
    overrides: Overrides = NONE_GIVEN,
    fork: Annotated[
        bool,
        typer.Option(
            "--fork",
            help="continue as a new run below the old one; any key may change except data, "
            "partition, model and dtype, and on a virtual clock the schedule",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Resume a stopped run from its last checkpoint."""
    from raysim.tracking.mlflow_process import connection
    from raysim.tracking.spool import SPOOL_FILE

    if (Path(run) / SPOOL_FILE).is_file():
        connection.start()  # beside the import of torch
    with uncollected():
        from raysim.runs.resume import forked, reopen

    console = Terminal(as_json)
    with preparing(console, run):
        reopened = forked(run, overrides) if fork else (*reopen(run, overrides), None)
    saved = reopened[2]
    console.tell(
        f"resumes after round {saved.facts['round']}" if saved else "no checkpoint: begins again"
    )
    _execute_and_print(as_json, console, *reopened)


def _execute_and_print(
    as_json: bool,
    console: Terminal,
    plan: Plan,
    folder: Path | None = None,
    saved: Checkpoint | None = None,
    origin: ForkOrigin | None = None,
) -> None:
    """Execute a plan as `execute` does, show its progress and print its result."""
    from raysim.runs.run import execute
    from raysim.runs.training_calls import how_to_continue
    from raysim.tracking import ui

    try:
        with RunProgress(plan, console) as progress:
            done = execute(plan, folder, saved, origin, progress=progress)
    except KeyboardInterrupt as stop:
        folder = vars(stop).get("folder", folder)
        aside(f"stopped; {how_to_continue(folder) if folder else 'nothing had begun'}")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from None
    console.tell(summary(done, saved.facts["round"] if saved else 0))
    here = Path.cwd()
    shown = done.run_dir.relative_to(here) if done.run_dir.is_relative_to(here) else done.run_dir
    console.tell(f"run directory  {shown}")
    console.tell(f"digest         {done.digest}")
    if done.state_digest and plan.clients_have_models:
        console.tell(f"state digest   {done.state_digest}")
    if done.run_id:
        hint = ui.hint(plan.config.tracking, done.run_id)
        console.tell(f"open in MLflow {hint}")
    if as_json:
        say(json.dumps(done.as_object()))


def _dry_run(plan: Plan, console: Terminal) -> None:
    """Train one client of the first round in this process and print a summary of the run."""
    import numpy as np

    from raysim.config.sections.schedule import InFlight
    from raysim.prepare.dry_run.client_rule import try_captures

    seconds, bytes_down, bytes_up = _train_one_client(plan)
    c = plan.config
    sizes = plan.clients.sizes
    blocks = -(-c.schedule.size // plan.block_size)
    facts = _method_rows(plan)
    facts["model"] = f"{c.model.name}, {plan.problem.size:,} parameters"
    facts["clients"] = (
        f"{len(plan.clients)}, samples min {sizes.min()}, median {int(np.median(sizes))}, "
        f"max {sizes.max()}"
    )
    for number, (start, lists) in enumerate(plan.clients.phases):
        of_phase = lists.sizes
        facts[f"phase {number}"] = (
            f"from round {start}, {np.count_nonzero(of_phase)} clients with samples, median "
            f"{int(np.median(of_phase))}, max {of_phase.max()}"
        )
    if held_out := len(plan.clients.validation):
        facts["validation"] = f"{held_out} samples that no client has"
    if plan.dataset.public_x is not None:
        facts["public data"] = f"{len(plan.dataset.public_x)} samples"
    facts["round"] = (
        f"{counted(c.schedule.size, 'client')} in {counted(blocks, 'block')} ({plan.mode})"
    )
    s = c.schedule
    flight = (
        f", {s.places(int((sizes > 0).sum()))} clients in flight" if isinstance(s, InFlight) else ""
    )
    facts["schedule"] = f"{s.name}{flight}, client speeds {s.client_speeds.name}"
    facts["traffic"] = f"{bytes_down / 1e6:.3g} MB down, {bytes_up / 1e6:.3g} MB up for each client"
    facts["on a GPU"] = try_captures(plan)
    facts["one client"] = f"{seconds:.3g} s here (with warming up)"
    facts["fingerprint"] = plan.config.fingerprint
    print_table(facts_table(facts), console)


def _method_rows(plan: Plan) -> dict[str, str]:
    """Return the method, its rules with all hyper-parameters, and the stages of the uploads."""
    from raysim.runs.artifacts.description import with_parameters

    rows = {
        "method": plan.label,
        "client rule": with_parameters(plan.client.name, plan.client),
        "server rule": with_parameters(plan.server.name, plan.server),
    }
    stages = {"upload stages": plan.stages}
    for group in plan.groups:
        rows[f"group {group.name}"] = with_parameters(group.rule.name, group.rule)
        if group.stages != plan.stages:
            stages[f"upload stages of {group.name}"] = group.stages
    for title, chain in stages.items():
        if chain or len(stages) > 1:
            names = [with_parameters(type(stage).__name__.lower(), stage) for stage in chain]
            rows[title] = ", then ".join(names) or "none"
    return rows


def _train_one_client(plan: Plan) -> tuple[float, int, int]:
    """Train one client of the first round and update the server with its upload.

    Clients that may fail (`faults.on_client_error`) are skipped.

    Returns:
        The training time in seconds, and the bytes of the download and of the upload; nan and 0 if
        no client arrives in that round.

    Raises:
        RaysimError: a client failed that may not, all clients of the round failed, or the server
            rule failed.
    """
    from raysim.engine.inline_executor import Inline
    from raysim.engine.loop import Engine
    from raysim.engine.round_clients import failed_in_training, make_cohort, make_tasks
    from raysim.server.round_cohort import RoundCohort
    from raysim.training.messages import cut_blocks

    inline = Inline()
    inline.open(plan)
    with closing(inline):
        engine = Engine(plan, inline)
        cohort = make_cohort(plan, engine.schedule.next_round(0))
        tasks = make_tasks(plan, engine.store, cohort)
        broadcast = inline.broadcast(cohort)
        failures: list[str] = []
        for task in tasks:
            training = inline.training(0)
            training.add({0: broadcast}, cut_blocks([task], 1))
            trained = training.get()
            failed = failed_in_training(0, trained, plan.config.faults.on_client_error)
            if failed:
                failures.append(f"client {task.client}: {failed[task.client]}")
                continue
            cohort.dropped = set(cohort.ids) - {task.client}
            following = RoundCohort(1, [], [], [], [], [])
            inline.advance(cohort, trained, {0: broadcast}, following)
            result = trained.workers[0].clients[0]
            bytes_down = plan.personal.received_bytes(broadcast)
            return trained.metrics["system/train_seconds"], bytes_down, result.bytes
    if tasks:
        raise ClientError(f"all clients of {round_name(0)} fail; the first: {failures[0]}")
    return float("nan"), 0, 0


def _keys_of_sweeps(overrides: Iterable[str]) -> list[str]:
    """Return the keys with several values, as in a sweep."""
    from raysim.sweeps import search_space

    try:
        return list(search_space.split_overrides(overrides)[1])
    except ConfigError:
        return []
