"""Check that rules, schedule and net support differential privacy."""

from __future__ import annotations

import logging

from raysim.config.schema import Config
from raysim.config.sections.privacy import ClientPrivacy
from raysim.config.sections.schedule import (
    InFlight,
    PoissonSampling,
    Sync,
    UniformSampling,
)
from raysim.errors import ConfigError
from raysim.models.checks.coupled_examples import couples_examples
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, ServerRule
from raysim.rules.methods import registry

logger = logging.getLogger("raysim")


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
    if model.buffer_size or couples_examples(model):
        raise ConfigError(
            f"privacy: model '{config.model.name}' has BatchNorm, random numbers that "
            "examples share, or the like, which makes the gradient of an example depend on the "
            "other examples, or sends statistics without noise; use a net with GroupNorm or none"
        )
    if config.client_privacy is not None:
        _check_client_privacy(config, config.client_privacy, server)
    else:
        _check_example_privacy(config, client)


def _check_example_privacy(config: Config, client: ClientRule) -> None:
    """Check that partition and client rule support the privacy of examples."""
    if config.partition.phases is not None:
        raise ConfigError(
            "privacy.unit: 'example' counts the uses of examples that clients keep in all rounds; "
            "leave partition.phases out, or use privacy.unit=client"
        )
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
    reason = _why_no_private_schedule(config.schedule) or _why_no_private_server(server)
    if reason is not None:
        raise ConfigError(f"privacy.unit: 'client' is not possible in this run: {reason}")
    try:
        privacy.update_noise(config.schedule.size)
    except ValueError as error:
        raise ConfigError(f"privacy.adaptive.noise_std: {error}") from None
    logger.info(
        "privacy/epsilon is that of a client that is %s",
        "added or removed" if config.samples_by_poisson else "replaced by another",
    )


def _why_no_private_schedule(schedule: Sync | InFlight) -> str | None:
    """Return why clients of a schedule cannot be protected, and the fix; None if they can."""
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
    return None


def _why_no_private_server(server: ServerRule) -> str | None:
    """Return why clients cannot be protected from a server rule, and the fix; None if they can."""
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
