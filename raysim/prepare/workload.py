"""Build what a run trains on, from its configuration: rules, data, partition, net and problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from raysim import schedule
from raysim.config.schema import Config
from raysim.config.sections.data import AnyData
from raysim.config.sections.schedule import InFlight, OwnSampling, Sync
from raysim.data import Dataset, split_dataset
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import (
    group_members,
    local_of_groups,
    without_clients_without_batch,
)
from raysim.engine.plan import sample_batch
from raysim.errors import ConfigError, RaysimError
from raysim.models import build
from raysim.models.checks.against_pytorch import check_reading
from raysim.models.flat import Model
from raysim.prepare import configured_task, configured_upload_stages
from raysim.prepare.checks import clients as client_checks
from raysim.prepare.checks import net as net_checks
from raysim.prepare.checks import rules as rule_checks
from raysim.prepare.checks import task as task_checks
from raysim.prepare.checks.privacy import check_privacy
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods import pairs
from raysim.rules.rule import Problem
from raysim.rules.tasks.learning_task import LearningTask, TaskMetric
from raysim.rules.upload_stages import UploadStage
from raysim.server.collusion import check_collusion
from raysim.training.personal import personal_parts


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


def build_problem(config: Config, rules: Rules, load: Callable[[AnyData], Dataset]) -> Workload:
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
    task_class = configured_task.find_learning_task(config)
    dataset = load(config.data)
    task = configured_task.make_learning_task(config, task_class, dataset)
    outputs = task_checks.check_data(config, task, dataset)
    metrics = configured_task.make_metrics(config, task, outputs)
    split = split_dataset(config.partition, dataset, config.seed, config.held_out)
    dataset = dataset.with_public(split.public)
    clients = without_clients_without_batch(config, split)
    _check_schedule(config, clients)
    client_checks.warn_of_empty_clients(config, split, clients)
    net_checks.check_model_fits_data(config)
    net = build.make_net(config, dataset.shape, outputs, dataset.inputs)
    dtype = getattr(torch, config.dtype)
    model = Model(
        build.copied(net),
        dataset.shape,
        outputs,
        dtype,
        learning_task=task,
        sample=sample_batch(dataset, dtype),
        name=config.model.name,
    )
    net_checks.check_net_is_finite(config, net)
    task_checks.confirm_loss(model, dataset, clients)
    of_net = {"data", "model", "task", "dtype"}
    # Workers and `result.net()` build a user's net again.
    is_built = ":" in config.model.name
    again = build.make_net(config, dataset.shape, outputs, dataset.inputs) if is_built else net
    check_reading(again, model, config.model_dump_json(include=of_net))
    net_checks.check_batches_of_one(config, net, model, clients.sizes)
    net_checks.note_probabilities(model)
    net_checks.note_coupled_evaluation(config, model, len(dataset.y_test))
    problem = Problem(
        n_clients=len(clients),
        cohort=config.schedule.size,
        size=model.size,
        segments=model.segments,
        shapes=tuple(model.shapes),
        names=tuple(name.removeprefix("0.") for name in model.names),
        classifier=model.classifier_names,
        frozen=frozen_parameters(rules.server, model),
        n_nonempty=clients.n_nonempty,
        model=config.model.name,
        levels=model.levels,
        classes=outputs,
        features=model.features,
        seed=config.seed,
        rounds=config.rounds,
        n_held_out=len(clients) - clients.n_training,
        n_public=0 if dataset.public_x is None else len(dataset.public_x),
        lr=max(local.step_sizes.largest for local in local_of_groups(config)),
    )
    members = group_members(config, len(clients))
    workload = Workload(dataset, clients, members, net, model, problem, task, metrics)
    _check_rules(config, rules, workload)
    return workload


def frozen_parameters(server: ServerRule, model: Model) -> dict[str, Tensor]:
    """Return the net's frozen parameters by name; {} for a rule that does not change them.

    Args:
        server: the server rule.
        model: the net.

    Raises:
        ConfigError: the rule changes them, and there are none or it does not broadcast them.
    """
    if not server.changes_frozen:
        return {}
    if "frozen" not in server.provides:
        raise ConfigError(
            f"server: rule '{server.name}' changes frozen parameters; give its class "
            'provides = ("x", "frozen")'
        )
    if not model.frozen:
        raise ConfigError(
            f"model: server rule '{server.name}' changes frozen parameters, and model "
            f"'{model.name}' has none; freeze some by model.freeze or requires_grad_(False)"
        )
    return {name.removeprefix("0."): p.detach().clone() for name, p in model.frozen.items()}


def _check_schedule(config: Config, clients: Clients | VirtualClients) -> None:
    """Check that the schedule fits the partition."""
    client_checks.check_cohort(config.schedule, len(clients))
    client_checks.check_cohort(
        config.schedule, clients.n_training, "evaluate.clients.held_out leaves"
    )
    if isinstance(config.schedule, InFlight):
        sizes = clients.sizes_by_round.phases
        n_with_data = min(int(np.count_nonzero(of_phase)) for of_phase in sizes)
        client_checks.check_cohort(config.schedule, n_with_data, "there is data for")
    # Building the schedule validates it, including the trace file that it may name.
    rounds = schedule.make_schedule(config, clients.sizes_by_round)
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
    task_checks.check_rules_of_task(workload.learning_task, *all_rules)
    task_checks.check_public_data(workload.dataset, *all_rules)
    task_checks.check_privacy_of_task(config, workload.learning_task)
    client_section = config.section_of_rule("client")
    server_section = config.section_of_rule("server")
    rule_checks.check_rule(client_section, client, workload.problem)
    rule_checks.check_rule(server_section, server, workload.problem)
    rule_checks.check_selection(config, server)
    rule_checks.check_differences(config, server, workload.clients)
    check_privacy(config, client, server, model)
    personal = personal_parts(config, client, model)
    all_personal = personal.size == workload.problem.size
    if all_personal and server.lr != 1.0 and set(client.sends) == {"delta"}:
        raise ConfigError(
            f"{server_section}.lr: all {personal.size} parameters are personal (local.personal, or "
            "the client rule), so the server makes no step; leave it out"
        )
    rule_checks.warn_of_averaged_statistics(server, model, personal)
    rule_checks.check_local_steps(config, client)
    rule_checks.check_groups(config, (client, server), rules.groups, workload.problem, model)
    by_key = {f"groups.{name}.client": rule for name, rule in rules.groups.items()}
    check_collusion(config, {client_section: client, **by_key}, server)
    for name, rule in {"": client, **rules.groups}.items():
        key = config.upload_key(name)
        section = config.uploads[key]
        if section and all_personal:
            raise ConfigError(
                f"{key}: clients send none of the {personal.size} parameters, since all are "
                "personal (local.personal, or the client rule); leave the stages out"
            )
        configured_upload_stages.check_stages(key, section, rule, server, rules.stages[key], model)
