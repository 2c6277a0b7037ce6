"""Resolve a configuration into a plan, the immutable description of a run (`raysim.engine.plan`).

Everything is resolved once, and every mistake is reported before Ray starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from raysim.config import explain, loading, tracking_uri
from raysim.config.references import reading_once
from raysim.config.schema import Config
from raysim.config.sections.base import with_value
from raysim.config.sections.data import AnyData
from raysim.data import Dataset, load_dataset
from raysim.data.partition.groups import local_of_groups
from raysim.engine.plan import Plan, measures_clients
from raysim.engine.probes import name_of as name_of_probe
from raysim.engine.process_setup import configure_process, gradients, torch_threads
from raysim.errors import ConfigError
from raysim.models.checks.against_pytorch import sample_outputs
from raysim.models.checks.deterministic_layers import check_deterministic_layers
from raysim.prepare import configured_probes, file_digests
from raysim.prepare.absolute_paths import with_absolute_paths
from raysim.prepare.checks import logged_metrics, machine
from raysim.prepare.checks import rules as rule_checks
from raysim.prepare.checks.clients import check_client_evaluation, check_cohort, note_unused_users
from raysim.prepare.checks.net import note_pixels
from raysim.prepare.checks.task import note_absent_classes
from raysim.prepare.dry_run import client_rule, learning_task, server_rule
from raysim.prepare.mode_and_block_size import choose_batching
from raysim.prepare.workload import Rules, build_problem, build_rules
from raysim.prepare.written_out import write_out
from raysim.rules.methods import registry
from raysim.system.deterministic_kernels import set_cuda_variables
from raysim.training.groups import ClientGroup


def prepare(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    tracked: bool = True,
) -> Plan:
    """Read, check and resolve the configuration of one run.

    Args:
        source: path of a YAML file, or the configuration as a mapping.
        overrides: values that replace those of `source`, as `key=value` texts or as a mapping.
        tracked: whether MLflow's own variables count.

    Returns:
        The plan of the run.

    Raises:
        ConfigError: the configuration has a mistake; the message names the key and the fix.
    """
    raw = read_run_config(source, overrides, tracked)
    plan = resolve_plan(raw)
    log_notes(raw, plan)
    return plan


def log_notes(raw: Mapping[str, Any], plan: Plan) -> None:
    """Log what a run does because of a default that its user may not expect.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        plan: the plan of the run.
    """
    rule_checks.note_uniform_weights(raw, plan)
    rule_checks.note_attackers(raw, plan)
    rule_checks.note_models_of_clients(plan)
    with gradients():  # it makes the net
        rule_checks.note_averaged_statistics(plan)
    note_pixels(raw, plan.config, plan.dataset)
    note_absent_classes(plan.learning_task, plan.dataset)
    note_unused_users(raw, plan.config, plan.dataset)


def read_run_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] | Mapping[str, Any] = (),
    tracked: bool = True,
) -> dict[str, Any]:
    """Read the configuration of one run without validating it.

    Args:
        source: path of a YAML file, or the configuration as a mapping.
        overrides: values that replace those of `source`, as `key=value` texts or as a mapping.
        tracked: whether MLflow's own variables count.

    Returns:
        The configuration as nested mappings.

    Raises:
        ConfigError: the configuration cannot be read, or describes a sweep or a privacy match.
    """
    raw = loading.read_config(source, overrides, keys, registry.algorithm_defaults)
    if tracked:
        raw = tracking_uri.with_environment(raw)
    for key in loading.parse_overrides(overrides):
        if key.partition(".")[0] == "sweep":
            raise ConfigError(
                f"{key}: belongs to a sweep, but this is a single run; leave it out, or use raysim "
                "sweep"
            )
    if raw.pop("sweep", None) is not None:
        file = "this configuration" if isinstance(source, Mapping) else str(source)
        given = [] if isinstance(overrides, Mapping) else overrides
        command = " ".join([f"raysim sweep {file}", *map(shlex.quote, given)])
        raise ConfigError(
            f"sweep: {file} describes several runs, itself or by what it extends; `{command}` "
            "trains them; with --dry-run it lists them, with --where KEY=VALUE only those with a "
            "value"
        )
    if "match" in raw:
        raise ConfigError(
            f"match: {source} compares two methods; start it with: raysim privacy-match {source}"
        )
    return raw


@reading_once()
def resolve_plan(raw: Mapping[str, Any], load: Callable[[AnyData], Dataset] = load_dataset) -> Plan:
    """Resolve a configuration into a plan.

    Each step raises ConfigError at the first mistake.

    Args:
        raw: the configuration, as `read_run_config` returns it.
        load: function that returns the data set of a section `data`.

    Returns:
        The plan of the run.

    Raises:
        ConfigError: the configuration has a mistake, or a rule fails in the dry run.
    """
    config = load_config(raw)
    for key, step_sizes in config.own_step_sizes().items():
        step_sizes.compute(key, config.rounds)
    # Passes over a few examples are not worth the threads, which wait for work by computing.
    with torch_threads(config.resources.threads), gradients():
        return _resolved(config, load)


def _resolved(config: Config, load: Callable[[AnyData], Dataset]) -> Plan:
    """Return the plan of a validated configuration, whose rules pass the dry run."""
    rules = build_rules(config)
    workload = build_problem(config, rules, load)
    attached = configured_probes.attached(config)
    batching = choose_batching(
        config, rules.client, rules.server, workload.model, any(map(measures_clients, attached))
    )

    written_out = write_out(config, rules, workload, batching, attached)
    own_rules = [rules.client, rules.server, *rules.groups.values()]
    logged_metrics.check_stop(written_out, own_rules, list(map(name_of_probe, attached)))
    logged_metrics.check_best(written_out)
    resolved = record_files(written_out, workload.dataset)
    plan = Plan(
        config=resolved,
        client=rules.client,
        server=rules.server,
        dataset=workload.dataset,
        clients=workload.clients,
        net=workload.net,
        problem=workload.problem,
        mode=batching.mode,
        block_size=batching.size,
        learning_task=workload.learning_task,
        metrics=workload.metrics,
        code=file_digests.code(resolved),
        sources=file_digests.sources(resolved),
        stages=rules.stages["local.upload"],
        groups=_groups(resolved, rules),
        members=workload.members,
        probes=attached,
        outputs=sample_outputs(workload.model),
    )
    # What `plan.model()` would build again; the plan is frozen.
    vars(plan)["idle_model"] = workload.model
    configured_probes.check_probes(plan)
    if config.files is None or config.files != resolved.files:
        # Else the same code passed the dry run when the run first started.
        try_rules(plan, config)
    return plan


def load_config(raw: Mapping[str, Any]) -> Config:
    """Validate a configuration as far as possible without its data and rules.

    Paths become absolute. Files of code are compared with recorded digests before any is imported.

    Args:
        raw: the configuration, as `read_run_config` returns it.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: the configuration has a mistake, or a file of code has changed.
    """
    config = _with_full_reference(explain.checked_section(Config, raw))
    file_digests.check_file_digests(config.files, file_digests.of_code(config))
    if config.resources.gpus or config.resources.server_on_gpu:
        # The checks below are the first to ask for a GPU.
        set_cuda_variables(config.resources.deterministic)
    machine.check_resources(config)
    machine.check_client_store(config)
    machine.check_logged_models(config)
    check_client_evaluation(config)
    tracking_uri.absolute_uri(config.tracking.uri)
    clients = getattr(config.partition, "clients", None)
    if clients is not None:
        check_cohort(config.schedule, clients)
    return with_absolute_paths(config)


def _with_full_reference(config: Config) -> Config:
    """Return the configuration with the name of the algorithm's object, if it only has a file."""
    if config.algorithm is None:
        return config
    name = registry.full_reference("algorithm", config.algorithm.name)
    return with_value(config, "algorithm.name", name)


