"""MimeLite with momentum (Karimireddy et al. 2020, arXiv 2008.03606).

damped    client  y <- y - lr ((1 - beta) grad f_i(y; batch) + beta m)     from y = x, m as received
          server  m <- (1 - beta) sum_i w_i q_i + beta m
undamped  client  y <- y - lr (grad f_i(y; batch) + beta m)
          server  m <- sum_i w_i q_i + beta m
both      upload  d_i = x - y_i,  q_i = grad f_i(x) over all local samples, at the x received
          server  x <- x - server_lr sum_i w_i d_i;   m_0 = 0
"""

import numpy as np

from .fedavg import aggregation_weights, at, present, weighted_sum


def run(
    x0, cohorts, sizes, batches, grad, *, lr, beta, server_lr=1.0, weights="uniform", damped=True
) -> list[np.ndarray]:
    """x_0, ..., x_T. A round with nobody present leaves x and m as they are."""
    x = np.array(x0, dtype=np.float64)
    m = np.zeros_like(x)
    xs = [x]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            b = at(beta, t)
            share = 1 - b if damped else 1.0
            d, q = {}, {}
            for i in clients:
                y = x
                for batch in batches[t][i]:
                    y = y - at(lr, t) * (share * grad(y, i, batch) + b * m)
                d[i], q[i] = x - y, grad(x, i, np.arange(sizes[i]))
            w = aggregation_weights(clients, sizes, weights)
            x = x - at(server_lr, t) * weighted_sum(w, d)
            m = share * weighted_sum(w, q) + b * m
        xs.append(x)
    return xs
