"""Check the rules of a run against its problem, its schedule and its local steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raysim.config.schema import Config
from raysim.config.sections.local import Local
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.config.sections.schedule import Sync, UniformSampling
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import local_of_groups
from raysim.errors import ConfigError, errors_begin
from raysim.metrics import find_metric, is_of_engine
from raysim.models.flat import Model
from raysim.prepare.checks.privacy import check_privacy
from raysim.rules.contract import ClientRule, ServerRule, half_of, overridden
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods import registry
from raysim.rules.rule import SHIPPED_PACKAGE, Problem, family, place_of_metric
from raysim.rules.uploads import declared, with_mode
from raysim.system import startup_stages
from raysim.system.signals import failing_as
from raysim.training.groups import ClientGroup
from raysim.training.personal import PersonalParts, personal_batch_norms
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask

if TYPE_CHECKING:
    from raysim.engine.plan import Plan

logger = logging.getLogger("raysim")

ALIKE = 1.1
"""Largest ratio of the sizes of clients that an even partition makes, and that no line mentions."""


def _check_logs(section: str, half: str, rule: ClientRule | ServerRule) -> None:
    """Raise ConfigError if a rule logs a metric of the engine, or gives one another unit."""
    registry.discover()
    for name, _, unit in rule.logs:
        place = place_of_metric(half, name)
        known = find_metric(place)
        if known is None or known.users_own:
            continue
        if is_of_engine(place):
            raise ConfigError(
                f"{section}: {half} rule '{rule.name}' logs '{name}', but raysim logs {place} "
                f"itself ({known.meaning}); give the metric another name"
            )
        if known.unit != unit:
            raise ConfigError(
                f"{section}: {half} rule '{rule.name}' logs '{name}' with the unit '{unit}', but "
                f"raysim has a metric {place} with the unit '{known.unit}' ({known.meaning}); give "
                "the metric another name"
            )


def check_rule(section: str, rule: ClientRule | ServerRule, problem: Problem) -> None:
    """Let a rule check its hyper-parameters against the problem.

    Args:
        section: the section of the configuration that the rule comes from.
        rule: the client or server rule.
        problem: the facts about data, clients and net.

    Raises:
        ConfigError: the rule refuses the problem, or its `check` fails.
    """
    half = half_of(rule)
    _check_logs(section, half, rule)
    uploads = declared(getattr(rule, "sends", ())).values()
    sends_features = any("F" in getattr(upload, "sizes", ()) for upload in uploads)
    if not problem.features and (rule.needs_features or sends_features):
        raise ConfigError(
            f"model: {half} rule '{rule.name}' needs features, but '{problem.model}' does not end "
            "in a linear classifier on features that it learns; take another net"
        )
    if isinstance(rule, ServerRule):
        _check_unused(section, rule)
    failed = f"{section}: check() of {half} rule '{rule.name}' failed"
    try:
        with failing_as(lambda why: ConfigError(f"{failed}: {why}"), (ValueError,)):
            rule.check(problem)
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from None


def _check_unused(section: str, rule: ServerRule) -> None:
    """Refuse hyper-parameters that a server rule inherits and does not use."""
    if rule.counts_equally and rule.weights != "uniform":
        raise ConfigError(
            f"{section}.weights: server rule '{rule.name}' counts all clients equally; leave it out"
        )
    if not rule.steps_by_lr and rule.lr != 1.0:
        raise ConfigError(
            f"{section}.lr: server rule '{rule.name}' makes no step of this size; leave it out"
        )


def check_groups(
    config: Config,
    of_run: tuple[ClientRule, ServerRule],
    rules: Mapping[str, ClientRule],
    problem: Problem,
    model: Model,
) -> None:
    """Check that the client rules of groups fit the problem, privacy and each other.

    Args:
        config: the configuration of the run.
        of_run: the client rule of the other clients, and the server rule.
        rules: the client rule of each group.
        problem: the facts about data, clients and net.
        model: the net.

    Raises:
        ConfigError: a rule refuses the problem or privacy, declares personal parameters of its own,
            or keeps a state that another rule keeps in another shape.
    """
    client, server = of_run
    for (name, rule), local in zip(rules.items(), local_of_groups(config)[1:], strict=True):
        with errors_begin(f"groups.{name}: "):
            check_local_steps(config.model_copy(update={"local": local}), rule)
    by_place: dict[str, ClientRule] = {}
    for name, rule in rules.items():
        if config.groups[name].client is not None:
            by_place[f"groups.{name}.client"] = rule
    for place, rule in by_place.items():
        check_rule(place, rule, problem)
        check_privacy(config, rule, server, model)
        if overridden(rule, ["personal"]) and type(rule).personal is not type(client).personal:
            raise ConfigError(
                f"{place}: client rule '{rule.name}' declares personal parameters, which are the "
                f"same for all clients; declare them in client rule '{client.name}', or in "
                "local.personal"
            )
    if by_place:
        _check_states({config.section_of_rule("client"): client, **by_place}, model)


def _check_states(rules: Mapping[str, ClientRule], model: Model) -> None:
    """Check that no two rules keep client states of one name in different shapes."""
    task = LoopTask(model, LocalSettings(x0=model.initial()[0]))
    shapes: dict[str, torch.Size] = {}
    for place, rule in rules.items():
        with translate_errors(partial(_error_at, place)):
            state = rule.state(task)
        for key, value in state.items():
            if shapes.setdefault(key, value.shape) != value.shape:
                raise ConfigError(
                    f"{place}: client rule '{rule.name}' keeps '{key}' as {list(value.shape)}, and "
                    f"another rule as {list(shapes[key])}; give it another name"
                )


def _error_at(place: str, text: str) -> ConfigError:
    return ConfigError(f"{place}: {text}")


def check_selection(config: Config, server: ServerRule) -> None:
    """Check that a server rule that selects clients is not in conflict with the configuration.

    Args:
        config: the configuration of the run.
        server: the server rule.

    Raises:
        ConfigError: rounds are asynchronous, clients are also sampled otherwise, or they are
            private.
    """
    if not overridden(server, ["select"]):
        if overridden(server, ["candidates"]):
            raise ConfigError(
                f"{config.section_of_rule('server')}.name: server rule '{server.name}' defines "
                "`candidates`, whose losses only `select` gets; define `select(self, state, pool, "
                "rng)` too"
            )
        return
    selects = f"server rule '{server.name}' selects the clients of each synchronous round itself"
    schedule = config.schedule
    if not isinstance(schedule, Sync):
        raise ConfigError(
            f"schedule.name: {selects}, but the rounds of '{schedule.name}' are asynchronous; use "
            "schedule=sync"
        )
    if not isinstance(schedule.sampling, UniformSampling):
        raise ConfigError(
            f"schedule.sampling: {selects}, so '{schedule.sampling.name}' would have no effect; "
            "leave it out"
        )
    if config.client_privacy is not None:
        raise ConfigError(
            f"privacy.unit: {selects}, by facts about them that get no noise; use a server rule "
            "that leaves this to schedule.sampling, such as fedavg"
        )
    if config.privacy is not None:
        logger.warning("privacy: %s; the training losses that it sees get no noise", selects)


def check_differences(
    config: Config, server: ServerRule, clients: Clients | VirtualClients
) -> None:
    """Check that clients keep their weights in sums of differences to their last uploads.

    Args:
        config: the configuration of the run.
        server: the server rule.
        clients: the partition of the training examples over the clients.

    Raises:
        ConfigError: clients count by their numbers of examples, which change over the rounds.
    """
    keys = with_mode(server.uploads, "difference")
    first, *later = clients.sizes_by_round.phases
    if not keys or server.weights != "samples" or all(np.array_equal(first, n) for n in later):
        return
    # A last upload would be taken back with the weight of today, not with the one that it had.
    raise ConfigError(
        f"{config.section_of_rule('server')}.weights: server rule '{server.name}' adds up the "
        f"differences of '{keys[0]}' to each client's last upload, and partition.phases changes "
        "the clients' numbers of examples; use weights=uniform, or leave partition.phases out"
    )


def warn_of_averaged_statistics(server: ServerRule, model: Model, personal: PersonalParts) -> None:
    """Warn if the server averages BatchNorm statistics of models that differ between clients.

    Args:
        server: the server rule.
        model: the net.
        personal: the parts of the net that stay with clients.
    """
    if personal.statistics != "averaged" or not model.buffer_size:
        return
    fix = "set local.buffers=personal if clients are to keep them"
    if overridden(server, ["sent_to"]):
        logger.warning(
            "server rule '%s' sends clients different models, but the net's BatchNorm statistics "
            "are averaged over all clients; %s",
            server.name,
            fix,
        )
    layers = [] if personal.mask is None else personal_batch_norms(model, personal.mask)
    if layers:
        logger.warning(
            "the parameters of BatchNorm layer %s are personal, but its statistics are averaged "
            "like those of the other layers; %s",
            " and ".join(f"'{layer}'" for layer in layers),
            fix,
        )


def note_uniform_weights(raw: Mapping[str, Any], plan: Plan) -> None:
    """Log that clients of different sizes count equally, if nobody has chosen it.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        plan: the plan of the run.
    """
    if not _may_weigh_by_samples(raw, plan):
        return
    sizes = plan.clients.sizes[plan.clients.sizes > 0]
    if sizes.max() <= ALIKE * sizes.min():
        return
    startup_stages.notes.info(
        "clients of different sizes count equally in means; McMahan 2017, Flower and PFLlib weigh "
        "them by their examples: %s.weights=samples",
        _section_of_server(raw),
    )


def _section_of_server(raw: Mapping[str, Any]) -> str:
    """Return the section of a configuration that has the server rule's hyper-parameters."""
    return "server" if raw.get("server") is not None else "algorithm"


