"""Early stopping: whether the evaluations that a run has recorded end it (section `stop`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from raysim.config.schema import Config
from raysim.config.sections.evaluation import OF_CLIENTS, ROUND_METRICS, Stop, section_that_measures
from raysim.errors import RaysimError
from raysim.spelling import did_you_mean


class StopRule:
    """Decides by the section `stop` whether a run ends after the records so far.

    It is a function of the records, so a resumed run ends where an uninterrupted one does.

    Args:
        config: the resolved configuration of the run.
        history: the records so far, in order.
    """

    def __init__(self, config: Config, history: Iterable[Mapping[str, float]] = ()):
        self.stop = config.stop
        self.reason = ""
        """Why the run ends after the last record that was seen; "" if it does not."""
        self.best = math.nan
        self.n_without_improvement = 0
        self.was_logged = False
        if self.stop is not None:
            self.metric = self.stop.metric or ""
            self.sign = -1.0 if self.stop.mode == "min" else 1.0
            self.every = _rounds_between_values(config, self.metric)
        for record in history:
            self.see(record)

    def see(self, record: Mapping[str, float]) -> None:
        """Take the next record into account.

        Args:
            record: metrics of a round.

        Raises:
            RaysimError: a round that should log the metric does not, and none has logged it before.
        """
        done = int(record["round"])
        # A run of fewer rounds also evaluates its last one; that must not count when it is resumed.
        if self.stop is None or self.reason or done % self.every:
            return
        if self.metric in record:
            self.was_logged = True
            reason = self._judge(self.stop, done, record[self.metric])
            # The untrained model counts as a value, but ends no run.
            self.reason = reason if done else ""
        # Rounds without clients have no metrics of clients.
        elif done and record.get("clients/used") and not self.was_logged:
            self._refuse_missing(record, done)

    def _refuse_missing(self, record: Mapping[str, float], done: int) -> None:
        """Raise RaysimError if a record lacks the metric, which no probe logs in its own rounds."""
        part = self.metric.partition("/")[0]
        if part in (*OF_CLIENTS, "client", "server", "accuracy", "val", self.metric):
            known = [name for name in record if not name.startswith(("system/", "round"))]
            raise RaysimError(
                f"stop.metric: up to round {done} there is no "
                f"'{self.metric}'{did_you_mean(self.metric, known)}"
            )

    def _judge(self, stop: Stop, done: int, value: float) -> str:
        """Return the reason to end the run after a value of the metric, or ""."""
        if stop.target is not None and self.sign * value >= self.sign * stop.target:
            return f"round {done}: {self.metric} {value:.6g} reaches the target {stop.target:g}"
        gain = self.sign * (value - self.best)
        if math.isfinite(value) and (math.isnan(self.best) or gain > stop.min_delta):
            self.best, self.n_without_improvement = value, 0
            return ""
        self.n_without_improvement += 1
        if stop.patience is None or self.n_without_improvement < stop.patience:
            return ""
        return (
            f"round {done}: {self.metric} did not improve on {self.best:.6g} in "
            f"{self.n_without_improvement} evaluations"
        )


def _rounds_between_values(config: Config, metric: str) -> int:
    """Return after how many rounds a metric has its next value."""
    if section := section_that_measures(config.evaluate, metric):
        return section.every
    bare = metric.removeprefix("val/").removeprefix("accuracy/")
    if metric in ROUND_METRICS or "/" in bare:
        return 1
    return config.evaluate.every or 1
