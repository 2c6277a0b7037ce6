"""Progress of commands: a live line on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from raysim.cli.terminal import Terminal
from raysim.errors import visible
from raysim.system import startup_stages

if TYPE_CHECKING:
    from raysim.engine.loop import Record
    from raysim.engine.plan import Plan
    from raysim.runs.result import RunResult

WIDE_COLUMNS = 100
"""Smallest width of a terminal on which a bar is drawn beside the figures."""

EPSILON = "privacy/epsilon"
"""Metric of the privacy loss of all rounds so far."""

LINE_INTERVAL_S = 5.0
"""Seconds between two plain lines."""


def duration(seconds: float) -> str:
    """Return a time span as text: 8 s, 3 min 20 s, 2 h 5 min.

    Args:
        seconds: the time span, rounded to whole seconds.
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def times(elapsed: float, done: float, total: float) -> str:
    """Return the elapsed time, and an estimate of the time left, as text.

    Args:
        elapsed: seconds so far.
        done: amount of work that is done, in any unit; 0 gives no estimate.
        total: amount of all work, in the same unit.
    """
    if done <= 0 or done >= total:
        return f"{duration(elapsed)} elapsed"
    return f"{duration(elapsed)} elapsed, {duration(elapsed / done * (total - done))} left"


@contextmanager
def preparing(console: Terminal, title: str) -> Iterator[None]:
    """Show the stages of the work inside the block, such as "loading mnist".

    Args:
        console: a terminal shows one changing line, anything else a line for each stage.
        title: text before the stage on a terminal, such as the name of a configuration.
    """
    if not console.is_terminal:
        with startup_stages.shown_by(lambda stage: console.print(stage, soft_wrap=True)):
            yield
        return
    with (
        console.status(console.render_str(title)) as status,
        startup_stages.shown_by(
            lambda stage: status.update(console.render_str(f"{title}: {stage}"))
        ),
    ):
        yield


class RunProgress:
    """Progress of a run: its stages before the first round, then rounds, metrics and time left.

    Args:
        plan: the plan of the run.
        console: a terminal shows a live line, anything else plain lines.
    """

    def __init__(self, plan: Plan, console: Terminal):
        resources = plan.config.resources
        self.console = console
        self.rounds = plan.config.rounds
        from raysim.config.sections.evaluation import DEFAULT_BEST

        best = plan.config.evaluate.best or DEFAULT_BEST
        self.metrics = dict.fromkeys((best.metric, "loss"))
        actors = f"{resources.actors} actor{'s'[: resources.actors != 1]}"
        self.workers = actors if resources.executor == "ray" else "inline"
        self.title = visible(f"{plan.label} on {plan.config.data.name}, {self.workers}")
        self.began = self.last_line = time.monotonic()
        self.first_round: int | None = None
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(20)] if console.width >= WIDE_COLUMNS else []),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task(self.title, total=self.rounds, status="")
        self.stages = startup_stages.shown_by(self._show_stage)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self.bar.start()
        else:
            self.console.print(f"{self.title}: {self.rounds} round{'s'[: self.rounds != 1]}")
        self.stages.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stages.__exit__(None, None, None)
        if self.console.is_terminal:
            self.bar.stop()

    def __call__(self, record: Record) -> None:
        """Show the record of a round."""
        done = int(record["round"])
        now = time.monotonic()
        if self.first_round is None:  # the start of actors and of MLflow is not the rounds' time
            self.first_round = done
            self.began = now
        figures = [f"{key} {record[key]:.4f}" for key in self.metrics if key in record]
        if "system/clients_per_second" in record:
            figures.append(f"{record['system/clients_per_second']:.0f} clients/s")
        if self.console.is_terminal:
            self.bar.update(self.task, completed=done, status=visible(" · ".join(figures)))
        elif done and (now - self.last_line > LINE_INTERVAL_S or done in (1, self.rounds)):
            trained = done - self.first_round
            figures.append(times(now - self.began, trained, self.rounds - self.first_round))
            self.console.print(f"round {done}/{self.rounds}  " + "  ".join(figures), soft_wrap=True)
            self.last_line = now

    def _show_stage(self, stage: str) -> None:
        if self.console.is_terminal:
            self.bar.update(self.task, status=visible(stage))
        else:
            self.console.print(stage, soft_wrap=True)


def summary(result: RunResult, done_before: int = 0) -> str:
    """Return the line that ends a run: rounds, time, last and best metric, ε, clients a second.

    Args:
        result: the result of the run.
        done_before: number of rounds that were done before this call.
    """
    from raysim.config.sections.evaluation import DEFAULT_BEST

    made = result.rounds - done_before
    total = result.config.rounds if result.early_stop else result.rounds
    asked = f" of {total}" if made != total else ""
    parts = [f"{made}{asked} round{'s'[: total != 1]} in {result.seconds:.1f} s"]
    training = sum(
        record.get("system/round_seconds", 0.0)
        for record in result.history
        if record["round"] > done_before
    )
    if training:
        parts[0] += f", of which {min(training, result.seconds):.1f} s training"
    best_by = result.config.evaluate.best or DEFAULT_BEST
    name = best_by.metric
    evaluated = [record for record in result.history if name in record]
    if evaluated:
        select = min if best_by.mode == "min" else max
        best = select(evaluated, key=lambda record: record[name])
        last = evaluated[-1][name]
        parts.append(f"{name} {last:.4f}, best {name} {best[name]:.4f} in round {best['round']:g}")
    spent = [record[EPSILON] for record in result.history if EPSILON in record]
    if spent and result.config.privacy is not None:
        parts.append(f"ε {spent[-1]:.4g} at δ {result.config.privacy.delta:g}".replace("e-0", "e-"))
    parts.append(f"{result.clients_per_second:.0f} clients/s")
    if result.early_stop:
        parts.append(f"early stop in {result.early_stop}")
    return " · ".join(parts)
