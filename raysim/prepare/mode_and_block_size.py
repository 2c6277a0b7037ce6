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
from raysim.models.keyed_layers import unfoldable
from raysim.rules.contract import ClientRule, ServerRule
from raysim.training.trainers.pooled import why_not_pooled
from raysim.training.trainers.trainer import TrainingMode
from raysim.training.trainers.vmap_trial import why_not_vmap

VMAP_BELOW_PARAMETERS = 10_000
"""Largest number of parameters at which vmap beats the loop on a CPU, without convolutions."""


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

    def why_not(mode: TrainingMode) -> str | None:
        if mode == "pooled":
            return why_not_pooled(config, client, server, model, probed)
        if mode == "vmap" and (why := why_not_vmap(model)):
            return f"model '{config.model.name}' cannot run under vmap ({why})"
        return None

    batching = config.batching
    mode: TrainingMode
    sizes = _block_sizes(config.schedule.size)
    if batching.mode == "auto":
        mode = next(
            mode
            for mode in sizes
            if _is_worthwhile(mode, config, model, sizes) and why_not(mode) is None
        )
    else:
        mode = batching.mode
    _check_im2col(config, mode, model)
    if batching.mode != "auto" and (reason := why_not(mode)) is not None:
        raise ConfigError(
            f"batching.mode: '{mode}' is not possible in this run: {reason}; use batching.mode=loop"
        )
    return BlockChoice(mode, sizes[mode] if batching.size == "auto" else batching.size)


def _block_sizes(cohort_size: int) -> dict[TrainingMode, int]:
    """Return the automatic size of blocks in each mode, fastest mode first."""
    return {
        "pooled": min(128, ceil(cohort_size / 16)),
        "vmap": min(64, ceil(cohort_size / 4)),
        # A large cohort is split into many blocks, so that all workers finish at about one time.
        "loop": min(16, ceil(cohort_size / 16)),
    }


def _is_worthwhile(
    mode: TrainingMode, config: Config, model: Model, sizes: dict[TrainingMode, int]
) -> bool:
    """Return whether a mode that is possible is also fast: vmap needs a GPU, or a small net."""
    if mode != "vmap" or config.resources.gpus > 0:
        return True
    small_net = model.size <= VMAP_BELOW_PARAMETERS and not model.convolutional
    return small_net and sizes["vmap"] >= 8


def _check_im2col(config: Config, mode: TrainingMode, model: Model) -> None:
    """Check that `batching.convolutions: im2col` has convolutions under vmap to apply to."""
    if config.batching.convolutions != "im2col":
        return
    if mode != "vmap":
        reason = f"batching.mode is {mode}"
    elif not any(map(unfoldable, model.module.modules())):
        reason = f"model '{config.model.name}' has none that can be unfolded"
    else:
        return
    raise ConfigError(
        "batching.convolutions: 'im2col' applies to convolutions under vmap, but "
        f"{reason}; leave it out"
    )
