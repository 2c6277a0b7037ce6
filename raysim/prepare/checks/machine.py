"""Check a configuration against this machine: GPUs, CPU cores, disk and cluster."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from raysim.config.schema import Config
from raysim.config.sections.execution import cluster_address
from raysim.errors import ConfigError
from raysim.system import machine

logger = logging.getLogger("raysim")

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
