"""Check a configuration against the machine, the partition, the rules and privacy.

These checks need more than the schema. Each raises ConfigError before anything starts; the message
names the key and the fix.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raysim.config.schema import Config
from raysim.config.sections.execution import cluster_address
from raysim.config.sections.optimizer import PLAIN_SGD
from raysim.config.sections.privacy import ClientPrivacy
from raysim.config.sections.schedule import (
    InFlight,
    PoissonSampling,
    SamplingBySamples,
    Sync,
    UniformSampling,
)
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import local_of_groups
from raysim.errors import ConfigError, in_a_line
from raysim.models import build
from raysim.models.checks.coupled_examples import couples_examples
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, ServerRule, overridden
from raysim.rules.errors.user_code import translate_errors
from raysim.rules.methods import registry
from raysim.rules.rule import Problem
from raysim.rules.uploads import declared, with_mode
from raysim.system import machine, startup_stages
from raysim.system.files import is_path
from raysim.system.signals import reraise_stop
from raysim.training.personal import PersonalParts, personal_batch_norms
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask

if TYPE_CHECKING:
    from raysim.engine.plan import Plan

logger = logging.getLogger("raysim")

ALIKE = 1.1
"""Largest ratio of the sizes of clients that an even partition makes, and that no line mentions."""

MAX_ACTORS_PER_CORE = 4
"""Largest number of actors per CPU core of this machine; a request for more is refused."""


def check_resources(config: Config) -> None:
    """Check that this machine has the GPUs and CPU cores that the configuration requests.

    The resources of a cluster are checked after the run has connected to it.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: the machine has too few GPUs or cores.
    """
    resources = config.resources
    on_ray = resources.executor == "ray"
    if on_ray and cluster_address(resources.address):
        return
    n_gpus = torch.cuda.device_count()
    n_cores = machine.cores()
    requested_gpus = resources.gpus * (resources.actors if on_ray else 1)
    if requested_gpus > n_gpus:
        each = f" ({resources.gpus:g} for each of {resources.actors} actors)" if on_ray else ""
        raise ConfigError(
            f"resources.gpus: the run requests {requested_gpus:g} GPUs in total{each}, but this "
            f"machine has {n_gpus}; set resources.gpus=0, or set resources.address to use a cluster"
        )
    requested_cores = resources.actors * resources.cpus
    if on_ray and (resources.cpus > n_cores or requested_cores > MAX_ACTORS_PER_CORE * n_cores):
        raise ConfigError(
            f"resources.actors: the run requests {resources.actors} actors with "
            f"{resources.cpus:g} CPUs each, but this machine has {n_cores} cores; lower "
            "resources.actors or resources.cpus, or set resources.address to use a cluster"
        )


def check_address(config: Config) -> None:
    """Check that a single run uses the cluster that it names; trials of a sweep may run inline.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: it names a cluster, and trains in this process.
    """
    resources = config.resources
    if resources.executor == "inline" and resources.address is not None:
        raise ConfigError(
            "resources.address: resources.executor=inline trains in this process, not on the "
            f"cluster {resources.address}; set resources.executor=ray, or resources.address=null"
        )


def check_client_store(config: Config) -> None:
    """Check that `client_state.dir` is a writable folder, or can be created in one.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: the folder is not writable.
    """
    if config.client_state.dir is None:
        return
    folder = Path(config.client_state.dir).expanduser()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"client_state.dir: {existing} is not a writable folder; set it to a folder that is"
        )


def check_logged_models(config: Config) -> None:
    """Check that a best checkpoint is kept if `tracking.models` asks for the best net.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: no best checkpoint is kept.
    """
    keeps_best = config.checkpoint.every and config.checkpoint.best
    if "best" in config.tracking.models and not keeps_best:
        raise ConfigError(
            "tracking.models: 'best' is the net of the best checkpoint, and none is kept; set "
            "checkpoint.every and checkpoint.best, or leave it out"
        )


def check_cohort(
    schedule: Sync | InFlight, clients: int, source: str = "partition.clients gives"
) -> None:
    """Check that the schedule needs no more clients at one time than exist.

    Args:
        schedule: the section `schedule` of the configuration.
        clients: the number of clients that exist.
        source: the words before that number in the message, naming the cause of the limit.

    Raises:
        ConfigError: the schedule needs more clients.
    """
    needed = {} if _draws_with_replacement(schedule) else {schedule.SIZE_KEY: schedule.size}
    if isinstance(schedule, InFlight):
        needed["concurrency"] = schedule.places(clients)
    for key, number in needed.items():
        if number > clients:
            raise ConfigError(
                f"schedule.{key}: the schedule needs {number} clients at one time, but {source} "
                f"only {clients}; lower schedule.{key}, or raise the number of clients"
            )


def warn_of_empty_clients(config: Config, clients: Clients | VirtualClients) -> None:
    """Log how many clients have no training examples, and what would avoid it.

    Args:
        config: the configuration of the run.
        clients: the partition.
    """
    empty = clients.n_training - clients.n_nonempty
    if not empty:
        return
    partition = config.partition
    if partition.val_fraction:
        way_out = "a smaller partition.val_fraction may avoid it"
    elif partition.name == "dirichlet":
        way_out = "partition.min_samples=1 avoids it"
    elif partition.name == "slow_class":
        way_out = "fewer partition.clients or a larger partition.alpha may avoid it"
    else:
        way_out = "leave them out of the partition"
    logger.warning(
        "%d of %d clients have no training examples; they never train, and methods count N = %d "
        "clients (%s)",
        empty,
        clients.n_training,
        clients.n_nonempty,
        way_out,
    )


def check_client_evaluation(config: Config) -> None:
    """Check that clients have test or validation examples if they are to be evaluated.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: they have none.
    """
    if config.evaluate.clients is None or config.partition.test or config.partition.val:
        return
    if config.partition.name == "virtual":
        raise ConfigError(
            "evaluate.clients: virtual clients share their examples, so they have no test "
            "examples of their own; leave it out, or use another partition"
        )
    raise ConfigError(
        "evaluate.clients: the clients have no test examples; set partition.test.fraction=0.2, "
        "partition.test=matched or, for users with test examples of their own, "
        "partition.test=natural"
    )


def _draws_with_replacement(schedule: Sync | InFlight) -> bool:
    """Return whether a round can draw more clients than there are."""
    sampling = getattr(schedule, "sampling", None)
    return isinstance(sampling, SamplingBySamples) and sampling.replace


def check_model_fits_data(config: Config) -> None:
    """Check that a classifier is not trained on quadratics, which have no classes.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: a model with labels is combined with `data=quadratics`.
    """
    if (
        config.data.name == "quadratics"
        and config.model.name in build.NETS
        and config.model.name != "quadratic"
    ):
        raise ConfigError(
            f"model.name: '{config.model.name}' is a classifier, but data 'quadratics' has no "
            "classes; use model=quadratic"
        )


def check_net_is_finite(config: Config, net: nn.Module) -> None:
    """Check that the initial parameters and BatchNorm statistics of the net are finite.

    A net that loads its weights from a file may have NaN or infinite ones.

    Args:
        config: the configuration of the run.
        net: the net.

    Raises:
        ConfigError: a tensor has a value that is not finite; the message names the tensor.
    """
    tensors = dict(net.named_parameters())
    for prefix, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            buffers = module.named_buffers(prefix)
            tensors |= {name: value for name, value in buffers if value.is_floating_point()}
    for name, value in tensors.items():
        if not torch.isfinite(value.detach().sum()) and not torch.isfinite(value.detach()).all():
            texts = [text for text in config.model.parameters.values() if isinstance(text, str)]
            files = [text for text in texts if is_path(text)]
            hint = f"; check {' and '.join(files)}" if files else ""
            raise ConfigError(
                f"model.name: the initial '{name}' of model '{config.model.name}' is not "
                f"finite{hint}"
            )


def check_rules(config: Config, client: ClientRule, server: ServerRule, problem: Problem) -> None:
    """Let both rules check their hyper-parameters against the problem.

    Args:
        config: the configuration that the rules come from.
        client: the client rule.
        server: the server rule.
        problem: the facts about data, clients and net.

    Raises:
        ConfigError: a rule refuses the problem, or its `check` fails.
    """
    for half, rule in (("client", client), ("server", server)):
        check_rule(config.section_of_rule(half), half, rule, problem)


def check_rule(section: str, half: str, rule: ClientRule | ServerRule, problem: Problem) -> None:
    """Let a rule check its hyper-parameters against the problem.

    Args:
        section: the section of the configuration that the rule comes from.
        half: "client" or "server".
        rule: the client or server rule.
        problem: the facts about data, clients and net.

    Raises:
        ConfigError: the rule refuses the problem, or its `check` fails.
    """
    for key, upload in declared(rule.sends).items() if isinstance(rule, ClientRule) else ():
        if not problem.features and "F" in getattr(upload, "sizes", ()):
            raise ConfigError(
                f"model: client rule '{rule.name}' sends '{key}' with a size of F features, but "
                f"'{problem.model}' does not end in a linear classifier on features"
            )
    try:
        rule.check(problem)
    except ValueError as error:
        raise ConfigError(f"{section}.{error}") from None
    except BaseException as error:
        reraise_stop(error)
        raise ConfigError(
            f"{section}: check() of {half} rule '{rule.name}' failed: {in_a_line(error)}"
        ) from None


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
        try:
            check_local_steps(config.model_copy(update={"local": local}), rule)
        except ConfigError as error:
            raise ConfigError(f"groups.{name}: {error}") from None
    own_rules = {name: rule for name, rule in rules.items() if config.groups[name].client}
    if not own_rules:
        return
    task = LoopTask(model, LocalSettings(x0=model.initial()[0]))

    def state(place: str, rule: ClientRule) -> dict[str, Tensor]:
        with translate_errors(lambda text: ConfigError(f"{place}: {text}")):
            return rule.state(task)

    shapes = {
        key: value.shape for key, value in state(config.section_of_rule("client"), client).items()
    }
    for name, rule in own_rules.items():
        place = f"groups.{name}.client"
        check_rule(place, "client", rule, problem)
        check_privacy(config, rule, server, model)
        if overridden(rule, ["personal"]) and type(rule).personal is not type(client).personal:
            raise ConfigError(
                f"{place}: client rule '{rule.name}' declares personal parameters, which are the "
                f"same for all clients; declare them in client rule '{client.name}', or in "
                "local.personal"
            )
        for key, value in state(place, rule).items():
            if shapes.setdefault(key, value.shape) != value.shape:
                raise ConfigError(
                    f"{place}: client rule '{rule.name}' keeps '{key}' as {list(value.shape)}, and "
                    f"another rule as {list(shapes[key])}; give it another name"
                )


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
    server, config = plan.server, plan.config
    sections = [raw.get(key) for key in ("algorithm", "server")]
    is_chosen = any(isinstance(section, Mapping) and "weights" in section for section in sections)
    own_weights = overridden(server, ["weigh"]) or config.client_privacy is not None
    if is_chosen or own_weights or server.weights != "uniform":
        return
    # A user's rule that gets the uploads one by one may well count them equally on purpose.
    takes_means = with_mode(server.uploads, "mean") or registry.is_shipped(server)
    sizes = plan.clients.sizes[plan.clients.sizes > 0]
    if not takes_means or sizes.max() <= ALIKE * sizes.min():
        return
    try:
        replace(server, weights="samples").check(plan.problem)
    except ValueError:  # the rule has no weights
        return
    key = "server" if raw.get("server") is not None else "algorithm"
    startup_stages.notes.info(
        "clients have %d to %d examples and count equally in means; McMahan 2017, Flower and "
        "PFLlib weigh them by their examples: %s.weights=samples",
        sizes.min(),
        sizes.max(),
        key,
    )


def check_local_steps(config: Config, client: ClientRule) -> None:
    """Check that the client rule supports the configured steps, and that they have a size.

    Args:
        config: the configuration of the run.
        client: the client rule.

    Raises:
        ConfigError: two settings exclude each other, the rule needs plain SGD or makes its own
            steps, a step size becomes 0, or autocast has no effect.
    """
    local = config.local
    if local.conflict is not None:
        raise ConfigError(f"local: {local.conflict}")
    if reason := client.needs_plain_sgd:
        if local.optimizer != PLAIN_SGD:
            kind = local.optimizer.name
            kind = f"'{kind}'" if kind != PLAIN_SGD.name else f"'{kind}' with further keys"
            raise ConfigError(
                f"local.optimizer: client rule '{client.name}' needs plain SGD, not "
                f"{kind}: {reason}; leave local.optimizer out"
                + ("; local.weight_decay fits" if local.optimizer.weight_decay else "")
            )
        if local.step_sizes.varies_in_a_round:
            raise ConfigError(
                f"local.lr.over: client rule '{client.name}' needs one step size in a round: "
                f"{reason}; use local.lr.over=rounds"
            )
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
    if local.autocast and config.dtype == "float64":
        raise ConfigError(
            "local.autocast: has no effect on float64; leave it out, or use dtype=float32"
        )


def check_privacy(config: Config, client: ClientRule, server: ServerRule, model: Model) -> None:
    """Check that rules, schedule and net support differentially private training.

    DP-SGD protects an example only if the client uses it through the clipped, noisy gradient
    alone. Uploads that stay unprotected are logged as a warning. DP-FedAvg protects a client only
    if the server knows it through the noisy sum alone.

    Args:
        config: the configuration; without a section `privacy` there is nothing to check.
        client: the client rule.
        server: the server rule.
        model: the net, in which examples must not meet, as they do in BatchNorm.

    Raises:
        ConfigError: the net has BatchNorm, the client rule computes other gradients, or rules or
            schedule do not support the privacy of clients.
    """
    if config.privacy is None:
        if config.algorithm and "privacy" in registry.algorithm_defaults(config.algorithm.name):
            logger.warning(
                "privacy: null switches off the privacy of algorithm '%s'", config.algorithm.name
            )
        return
    if not config.privacy.noise_multiplier:
        logger.warning(
            "privacy.noise_multiplier: 0 adds no noise, so the run is not private (epsilon is "
            "infinite)"
        )
    has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.module.modules())
    if has_norm or model.buffer_size or couples_examples(model):
        raise ConfigError(
            f"privacy: model '{config.model.name}' has BatchNorm or the like, which makes the "
            "gradient of an example depend on the other examples, or sends statistics without "
            "noise; use a net with GroupNorm or none"
        )
    if config.client_privacy is not None:
        _check_client_privacy(config, config.client_privacy, server)
        return
    if not client.supports_dp:
        raise ConfigError(
            f"privacy: client rule '{client.name}' computes gradients that DP-SGD does not "
            "protect; use fedavg, fedprox, fedcurv or another rule with one gradient per step"
        )
    if client.unprotected_uploads:
        logger.warning(
            "privacy: client rule '%s' uploads %s without protection",
            client.name,
            " and ".join(client.unprotected_uploads),
        )


def _check_client_privacy(config: Config, privacy: ClientPrivacy, server: ServerRule) -> None:
    """Check that schedule and server rule support the privacy of clients."""
    if (reason := _why_no_client_privacy(config.schedule, server)) is not None:
        raise ConfigError(f"privacy.unit: 'client' is not possible in this run: {reason}")
    try:
        privacy.update_noise(config.schedule.size)
    except ValueError as error:
        raise ConfigError(f"privacy.adaptive.noise_std: {error}") from None
    logger.info(
        "privacy/epsilon is that of a client that is %s",
        "added or removed" if config.samples_by_poisson else "replaced by another",
    )


def _why_no_client_privacy(schedule: Sync | InFlight, server: ServerRule) -> str | None:
    """Return why clients cannot be protected, and the fix; None if they can."""
    if not isinstance(schedule, Sync):
        return (
            "ε is not known for clients of an asynchronous schedule; use schedule=sync with "
            "sampling uniform or poisson"
        )
    if not isinstance(schedule.sampling, UniformSampling | PoissonSampling):
        return (
            f"ε is not known for schedule.sampling '{schedule.sampling.name}'; use poisson or "
            "uniform"
        )
    if schedule.client_dropout or schedule.availability or schedule.deadline is not None:
        return (
            "ε counts on all clients in every draw; leave out schedule.client_dropout, "
            "availability and deadline"
        )
    name = f"server rule '{server.name}'"
    if server.weights != "uniform":
        return f"{name} weighs clients by their samples, which would show; set weights to uniform"
    if type(server).weigh is not ServerRule.weigh or server.weights_after_training:
        return f"{name} weighs clients unequally; use one with uniform weights, such as fedavg"
    if list(server.uploads.values()) != ["mean"]:
        return (
            f"{name} receives {dict(server.uploads)}, and only the mean of one upload gets noise; "
            "use one that receives no more, such as fedavg"
        )
    if server.needs_base_params:
        return f"{name} needs the model that each client started from; use one that does not"
    if type(server).before_round is not ServerRule.before_round:
        return f"{name} uses who takes part (before_round), which must stay secret"
    return None
