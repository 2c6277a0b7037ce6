"""The registry of metrics: the name of each, its unit, what it measures and when it is logged."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from raysim.metrics.table import (
    CLIENT_FIGURES,
    EVERY_ROUND,
    METRICS,
    METRICS_KEY,
    VALIDATION,
    Metric,
)

_OF_ENGINE = [metric for metric in METRICS if not metric.users_own]
_FORMS_OF_USERS = [metric for metric in METRICS if metric.users_own]

FALLING = ("client_loss/", "theory/f", "theory/grad_norm2", "forgetting/")
"""First parts of the names of losses and gradients that have no best value in a run's result."""

_DECLARED: dict[str, Metric] = {}
"""Metrics that rules and the files of methods declare, by name."""


def declare(name: str, unit: str, meaning: str, rule: str, users_own: bool) -> None:
    """Declare a metric that a rule logs in every round.

    Args:
        name: name of the metric, such as "server/tau_eff".
        unit: its unit; "" for none.
        meaning: what it measures.
        rule: name of the rule. Several rules may declare one metric.
        users_own: whether the rule is not shipped.
    """
    if is_of_engine(name):
        return  # what it is stands in the engine's list
    rules = frozenset({rule})
    if before := _DECLARED.get(name):
        if users_own and not before.users_own:
            return  # nor is a shipped method's metric changed by a user's
        rules |= before.rules
    logged = f"{EVERY_ROUND}, {' and '.join(sorted(rules))}"
    _DECLARED[name] = Metric(name, unit, meaning, logged, users_own=users_own, rules=rules)


def declare_evaluation(name: str, unit: str, meaning: str, larger_is_better: bool | None) -> None:
    """Declare a metric of evaluations that a shipped method brings.

    Args:
        name: name of the metric, which `evaluate.metrics` can have.
        unit: its unit; "" for none.
        meaning: what it measures.
        larger_is_better: True if larger values are better, False if smaller ones are; None if it
            has no direction.
    """
    _DECLARED[name] = Metric(name, unit, meaning, METRICS_KEY, larger_is_better=larger_is_better)


def declare_own(name: str, unit: str, larger_is_better: bool | None) -> None:
    """Declare a metric of a user's file, unless raysim has one of that name.

    Args:
        name: name under which it is logged.
        unit: its unit; "" for none.
        larger_is_better: True if larger values are better, False if smaller ones are; None if it
            has no direction.
    """
    entry = find_metric(name)
    if entry is None or entry.users_own:
        meaning = entry.meaning if entry else ""
        _DECLARED[name] = Metric(
            name, unit, meaning, METRICS_KEY, users_own=True, larger_is_better=larger_is_better
        )


def own_metrics_of(rules: Container[str]) -> list[Metric]:
    """Return the metrics that rules of users' files declare.

    Args:
        rules: names of the rules.
    """
    own = [metric for metric in _DECLARED.values() if metric.users_own]
    return [metric for metric in own if any(rule in rules for rule in metric.rules)]


def all_metrics() -> list[Metric]:
    """Return all metrics of a run; of several that match a name the first one counts.

    Those of users' files are one entry, whatever this process has imported.
    """
    metrics = list(_OF_ENGINE)
    for declared in _DECLARED.values():
        if declared.users_own:
            continue
        part, slash, _ = declared.name.partition("/")
        places = []
        for i, metric in enumerate(metrics):
            # A bare name stands among those of the evaluations.
            same = metric.name.startswith(f"{part}/") if slash else metric.logged == METRICS_KEY
            if same or metric.name == part:
                places.append(i)
        metrics.insert(places[-1] + 1 if places else len(metrics), declared)
    return metrics + _FORMS_OF_USERS


def find_metric(name: str) -> Metric | None:
    """Return the entry of a metric; None if there is none.

    Args:
        name: name of the metric.
    """
    candidates = [*_OF_ENGINE, *_DECLARED.values(), *_FORMS_OF_USERS]
    return next((metric for metric in candidates if metric.matches(name)), None)


def is_of_engine(name: str) -> bool:
    """Return whether the engine itself logs a metric of this name.

    Args:
        name: name of the metric, such as "server/uploads".
    """
    return any(metric.matches(name) for metric in _OF_ENGINE)


def name_taken(name: str) -> str | None:
    """Return the metric of raysim with which a user's metric would collide; None if there is none.

    Args:
        name: name of the user's metric, which is also logged as "clients/NAME".
    """
    if name == "rounds":  # the numbers of the rounds in a ledger's row
        return name
    entry = find_metric(name)
    # A copy of a method's file has a metric with the name of the shipped one.
    is_of_method = name in _DECLARED and not _DECLARED[name].rules
    if entry is not None and not entry.users_own and not is_of_method:
        return name
    return next((metric.name for metric in METRICS if metric.name == f"clients/{name}"), None)


def has_direction(name: str) -> bool:
    """Return whether a metric has a best value in a run, the largest or the smallest.

    Args:
        name: name of the metric.
    """
    entry = find_metric(name)
    return entry is not None and entry.larger_is_better is not None and not accumulates(name)


def accumulates(name: str) -> bool:
    """Return whether a metric counts up over the rounds, so that only its last value is reported.

    Args:
        name: name of the metric.
    """
    entry = find_metric(name)
    return entry is not None and entry.accumulates


def is_share(name: str) -> bool:
    """Return whether a metric is a share between 0 and 1, such as an accuracy.

    A metric that is not in the registry is one if its name ends in "accuracy".

    Args:
        name: name of the metric, such as "accuracy", "val/accuracy" or "clients/accuracy_worst10".
    """
    entry = find_metric(name)
    if entry is None or entry.unit == "as the metric":
        entry = find_metric(without_figure(name))
    return entry.unit == "share" if entry else name.endswith("accuracy")


def without_figure(name: str) -> str:
    """Return the name of a task's metric: "loss" for "clients/val_loss_worst10".

    Args:
        name: name of the metric, or of a figure of its values at the clients.
    """
    ends = "|".join(end for end in CLIENT_FIGURES if end)
    prefix, _, figure = name.rpartition("/")
    bare = re.sub(f"({ends})$", "", figure)
    return bare.removeprefix(VALIDATION) if prefix else bare


def lower_is_better(name: str) -> bool:
    """Return whether smaller values of a metric are better: of losses, errors and deviations.

    Args:
        name: name of the metric, such as "loss", "val/mse" or "clients/loss_worst10".
    """
    own = find_metric(name)
    is_declared = own is not None and own.users_own and own.larger_is_better is not None
    if name.endswith("_std") and not is_declared:
        return True
    bare = without_figure(name)
    for candidate in (name, bare):
        entry = find_metric(candidate)
        if entry is not None and entry.larger_is_better is not None:
            return not entry.larger_is_better
    return bare.endswith("loss") or name.startswith(FALLING)


def reserved_prefixes() -> Iterator[str]:
    """Yield the first parts of the names of raysim's own metrics, which no probe may have."""
    yield from dict.fromkeys(
        metric.name.partition("/")[0] for metric in METRICS if not metric.name.startswith("{")
    )
