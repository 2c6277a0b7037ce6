"""Progress of commands: a live line on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
from raysim.errors import counted, visible
from raysim.runs.progress import ProgressText
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


@contextmanager
def preparing(console: Terminal, title: str) -> Iterator[None]:
    """Show the stages of the work inside the block, such as "loading mnist".

    Args:
        console: a terminal shows one changing line, anything else a line for each stage.
        title: text before the stage on a terminal, such as the name of a configuration.
    """
    if not console.is_terminal:
        with startup_stages.shown_by(console.tell):
            yield
        return
    with (
        console.status(console.render_str(title)) as status,
        startup_stages.shown_by(
            lambda stage: status.update(console.render_str(f"{title}: {stage}"))
        ),
    ):
        yield


def notes_shown(console: Terminal) -> AbstractContextManager[None]:
    """Print each note on the runs that are prepared inside the block, once.

    Args:
        console: where the notes are printed.
    """
    return startup_stages.notes_shown_by(lambda note: console.tell(f"note: {note}"))


class RunProgress:
    """Progress of a run: its stages before the first round, then rounds, metrics and time left.

    Args:
        plan: the plan of the run.
        console: a terminal shows a live line, anything else plain lines.
    """

    def __init__(self, plan: Plan, console: Terminal):
        self.console = console
        self.text = ProgressText(plan)
        self.rounds = plan.config.rounds
        self.last_line = time.monotonic()
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
        self.task = self.bar.add_task(visible(self.text.title), total=self.rounds, status="")
        self.stages = startup_stages.shown_by(self._show_stage)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self.bar.start()
        else:
            self.console.tell(f"{self.text.title}: {counted(self.rounds, 'round')}")
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
        if self.console.is_terminal:
            figures = self.text.figures(record, now)
            self.bar.update(self.task, completed=done, status=visible(" · ".join(figures)))
            return
        line = self.text.round_line(record, now)
        if done and (now - self.last_line > LINE_INTERVAL_S or done in (1, self.rounds)):
            self.console.tell(line)
            self.last_line = now

    def _show_stage(self, stage: str) -> None:
        if self.console.is_terminal:
            self.bar.update(self.task, status=visible(stage))
        else:
            self.console.tell(stage)


def summary(result: RunResult, done_before: int = 0) -> str:
    """Return the line that ends a run: rounds, time, last and best metric, ε, clients a second.

    Args:
        result: the result of the run.
        done_before: number of rounds that were done before this call.
    """
    parts = [_rounds_and_time(result, done_before), *_last_and_best(result)]
    spent = [record[EPSILON] for record in result.history if EPSILON in record]
    if spent and result.config.privacy is not None:
        parts.append(f"ε {spent[-1]:.4g} at δ {result.config.privacy.delta:g}".replace("e-0", "e-"))
    parts.append(f"{result.clients_per_second:.0f} clients/s")
    if result.early_stop:
        parts.append(f"early stop in {result.early_stop}")
    return " · ".join(parts)


def _rounds_and_time(result: RunResult, done_before: int) -> str:
    """Return the numbers of rounds and seconds of this call as text."""
    done = result.rounds - done_before
    total = result.config.rounds if result.early_stop else result.rounds
    asked = f" of {total}" if done != total else ""
    text = f"{done}{asked} round{'s'[: total != 1]} in {result.seconds:.1f} s"
    from raysim.runs.result import total

    records = [record for record in result.history if record["round"] > done_before]
    training = total(records, "system/round_seconds")
    if training:
        text += f", of which {min(training, result.seconds):.1f} s training"
    return text


def _last_and_best(result: RunResult) -> list[str]:
    """Return the last and the best value of the metric that selects the best model, if any.

    The untrained model counts only if no other has been evaluated, as in the metrics of a result.
    """
    best_by = result.config.evaluate.best_by
    name = best_by.metric
    evaluated = [record for record in result.history if name in record]
    if not evaluated:
        return []
    trained = [record for record in evaluated if record["round"] > 0] or evaluated
    best = best_by.select(trained, key=lambda record: record[name])
    last = evaluated[-1][name]
    return [f"{name} {last:.4f}, best {name} {best[name]:.4f} in round {best['round']:g}"]
