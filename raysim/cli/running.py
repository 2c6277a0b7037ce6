"""`raysim run | resume | sweep`: experiments, with a line or a table of how they go."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from raysim.cli.base import Overrides, app

if TYPE_CHECKING:
    from raysim.engine import Record
    from raysim.plan import Plan
    from raysim.sweep import Outcome, Sweep, Trial


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="a YAML file, or the name of a shipped one (raysim list configs)")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="last line of standard output: one JSON object")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the resolved configuration, stop")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, train one client here, stop")] = False,
) -> None:
    """Run one experiment."""
    from raysim.plan import prepare

    plan = prepare(config, overrides or [])
    if print_config:
        print(plan.config.dump(), end="")
        return
    console = Console(stderr=as_json, highlight=False)
    if dry_run:
        _rehearse(plan, console)
        return
    _execute(as_json, console, plan)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="the run's folder, or its MLflow id")],
    overrides: Overrides = None,
    fork: Annotated[
        bool, typer.Option("--fork", help="go on as a new run under the old one, with any other keys")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="last line of standard output: one JSON object")] = False,
) -> None:
    """Go on with a run that was stopped, from its last checkpoint."""
    from raysim.experiment import forked, reopen

    console = Console(stderr=as_json, highlight=False)
    reopened = forked(run, overrides or []) if fork else (*reopen(run, overrides or []), None)
    _execute(as_json, console, *reopened)


def _execute(as_json: bool, console: Console, plan: Plan, *reopened: Any) -> None:
    from raysim.experiment import execute
    from raysim.tracking import ui_hint

    if reopened:
        saved = reopened[1]
        console.print(f"goes on after round {saved.facts['round']}" if saved else "no checkpoint: begins again")
    try:
        with _Progress(plan, console) as progress:
            done = execute(plan, *reopened, progress=progress)
    except KeyboardInterrupt as stop:
        print(f"stopped; {_what_is_left(plan, reopened)}", file=sys.stderr)
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from None
    best = done.metrics.get("accuracy")
    console.print(
        f"{done.rounds} rounds in {done.seconds:.1f} s" + (f", best accuracy {best['best']:.4f}" if best else "")
    )
    console.print(f"run directory  {done.run_dir}", soft_wrap=True)
    console.print(f"look at it     {ui_hint(plan.config.tracking)}   (run {done.run_id})", soft_wrap=True)
    if as_json:
        print(json.dumps(done.as_object()))


def _what_is_left(plan: Plan, reopened: tuple) -> str:
    """Where a stopped run can be taken up again."""
    from raysim import checkpoint
    from raysim.experiment import latest_run_dir

    folder = reopened[0] if reopened else latest_run_dir(plan)
    if folder is None:
        return "nothing had begun"
    saved = checkpoint.available(folder)
    where = f"from round {int(saved[-1].name.removeprefix('round-'))}" if saved else "from the beginning"
    return f"what was done is kept; `raysim resume {folder}` goes on {where}"


class _Progress:
    """One live line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, plan: Plan, console: Console):
        self.rounds, self.console = plan.config.rounds, console
        r = plan.config.resources
        self.where = f"{r.actors} actor{'s'[: r.actors != 1]}" if r.executor == "ray" else "inline"
        self.title = f"{plan.label} on {plan.config.data.name}"
        self.began = self.last = time.monotonic()
        self.first: int | None = None

    def __enter__(self) -> _Progress:
        c = self.console
        if c.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
                console=c,
            )
            self.task = self.bar.add_task(self.title, total=self.rounds, said="starting")
            self.bar.start()
        else:
            c.print(f"{self.title}, {self.where}: {self.rounds} rounds")
        return self

    def __exit__(self, *stop: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def __call__(self, record: Record) -> None:
        done, now = int(record["round"]), time.monotonic()
        if self.first is None:  # the start of actors and tracker is not the rounds' time
            self.first, self.began = done, now
        figures = [f"{k} {record[k]:.4f}" for k in ("accuracy", "loss") if k in record]
        if "clients_per_second" in record:
            figures.append(f"{record['clients_per_second']:.0f} clients/s")
        if self.console.is_terminal:
            self.bar.update(self.task, completed=done, said=" · ".join([*figures, self.where]))
        elif done and (now - self.last > 5 or done in (1, self.rounds)):
            left = (now - self.began) / max(done - self.first, 1) * (self.rounds - done)
            figures += [f"{left:.0f} s left"] if done > self.first else []
            self.console.print(f"round {done}/{self.rounds}  " + "  ".join(figures), soft_wrap=True)
            self.last = now


def _rehearse(plan: Plan, console: Console) -> None:
    """Trains the first client of round 0 in this process and says what the run would be."""
    import numpy as np

    from raysim.block import cut
    from raysim.config import InFlight
    from raysim.engine import Engine
    from raysim.executor import Inline

    inline = Inline()
    inline.open(plan)
    engine = Engine(plan, inline)
    first = engine.round(engine.schedule.turn(0))
    jobs = engine.jobs(first)
    took, bytes_up = float("nan"), 0
    if jobs:
        training, down = inline.training(0), inline.broadcast(first)
        training.add({0: down}, cut(jobs[:1], 1))
        trained = training.get()
        took, bytes_up = trained.metrics["train_seconds"], trained.done[0].done[0].bytes
        engine.judge(first, jobs[:1], trained)
    inline.close()
    c, sizes = plan.config, plan.clients.sizes
    blocks = -(-c.schedule.size // plan.block_size)
    table = Table(show_header=False, box=None)
    table.add_row("method", f"{plan.label}: client rule {plan.client.name} × server rule {plan.server.name}")
    table.add_row("model", f"{c.model.name}, {plan.problem.size:,} parameters")
    table.add_row(
        "clients", f"{len(plan.clients)}, samples min {sizes.min()}, median {int(np.median(sizes))}, max {sizes.max()}"
    )
    if held_out := len(plan.clients.validation):
        table.add_row("validation", f"{held_out} samples that no client has")
    table.add_row("round", f"{c.schedule.size} clients in {blocks} blocks ({plan.mode})")
    s = c.schedule
    flight = f", {s.places(int((sizes > 0).sum()))} clients in flight" if isinstance(s, InFlight) else ""
    table.add_row("schedule", f"{s.name}{flight}, speeds {s.speeds.name}")
    table.add_row("traffic", f"{plan.bytes_down / 1e6:.3g} MB down, {bytes_up / 1e6:.3g} MB up for each client")
    table.add_row("one client", f"{took:.3g} s here (with warming up)")
    table.add_row("fingerprint", plan.config.fingerprint)
    console.print(table)


@app.command()
def sweep(
    config: Annotated[str, typer.Argument(help="a YAML file, or the name of a shipped one; its section sweep varies")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, or several: local.lr=0.1,0.01 seed=0..4 (both ends included)")
    ] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="trials at once; default: as many as have room")] = None,
    folder: Annotated[str | None, typer.Option("--dir", help="where the trials are; default runs")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="last line of standard output: one JSON object")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check and list the trials, stop")] = False,
) -> None:
    """Run an experiment for every combination of values. The same command again does what is still missing."""
    from raysim import sweep as sweeps

    console = Console(stderr=as_json, highlight=False)
    planned = sweeps.prepare(config, overrides or [], folder)
    if dry_run:
        _list_trials(planned, console)
        return
    done: Outcome | None = None
    try:
        with _SweepProgress(planned, console) as progress:
            done = sweeps.run(planned, parallel, progress)
    except KeyboardInterrupt as stop:
        print("stopped; what is finished is kept, and the same command goes on with the rest", file=sys.stderr)
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from None
    _sum_up(done, console)
    if as_json:
        print(json.dumps(done.as_object()))
    if done.failed:
        raise typer.Exit(1)


