"""Differential privacy: clipped gradients and the privacy budget (Abadi et al., CCS 2016).

`Task.grad` uses `clipped_sum` if the configuration has a section `privacy`. The accountant is
Google's dp-accounting. The guarantee covers single examples of a client, against an observer of
everything that the client sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import inf

import numpy as np
import torch
from torch import Tensor

from raysim.rules.batch import Batch

MAX_GRADIENT_BLOCK_NUMBERS = 2**25
"""Limit on the numbers in a matrix of per-example gradients; it bounds the memory."""


def in_parts(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield the batch in parts whose per-example gradients fit into memory.

    Args:
        batch: the batch.
        size: P, the number of parameters.

    Yields:
        Parts of at most `MAX_GRADIENT_BLOCK_NUMBERS` / P examples, at least one.
    """
    count = max(1, MAX_GRADIENT_BLOCK_NUMBERS // size)
    n = len(batch.y)
    if n <= count:
        yield batch
        return
    for start in range(0, n, count):
        part = slice(start, start + count)
        drops = tuple(tuple(mask[part] for mask in masks) for masks in batch.drops)
        yield replace(batch, x=batch.x[part], y=batch.y[part], drops=drops)


def clipped_sum(rows: Tensor, clip: float | None) -> Tensor:
    """Return the sum of clipped gradients, Σ_k g_k min(1, clip / ‖g_k‖).

    Args:
        rows: per-example gradients g_k, [B, P].
        clip: maximum norm of a gradient; None: unlimited.

    Returns:
        The sum over the examples, [P]. A zero gradient adds zero.
    """
    factors = rows.new_ones(len(rows))
    if clip is not None:
        norms = (rows * rows).sum(1).sqrt()
        factors = factors * torch.clamp(clip / norms.clamp(min=1e-30), max=1.0)
    return factors @ rows


def passes(cursors: np.ndarray, per_pass: np.ndarray) -> int:
    """Return the maximum number of times that an example was used.

    This is the largest number of passes that a client has started over its data.

    Args:
        cursors: [N], batches that each client has drawn.
        per_pass: [N], batches in one pass over the data of each client.
    """
    return int(np.max(-(-cursors // np.maximum(per_pass, 1)), initial=0))


@lru_cache
def epsilon(sigma: float, delta: float, uses: int) -> float:
    """Return ε after every example took part in `uses` noisy sums.

    In neighbouring data sets the gradients of one example are 0. Batches are fixed parts of a
    shuffled pass, not Poisson samples, so there is no amplification by sampling: an example is in
    one sum of each pass, and `uses` Gaussian mechanisms compose (Rényi accountant).

    Args:
        sigma: noise multiplier, the standard deviation of the noise in units of the clip norm.
        delta: δ of the guarantee.
        uses: number of noisy sums with the same example, see `passes`.

    Returns:
        ε at `delta`; infinity without noise, 0 without uses.
    """
    if uses == 0:
        return 0.0
    if sigma == 0:
        return inf
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    return float(RdpAccountant().compose(GaussianDpEvent(sigma), uses).get_epsilon(delta))
