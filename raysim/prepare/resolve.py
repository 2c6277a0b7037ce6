"""Resolve a configuration into a plan, the immutable description of a run (`raysim.engine.plan`).

Everything is resolved once, and every mistake is reported before Ray starts.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim import schedule
from raysim.config import explain, loading, tracking_uri
from raysim.config.references import reading_once
from raysim.config.schema import Config
from raysim.config.sections.base import Named, named
from raysim.config.sections.data import AnyData
from raysim.config.sections.schedule import InFlight, OwnSampling, Sync
from raysim.data import Dataset, load_dataset, split_dataset
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import group_members, local_of_groups
from raysim.engine import early_stop, learning, probes
from raysim.engine.plan import Plan, Probe, measures_clients
from raysim.errors import ConfigError, RaysimError
from raysim.models import build
from raysim.models.checks.against_pytorch import check_reading, sample_outputs
from raysim.models.flat import Model
from raysim.prepare import checks, configured_upload_stages, file_digests
from raysim.prepare.absolute_paths import with_absolute_paths, with_run_folder
from raysim.prepare.dry_run import client_rule, learning_task, server_rule
from raysim.prepare.mode_and_block_size import BlockChoice, choose_batching
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods import pairs, registry
from raysim.rules.rule import Problem
from raysim.rules.tasks.learning_task import LearningTask, TaskMetric
from raysim.rules.upload_stages import UploadStage
from raysim.server.collusion import check_collusion
from raysim.training.groups import ClientGroup
from raysim.training.personal import personal_parts


def prepare(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()
) -> Plan:
    """Read, check and resolve the configuration of one run.

    Args:
        source: path of a YAML file, or the configuration as a mapping.
        overrides: values that replace those of `source`, as `key=value` texts or as a mapping.

    Returns:
        The plan of the run.

    Raises:
        ConfigError: the configuration has a mistake; the message names the key and the fix.
    """
    raw = read_run_config(source, overrides)
    plan = resolve_plan(raw)
    checks.note_uniform_weights(raw, plan)
    return plan


def read_run_config(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()
) -> dict[str, Any]:
    """Read the configuration of one run without validating it.

    Args:
        source: path of a YAML file, or the configuration as a mapping.
        overrides: values that replace those of `source`, as `key=value` texts or as a mapping.

    Returns:
        The configuration as nested mappings.

    Raises:
        ConfigError: the configuration cannot be read, or describes a sweep or a privacy match.
    """
    raw = loading.read_config(source, overrides, keys, registry.algorithm_defaults)
    raw = tracking_uri.with_environment(raw)
    sweep_keys = [
        key for key in loading.parse_overrides(overrides) if key.partition(".")[0] == "sweep"
    ]
    if sweep_keys:
        raise ConfigError(
            f"{sweep_keys[0]}: belongs to a sweep, but this is a single run; leave it out, or use "
            "raysim sweep"
        )
    if raw.pop("sweep", None) is not None:
        file = "this configuration" if isinstance(source, Mapping) else str(source)
        chosen = [] if isinstance(overrides, Mapping) else [shlex.quote(text) for text in overrides]
        command = " --where ".join([f"raysim sweep {file}", *(chosen or ["seed=1"])])
        raise ConfigError(
            f"sweep: {file} describes several runs, itself or by what it extends; `raysim sweep "
            f"{file}` trains them, and `{command}` those with these values"
        )
    if "match" in raw:
        raise ConfigError(
            f"match: {source} compares two methods; start it with: raysim privacy-match {source}"
        )
    return raw


@dataclass(frozen=True)
class Rules:
    """The rules of a run, with the stages of its uploads."""

    client: ClientRule
    """The client rule, with its hyper-parameters."""

    server: ServerRule
    """The server rule, with its hyper-parameters."""

    groups: Mapping[str, ClientRule]
    """The client rule of each group, by the name of the group."""

    stages: Mapping[str, tuple[UploadStage, ...]]
    """The stages of uploads with their parameters, by key: `local.upload`, and those of groups."""


@dataclass(frozen=True)
class Workload:
    """Data, partition and net of a run: the problem that the rules solve."""

    dataset: Dataset
    """The data set, with its training and test examples."""

    clients: Clients | VirtualClients
    """The partition of the training examples over the clients."""

    members: np.ndarray | None
    """[N], the group of each client from 1, 0 for none; None without groups."""

    net: nn.Module
    """The net with its initial parameters."""

    model: Model
    """A copy of the net, with its parameters as one flat vector."""

    problem: Problem
    """The facts about data, clients and net that the rules may use."""

    learning_task: LearningTask
    """Learning task of the net."""

    metrics: tuple[TaskMetric, ...]
    """The metrics of the evaluations."""


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
    rules = build_rules(config)
    workload = build_problem(config, rules, load)
    attached = probes.attached(config)
    batching = choose_batching(
        config, rules.client, rules.server, workload.model, any(map(measures_clients, attached))
    )

    written_out = _written_out(config, rules, workload, batching, attached)
    early_stop.check_stop(written_out, [probes.name_of(probe) for probe in attached])
    early_stop.check_best(written_out)
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
    probes.check_probes(plan)
    if config.files is None:
        # With recorded digests, the same code passed the dry run when the run first started.
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
    _refuse_bare_hyperparameters(raw)
    config = _with_full_reference(explain.checked_section(Config, raw))
    file_digests.check_file_digests(config.files, file_digests.of_code(config))
    checks.check_resources(config)
    checks.check_client_store(config)
    checks.check_logged_models(config)
    checks.check_client_evaluation(config)
    tracking_uri.absolute_uri(config.tracking.uri)
    clients = getattr(config.partition, "clients", None)
    if clients is not None:
        checks.check_cohort(config.schedule, clients)
    return with_absolute_paths(with_run_folder(config))


def _refuse_bare_hyperparameters(raw: Mapping[str, Any]) -> None:
    """Refuse a hyper-parameter of the algorithm that lacks its section, such as `mu`."""
    algorithm = named(raw.get("algorithm")) if raw.get("algorithm") is not None else {}
    unknown = [key for key in raw if key not in Config.model_fields]
    if not unknown or not isinstance(algorithm, Mapping) or "name" not in algorithm:
        return
    known = registry.algorithm_hyperparameters(str(algorithm["name"]))
    for key in unknown:
        sections = {found.partition(".")[0] for found in explain.keys_with_sections(key)}
        if key in known and not sections - {"data"}:
            raise ConfigError(f"{key}: unknown key; did you mean algorithm.{key}?")


def _with_full_reference(config: Config) -> Config:
    """Return the configuration with the name of the algorithm's object, if it only has a file."""
    if config.algorithm is None:
        return config
    name = registry.full_reference("algorithm", config.algorithm.name)
    return config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"name": name})}
    )


