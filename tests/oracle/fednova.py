"""FedNova (Wang J. et al., NeurIPS 2020): updates are divided by the work that is in them.

client    tau_i steps from y = x:
          plain     y <- y - lr grad f_i(y; batch)                            a_i = tau_i
          rho       u <- rho u + grad f_i(y; batch),  y <- y - lr u,  u = 0 at the start of the round
                                      a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)
          mu        y <- y - lr (grad f_i(y; batch) + mu (y - x))
                                      a_i = (1 - (1 - lr mu)^tau_i) / (lr mu)
upload    d_i = x - y_i,  a_i
server    q_i = n_i / sum_{S_t} n_j (samples) or 1/S (uniform);   tau_eff = sum_i q_i a_i
          m <- beta1 m + tau_eff sum_i q_i d_i / a_i,   x <- x - server_lr m,   m_0 = 0
"""

import numpy as np

from .fedavg import aggregation_weights, at, local_prox, local_sgd, present, weighted_sum


def local_momentum(x, client, batches, grad, lr, rho) -> np.ndarray:
    y, u = x, np.zeros_like(x)
    for batch in batches:
        u = rho * u + grad(y, client, batch)
        y = y - lr * u
    return y


def work(tau: int, *, lr: float, rho: float = 0.0, mu: float = 0.0) -> float:
    """a_i after tau steps."""
    if rho:
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    if mu:
        return (1 - (1 - lr * mu) ** tau) / (lr * mu)
    return float(tau)


def run(
    x0,
    cohorts,
    sizes,
    batches,
    grad,
    *,
    lr,
    server_lr=1.0,
    weights="samples",
    rho=0.0,
    mu=0.0,
    beta1=0.0,
) -> list[np.ndarray]:
    """x_0, ..., x_T. Clients without a step are left out; a round with nobody present leaves x and
    m as they are."""
    if rho and mu:
        raise ValueError(f"rho={rho} and mu={mu}: no a_i is given for both")
    x = np.array(x0, dtype=np.float64)
    m = np.zeros_like(x)
    xs = [x]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            normalised, a = {}, {}
            for i in clients:
                given = (x, i, batches[t][i], grad, at(lr, t))
                if rho:
                    y = local_momentum(*given, rho)
                elif mu:
                    y = local_prox(*given, mu)
                else:
                    y = local_sgd(*given)
                a[i] = work(len(batches[t][i]), lr=at(lr, t), rho=rho, mu=mu)
                normalised[i] = (x - y) / a[i]
            q = aggregation_weights(clients, sizes, weights)
            tau_eff = weighted_sum(q, a)
            m = at(beta1, t) * m + tau_eff * weighted_sum(q, normalised)
            x = x - at(server_lr, t) * m
        xs.append(x)
    return xs
