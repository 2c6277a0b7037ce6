"""SCAFFOLD (Karimireddy et al., ICML 2020).

client    y <- y - lr (grad f_i(y; batch) - c_i + c)      from y = x, K steps
I         c_i+ = grad f_i(x)                              over all local samples
II        c_i+ = c_i - c + (x - y_i) / (K lr)             K as taken, lr of this round
upload    d_i = x - y_i,  c_i+ - c_i;   then c_i <- c_i+
server    x <- x - server_lr sum_i w_i d_i
          c <- c + (1/N) sum_{i in S_t} (c_i+ - c_i)      N clients in all, whatever w says;   c_0 = c_i = 0
"""

from dataclasses import dataclass, field

import numpy as np

from .fedavg import aggregation_weights, at, present, weighted_sum


@dataclass
class Trace:
    """x_0 .. x_T; c and the c_i of those who ever took part, after each round."""

    x: list[np.ndarray]
    c: list[np.ndarray] = field(default_factory=list)
    rows: list[dict] = field(default_factory=list)


def trace(
    x0, cohorts, sizes, batches, grad, *, lr, server_lr=1.0, weights="uniform", option="II"
) -> Trace:
    if option not in ("I", "II"):
        raise ValueError(f"option={option!r}, expected 'I' or 'II'")
    x = np.array(x0, dtype=np.float64)
    c, rows = np.zeros_like(x), {}
    out = Trace([x])
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            d, dc = {}, {}
            for i in clients:
                c_i = rows.get(i, np.zeros_like(x))
                y, K, eta = x, len(batches[t][i]), at(lr, t)
                for batch in batches[t][i]:
                    y = y - eta * (grad(y, i, batch) - c_i + c)
                if option == "I":
                    c_plus = grad(x, i, np.arange(sizes[i]))
                else:
                    c_plus = c_i - c + (x - y) / (K * eta)
                d[i], dc[i] = x - y, c_plus - c_i
                rows[i] = c_plus
            x = x - at(server_lr, t) * weighted_sum(aggregation_weights(clients, sizes, weights), d)
            c = c + sum(dc.values()) / np.count_nonzero(sizes)  # clients with examples
        out.x.append(x)
        out.c.append(c)
        out.rows.append(dict(rows))
    return out


def run(x0, cohorts, sizes, batches, grad, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, grad, **hyper).x
