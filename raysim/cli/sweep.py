"""`raysim sweep`: command that executes many runs and shows their progress."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from raysim.cli.base import NONE_GIVEN, JsonOption, app, print_table
from raysim.cli.completion import complete_configuration, complete_override
from raysim.cli.progress import notes_shown, preparing
from raysim.cli.terminal import Terminal, aside, say
from raysim.errors import ConfigError, counted
from raysim.imports import uncollected
from raysim.runs.progress import times
from raysim.system import startup_stages

if TYPE_CHECKING:
    from raysim.sweeps.definition import Sweep, Trial
    from raysim.sweeps.summary import SweepResult
    from raysim.sweeps.sweep_ledger import NoLedger


@app.command()
def sweep(
    config: Annotated[
        str,
        typer.Argument(
            help="a YAML file, or the name of a shipped one; its section 'sweep' holds the values",
            autocompletion=complete_configuration,
        ),
    ],
    overrides: Annotated[
        list[str],
        typer.Argument(
            help="key=value, or several values: local.lr=0.1,0.01 seed=0..4 (both ends included); "
            "at random: 'local.lr=loguniform(1e-3,1)', uniform, randint, choice, with "
            "sweep.samples=20; and sweep.retries=1 "
            "sweep.early_stopping.metric=accuracy",
            autocompletion=complete_override,
        ),
    ] = NONE_GIVEN,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="trials that run at once; default: as many as fit")
    ] = None,
    folder: Annotated[
        str | None, typer.Option("--dir", help="folder of the trials; default runs")
    ] = None,
    ledgers: Annotated[
        list[Path],
        typer.Option(
            "--ledger",
            help="file with one row per finished run; runs with a row are not trained, and new "
            "rows are appended",
        ),
    ] = NONE_GIVEN,
    where: Annotated[
        list[str],
        typer.Option(
            help="KEY=VALUE: only the trials with this value, e.g. algorithm=fedavg or seed=1,2; "
            "may be repeated"
        ),
    ] = NONE_GIVEN,
    as_json: JsonOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check and list the trials, stop")
    ] = False,
) -> None:
    """Run an experiment for many values of its keys. Run it again to complete missing trials."""
    from raysim.sweeps.reading import validate_sweep_early
    from raysim.tracking.mlflow_process import connection

    if len(ledgers) > 1:
        several = " ".join(map(str, ledgers))
        raise ConfigError(
            f"--ledger: a sweep writes into one ledger, and {len(ledgers)} are given; merge them "
            f"first: raysim ledger merge {several} -o NEW"
        )
    console = Terminal(as_json)
    validate_sweep_early(config, overrides)
    if not dry_run:
        connection.start()  # beside the import of torch
    with uncollected():
        from raysim.sweeps.preparation import prepare_sweep
        from raysim.sweeps.runner import run_sweep
        from raysim.sweeps.sweep_ledger import NoLedger, SweepLedger

    with notes_shown(console), preparing(console, "checking the trials"):
        planned = prepare_sweep(config, overrides, folder, where)
        book = SweepLedger(ledgers[0], planned, aside) if ledgers else NoLedger()
    if book.note:
        aside(book.note)
    if dry_run:
        _list_trials(planned, book, console)
        return
    done: SweepResult | None = None
    try:
        with _SweepProgress(planned, book, console) as progress:
            done = run_sweep(planned, parallel, progress, book)
    except KeyboardInterrupt as stop:
        aside("stopped; finished trials are kept, and the same command runs the rest")
        raise typer.Exit(128 + getattr(stop, "signal", 2)) from None
    _sum_up(done, console)
    if as_json:
        say(json.dumps(done.as_object()))
    if done.failed:
        raise typer.Exit(1)


def _list_trials(planned: Sweep, ledger: NoLedger, console: Terminal) -> None:
    """Print a table of the trials, with the file's value where a trial does not vary a key.

    A trial that is left alone shows all keys that the file varies.
    """
    from raysim.reports.selecting import full_name
    from raysim.sweeps.search_space import shown

    keys = list(planned.axes or planned.trials[0].values)
    table = Table("", *keys, "folder", box=None)
    for trial in planned.trials:
        values = []
        for key in keys:
            if key in trial.values:
                values.append(shown(trial.values[key]))
            else:
                name = full_name(key, trial.params)
                values.append(trial.params[name] if name else "–")
        state = "done" if planned.done(trial) else ""
        if trial.folder in ledger.taken:
            state = "ledger"
        table.add_row(state, *values, trial.folder.name)
    print_table(table, console)
    console.tell(f"folders are in {os.path.relpath(planned.trials[0].folder.parent)}")
    console.tell(_size(planned, ledger))


def _size(planned: Sweep, ledger: NoLedger) -> str:
    """Return the number of trials as text."""
    completed = sum(map(planned.done, planned.trials))
    others = " of the others" if completed else ""
    rows = "" if ledger.n_taken is None else f", {ledger.n_taken}{others} in the ledger"
    merged = f", {planned.merged} further ones would compute the same" if planned.merged else ""
    return f"{counted(len(planned.trials), 'trial')} ({completed} already there{rows}{merged})"


def _sum_up(done: SweepResult, console: Terminal) -> None:
    """Print the results of a sweep and its failed trials."""
    from raysim.tracking import ui

    console.tell(f"\n{done.table}\n")
    for trial, error in done.failed:
        aside(f"failed: {trial.title}: {error.splitlines()[0]} ({trial.folder}/error.txt)")
    console.tell(done.ends)
    console.tell(f"tables, plots  {os.path.relpath(done.sweep.folder)}")
    console.tell(f"open in MLflow {ui.hint(done.sweep.tracking, done.run_id)}")


SUMMARY_INTERVAL_S = 10.0
"""Seconds between two lines with the running trials, if the output is not a terminal."""


class _SweepProgress:
    """Progress display of a sweep.

    It prints one line for each trial that ends. On a terminal it also shows a live table of the
    running trials.
    """

    def __init__(self, planned: Sweep, ledger: NoLedger, console: Terminal):
        stopping = planned.settings.early_stopping
        self.console = console
        self.total = len(planned.trials)
        self.ended = sum(map(planned.done, planned.trials)) + len(ledger.taken)
        self.counts: Counter[str] = Counter()
        best = planned.trials[0].config.evaluate.best_by
        shown = (getattr(stopping, "metric", None), best.metric, "loss")
        self.columns = list(dict.fromkeys(filter(None, shown)))
        self.metric = best.metric
        self.running: dict[Path, tuple[str, int, dict[str, float]]] = {}
        # It shows nothing where the output is not a terminal.
        self.live = Live(console=console, transient=True, auto_refresh=False)
        self.missing = self.total - self.ended
        self.began = self.last_line = time.monotonic()
        self.stages = startup_stages.shown_by(self._show_stage)
        console.tell(_size(planned, ledger))

    def __enter__(self) -> _SweepProgress:
        self.live.start()
        self.stages.__enter__()
        return self

    def __exit__(self, *stop: object) -> None:
        self.stages.__exit__(None, None, None)
        self.live.stop()

    def __call__(self, trial: Trial, state: str, facts: Mapping[str, Any]) -> None:
        if state == "running":
            self.running[trial.folder] = trial.title, trial.config.rounds, dict(facts)
        else:
            self.running.pop(trial.folder, None)
            self.ended += state != "again"
            self.counts[state] += 1
            outcome = _outcome(state, facts, self.metric)
            self.console.tell(f"[{self.ended}/{self.total}] {trial.title}  {outcome}")
            self.last_line = time.monotonic()
        if self.console.is_terminal:
            self.live.update(Group(self._table(), self._line()), refresh=True)
        elif time.monotonic() - self.last_line > SUMMARY_INTERVAL_S:
            self.console.tell(self._line())
            self.last_line = time.monotonic()

    def _show_stage(self, stage: str) -> None:
        self.live.update(stage, refresh=True)
        if not self.console.is_terminal:
            self.console.tell(stage)

    def _table(self) -> Table:
        """Return the table of the running trials."""
        table = Table("running", "round", *self.columns, box=None)
        for title, rounds, facts in self.running.values():
            figures = [f"{facts[key]:.4f}" if key in facts else "" for key in self.columns]
            table.add_row(
                title,
                f"{int(facts['round'])}/{rounds}" if "round" in facts else f"/{rounds}",
                *figures,
            )
        return table

    def _line(self) -> str:
        """Return the counts of trials as one line."""
        words = {"stopped": "stopped early", "again": "tried again", "failed": "failed"}
        more = "".join(
            f", {self.counts[state]} {word}" for state, word in words.items() if self.counts[state]
        )
        ended_here = self.missing - (self.total - self.ended)
        shares = [facts.get("round", 0) / rounds for _, rounds, facts in self.running.values()]
        spent = times(time.monotonic() - self.began, ended_here + sum(shares), self.missing)
        running = f"{len(self.running)} running"
        return f"{self.ended} of {self.total} done{more}; {running}; {spent}"


def _outcome(state: str, facts: Mapping[str, Any], metric: str) -> str:
    """Return a text about the end of a trial."""
    if "error" in facts:
        title = "FAILED" if state == "failed" else "failed, once more"
        return f"{title}: {facts['error'].splitlines()[0]}"
    best = facts.get("metrics", {}).get(metric)
    parts = [f"best {metric} {best['best']:.4f}"] if best else []
    parts += [f"{facts['seconds']:.1f} s"] if "seconds" in facts else []
    parts += [f"stopped early ({facts['stopped']})"] if state == "stopped" else []
    return "  ".join(parts)
