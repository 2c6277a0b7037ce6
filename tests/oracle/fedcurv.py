"""FedCurv (Shoham et al., NeurIPS workshop 2019), behind any local gradient.

Fisher    F_i = (1/n_i) sum_s (∇ log p(y_s | x_s; y_i))²      one sample at a time, at the final y_i, all n_i samples
client    y <- y - lr (grad f_i(y; batch) + 2 λ (A y - b)),   all products elementwise;  first round: A = b = 0
server    x as FedAvg;  over the clients of the round   A = sum_j F_j,  b = sum_j F_j y_j;   over="mean": 1/S of these
own       False: A - F_i and b - F_i y_i for a client that took part in the last round (1/S of them if over="mean")

A round with nobody present leaves everything as it is. `grad(w, client, batch)` as for FedAvg;
`fisher(w, client)`.
"""

from dataclasses import dataclass, field

import numpy as np

from .fedavg import aggregation_weights, at, present, weighted_sum


def diagonal(net, w, x, y) -> np.ndarray:
    """F [P]."""
    total = np.zeros(net.size)
    for k in range(len(x)):
        total = total + net.grad(w, x[k : k + 1], y[k : k + 1]) ** 2
    return total / len(x)


def penalty_gradient(y, A, b, lam) -> np.ndarray:
    return 2 * lam * (A * y - b)


@dataclass
class Trace:
    """x_0 .. x_T; A and b as the clients of each round received them; of each round client -> (F_i,
    y_i)."""

    x: list[np.ndarray]
    A: list[np.ndarray] = field(default_factory=list)
    b: list[np.ndarray] = field(default_factory=list)
    terms: list[dict] = field(default_factory=list)


def trace(
    x0,
    cohorts,
    sizes,
    batches,
    grad,
    fisher,
    *,
    lr,
    lam,
    own=True,
    over="sum",
    server_lr=1.0,
    weights="uniform",
    mistake=None,
) -> Trace:
    """mistake: "half" (λ instead of 2 λ), "stale" (without own, the term of any earlier round is
    taken off)."""
    if over not in ("sum", "mean") or mistake not in (None, "half", "stale"):
        raise ValueError(f"over={over!r}, mistake={mistake!r}")
    x = np.array(x0, dtype=np.float64)
    A, b = np.zeros_like(x), np.zeros_like(x)
    last, ever, scale = {}, {}, 1.0
    out = Trace([x])
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        out.A.append(A)
        out.b.append(b)
        terms = {}
        if clients:
            for i in clients:
                A_i, b_i = A, b
                mine = (ever if mistake == "stale" else last).get(i)
                if not own and mine is not None:
                    A_i, b_i = A - scale * mine[0], b - scale * mine[0] * mine[1]
                strength = at(lam, t) / 2 if mistake == "half" else at(lam, t)
                y = x
                for batch in batches[t][i]:
                    y = y - at(lr, t) * (
                        grad(y, i, batch) + penalty_gradient(y, A_i, b_i, strength)
                    )
                terms[i] = fisher(y, i), y
            share = aggregation_weights(clients, sizes, weights)
            x = x - at(server_lr, t) * weighted_sum(
                share, {i: x - y for i, (_, y) in terms.items()}
            )
            scale = 1.0 / len(clients) if over == "mean" else 1.0
            A = scale * sum(F for F, _ in terms.values())
            b = scale * sum(F * y for F, y in terms.values())
            last, ever = terms, {**ever, **terms}
        out.x.append(x)
        out.terms.append(terms)
    return out


def run(x0, cohorts, sizes, batches, grad, fisher, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, grad, fisher, **hyper).x
