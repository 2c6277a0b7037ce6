"""Check a configuration against the machine, the partition, the rules and privacy.

These checks need more than the schema. Each raises ConfigError before anything starts; the message
names the key and the fix.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raysim.config.schema import Config
from raysim.config.sections.data import Arrays, OwnData
from raysim.config.sections.execution import cluster_address
from raysim.config.sections.schedule import (
    InFlight,
    SamplingBySamples,
    Sync,
)
from raysim.data.dataset import Dataset
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.partition.groups import local_of_groups
from raysim.errors import ConfigError
from raysim.models import build
from raysim.models.checks.coupled_examples import couples_in_evaluation
from raysim.models.flat import Model
from raysim.system import machine, startup_stages
from raysim.system.files import is_path
from raysim.system.global_generators import generators_kept

logger = logging.getLogger("raysim")


WAYS_OUT = {
    "dirichlet": "partition.min_samples=1 avoids it",
    "slow_class": "fewer partition.clients or a larger partition.alpha may avoid it",
}
"""Advice against clients without examples, for some kinds of partition."""

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
    if resources.executor != "ray":
        _check_gpus(resources.gpus, "")
        if resources.server_on_gpu and not torch.cuda.device_count():
            raise ConfigError("resources.server_gpus: this machine has no GPU; leave the key out")
        return
    if cluster_address(resources.address):
        return
    actors = resources.actors
    _check_gpus(resources.gpus * actors, f" ({resources.gpus:g} for each of {actors} actors)")
    n_cores = machine.cores()
    if resources.cpus > n_cores or actors * resources.cpus > MAX_ACTORS_PER_CORE * n_cores:
        raise ConfigError(
            f"resources.actors: the run requests {actors} actors with {resources.cpus:g} CPUs "
            f"each, but this machine has {n_cores} cores; lower resources.actors or "
            "resources.cpus, or set resources.address to use a cluster"
        )


def _check_gpus(requested: float, each: str) -> None:
    """Refuse more GPUs than this machine has; `each` says who requests them."""
    n_gpus = torch.cuda.device_count()
    if requested > n_gpus:
        raise ConfigError(
            f"resources.gpus: the run requests {requested:g} GPUs in total{each}, but this "
            f"machine has {n_gpus}; set resources.gpus=0, or set resources.address to use a cluster"
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


def note_pixels(raw: Mapping[str, Any], config: Config, dataset: Dataset) -> None:
    """Log that a user's own uint8 arrays are read as images, if nobody has chosen how.

    A net that divides by 255 itself would get other numbers than its author thinks.

    Args:
        raw: the configuration of the run, before its defaults were written out.
        config: the configuration of the run.
        dataset: its data set.
    """
    section = raw.get("data")
    has_chosen = isinstance(section, Mapping) and "scaling" in section
    if dataset.are_images and isinstance(config.data, Arrays | OwnData) and not has_chosen:
        startup_stages.notes.info(
            "x is uint8 %s, read as images: before forward, pixels are divided by 255 and "
            "normalised by ImageNet's mean and deviation; data.scaling=unit divides only, and "
            "x.astype('float32') stays as it is",
            list(dataset.x.shape),
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
    way_out = WAYS_OUT.get(config.partition.name, "leave them out of the partition")
    if config.partition.val_fraction:
        way_out = "a smaller partition.val_fraction may avoid it"
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
    classifiers = build.NETS.keys() - {"quadratic"}
    if config.data.name == "quadratics" and config.model.name in classifiers:
        raise ConfigError(
            f"model.name: '{config.model.name}' is a classifier, but data 'quadratics' has no "
            "classes; use model=quadratic"
        )


def note_coupled_evaluation(config: Config, model: Model, n_test: int) -> None:
    """Note that metrics depend on the batches of an evaluation, if examples meet in them.

    Args:
        config: the configuration of the run.
        model: its net.
        n_test: number of test examples.
    """
    size = config.evaluate.batch_size
    if n_test > size and couples_in_evaluation(model):
        startup_stages.notes.info(
            "%s turns an example into other outputs beside others in evaluation mode too, as "
            "BatchNorm without running statistics does: metrics depend on evaluate.batch_size, %d, "
            "and %d takes all test examples in one batch",
            model.label,
            size,
            n_test,
        )


def check_batches_of_one(config: Config, net: nn.Module, model: Model) -> None:
    """Check that PyTorch trains the net on one example, if a mini-batch has one by configuration.

    BatchNorm refuses a single value for each channel; the engine's returns its shift, as the only
    example of a client needs it, and would learn nothing.

    Args:
        config: the configuration of the run.
        net: the net as the user wrote it.
        model: the same net as the run reads it.

    Raises:
        ConfigError: PyTorch refuses it.
    """
    has_batches_of_one = any(local.batch_size == 1 for local in local_of_groups(config))
    are_frozen = config.local.buffers == "frozen"
    if not has_batches_of_one or are_frozen or not model.needs_two_examples:
        return
    x, _ = model.examples(1)
    try:
        with generators_kept(), torch.no_grad():
            copy.deepcopy(net).to(model.dtype).train()(x)
    except ValueError as error:
        raise ConfigError(
            f"local.batch_size: PyTorch does not train this net on single examples: {error}; take "
            "at least 2"
        ) from None


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
            tensors |= dict(module.named_buffers(prefix))
    for name, value in tensors.items():
        if not torch.isfinite(value.detach()).all():
            parameters = config.model.parameters.values()
            files = [text for text in parameters if isinstance(text, str) and is_path(text)]
            hint = f"; check {' and '.join(files)}" if files else ""
            raise ConfigError(
                f"model.name: the initial '{name}' of model '{config.model.name}' is not "
                f"finite{hint}"
            )