def note_models_of_clients(plan: Plan) -> None:
    """Log that clients have models of their own, if only the global model is evaluated.

    Args:
        plan: the plan of the run.
    """
    evaluate = plan.config.evaluate
    if evaluate.every and evaluate.clients is None and plan.clients_have_models:
        startup_stages.notes.info(
            "clients have models of their own, and only the global model is evaluated, which some "
            "methods never train; evaluate.clients.every=10 and partition.test.fraction=0.2 "
            "measure those of the clients, evaluate.every=0 leaves the global one out"
        )


def note_attackers(raw: Mapping[str, Any], plan: Plan) -> None:
    """Log that attackers have no effect, or are more in a round than the server rule is set for.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        plan: the plan of the run.
    """
    server, cohort = plan.server, plan.problem.cohort
    if plan.members is None:
        return
    members = plan.members[plan.clients.sizes > 0]
    for k, group in enumerate(plan.groups, 1):
        if group.rule.attacks:
            n_in_round = round(float(np.mean(members == k)) * cohort)
            _note_no_effect(group, max(n_in_round, 1), cohort)
    key = f"{_section_of_server(raw)}.{server.attackers_key}"
    value = getattr(server, server.attackers_key, None)
    if not isinstance(value, int | float):
        return
    attacking = [k for k, group in enumerate(plan.groups, 1) if group.rule.attacks]
    share = float(np.isin(members, attacking).mean())
    is_number = isinstance(value, int)
    n_attackers = round(share * cohort)
    if round(value if is_number else value * cohort) >= n_attackers:
        return
    needed = n_attackers if is_number else round(share, 2)
    names = " and ".join(plan.groups[k - 1].name for k in attacking)
    startup_stages.notes.info(
        "%s expects %s=%s, but of the %d clients of a round about %d are attackers "
        "(groups: %s); set %s=%g, or take fewer attackers or another rule if it refuses that",
        server.name,
        key,
        value,
        cohort,
        n_attackers,
        names,
        key,
        needed,
    )


