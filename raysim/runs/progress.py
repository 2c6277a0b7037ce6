"""Progress of a run as text, and the line that shows it in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raysim.system import startup_stages

if TYPE_CHECKING:
    from raysim.engine.plan import Plan

ProgressCallback = Callable[[dict[str, float]], bool | str | None]
"""Function that is called with the record of each round.

If it returns True, or a text with the reason, the run ends gracefully.
"""

UPDATE_INTERVAL_S = 0.2
"""Seconds between two updates of a notebook's line."""


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


class ProgressText:
    """Texts about a run: what it is, its metrics and its time.

    Args:
        plan: the plan of the run.
    """

    def __init__(self, plan: Plan):
        resources = plan.config.resources
        self.rounds = plan.config.rounds
        self.metrics = dict.fromkeys((plan.config.evaluate.best_by.metric, "loss"))
        actors = f"{resources.actors} actor{'s'[: resources.actors != 1]}"
        workers = actors if resources.executor == "ray" else "inline"
        self.title = f"{plan.label} on {plan.config.data.name}, {workers}"
        self.first_round: int | None = None
        self.began = 0.0

    def figures(self, record: Mapping[str, float], now: float) -> list[str]:
        """Return the figures of a round as texts.

        Args:
            record: the round's record.
            now: the time in seconds; that of the first record is the beginning of the rounds, after
                the start of actors and of MLflow.
        """
        if self.first_round is None:
            self.first_round = int(record["round"])
            self.began = now
        figures = [f"{key} {record[key]:.4f}" for key in self.metrics if key in record]
        if "system/clients_per_second" in record:
            figures.append(f"{record['system/clients_per_second']:.0f} clients/s")
        return figures

    def round_line(self, record: Mapping[str, float], now: float) -> str:
        """Return a line about a round: its number, figures and times.

        Args:
            record: the round's record.
            now: the time in seconds.
        """
        figures = self.figures(record, now)
        done, first = int(record["round"]), self.first_round or 0
        spent = times(now - self.began, done - first, self.rounds - first)
        return "  ".join([f"round {done}/{self.rounds}", *figures, spent])


class NotebookLine:
    """Line under a notebook's cell that shows the stages and rounds of a run.

    Args:
        display: function of IPython that shows an object and returns its handle.
    """

    def __init__(self, display: Callable[..., Any]):
        self.handle = display(_Text("raysim: preparing"), display_id=True)
        self.text: ProgressText | None = None
        self.last_update = -UPDATE_INTERVAL_S

    def begin(self, plan: Plan) -> NotebookLine:
        """Show from now on what the run is; return the line."""
        self.text = ProgressText(plan)
        return self

    def stage(self, stage: str) -> None:
        """Show a stage before the first round."""
        self.handle.update(_Text(f"{self.text.title if self.text else 'raysim'}: {stage}"))

    def __call__(self, record: Mapping[str, float]) -> None:
        """Show the record of a round; of fast rounds not every one."""
        assert self.text is not None, "a run has begun before its first record"
        now = time.monotonic()
        line = self.text.round_line(record, now)
        is_last = record["round"] == self.text.rounds
        if is_last or now - self.last_update >= UPDATE_INTERVAL_S:
            self.handle.update(_Text(f"{self.text.title}: {line}"))
            self.last_update = now


class _Text:
    """Text that IPython shows as it is, without quotes."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


@contextmanager
def shown(progress: ProgressCallback | None) -> Iterator[Callable[[Plan], ProgressCallback]]:
    """Show the progress of the run that is prepared and executed inside the block.

    Args:
        progress: called with each record; None: a notebook shows a line, elsewhere nothing is
            shown.

    Yields:
        A function from the plan to the callback of its run.
    """
    display = _notebooks_display() if progress is None else None
    if display is None:
        yield lambda plan: progress or (lambda record: None)
        return
    line = NotebookLine(display)
    with startup_stages.shown_by(line.stage):
        yield line.begin


def _notebooks_display() -> Callable[..., Any] | None:
    """Return IPython's `display` if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return ipython.display.display if ipython and hasattr(shell, "kernel") else None
