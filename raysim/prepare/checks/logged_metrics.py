"""Check that runs log the metrics by which they stop and select the best model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from raysim.config.schema import Config
from raysim.config.sections.base import with_value
from raysim.config.sections.evaluation import OF_CLIENTS, ROUND_METRICS
from raysim.errors import ConfigError
from raysim.metrics import (
    VALIDATION,
    find_metric,
    reserved_prefixes,
    without_figure,
)
from raysim.rules.methods.registry import is_shipped
from raysim.rules.rule import Rule
from raysim.spelling import did_you_mean


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
        others = with_value(config, "evaluate.best", None)
        check_metric("evaluate.best.metric", best.metric, [others])


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
