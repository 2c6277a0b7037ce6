"""Check the cohort and the evaluations of clients against the partition."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysim.config.schema import Config
from raysim.config.sections.schedule import (
    InFlight,
    SamplingBySamples,
    Sync,
)
from raysim.data import Dataset
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.errors import ConfigError
from raysim.spelling import did_you_mean, lacking
from raysim.system import startup_stages

logger = logging.getLogger("raysim")


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
    sampling = getattr(schedule, "sampling", None)
    replaces = isinstance(sampling, SamplingBySamples) and sampling.replace
    needed = {} if replaces else {schedule.SIZE_KEY: schedule.size}
    if isinstance(schedule, InFlight):
        needed["concurrency"] = schedule.places(clients)
    for key, number in needed.items():
        if number > clients:
            raise ConfigError(
                f"schedule.{key}: the schedule needs {number} clients at one time, but {source} "
                f"only {clients}; lower schedule.{key}, or raise the number of clients"
            )


def warn_of_empty_clients(
    config: Config, split: Clients | VirtualClients, clients: Clients | VirtualClients
) -> None:
    """Log how many clients have no training examples or no batch, and what would avoid it.

    Args:
        config: the configuration of the run.
        split: the partition.
        clients: the partition without the examples of clients that have no batch.
    """
    if split.n_nonempty > clients.n_nonempty:
        logger.warning(
            "%d of %d clients have fewer examples than a batch and local.drop_last is true; they "
            "never train, and methods count N = %d clients (a smaller local.batch_size may avoid "
            "it)",
            split.n_nonempty - clients.n_nonempty,
            clients.n_training,
            clients.n_nonempty,
        )
    for number, (_, lists) in enumerate(split.phases):
        of_phase = np.count_nonzero(lists.sizes)
        with_batch = np.count_nonzero(clients.phases[number][1].sizes)
        if with_batch < of_phase:
            logger.warning(
                "phase %d: %d of %d clients with examples have fewer than a batch and "
                "local.drop_last is true; they do not train in it",
                number,
                of_phase - with_batch,
                of_phase,
            )
    empty = split.n_training - split.n_nonempty
    if not empty:
        return
    logger.warning(
        "%d of %d clients have no training examples; they never train, and methods count N = %d "
        "clients (fewer partition.clients, a larger partition.min_samples or partition.alpha or a "
        "smaller partition.val_fraction or public_fraction may avoid it)",
        empty,
        clients.n_training,
        clients.n_nonempty,
    )


def note_unused_users(raw: Mapping[str, Any], config: Config, dataset: Dataset) -> None:
    """Log that clients are not the users of the data, unless a partition is named.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        config: the same with its defaults.
        dataset: the data set.
    """
    given = raw.get("partition") or {}
    is_named = not isinstance(given, Mapping) or "name" in given
    if dataset.groups is not None and not is_named:
        startup_stages.notes.info(
            "the training examples have %d users, and partition '%s', the default, makes other "
            "clients of them; partition=natural makes each user a client",
            len(np.unique(dataset.groups)),
            config.partition.name,
        )


def check_client_evaluation(config: Config) -> None:
    """Check that clients have test or validation examples if they are to be evaluated.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: they have none, or `exclude` names a group that does not exist.
    """
    if config.evaluate.clients is None:
        return
    for name in lacking(config.evaluate.clients.exclude, config.groups):
        known = did_you_mean(name, config.groups) or "; it has no groups"
        raise ConfigError(f"evaluate.clients.exclude: the run has no group '{name}'{known}")
    if config.partition.test or config.partition.val:
        return
    raise ConfigError(
        "evaluate.clients: the clients have no test examples; set partition.test.fraction=0.2, "
        "partition.test=matched or, for users with test examples of their own, "
        "partition.test=natural"
    )
