"""The command line: `raysim run | resume | sweep | bench | report | attack | track | list | data | doctor`.

Exit codes: 0 done, 1 a run that failed, 2 a mistake in what was given, 130 and 143 ended by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import json
import logging
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

from raysim.errors import ConfigError, RaysimError, did_you_mean
from raysim.signals import leave_at_once

if TYPE_CHECKING:
    from torch import Tensor

    from raysim.engine import Record
    from raysim.plan import Plan
    from raysim.sweep import Outcome, Sweep, Trial

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated-learning simulation on Ray.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: fetch them, look at them.")
app.add_typer(data_app, name="data")
track_app = typer.Typer(no_args_is_help=True, help="What runs track, on its way to MLflow.")
app.add_typer(track_app, name="track")
report_app = typer.Typer(no_args_is_help=True, help="What runs have reached, from MLflow.")
app.add_typer(report_app, name="report")

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value with dots, e.g. local.lr=0.1 algorithm=fedavg")]


def main() -> None:
    """One command."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except RaysimError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def console() -> None:
    """The console script."""
    leave_at_once()
    main()


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


@report_app.command("table")
def report_table(
    runs: Annotated[list[str], typer.Argument(help="experiments, or ids of runs; that of a sweep is for its trials")],
    uri: Annotated[str | None, typer.Option(help="of the tracking store; default sqlite:///mlflow.db")] = None,
    metric: Annotated[str, typer.Option(help="what to tell of")] = "accuracy",
    target: Annotated[float | None, typer.Option(help="tell the first round that reached this value")] = None,
    group: Annotated[str | None, typer.Option(help="KEY,KEY: rows by these parameters, not by all that differ")] = None,
    best_of: Annotated[str | None, typer.Option(help="KEY,KEY: for each of these values only the best row")] = None,
    form: Annotated[str, typer.Option("--format", help="markdown or csv")] = "markdown",
    out: Annotated[Path | None, typer.Option(help="a file to write, instead of printing")] = None,
) -> None:
    """What runs reached, mean ± std over seeds; rows by the parameters that differ."""
    from raysim import report

    if form not in ("markdown", "csv"):
        raise ConfigError(f"--format: nothing called '{form}'{did_you_mean(form, ('markdown', 'csv'))}")
    keys = {name: text.split(",") if text else None for name, text in (("group", group), ("best_of", best_of))}
    rows = report.table(runs, uri, metric, target=target, **keys, say=lambda line: print(line, file=sys.stderr))
    text = report.as_csv(rows) if form == "csv" else report.markdown(rows, metric, target)
    if out is None:
        print(text)
        return
    try:
        out.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None


@app.command()
def bench(
    config: Annotated[str, typer.Argument(help="a YAML file, or the name of a shipped one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value; what is given is not varied")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="for each candidate")] = 5.0,
    blocks: Annotated[bool, typer.Option("--blocks", help="also vary block.mode and size (other last bits)")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="last line of standard output: one JSON object")] = False,
) -> None:
    """Try out where a configuration runs fastest here: executor, actors, shares of GPUs, blocks."""
    from raysim import bench as benches

    console = Console(stderr=as_json, highlight=False)

    def tell(one: benches.Candidate) -> None:
        said = one.problem or f"{one.clients_per_second:8.1f} clients/s over {one.rounds} rounds"
        console.print(f"{one.text or 'as given':64} {said}", soft_wrap=True, markup=False)

    best = benches.bench(config, overrides or [], seconds=seconds, blocks=blocks, tell=tell).best
    assert best is not None
    console.print(f"fastest: {best.text or 'as given'}", soft_wrap=True, markup=False)
    if as_json:
        print(json.dumps({"settings": best.settings, "clients_per_second": round(best.clients_per_second, 3)}))


@app.command()
def attack(
    run_dir: Annotated[str, typer.Argument(help="the folder of a run with observe.rounds=[0], say, and local.steps=1")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value: cost=l2 attacker=adaptive iterations=2000 restarts=1 ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="last line of standard output: one JSON object")] = False,
) -> None:
    """Try to recover clients' images from the updates that a run has kept (gradient inversion)."""
    from raysim import attack as attacks

    console = Console(stderr=as_json, highlight=False)
    with _AttackProgress(console) as progress:
        result, folder = attacks.attack(run_dir, overrides or [], progress)
    table = Table("client", "label", "cost", "PSNR (dB)", box=None)
    for one in result.clients:
        labels, quality = (" ".join(texts) for texts in (map(str, one.labels), (f"{p:.2f}" for p in one.psnr)))
        table.add_row(str(one.client), labels, f"{one.cost:.4g}", quality)
    console.print(table)
    exact = f", {result.exact} recovered exactly and not counted" if result.exact else ""
    console.print(f"mean PSNR      {result.psnr:.2f} dB{exact}, median {result.median:.2f}, in {result.seconds:.1f} s")
    console.print(f"look at it     {folder / 'attack.png'}", soft_wrap=True)
    if result.failed:
        clients = ", ".join(map(str, result.failed))
        print(f"the cost is not finite for client {clients}; lower lr, or try another seed", file=sys.stderr)
    if as_json:
        print(json.dumps({**result.as_object(), "folder": str(folder.absolute())}))


