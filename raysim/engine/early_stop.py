"""Early stopping: whether the evaluations that a run has recorded end it (section `stop`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from raysim.config.schema import Config
from raysim.config.sections.evaluation import BestBy, Stop
from raysim.errors import ConfigError, RaysimError
from raysim.metrics import (
    VALIDATION,
    find_metric,
    lower_is_better,
    reserved_prefixes,
    without_figure,
)
from raysim.rules.methods.registry import is_shipped
from raysim.rules.rule import Rule
from raysim.spelling import did_you_mean

ROUND_METRICS = (
    "train_loss",
    "clients/used",
    "bytes_up",
    "bytes_down",
    "system/clients_per_second",
    "system/round_seconds",
)
"""Metrics that every round logs; other metrics with a / in their name depend on the method."""

OF_CLIENTS = ("clients", "held_out", "fine_tuned", "held_out_fine_tuned", "participation_gap")
"""First parts of the names of metrics that evaluations of clients log."""


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
    clients = config.evaluate.clients
    if clients is not None and metric.partition("/")[0] in OF_CLIENTS:
        return clients.every
    bare = metric.removeprefix("val/").removeprefix("accuracy/")
    is_evaluated = "/" not in bare and metric not in ROUND_METRICS
    return config.evaluate.every or 1 if is_evaluated else 1


def written_out(stop: Stop | None, best: BestBy | None) -> Stop | None:
    """Return the section `stop` with metric and direction written out.

    Args:
        stop: the section; None is returned as it is.
        best: the metric that selects the best model, the default of `stop.metric`; None: there is
            none.
    """
    if stop is None or best is None:
        return stop
    metric = stop.metric or best.metric
    mode = best.mode
    if metric != best.metric:
        mode = "min" if lower_is_better(metric) else "max"
    return stop.model_copy(update={"metric": metric, "mode": stop.mode or mode})


def check_stop(config: Config, rules: Sequence[Rule], probes: Sequence[str] = ()) -> None:
    """Check that a run logs the metric of its section `stop`, and that time does not decide it.

    Args:
        config: the resolved configuration of the run.
        rules: its client rules and its server rule.
        probes: the names of its probes, with which their metrics begin.

    Raises:
        ConfigError: the run does not log the metric, or it is one of `system/`; the message names
            the key and the fix.
    """
    if config.stop is None:
        return
    key = "stop.metric"
    metric = config.stop.metric or ""
    if metric.startswith("system/"):
        raise ConfigError(
            f"{key}: {metric} depends on the machine, so the run would end after another round "
            "elsewhere; name another metric"
        )
    check_metric(key, metric, [config])
    entry = find_metric(metric)
    if entry is not None:
        if _is_missing(config, entry.logged):
            raise ConfigError(f"{key}: {metric} is not measured; set {entry.logged}")
        if entry.rules and not _may_log(rules, entry.rules):
            by = ", ".join(sorted(entry.rules))
            raise ConfigError(f"{key}: {metric} is not logged by this method, but by {by}")
    source, _, rest = metric.partition("/")
    is_unknown = bool(rest) and source not in {*reserved_prefixes(), *probes}
    if is_unknown and not _has_users_metric(config.evaluate.metrics or ()):
        raise ConfigError(
            f"{key}: '{metric}' is no metric, and no probe of this run is called '{source}'"
            f"{did_you_mean(source, probes)}"
        )


def check_best(config: Config) -> None:
    """Check that a run logs the metric that selects its best model.

    Args:
        config: the resolved configuration of the run.

    Raises:
        ConfigError: the run does not log it; the message names the key and the fix.
    """
    best = config.evaluate.best
    # The default of a run that evaluates nothing selects nothing.
    if best is not None and (config.evaluate.every or "/" in best.metric):
        others = config.evaluate.model_copy(update={"best": None})
        config = config.model_copy(update={"evaluate": others})
        check_metric("evaluate.best.metric", best.metric, [config])


def _is_missing(config: Config, logged: str) -> bool:
    """Return whether a metric is logged with a key of the configuration which is not set."""
    section, *rest = logged.split(".")
    if not rest or section not in Config.model_fields or not re.fullmatch(r"[\w.]+", logged):
        return False
    value = getattr(config, section)
    for key in rest:
        value = getattr(value, key, None)
    return value is None


def _may_log(rules: Sequence[Rule], names: frozenset[str]) -> bool:
    """Return whether one of a run's rules logs what the rules of these names declare."""
    for rule in rules:
        # A user's rule may log what it does not declare.
        if not is_shipped(rule):
            return True
        # A rule logs what it inherits.
        if any(getattr(ancestor, "name", "") in names for ancestor in type(rule).__mro__):
            return True
    return False


