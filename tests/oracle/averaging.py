"""FedAvg's server (2.2) and the one with momentum (2.10: Hsu et al. 2019; Luo et al. 2023), behind
any client, with the running statistics of BatchNorm beside the parameters (1.6).

    server    d = sum_i w_i d_i,   x <- x - server_lr d
    ..M       m <- beta1 m + d,    x <- x - server_lr m,   m_0 = 0: undamped, no Nesterov
    both      statistics <- sum_i w_i statistics_i: no server_lr, no momentum

Statistics are a list of (mean, var), one for each BatchNorm; [] for a net without.
"""

from collections.abc import Callable

import numpy as np

from .batchnorm import MOMENTUM
from .fedavg import aggregation_weights, at, present, weighted_sum
from .nets import Blocks

Statistics = list[tuple[np.ndarray, np.ndarray]]


def fresh(net: Blocks) -> Statistics:
    """Those of a new net."""
    return [(np.zeros(width), np.ones(width)) for width in net.hidden] if net.norm else []


def moved(running: Statistics, seen: Statistics) -> Statistics:
    """Those after one more batch of which BatchNorm saw (mean, unbiased var)."""
    return [
        (
            (1 - MOMENTUM) * mean + MOMENTUM * of_batch,
            (1 - MOMENTUM) * var + MOMENTUM * var_of_batch,
        )
        for (mean, var), (of_batch, var_of_batch) in zip(running, seen, strict=True)
    ]


def averaged(w: dict, uploaded: dict[int, Statistics]) -> Statistics:
    layers = range(len(next(iter(uploaded.values()))))
    mean = [weighted_sum(w, {i: s[layer][0] for i, s in uploaded.items()}) for layer in layers]
    var = [weighted_sum(w, {i: s[layer][1] for i, s in uploaded.items()}) for layer in layers]
    return list(zip(mean, var, strict=True))


def run(
    x0,
    cohorts,
    sizes,
    batches,
    local: Callable,
    running: Statistics,
    *,
    server_lr=1.0,
    weights="uniform",
    beta1=None,
) -> tuple[list[np.ndarray], list[Statistics]]:
    """x_0, ..., x_T and the server's statistics 0, ..., T.

    `local(t, x, running, client)` gives y_i and its statistics, from those received. beta1=None: no
    momentum. A round with nobody present leaves x, m and the statistics as they are.
    """
    x = np.array(x0, dtype=np.float64)
    m = np.zeros_like(x)
    xs, history = [x], [running]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            trained = {i: local(t, x, running, i) for i in clients}
            w = aggregation_weights(clients, sizes, weights)
            d = weighted_sum(w, {i: x - y for i, (y, _) in trained.items()})
            m = d if beta1 is None else at(beta1, t) * m + d
            x = x - at(server_lr, t) * m
            running = averaged(w, {i: statistics for i, (_, statistics) in trained.items()})
        xs.append(x)
        history.append(running)
    return xs, history