def record_files(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with the digests of all files that it names.

    Args:
        config: the configuration, with the digests of an earlier resolution in `files` if there are
            any.
        dataset: the data set of the run.

    Raises:
        ConfigError: a file has changed since its digest was recorded, or since it was imported.
    """
    file_digests.refuse_edited_modules(config)
    files = {**file_digests.of_code(config), **file_digests.of_data(config, dataset)}
    file_digests.check_file_digests(config.files, files)
    return config.model_copy(update={"files": files or None})


def try_rules(plan: Plan, config: Config) -> None:
    """Run users' rules on a few clients, and their net, loss and metrics on a few examples.

    Args:
        plan: the plan of the run.
        config: the configuration before its defaults were written out; messages name its keys.

    Raises:
        ConfigError: a rule fails, or computes other values on lanes than in mode loop; or a rule,
            a loss or a metric draws from a global random generator; or a layer has no deterministic
            kernel on this machine's GPU.
    """
    resources = plan.config.resources
    if resources.gpus and resources.deterministic and torch.cuda.is_available():
        check_deterministic_layers(plan.net, plan.model("cuda:0"))
    client_key = f"{config.section_of_rule('client')}.name"
    server_key = f"{config.section_of_rule('server')}.name"
    with ExitStack() as restored:
        on_gpu = resources.gpus or resources.server_on_gpu
        if on_gpu and torch.cuda.is_available():  # with the kernels of the run
            restored.callback(configure_process(resources, on_gpu=True))
        learning_task.dry_run_task(plan)
        client_rule.dry_run_rules(plan, client_key, server_key)
        server_rule.dry_run_server_rule(plan, server_key)


def _groups(config: Config, rules: Rules) -> tuple[ClientGroup, ...]:
    """Return the groups of a run, with configuration and stages of each."""
    return tuple(
        ClientGroup(
            name,
            rules.groups[name],
            config.model_copy(update={"local": local}),
            rules.stages[config.upload_key(name)],
        )
        for name, local in zip(config.groups, local_of_groups(config)[1:], strict=True)
    )


def keys(section: str, before: str, name: str) -> set[str]:
    """Return the keys of a section that keep their meaning when the section's name changes.

    `loading.read_config` keeps the values of these keys when an override changes the name.

    Args:
        section: key of the section, such as "model".
        before: the value of the section's `name` before the override.
        name: the value of the section's `name` after the override.
    """
    if section in ("algorithm", "client", "server"):
        return registry.shared_keys(section, before, name)
    return explain.shared_keys(section, before, name)
