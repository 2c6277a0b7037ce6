"""Early stopping of a sweep: its settings, the rungs of a trial, and who is stopped there."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from raysim.config.schema import Config
from raysim.config.sections.base import Section
from raysim.errors import RaysimError
from raysim.metrics import lower_is_better
from raysim.spelling import did_you_mean

WORST_VALUE = 1e300
"""Magnitude that replaces a value that is not finite, so that percentiles stay finite."""


class EarlyStopping(Section):
    """Asynchronous successive halving that stops trials, as Ray Tune's AsyncHyperBandScheduler.

    A rung is a round at which a trial is judged: `grace_period`, then each `reduction_factor` times
    the last. A trial stops if its value is worse than the quantile that separates the best
    1 / reduction_factor of the values which others had at the rung before it. The quantile is
    interpolated, and the first trial at a rung continues. No trial waits for others, so more than
    1 / reduction_factor continue while there are few. ASHA (Li et al. 2020, algorithm 2) pauses all
    trials at a rung, and promotes as many as are among the best floor(n / reduction_factor) of n.
    Seeds are separate trials.
    """

    metric: str | None = None
    """Metric by which trials are judged; unset, the one that says which model is best
    (`evaluate.best`; accuracy for classification)."""

    mode: Literal["max", "min"] | None = None
    """Direction of the metric; unset, that of `evaluate.best` or of the metric's kind: losses,
    errors and perplexity are minimized."""

    grace_period: int = Field(default=10, ge=1)
    """Round of the first rung."""

    reduction_factor: float = Field(default=4, gt=1)
    """Factor between rungs; about 1 / reduction_factor of the trials continue at each."""

    max_rounds: int | None = Field(default=None, ge=1)
    """Maximum number of rounds of every trial, also of the best; unset, the trial's `rounds`."""

    def of(self, config: Config) -> EarlyStopping:
        """Return these settings with the metric of a trial, if none is set.

        Args:
            config: resolved configuration of the trial.
        """
        best = config.evaluate.best
        if best is None or self.metric not in (None, best.metric):
            return self
        return self.model_copy(update={"metric": best.metric, "mode": self.mode or best.mode})

    @property
    def lower(self) -> bool:
        """True if smaller values of the metric are better."""
        return lower_is_better(self.metric or "") if self.mode is None else self.mode == "min"

    def rungs(self, rounds: int) -> list[float]:
        """Return the rungs of a trial; its last round is not a rung.

        Args:
            rounds: number of rounds of the trial.

        Returns:
            Rounds in ascending order, also fractions; with a smaller `max_rounds` it is the last
            rung.
        """
        last = min(rounds, self.max_rounds or rounds)
        rungs = []
        rung = float(self.grace_period)
        while rung < last:
            rungs.append(rung)
            rung *= self.reduction_factor
        if last < rounds:
            rungs.append(float(last))
        return rungs


class RungTracker:
    """Tracker of the rungs that a run reaches.

    Args:
        stopping: settings of early stopping; None for a run without rungs.
        rounds: number of rounds of the run.
    """

    def __init__(self, stopping: EarlyStopping | None, rounds: int):
        self.left: deque[float] = deque()
        self.seen = False
        self.metric = ""
        if stopping is not None:
            self.left.extend(stopping.rungs(rounds))
            self.metric = stopping.metric or ""
            self.worst = WORST_VALUE if stopping.lower else -WORST_VALUE

    def climb(self, record: Mapping[str, float]) -> dict[str, float] | None:
        """Return the rung that a record reaches with its value, or None between two rungs.

        Args:
            record: metrics of a round, with its number as "round".

        Raises:
            RaysimError: the metric has not been logged up to the first rung.
        """
        if not self.left:
            return None
        t = record["round"]
        value = record.get(self.metric)
        self.seen = self.seen or value is not None
        if t < self.left[0]:
            return None
        if not self.seen:
            raise RaysimError(
                f"sweep.early_stopping.metric: up to round {t:g} there is no "
                f"'{self.metric}'{did_you_mean(self.metric, record)}"
            )
        if value is None:
            return None
        reached = self.left.popleft()
        while self.left and self.left[0] <= t:
            reached = self.left.popleft()
        return {"rung": reached, "value": value if math.isfinite(value) else self.worst}


class Halving:
    """Decisions of a sweep's early stopping, by what its trials have reached so far.

    Args:
        stopping: the settings, with a metric.
    """

    def __init__(self, stopping: EarlyStopping):
        self.stopping = stopping
        self.reached: dict[float, dict[Path, float]] = defaultdict(dict)
        """Values by rung and by the folder of the trial."""
        self.reasons: dict[tuple[float, Path], str] = {}
        """Reason of each stop, by rung and folder. A retried trial gets its reason again."""

    def judge(self, trial: Path, figures: Mapping[str, float]) -> str:
        """Keep what a trial has reached at a rung, and decide whether it goes on.

        Args:
            trial: folder of the trial.
            figures: its `round`, and what `RungTracker.climb` returned.

        Returns:
            The reason to stop the trial; "" if it goes on. It stays if the trial comes again.
        """
        rung, value = figures["rung"], figures["value"]
        others = self.reached[rung]
        if trial in others:
            return self.reasons.get((rung, trial), "")
        best = 1 / self.stopping.reduction_factor
        among_best = True  # the first trial at a rung always goes on
        if others and self.stopping.lower:
            among_best = value <= np.quantile(list(others.values()), best)
        elif others:
            among_best = value >= np.quantile(list(others.values()), 1 - best)
        others[trial] = value
        if among_best and rung != self.stopping.max_rounds:
            return ""
        shown = f"{value:.4g}" if abs(value) < WORST_VALUE else "not finite"
        reason = f"round {figures['round']:g}: {self.stopping.metric} {shown}"
        self.reasons[rung, trial] = reason
        return reason