def _note_no_effect(group: ClientGroup, n_attackers: int, cohort: int) -> None:
    """Log that a group of attackers changes nothing in a round of the usual numbers."""
    rule, key = group.rule, f"groups.{group.name}.client"
    failed = f"{key}: no_effect() of client rule '{rule.name}' failed"
    with failing_as(lambda why: ConfigError(f"{failed}: {why}")):
        reason = rule.no_effect(n_attackers, cohort - n_attackers)
    if reason:
        startup_stages.notes.info(
            "%s: %s has no effect, as of the %d clients of a round about %d are attackers: %s",
            key,
            rule.name,
            cohort,
            n_attackers,
            reason,
        )


def note_averaged_statistics(plan: Plan) -> None:
    """Log that statistics are averaged over clients whose updates the server weighs otherwise.

    Args:
        plan: the plan of the run.
    """
    server = type(plan.server)
    # Robust rules that choose clients take the statistics of those that they have chosen.
    chooses = server.weights_after_training and family(server.__module__) == "robust"
    are_attacked = not chooses and any(group.rule.attacks for group in plan.groups)
    is_shipped = server.__module__.startswith(f"{SHIPPED_PACKAGE}.")
    sets_no_weights = not is_shipped and not server.weights_after_training
    weighs = sets_no_weights and bool(with_mode(plan.server.uploads, "per_client"))
    if not (are_attacked or weighs):
        return
    if plan.initial[1].numel() and plan.personal.statistics == "averaged":
        who, fix = (
            "clients",
            "for its own weights set weights_after_training and call set_weights",
        )
        if are_attacked:
            who, fix = "attackers", "set local.buffers=frozen or personal, or take nn.GroupNorm"
        startup_stages.notes.info(
            "%s also send statistics of normalisation layers, which are averaged over all clients, "
            "whatever %s does with the updates; %s",
            who,
            plan.server.name,
            fix,
        )