def check_metric(key: str, metric: str, configs: Sequence[Config]) -> None:
    """Check that runs log a metric by which they are stopped.

    Args:
        key: the key that names the metric, for messages.
        metric: name of the metric.
        configs: resolved configurations of the runs.

    Raises:
        ConfigError: a run does not log it; the message names the key and the fix.
    """
    measured = _measured_names(configs)
    evaluated = {*measured, *(f"val/{name}" for name in measured)} - {*ROUND_METRICS}
    known = (*sorted(evaluated), *ROUND_METRICS)
    is_unknown = metric not in known and "/" not in metric
    if is_unknown and not _has_users_metric(measured):
        raise ConfigError(f"{key}: no run has a metric '{metric}'{did_you_mean(metric, known)}")
    part = metric.partition("/")[0]
    # Every round logs some clients/, such as clients/used; evaluations log those of the metrics.
    is_of_clients = part == "clients" and without_figure(metric) in measured
    for config in configs:
        if part == "val" or metric in evaluated:
            _check_metric_of_model(key, metric, config, metric in evaluated)
        if is_of_clients or part in OF_CLIENTS[1:]:
            _check_metric_of_clients(key, metric, config)


def _check_metric_of_model(key: str, metric: str, config: Config, is_evaluated: bool) -> None:
    """Check that a run evaluates the global model, on held-out examples for a metric of those."""
    if is_evaluated and not config.evaluate.every:
        raise ConfigError(
            f"{key}: evaluate.every=0 measures no {metric}; use train_loss, or evaluate"
        )
    if metric.startswith("val/") and not config.partition.val_fraction:
        raise ConfigError(
            f"{key}: {metric} needs held-out examples; set partition.val_fraction=0.1"
        )


def _has_users_metric(names: Iterable[str]) -> bool:
    """Return whether a metric among some is a user's, given as a reference.

    It logs under another name than its reference, so any name may be its.
    """
    return any(":" in name for name in names)


def _measured_names(configs: Iterable[Config]) -> set[str]:
    """Return the metrics of the runs' evaluations; users' ones by their references."""
    names = {"loss"}
    for config in configs:
        names.update(config.evaluate.metrics or ())
        best = config.evaluate.best
        if best is not None and "/" not in best.metric:
            names.add(best.metric)
    return names


def _check_metric_of_clients(key: str, metric: str, config: Config) -> None:
    """Check that a run evaluates clients, on the kind of examples that a metric is about."""
    part, _, figure = metric.partition("/")
    is_val = figure.startswith(VALIDATION)
    is_there = config.partition.val if is_val else config.partition.test
    needed = "partition.val.fraction=0.1" if is_val else "partition.test.fraction=0.2"
    if not config.evaluate.clients:
        also = "" if is_there else f" and {needed}"
        raise ConfigError(
            f"{key}: {metric} needs evaluations of clients; set evaluate.clients.every=10{also}"
        )
    if not is_there:
        kind, other = "validation", ""
        if not is_val:
            kind, other = "test", f", or name {part}/{VALIDATION}{figure}"
        raise ConfigError(
            f"{key}: {metric} needs {kind} examples of each client; set {needed}{other}"
        )
