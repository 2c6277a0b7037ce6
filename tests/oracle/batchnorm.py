"""BatchNorm under FedAvg: running statistics on the client and on the server.

client   starts from the server's statistics; after each batch, with momentum 0.1,
         mean <- 0.9 mean + 0.1 batch mean,   var <- 0.9 var + 0.1 unbiased batch variance,   batches += 1
         (a batch of one sample: variance 0, unbiased variance taken as 0)
server   statistics = sum_i w_i statistics_i, overwritten, with the weights of the round and no server_lr;
         the counter is averaged and truncated to an integer
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .fedavg import aggregation_weights, at, present, weighted_sum
from .nets import MLPBatchNorm

MOMENTUM = 0.1


@dataclass
class Statistics:
    mean: np.ndarray  # [hidden]
    var: np.ndarray  # [hidden]
    batches: int


def initial(net: MLPBatchNorm) -> Statistics:
    return Statistics(np.zeros(net.hidden), np.ones(net.hidden), 0)


def local_sgd(
    net: MLPBatchNorm, w, start: Statistics, data, batches, lr
) -> tuple[np.ndarray, Statistics]:
    """Local SGD of one client with data (x [n, inputs], y [n]); `batches` are index arrays."""
    x, y = data
    w = np.array(w, dtype=np.float64)
    mean, var, seen = start.mean.copy(), start.var.copy(), start.batches
    for batch in batches:
        gradient, batch_mean, batch_var = net.grad_and_statistics(w, x[batch], y[batch])
        mean = (1 - MOMENTUM) * mean + MOMENTUM * batch_mean
        var = (1 - MOMENTUM) * var + MOMENTUM * batch_var
        seen = seen + 1
        w = w - lr * gradient
    return w, Statistics(mean, var, seen)


def average(statistics: dict, sizes, weights: str = "uniform") -> Statistics:
    """The server's average of {client: Statistics}; the counter: exact mean, then truncated."""
    w = aggregation_weights(list(statistics), sizes, weights)
    share = {i: 1 if weights == "uniform" else int(sizes[i]) for i in statistics}
    counter = Fraction(
        sum(share[i] * s.batches for i, s in statistics.items()), sum(share.values())
    )
    return Statistics(
        weighted_sum(w, {i: s.mean for i, s in statistics.items()}),
        weighted_sum(w, {i: s.var for i, s in statistics.items()}),
        int(counter),
    )


def run(
    x0, cohorts, sizes, batches, net: MLPBatchNorm, data, *, lr, server_lr=1.0, weights="uniform"
) -> tuple[list[np.ndarray], list[Statistics]]:
    """FedAvg with statistics: x_0..x_T and the server's statistics 0..T. data[i] = (x, y) of client
    i."""
    x = np.array(x0, dtype=np.float64)
    server = initial(net)
    xs, history = [x], [server]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            d, uploaded = {}, {}
            for i in clients:
                y, uploaded[i] = local_sgd(net, x, server, data[i], batches[t][i], at(lr, t))
                d[i] = x - y
            x = x - at(server_lr, t) * weighted_sum(aggregation_weights(clients, sizes, weights), d)
            server = average(uploaded, sizes, weights)
        xs.append(x)
        history.append(server)
    return xs, history
