"""Client-level differential privacy: the clipped update of a client, and the privacy budget.

The server's part is in `raysim.server.client_dp_noise`. The accountant is Google's dp-accounting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from typing import Literal

import numpy as np
from torch import Tensor

from raysim.rules.contract import Report
from raysim.rules.upload_stages import clipped

CLIP_NORM = "privacy/clip_norm"
"""Key of the adaptive clip norm in the broadcast."""

UNCLIPPED = "privacy/unclipped"
"""Key of the upload that encodes whether a client's update was within the clip norm.

It is 1/2 or -1/2, so that adding or removing a client changes the sum by 1/2 at most.
"""


def with_clipped_update(report: Report, key: str, norm: float) -> Report:
    """Return a client's report with its update clipped, and with the upload `UNCLIPPED` added.

    Args:
        report: the uploads and metrics of a client; not changed.
        key: the key of the update [P].
        norm: the clip norm, the largest L2 norm of the update.
    """
    update: Tensor = report[key]
    within = clipped(update, norm)
    unclipped = update.new_full((1,), 0.5 if within is update else -0.5)
    return {**report, key: within, UNCLIPPED: unclipped}


def client_epsilon(
    sampling: Literal["poisson", "uniform"],
    cohort: int,
    n_clients: int,
    noise_multiplier: float,
    delta: float,
    rounds: int,
) -> float:
    """Return ε of a client after a number of rounds (Rényi accountant).

    With Poisson sampling, neighbouring data sets differ in one client that is added or removed.
    With cohorts of fixed size, they differ in one client that is replaced; the sum then changes by
    twice the clip norm, so the noise counts half.

    Args:
        sampling: how cohorts are sampled; "uniform" is without replacement, of fixed size.
        cohort: the (expected) size of a cohort.
        n_clients: all clients, also those without examples.
        noise_multiplier: standard deviation of the noise, in units of the clip norm.
        delta: δ of the guarantee.
        rounds: number of rounds.

    Returns:
        ε at `delta`; infinity without noise, 0 without rounds.
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return inf
    from dp_accounting.rdp import compute_epsilon

    orders, of_a_round = _renyi_divergences(sampling, cohort, n_clients, noise_multiplier)
    return float(compute_epsilon(orders, list(rounds * of_a_round), delta)[0])


@lru_cache(maxsize=16)
def _renyi_divergences(
    sampling: str, cohort: int, n_clients: int, noise_multiplier: float
) -> tuple[list[float], np.ndarray]:
    """Return orders, and the Rényi divergence of one round at each; rounds add up."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    if sampling == "poisson":
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        noise = dp_accounting.GaussianDpEvent(noise_multiplier)
        event = dp_accounting.PoissonSampledDpEvent(cohort / n_clients, noise)
    else:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        # Replacing a client changes the sum by up to twice the clip norm.
        noise = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        event = dp_accounting.SampledWithoutReplacementDpEvent(n_clients, cohort, noise)
    accountant = RdpAccountant(neighboring_relation=relation)
    with _without_warnings():
        accountant.compose(event)
    # The accountant computes these for a second whenever it composes, so they are kept.
    return list(accountant._orders), accountant._rdp


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings about orders that the accountant leaves out, which only loosens ε."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
