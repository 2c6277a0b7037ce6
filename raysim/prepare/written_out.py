"""Write out every default and automatic choice of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from raysim.config.schema import Config
from raysim.config.sections.base import Named
from raysim.engine import early_stop, learning, probes
from raysim.engine.plan import Probe
from raysim.models import build
from raysim.prepare import configured_upload_stages
from raysim.prepare.mode_and_block_size import BlockChoice
from raysim.prepare.workload import Rules, Workload
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods import registry


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
    groups = {}
    for name, group in config.groups.items():
        client = group.client and _with_parameters(group.client.name, rules.groups[name])
        groups[name] = group.model_copy(update={"client": client})
    evaluate = learning.written_out(config, workload.learning_task, workload.metrics)
    own_rules = (rules.client, rules.server, *rules.groups.values())
    model = {"name": config.model.name, **build.net_arguments(config.model)}
    update = {
        "client": _rule_section(config, config.client, rules.client),
        "server": _rule_section(config, config.server, rules.server),
        "groups": groups,
        "algorithm": config.algorithm and Named(name=config.algorithm.name),
        "model": Named.model_validate(model),
        "batching": config.batching.model_copy(
            update={"size": batching.size, "mode": batching.mode}
        ),
        "task": learning.task_section(config, workload.learning_task),
        "evaluate": evaluate,
        "own_metrics": learning.own_metrics(workload.metrics, own_rules),
        "stop": early_stop.written_out(config.stop, evaluate.best),
    }
    written_out = probes.with_probe_parameters(config.model_copy(update=update), attached)
    return configured_upload_stages.with_stage_parameters(written_out, rules.stages)


def _rule_section(config: Config, section: Named | None, rule: ClientRule | ServerRule) -> Named:
    """Return the section of a rule: the name that loads it, and every hyper-parameter."""
    if section is not None:
        return _with_parameters(section.name, rule)
    algorithm = config.algorithm.name if config.algorithm else ""
    return _with_parameters(registry.rule_reference(type(rule), algorithm), rule)


def _with_parameters(name: str, rule: ClientRule | ServerRule) -> Named:
    return Named.model_validate({"name": name, **asdict(rule)})