def _list_trials(planned: Sweep, console: Console) -> None:
    from raysim.sweep import as_text

    table = Table("", *planned.axes, "folder", box=None)
    for trial in planned.trials:
        values = [as_text(trial.values[key]) if key in trial.values else "" for key in planned.axes]
        table.add_row("done" if trial.result else "", *values, os.path.relpath(trial.folder))
    console.print(table)
    console.print(_size(planned))


def _size(planned: Sweep) -> str:
    there = sum(trial.result is not None for trial in planned.trials)
    merged = f", {planned.merged} further ones would compute the same" if planned.merged else ""
    return f"{len(planned.trials)} trials ({there} already there{merged})"


def _sum_up(done: Outcome, console: Console) -> None:
    from raysim.tracking import ui_hint

    console.print(f"\n{done.table}\n", soft_wrap=True, markup=False)
    for trial, error in done.failed:
        print(f"failed: {trial.title}: {error.splitlines()[0]} ({trial.folder}/error.txt)", file=sys.stderr)
    finished = len(done.sweep.trials) - len(done.failed)
    console.print(f"{finished} of {len(done.sweep.trials)} trials finished, {done.reused} of them before this")
    console.print(f"look at it     {ui_hint(done.sweep.tracking)}   (run {done.run_id})", soft_wrap=True)


class _SweepProgress:
    """A live table of what is running on a terminal; everywhere a line for each trial that has ended."""

    def __init__(self, planned: Sweep, console: Console):
        self.console, self.total = console, len(planned.trials)
        self.ended = sum(trial.result is not None for trial in planned.trials)
        self.running: dict[Path, tuple[str, int, dict[str, float]]] = {}
        self.live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        console.print(_size(planned))

    def __enter__(self) -> _SweepProgress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *stop: object) -> None:
        if self.live:
            self.live.stop()

    def __call__(self, trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
        if state == "running":
            self.running[trial.folder] = trial.title, trial.config.rounds, dict(facts)
        else:
            self.running.pop(trial.folder, None)
            self.ended += 1
            best = facts.get("metrics", {}).get("accuracy")
            said = f"best accuracy {best['best']:.4f}" if best else ""
            said += f"  {facts['seconds']:.1f} s" if "seconds" in facts else ""
            said = said or f"FAILED: {facts['error'].splitlines()[0]}" if state == "failed" else said
            self.console.print(f"[{self.ended}/{self.total}] {trial.title}  {said}", soft_wrap=True, markup=False)
        if self.live:
            self.live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None)
        for column in ("running", "round", "accuracy", "loss"):
            table.add_column(column)
        for title, rounds, facts in self.running.values():
            figures = [f"{facts[key]:.4f}" if key in facts else "" for key in ("accuracy", "loss")]
            table.add_row(title, f"{int(facts['round'])}/{rounds}" if "round" in facts else f"/{rounds}", *figures)
        return table
