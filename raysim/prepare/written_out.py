"""Write out every default and automatic choice of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from typing import Any

from raysim.config.limited_yaml import plain
from raysim.config.schema import Config
from raysim.config.sections.base import Named, with_value
from raysim.config.sections.evaluation import BestBy, Evaluate, OwnMetric, Stop
from raysim.engine.plan import Probe
from raysim.metrics import (
    VALIDATION,
    find_metric,
    lower_is_better,
    own_metrics_of,
)
from raysim.models import build
from raysim.prepare import configured_probes, configured_upload_stages
from raysim.prepare.configured_task import metric_names
from raysim.prepare.mode_and_block_size import BlockChoice
from raysim.prepare.workload import Rules, Workload
from raysim.rules.contract import ALGORITHMS, ClientRule, ServerRule
from raysim.rules.methods import registry
from raysim.rules.tasks.learning_task import METHOD_METRICS, LearningTask, TaskMetric
from raysim.rules.tasks.loss_task import LossTask


def write_out(
    config: Config,
    rules: Rules,
    workload: Workload,
    batching: BlockChoice,
    attached: Sequence[Probe],
) -> Config:
    """Return the configuration with every default and automatic choice written out.

    A configuration that is written out means the same in later versions.
    """
    for name, group in config.groups.items():
        client = group.client and _with_parameters(group.client.name, rules.groups[name])
        config = with_value(config, f"groups.{name}.client", client)
    evaluate = _evaluate_section(config, workload.learning_task, workload.metrics)
    own_rules = (rules.client, rules.server, *rules.groups.values())
    model = {"name": config.model.name, **build.net_arguments(config.model)}
    update = {
        "client": _rule_section(config, config.client, rules.client),
        "server": _rule_section(config, config.server, rules.server),
        "algorithm": config.algorithm and Named(name=config.algorithm.name),
        "model": Named.model_validate(model),
        "batching": config.batching.model_copy(
            update={"size": batching.size, "mode": batching.mode}
        ),
        "task": _task_section(config, workload.learning_task),
        "evaluate": evaluate,
        "own_metrics": _own_metrics(workload.metrics, own_rules),
        "own_defaults": _own_defaults(config, rules),
        "stop": _stop_section(config.stop, evaluate.best),
    }
    written_out = configured_probes.with_probe_parameters(
        config.model_copy(update=update), attached
    )
    return configured_upload_stages.with_stage_parameters(written_out, rules.stages)


def _rule_section(config: Config, section: Named | None, rule: ClientRule | ServerRule) -> Named:
    """Return the section of a rule: the name that loads it, and every hyper-parameter."""
    if section is not None:
        return _with_parameters(section.name, rule)
    algorithm = config.algorithm.name if config.algorithm else ""
    return _with_parameters(registry.rule_reference(type(rule), algorithm), rule)


def _with_parameters(name: str, rule: ClientRule | ServerRule) -> Named:
    return Named.model_validate({"name": name, **asdict(rule)})


def _task_section(config: Config, task: LearningTask) -> Named:
    """Return the section `task` with every parameter written out."""
    like = {"like": task.like} if isinstance(task, LossTask) else {}
    return Named.model_validate({"name": config.task.name, **like, **asdict(task)})


def _evaluate_section(
    config: Config, task: LearningTask, metrics: tuple[TaskMetric, ...]
) -> Evaluate:
    """Return the section `evaluate` with metrics and best metric written out."""
    names = tuple(map(_full_name, metric_names(config, task), metrics))
    best = config.evaluate.best or default_best(metrics)
    if config.evaluate.best is None and not config.evaluate.every and config.evaluate.clients:
        kind = "" if config.partition.test else VALIDATION
        best = BestBy(metric=f"clients/{kind}{best.metric}", mode=best.mode)
    return config.evaluate.model_copy(update={"metrics": names, "best": best})


def default_best(metrics: tuple[TaskMetric, ...]) -> BestBy:
    """Return the metric that selects the best model: the first one, if it has a direction.

    Args:
        metrics: the metrics of the evaluations.
    """
    if not metrics or metrics[0].larger_is_better is None:
        return BestBy(metric="loss", mode="min")
    return BestBy(metric=metrics[0].name, mode="max" if metrics[0].larger_is_better else "min")


def _full_name(name: str, metric: TaskMetric) -> str:
    """Return a method's metric by its reference, as rows of ledgers have it; others by their name.

    The two spellings are then one trial of a sweep.
    """
    cls = type(metric)
    of_method = ":" not in name and METHOD_METRICS.get(name) is cls
    return f"{cls.__module__}:{cls.__qualname__}" if of_method else name


def _own_metrics(
    metrics: Iterable[TaskMetric], rules: Iterable[ClientRule | ServerRule]
) -> dict[str, OwnMetric] | None:
    """Return unit and direction of the metrics of users' files; None if there are none."""
    entries = [find_metric(metric.name) for metric in metrics]
    bases = {base for rule in rules for base in type(rule).__mro__}
    # Rules declare metrics too (`logs`).
    entries += own_metrics_of({getattr(base, "name", "") for base in bases})
    own = {}
    for entry in entries:
        if entry is not None and entry.users_own:
            own[entry.name] = OwnMetric(unit=entry.unit, larger_is_better=entry.larger_is_better)
    return own or None


def _own_defaults(config: Config, rules: Rules) -> dict[str, dict[str, Any]] | None:
    """Return the defaults of the rules by section, for reports; None if they ship with raysim."""
    method = registry.find_rule("algorithm", config.algorithm.name) if config.algorithm else None
    sections = {"client": rules.client, "server": rules.server}
    sections |= {f"groups.{name}.client": rule for name, rule in rules.groups.items()}
    if method in (None, *ALGORITHMS.values()) and all(map(registry.is_shipped, sections.values())):
        return None
    own = {}
    for section, rule in sections.items():
        # The values that an algorithm gives its rules are its defaults.
        settings = method.settings if method and section in ("client", "server") else {}
        values = {f.name: settings.get(f.name, f.default) for f in fields(rule)}
        own[section] = {}
        for key, value in values.items():
            if value is not MISSING:
                with suppress(ValueError):  # __post_init__ may replace what no file can hold
                    own[section][key] = plain(value)
    return own


def _stop_section(stop: Stop | None, best: BestBy | None) -> Stop | None:
    """Return the section `stop` with metric and direction written out."""
    # They are by default those that select the best model.
    if stop is None or best is None:
        return stop
    metric = stop.metric or best.metric
    mode = best.mode
    if metric != best.metric:
        mode = "min" if lower_is_better(metric) else "max"
    return stop.model_copy(update={"metric": metric, "mode": stop.mode or mode})