def build_rules(config: Config) -> Rules:
    """Return the rules and the upload stages that a configuration names.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a name or a hyper-parameter is wrong, or the rules do not fit together.
    """
    client, server = pairs.resolve_rules(config)
    groups = pairs.resolve_group_rules(config, client, server)
    stages = {
        key: configured_upload_stages.make_stages(key, section)
        for key, section in config.uploads.items()
    }
    return Rules(client, server, groups, stages)


def build_problem(
    config: Config, rules: Rules, load: Callable[[AnyData], Dataset] = load_dataset
) -> Workload:
    """Load the data, split it over the clients, build the net, and check schedule and rules.

    Args:
        config: the validated configuration.
        rules: the rules to check against the problem.
        load: function that returns the data set of a section `data`.

    Returns:
        Data, partition, net and the facts that the rules may use.

    Raises:
        ConfigError: schedule, model or rules do not fit the data and its partition.
    """
    task_class = learning.find_learning_task(config)
    dataset = load(config.data)
    task = learning.make_learning_task(config, task_class, dataset)
    outputs = learning.check_data(config, task, dataset)
    metrics = learning.make_metrics(config, task, outputs)
    clients = split_dataset(config.partition, dataset, config.seed, config.held_out)
    _check_schedule(config, clients)
    checks.warn_of_empty_clients(config, clients)
    checks.check_model_fits_data(config)
    net = build.make_net(config, dataset.shape, outputs)
    dtype = getattr(torch, config.dtype)
    model = Model(
        copy.deepcopy(net),
        dataset.shape,
        outputs,
        dtype,
        learning_task=task,
        sample=learning.sample_batch(dataset, dtype),
        name=config.model.name,
    )
    checks.check_net_is_finite(config, net)
    check_reading(net, model)
    problem = Problem(
        n_clients=len(clients),
        cohort=config.schedule.size,
        size=model.size,
        segments=model.segments,
        n_nonempty=clients.n_nonempty,
        model=config.model.name,
        levels=model.levels,
        has_features=model.has_features,
        classes=outputs,
        features=model.features,
        seed=config.seed,
        n_held_out=len(clients) - clients.n_training,
        n_public=0 if dataset.public_x is None else len(dataset.public_x),
        lr=max(local.step_sizes.largest for local in local_of_groups(config)),
    )
    members = group_members(config, len(clients))
    workload = Workload(dataset, clients, members, net, model, problem, task, metrics)
    _check_rules(config, rules, workload)
    return workload


def _check_schedule(config: Config, clients: Clients | VirtualClients) -> None:
    """Check that the schedule fits the partition."""
    checks.check_cohort(config.schedule, len(clients))
    checks.check_cohort(config.schedule, clients.n_training, "evaluate.clients.held_out leaves")
    if isinstance(config.schedule, InFlight):
        checks.check_cohort(config.schedule, clients.n_nonempty, "there is data for")
    # Building the schedule validates it, including the trace file that it may name.
    rounds = schedule.make_schedule(config, clients.sizes)
    if isinstance(config.schedule, Sync) and isinstance(config.schedule.sampling, OwnSampling):
        assert isinstance(rounds, schedule.Synchronous)
        try:
            rounds.select(0)
        except schedule.ScheduleExhausted:
            pass  # the run reports it
        except RaysimError as error:
            raise ConfigError(str(error)) from None


