"""The uploads of a round as the server receives them: sums of all workers, and single uploads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raysim.numerics.fixed_point import combine, is_short, to_float
from raysim.training.messages import WorkerResult
from raysim.training.uploads.upload_sum import names_upload

BUFFERS = "buffers"
"""Key of the BatchNorm statistics among the uploads, which the server rule does not receive."""


def total_uploads(
    outcomes: list[WorkerResult],
    divisors: Mapping[str, float],
    buffers_divisor: float,
    like: Tensor,
    always_exact: bool,
) -> tuple[dict[tuple[str, str], Tensor], int]:
    """Return the sums of all workers by upload mode and key, and how many of them are short.

    Args:
        outcomes: the results of the workers, at least one.
        divisors: the number by which the sums of each mode are divided.
        buffers_divisor: another divisor of the mean of BatchNorm statistics.
        like: the parameters [P], for the device and the type of sums that are rounded.
        always_exact: whether all sums are returned in float64.
    """
    bound = sum(outcome.bound for outcome in outcomes)
    totals = {}
    n_short = 0
    for name in outcomes[0].sums:
        mode, _, key = name.partition(" ")
        with names_upload(name):
            total = combine([outcome.sums[name] for outcome in outcomes], bound)
        divisor = divisors[mode]
        if key == BUFFERS:
            divisor *= buffers_divisor
        # Rules add differences up over all rounds.
        is_exact = always_exact or mode == "difference"
        dtype = torch.float64 if is_exact else like.dtype
        summed = to_float(total, dtype, divisor).to(like.device)
        n_short += is_short(total, summed, divisor, like.dtype == torch.float64)
        totals[mode, key] = summed
    return totals, n_short


def uploads_of_clients(
    outcomes: list[WorkerResult], ids: list[int], device: torch.device
) -> dict[str, list[Tensor]]:
    """Return the uploads that arrive client by client, by key.

    Args:
        outcomes: the results of the workers, at least one.
        ids: clients, in whose order the uploads are returned.
        device: device of the returned tensors.
    """
    arrived = [client for outcome in outcomes for client in outcome.ids]
    position = {client: i for i, client in enumerate(arrived)}
    uploads_by_key = {}
    for key in outcomes[0].rows:
        uploads = [row for outcome in outcomes for row in outcome.rows[key]]
        uploads_by_key[key] = [uploads[position[client]].to(device) for client in ids]
    return uploads_by_key