def _may_weigh_by_samples(raw: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether clients count equally only because that is the default of the server rule."""
    server = plan.server
    for section in (raw.get("algorithm"), raw.get("server")):
        if isinstance(section, Mapping) and "weights" in section:
            return False
    # A user's rule that gets the uploads one by one may well count them equally on purpose.
    on_purpose = not with_mode(server.uploads, "mean") and not registry.is_shipped(server)
    has_own_weights = overridden(server, ["weigh"]) or server.weights != "uniform"
    if on_purpose or has_own_weights or server.counts_equally or plan.config.client_privacy:
        return False
    try:
        replace(server, weights="samples").check(plan.problem)
    except ValueError:  # the rule has no weights
        return False
    return True


def check_local_steps(config: Config, client: ClientRule) -> None:
    """Check that the client rule supports the configured steps, and that they have a size.

    Args:
        config: the configuration of the run.
        client: the client rule.

    Raises:
        ConfigError: two settings exclude each other, the rule needs plain SGD or makes its own
            steps, a step size becomes 0, or local.precision has no effect.
    """
    local = config.local
    if local.conflict is not None:
        raise ConfigError(f"local: {local.conflict}")
    if client.needs_plain_sgd:
        _check_plain_sgd(local, client)
    if local.accumulate > 1 and overridden(client, ["step"]):
        raise ConfigError(
            f"local.accumulate: client rule '{client.name}' has a step of its own, in which each "
            "mini-batch moves the parameters; leave local.accumulate at 1, and raise "
            "local.batch_size instead"
        )
    last = local.step_sizes.of_step(config.rounds - 1)
    if not local.step_sizes.varies_in_a_round and last <= 0:
        raise ConfigError(
            "local.lr: is 0 in the last round; raise local.lr.eta_min, give local.lr.T_max at "
            f"least the number of rounds ({config.rounds}), or return a number > 0"
        )
    if local.precision != "float32" and config.dtype == "float64":
        raise ConfigError(
            f"local.precision: {local.precision} has no effect on float64; leave it out, or use "
            "dtype=float32"
        )
    if local.precision == "tf32" and not config.resources.gpus:
        logger.warning("local.precision: only GPUs have TF32; clients on CPUs compute in float32")


def _check_plain_sgd(local: Local, client: ClientRule) -> None:
    """Check that steps are plain SGD with one step size in a round, which a rule needs."""
    reason = client.needs_plain_sgd
    if local.optimizer != PLAIN_SGD:
        kind = f"'{local.optimizer.name}'"
        if local.optimizer.name == PLAIN_SGD.name:
            kind += " with further keys"
        advice = "; local.weight_decay fits" if local.optimizer.weight_decay else ""
        raise ConfigError(
            f"local.optimizer: client rule '{client.name}' needs plain SGD, not {kind}: {reason}; "
            f"leave local.optimizer out{advice}"
        )
    if local.step_sizes.varies_in_a_round:
        raise ConfigError(
            f"local.lr.over: client rule '{client.name}' needs one step size in a round: "
            f"{reason}; use local.lr.over=rounds"
        )
