"""FedSGD and FedAvg (McMahan et al., AISTATS 2017), FedProx (Li T. et al., MLSys 2020), FedAvgM and
FedProxM (Hsu et al. 2019; Luo et al. 2023).

    FedSGD    y_i = x - lr grad f_i(x)                 one step, over all local samples
    FedAvg    y <- y - lr grad f_i(y; batch)           from y = x, one step for each local batch
    FedProx   y <- y - lr (grad f_i(y; batch) + mu (y - x))
    upload    d_i = x - y_i
    server    d = sum_i w_i d_i,   x <- x - server_lr d
              w_i = 1/S (uniform) or n_i / sum_j n_j (samples)
    ..M       m <- beta1 m + d,    x <- x - server_lr m,   m_0 = 0

`lr`, `server_lr` and `beta1` are numbers or functions of the round t = 0, 1, ...
"""

from collections.abc import Callable

import numpy as np


def at(value: float | Callable[[int], float], t: int) -> float:
    """The value of a constant or of a schedule in round t (1.7)."""
    return value(t) if callable(value) else value


def present(cohort, sizes, batches_t) -> list:
    """The sampled clients that have samples and batches, in sampling order (1.10)."""
    return [i for i in cohort if sizes[i] > 0 and len(batches_t[i]) > 0]


def aggregation_weights(clients, sizes, weights: str) -> dict:
    """w_i over the clients that are present (1.3)."""
    if weights == "uniform":
        return {i: 1.0 / len(clients) for i in clients}
    if weights == "samples":
        total = sum(sizes[j] for j in clients)
        return {i: sizes[i] / total for i in clients}
    raise ValueError(f"weights={weights!r}, expected 'uniform' or 'samples'")


def weighted_sum(w: dict, d: dict) -> np.ndarray:
    """sum_i w_i d_i, in sampling order."""
    total = np.zeros(())
    for i, share in w.items():
        total = total + share * d[i]
    return total


def local_sgd(x, client, batches, grad, lr) -> np.ndarray:
    """2.2, client."""
    y = x.copy()
    for batch in batches:
        y = y - lr * grad(y, client, batch)
    return y


def local_prox(x, client, batches, grad, lr, mu) -> np.ndarray:
    """2.3, client."""
    y = x.copy()
    for batch in batches:
        y = y - lr * (grad(y, client, batch) + mu * (y - x))
    return y


def run(
    x0, cohorts, sizes, batches, grad, *, lr, server_lr=1.0, weights="uniform", mu=None, beta1=None
) -> list[np.ndarray]:
    """x_0, ..., x_T. mu=None: plain local steps (2.2), else proximal ones (2.3).

    beta1=None: no server momentum (2.2), else 2.10. A round with nobody present leaves x and m as
    they are.
    """
    x = np.array(x0, dtype=np.float64)
    m = np.zeros_like(x)
    xs = [x]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if not clients:
            xs.append(x)
            continue
        d = {}
        for i in clients:
            if mu is None:
                y = local_sgd(x, i, batches[t][i], grad, at(lr, t))
            else:
                y = local_prox(x, i, batches[t][i], grad, at(lr, t), mu)
            d[i] = x - y
        aggregate = weighted_sum(aggregation_weights(clients, sizes, weights), d)
        if beta1 is None:
            x = x - at(server_lr, t) * aggregate
        else:
            m = at(beta1, t) * m + aggregate
            x = x - at(server_lr, t) * m
        xs.append(x)
    return xs


def fedavg(x0, cohorts, sizes, batches, grad, *, lr, server_lr=1.0, weights="uniform"):
    return run(x0, cohorts, sizes, batches, grad, lr=lr, server_lr=server_lr, weights=weights)


def fedsgd(x0, cohorts, sizes, batches, grad, *, lr, server_lr=1.0, weights="uniform"):
    """batches[t][i] must hold one batch, all the samples of client i."""
    for t, cohort in enumerate(cohorts):
        for i in present(cohort, sizes, batches[t]):
            if len(batches[t][i]) != 1:
                raise ValueError(
                    f"round {t}, client {i}: FedSGD takes one full batch, not {len(batches[t][i])}"
                )
    return run(x0, cohorts, sizes, batches, grad, lr=lr, server_lr=server_lr, weights=weights)


def fedprox(x0, cohorts, sizes, batches, grad, *, lr, mu, server_lr=1.0, weights="uniform"):
    return run(
        x0, cohorts, sizes, batches, grad, lr=lr, server_lr=server_lr, weights=weights, mu=mu
    )


def fedavgm(x0, cohorts, sizes, batches, grad, *, lr, beta1, server_lr=1.0, weights="uniform"):
    return run(
        x0, cohorts, sizes, batches, grad, lr=lr, server_lr=server_lr, weights=weights, beta1=beta1
    )


def fedproxm(x0, cohorts, sizes, batches, grad, *, lr, mu, beta1, server_lr=1.0, weights="uniform"):
    return run(
        x0,
        cohorts,
        sizes,
        batches,
        grad,
        lr=lr,
        server_lr=server_lr,
        weights=weights,
        mu=mu,
        beta1=beta1,
    )
