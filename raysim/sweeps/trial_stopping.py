"""Early stopping of a sweep: its settings, and the rungs at which its trials are judged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from raysim.config.schema import Config
from raysim.config.sections.base import Section
from raysim.errors import RaysimError
from raysim.metrics import lower_is_better
from raysim.spelling import did_you_mean

WORST_VALUE = 1e300
"""Magnitude that replaces a value that is not finite, so that percentiles stay finite."""


class EarlyStopping(Section):
    """Asynchronous successive halving (ASHA; Li et al. 2020, algorithm 2).

    A rung is a round at which a trial is judged: `grace_period`, then each `reduction_factor` times
    the last. A trial continues only if it is among the best 1 / reduction_factor of the trials that
    have reached the rung so far. No trial waits for others. Seeds are separate trials.
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
    """Factor between rungs; 1 / reduction_factor of the trials continue at each."""

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
