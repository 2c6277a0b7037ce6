"""FedDyn (Acar et al., ICLR 2021), in displacements: lambda_i is -1/alpha times the estimate of
grad f_i.

client    y <- y - lr (grad f_i(y; batch) + alpha_i (y - x + lambda_i))      from y = x
          lambda_i <- lambda_i + (y_i - x)                                   lambda_i = 0 at first
server    a = sum_i w_i y_i,   h <- h + (1/N) sum_{i in S_t} (y_i - x),   x <- a + h
          N clients in all, whatever w says: h is the mean of all lambda_i
alpha_i   alpha; with scale_alpha (the authors' code) alpha / (n_i / n), n = sum_j n_j / N
"""

from dataclasses import dataclass, field

import numpy as np

from .fedavg import aggregation_weights, at, present, weighted_sum


@dataclass
class Trace:
    """x_0 .. x_T; h and the lambda_i of those who ever took part, after each round."""

    x: list[np.ndarray]
    h: list[np.ndarray] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)


def trace(
    x0, cohorts, sizes, batches, grad, *, lr, alpha, weights="uniform", scale_alpha=False
) -> Trace:
    x = np.array(x0, dtype=np.float64)
    h, rows = np.zeros_like(x), {}
    out = Trace([x])
    N = np.count_nonzero(sizes)  # a client without examples is none
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            ys = {}
            for i in clients:
                alpha_i = (
                    at(alpha, t) / (sizes[i] / (sum(sizes) / N)) if scale_alpha else at(alpha, t)
                )
                lambda_i = rows.get(i, np.zeros_like(x))
                y = x
                for batch in batches[t][i]:
                    y = y - at(lr, t) * (grad(y, i, batch) + alpha_i * (y - x + lambda_i))
                ys[i], rows[i] = y, lambda_i + (y - x)
            a = weighted_sum(aggregation_weights(clients, sizes, weights), ys)
            h = h + sum(y - x for y in ys.values()) / N
            x = a + h
        out.x.append(x)
        out.h.append(h)
        out.rows.append(dict(rows))
    return out


def run(x0, cohorts, sizes, batches, grad, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, grad, **hyper).x