class _AttackProgress:
    """One live line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, console: Console):
        self.console, self.status = console, None
        self.began = self.last = time.monotonic()

    def __enter__(self) -> _AttackProgress:
        if self.console.is_terminal:
            self.status = self.console.status("reading the run")
            self.status.start()
        return self

    def __exit__(self, *stop: object) -> None:
        if self.status:
            self.status.stop()

    def __call__(self, done: int, total: int, costs: Tensor) -> None:
        now = time.monotonic()
        if done == 1:  # what came before is not the iterations' time
            self.began = now
        if now - self.last < (0.5 if self.status else 5) and done not in (1, total):
            return
        self.last, left = now, (now - self.began) / max(done - 1, 1) * (total - done)
        said = f"iteration {done}/{total}  mean cost {float(costs.mean()):.4g}"
        said += f"  {left:.0f} s left" if 1 < done < total else ""
        if self.status:
            self.status.update(said)
        else:
            self.console.print(said, soft_wrap=True)


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


@app.command(name="list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, clients, servers, pairs, models, datasets, partitions, schedules, speeds, configs"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What there is to choose from."""
    rows = _catalogue(what)
    if as_json:
        print(json.dumps(rows))
        return
    if what == "pairs":
        return _print_pairs(rows)
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def _catalogue(what: str) -> list[dict[str, str]]:
    from raysim import nets, rules
    from raysim.validation import choices

    def first_line(thing: Any) -> str:
        return " ".join((thing.__doc__ or "").split("\n\n")[0].split())

    if what == "algorithms":
        rules.discover()
        return [
            {
                "name": a.name,
                "paper": a.paper,
                "client": a.client.name,
                "server": a.server.name,
                "state": a.state,
                "traffic": a.traffic,
                "presets": " ".join(a.presets),
            }
            for a in rules.ALGORITHMS.values()
        ]
    if what in ("clients", "servers"):
        rules.discover()
        registry: Any = rules.CLIENTS if what == "clients" else rules.SERVERS
        return [{"name": n, "what": first_line(c), "keys": " ".join(rules.fields(c))} for n, c in registry.items()]
    if what == "pairs":
        return _pairs()
    if what == "configs":
        from raysim.layers import shipped

        return [{"name": name, "what": text} for name, text in shipped().items()]
    if what == "models":
        return [{"name": n, "what": first_line(f)} for n, f in nets.NETS.items()]
    if what == "datasets":
        from raysim import data

        return [{"name": n, "here": "yes" if data.present(n) else "no"} for n in data.names()]
    sections = {"partitions": "partition", "schedules": "schedule", "speeds": "speeds"}
    if what in sections:
        return [
            {"name": n, "what": first_line(m), "keys": " ".join(k for k in m.model_fields if k != "name")}
            for n, m in choices(sections[what]).items()
        ]
    known = ("algorithms", "clients", "configs", "servers", "pairs", "models", "datasets", *sections)
    raise ConfigError(f"list: nothing called '{what}'{did_you_mean(what, known)}")


def _pairs() -> list[dict[str, str]]:
    """Server rules down, client rules across: what each pair is called ("x": nothing; "": it is refused)."""
    from raysim import rules

    rules.discover()
    named: dict[tuple[str, str], str] = {}
    for a in rules.ALGORITHMS.values():
        named.setdefault((a.client.name, a.server.name), a.name)

    def word(client: str, server: str) -> str:
        try:
            rules.refuse_pair(rules.CLIENTS[client](), rules.SERVERS[server]())
        except ConfigError:
            return ""
        return named.get((client, server), "x")

    clients = sorted(rules.CLIENTS)
    return [{"server": s, **{c: word(c, s) for c in clients}} for s in sorted(rules.SERVERS)]


def _print_pairs(rows: list[dict[str, str]]) -> None:
    """The matrix, with server rules down and client rules across, in columns as wide as their names."""
    widths = {"server": max(len(row["server"]) for row in rows)} | {c: len(c) for c in rows[0] if c != "server"}
    print("  ".join(key.ljust(width) for key, width in widths.items()))
    for row in rows:
        marks = {c: "*" if name not in ("", "x") else name for c, name in row.items()} | {"server": row["server"]}
        print("  ".join(marks[key].ljust(width) for key, width in widths.items()).rstrip())
    print("\n*: a named algorithm (raysim list algorithms)   x: runs as client=... server=...   empty: refused")


@track_app.command()
def replay(run_dir: Annotated[Path, typer.Argument(help="the run's folder")]) -> None:
    """Send what a run could not send while its tracking server was down."""
    from raysim import tracking

    print(f"{tracking.replay(run_dir)} records sent")


@data_app.command()
def fetch(name: str, root: Annotated[str | None, typer.Option(help="folder; default $RAYSIM_DATA")] = None) -> None:
    """Download a data set."""
    from raysim import data

    data.fetch(name, root)
    print(f"{name} is there")


@data_app.command()
def show(
    name: str,
    root: Annotated[str | None, typer.Option(help="folder; default $RAYSIM_DATA")] = None,
    path: Annotated[str | None, typer.Option(help="for name=folder and name=users: where they are")] = None,
    out: Annotated[Path | None, typer.Option(help="where to draw the sample grid; default NAME.png")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Sizes, classes, and a grid of samples as PNG."""
    from raysim import data
    from raysim.config import Data

    dataset = data.load(Data(name=name, root=root, path=path))
    picture = out or Path(f"{name}.png")
    data.sample_grid(dataset, picture)
    facts = {**data.summary(dataset), "samples": str(picture)}
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        table.add_row(key, str(value))
    Console().print(table)


@app.command()
def doctor() -> None:
    """Check that this machine can run raysim."""
    from raysim import diagnosis

    console, sick = Console(highlight=False), 0
    for name, good, said in diagnosis.examine():
        sick += not good
        console.print(f"{'ok ' if good else 'NOT'}  {name:<12} {said}", soft_wrap=True)
    if sick:
        sys.exit(1)


if __name__ == "__main__":
    console()
