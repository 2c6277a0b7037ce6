"""MIFA (Gu, Huang, Zhang, Huang, NeurIPS 2021) as in Luo et al. 2023, and MIFAM: the latest update
of every client.

client    FedAvg's:  d_i = x - y_i
server    row i of the table <- d_i for the clients of the round;  0 for a client never seen
          D = sum_{all i} omega_i row_i,   omega_i = 1/N (uniform) or n_i / sum_{all j} n_j (samples)
          x <- x - server_lr D
..M       m <- beta1 m + D,   x <- x - server_lr m,   m_0 = 0
wait      (the authors' code) x and m stand still until every client that has samples has taken part once; they move
          from the round on in which the last of them does
"""

import numpy as np

from .fedavg import at, local_sgd, present


def run(
    x0,
    cohorts,
    sizes,
    batches,
    grad,
    *,
    lr,
    server_lr=1.0,
    weights="uniform",
    beta1=None,
    wait=False,
) -> list[np.ndarray]:
    """x_0, ..., x_T. beta1=None: MIFA, else MIFAM. A round with nobody present leaves x and m as
    they are."""
    if weights not in ("uniform", "samples"):
        raise ValueError(f"weights={weights!r}, expected 'uniform' or 'samples'")
    x = np.array(x0, dtype=np.float64)
    m = np.zeros_like(x)
    N = len(sizes)
    table = np.zeros((N, len(x)))
    omega = (
        np.array(sizes, bool) / np.count_nonzero(sizes)  # the mean over clients with examples
        if weights == "uniform"
        else np.array([n / sum(sizes) for n in sizes])
    )
    seen = set()
    everybody = {i for i in range(N) if sizes[i] > 0}
    xs = [x]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        for i in clients:
            table[i] = x - local_sgd(x, i, batches[t][i], grad, at(lr, t))
            seen.add(i)
        if clients and (seen == everybody or not wait):
            D = omega @ table
            m = D if beta1 is None else at(beta1, t) * m + D
            x = x - at(server_lr, t) * m
        xs.append(x)
    return xs


def mifam(x0, cohorts, sizes, batches, grad, *, beta1, **hyper) -> list[np.ndarray]:
    return run(x0, cohorts, sizes, batches, grad, beta1=beta1, **hyper)
