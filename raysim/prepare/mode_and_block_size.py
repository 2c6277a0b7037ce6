"""Choice of the mode in which a worker trains clients, and of the size of their blocks.

The choice depends on the configuration alone, never on the machine, so that a run gives the same
bits everywhere.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from raysim.config.schema import Config
from raysim.errors import ConfigError
from raysim.models.flat import Model
from raysim.rules.contract import ClientRule, ServerRule
from raysim.training.trainers.pooled import why_not_pooled
from raysim.training.trainers.trainer import TrainingMode


class BlockChoice(NamedTuple):
    """Training mode and size of the blocks of a run."""

    mode: TrainingMode
    """The mode in which a worker trains the clients of a block."""

    size: int
    """The largest number of clients in a block."""


def choose_batching(
    config: Config, client: ClientRule, server: ServerRule, model: Model, probed: bool
) -> BlockChoice:
    """Choose the training mode and the size of blocks.

    Args:
        config: the configuration; values of `batching` other than "auto" are used as they are.
        client: the client rule of the run.
        server: the server rule of the run.
        model: the net.
        probed: whether a probe measures single clients; such clients cannot be pooled.

    Returns:
        The mode and the size of blocks.

    Raises:
        ConfigError: the rules, the net or the schedule do not support the configured mode.
    """
    batching = config.batching
    asked = batching.mode
    mode: TrainingMode = "lanes" if config.resources.gpus > 0 else "loop"
    if server.changes_frozen:
        if asked == "lanes":
            raise ConfigError(
                f"batching.mode: server rule '{server.name}' changes frozen parameters, which "
                "lanes share; use batching.mode=loop"
            )
        mode = "loop"
    if asked in ("auto", "pooled"):
        reason = why_not_pooled(config, client, server, model, probed)
        if reason is None:
            mode = "pooled"
        elif asked == "pooled":
            raise ConfigError(
                f"batching.mode: 'pooled' is not possible in this run: {reason}; use "
                f"batching.mode={mode}, for a run that has begun in this mode with --fork"
            )
    else:
        mode = asked
    size = batching.size
    return BlockChoice(mode, block_size(mode, config.schedule.size) if size == "auto" else size)


def block_size(mode: TrainingMode, cohort_size: int) -> int:
    """Return the automatic size of blocks in a mode.

    Args:
        mode: the mode.
        cohort_size: number of clients in a round.
    """
    if mode == "pooled":
        return min(128, ceil(cohort_size / 16))
    if mode == "lanes":
        # Few large blocks, since lanes wait for each other at the end of each.
        return min(64, ceil(cohort_size / 4))
    # A large cohort is split into many blocks, so that all workers finish at about one time.
    return min(16, ceil(cohort_size / 16))