def _check_rules(config: Config, rules: Rules, workload: Workload) -> None:
    """Check that the rules of all clients, and the stages of uploads, fit the problem."""
    client, server, model = rules.client, rules.server, workload.model
    all_rules = (client, server, *rules.groups.values())
    learning.check_rules_of_task(workload.learning_task, *all_rules)
    learning.check_public_data(workload.dataset, *all_rules)
    learning.check_privacy_of_task(config, workload.learning_task)
    checks.check_rules(config, client, server, workload.problem)
    checks.check_selection(config, server)
    checks.check_privacy(config, client, server, model)
    personal = personal_parts(config, client, model)
    checks.warn_of_averaged_statistics(server, model, personal)
    checks.check_local_steps(config, client)
    checks.check_groups(config, (client, server), rules.groups, workload.problem, model)
    by_key = {f"groups.{name}.client": rule for name, rule in rules.groups.items()}
    check_collusion(config, {config.section_of_rule("client"): client, **by_key}, server)
    for name, rule in {"": client, **rules.groups}.items():
        key = config.upload_key(name)
        section = config.uploads[key]
        if section and personal.size == workload.problem.size:
            raise ConfigError(
                f"{key}: clients send none of the {personal.size} parameters, since all are "
                "personal (local.personal, or the client rule); leave the stages out"
            )
        configured_upload_stages.check_stages(key, section, rule, server, rules.stages[key], model)


def record_files(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with the digests of all files that it names.

    Args:
        config: the configuration, with the digests of an earlier resolution in `files` if there are
            any.
        dataset: the data set of the run.

    Raises:
        ConfigError: a file has changed since its digest was recorded.
    """
    files = {**file_digests.of_code(config), **file_digests.of_data(config, dataset)}
    file_digests.check_file_digests(config.files, files)
    return config.model_copy(update={"files": files or None})


def try_rules(plan: Plan, config: Config) -> None:
    """Run users' rules on a few clients, and their loss and metrics on a few examples.

    Args:
        plan: the plan of the run.
        config: the configuration before its defaults were written out; messages name its keys.

    Raises:
        ConfigError: a rule fails, or computes different values in loop and vmap mode; or a rule, a
            loss or a metric draws from a global random generator.
    """
    learning_task.dry_run_task(plan)
    client_key = f"{config.section_of_rule('client')}.name"
    server_key = f"{config.section_of_rule('server')}.name"
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


def _written_out(
    config: Config,
    rules: Rules,
    workload: Workload,
    batching: BlockChoice,
    attached: Sequence[Probe],
) -> Config:
    """Return the configuration with every default and automatic choice written out.

    A configuration that is written out means the same in later versions.
    """
    evaluate = learning.written_out(config, workload.learning_task, workload.metrics)
    written_out = config.model_copy(
        update={
            "client": _rule_section(config.client, rules.client, config.algorithm),
            "server": _rule_section(config.server, rules.server, config.algorithm),
            "groups": {
                name: group.model_copy(
                    update={
                        "client": group.client and _rule_section(group.client, rules.groups[name])
                    }
                )
                for name, group in config.groups.items()
            },
            "algorithm": None if config.algorithm is None else Named(name=config.algorithm.name),
            "model": Named.model_validate(
                {"name": config.model.name, **build.net_arguments(config.model)}
            ),
            "batching": config.batching.model_copy(
                update={"size": batching.size, "mode": batching.mode}
            ),
            "task": learning.task_section(config, workload.learning_task),
            "evaluate": evaluate,
            "stop": early_stop.written_out(config.stop, evaluate.best),
        }
    )
    written_out = probes.with_probe_parameters(written_out, attached)
    return configured_upload_stages.with_stage_parameters(written_out, rules.stages)


def _rule_section(
    section: Named | None, rule: ClientRule | ServerRule, algorithm: Named | None = None
) -> Named:
    """Return the section of a rule: the name that loads it, and every hyper-parameter."""
    name = (
        section.name
        if section
        else registry.rule_reference(type(rule), algorithm.name if algorithm else "")
    )
    return Named.model_validate(
        {"name": name, **{f.name: asdict(rule)[f.name] for f in fields(rule)}}
    )


def keys(section: str, before: str, name: str) -> set[str]:
    """Return the keys of a section that keep their meaning when the section's name changes.

    `loading.read_config` keeps the values of these keys when an override changes the name. The
    arguments of a net have a meaning only for that net, so none is kept for `model`.

    Args:
        section: key of the section, such as "model".
        before: the value of the section's `name` before the override.
        name: the value of the section's `name` after the override.
    """
    if section in ("algorithm", "client", "server"):
        return registry.shared_keys(section, before, name)
    if section == "model":
        return set()
    keys_before = explain.section_keys(section, before) or set()
    keys_after = explain.section_keys(section, name) or set()
    return keys_before & keys_after
