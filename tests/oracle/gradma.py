"""GradMA-W, GradMA-S and GradMA. Luo, Li, Lan, Gao, "GradMA", CVPR 2023.

    Worker_Update  g = grad f_i(y_tau),  a = grad f_i(y_{tau-1}) with y_{-1} = x',  b = grad f_i(x),
                   c = y_tau - x;   all three gradients on the batch of step tau
                   y_{tau+1} = y_tau - lr QP(g, [a, b, c]);   at the end x' = y_I, upload d_i = x - y_I
    mem_red        for i in S_t:  in buf: c(i) += 1;  else: if |buf| = m, evict argmin of c over buf minus S_t
                   and set its count to 0; then c(i) += 1, add i to buf and to new
    Server_Update  d = sum w_i d_i,  p = beta1 m~ + d
                   D_i = d_i (sampled, new) | beta2 D_i + d_i (sampled, old) | beta2 D_i (in buf, not sampled)
                   m~ = QP(p, D),  x <- x - server_lr m~,  new = {}

    gradma_w = Worker_Update + FedAvg's server;  gradma_s = FedAvg's clients + mem_red + Server_Update;
    gradma = mem_red, then Worker_Update, then Server_Update.

Options, the paper's text first: qp_scope whole | per_tensor (needs `segments`); weights uniform |
samples; previous (x') memory | reset to x_t every round; first_previous (x' of a client never seen)
x0 | global (x_t). `memory` is m, the number of rows.
"""

from dataclasses import dataclass, field

import numpy as np

from .fedavg import aggregation_weights, at, local_sgd, present, weighted_sum
from .qp import project, project_per_tensor


def worker_update(x, previous, client, batches, grad, lr, qp) -> np.ndarray:
    """3.1. Returns y_I; `previous` is x'."""
    y = x.copy()
    y_before = previous
    for batch in batches:
        g = grad(y, client, batch)  # 1.
        a = grad(y_before, client, batch)
        b = grad(x, client, batch)
        c = y - x
        g_tilde = qp(g, np.stack([a, b, c], axis=1))  # 2.
        y_before = y
        y = y - lr * g_tilde
    return y


def mem_red(cohort, m: int, count: dict, buf: list, new: list, D: dict) -> list:
    """3.2. Changes count, buf (in order of entry), new and D. Returns the evicted ids, in order."""
    evicted = []
    if m == 0:  # no memory at all: FedAvgM
        return evicted
    for i in cohort:
        if i in buf:
            count[i] = count[i] + 1
            continue
        if len(buf) == m:
            V = [k for k in buf if k not in cohort]
            if not V:
                raise ValueError(f"memory of {m} rows is smaller than the cohort {list(cohort)}")
            v = V[0]
            for k in V:
                if count[k] < count[v]:  # strictly: on a tie the row that entered first
                    v = k
            buf.remove(v)
            del D[v]
            count[v] = 0
            evicted.append(v)
        count[i] = count.get(i, 0) + 1
        buf.append(i)
        new.append(i)
    return evicted


def server_update(
    x, m_tilde, d: dict, w: dict, buf: list, new: list, D: dict, *, beta1, beta2, server_lr, qp
):
    """3.3, changes D and new. Returns the next x and m~."""
    aggregate = weighted_sum(w, d)  # 1.
    p = beta1 * m_tilde + aggregate
    for i in buf:  # 2.
        if i in d and i in new:
            D[i] = d[i].copy()
        elif i in d:
            D[i] = beta2 * D[i] + d[i]
        else:
            D[i] = beta2 * D[i]
    m_tilde = qp(p, np.stack([D[i] for i in buf], axis=1)) if buf else p  # 3.
    x = x - server_lr * m_tilde
    new.clear()  # 4.
    return x, m_tilde


@dataclass
class Trace:
    """What happened. Lists have one entry per round, except x, which starts with x_0."""

    x: list[np.ndarray]
    evicted: list[list] = field(default_factory=list)  # ids evicted in the round, in order
    memory: list[list] = field(
        default_factory=list
    )  # ids in buf after the round, in the order of entry
    counts: list[dict] = field(default_factory=list)  # c(i) after the round, ids in buf only
    momentum: list[np.ndarray] = field(default_factory=list)  # m~ after the round
    rows: list[dict] = field(default_factory=list)  # D after the round, id -> [P]
    previous: list[dict] = field(
        default_factory=list
    )  # last local models after the round, id -> [P]


def _refuse(variant, qp_scope, previous, first_previous, segments, small_tensor_rule) -> None:
    """Refuse options that do not exist, or do not go together."""
    for option, value, legal in [
        ("variant", variant, ("gradma_w", "gradma_s", "gradma")),
        ("qp_scope", qp_scope, ("whole", "per_tensor")),
        ("previous", previous, ("memory", "reset")),
        ("first_previous", first_previous, ("x0", "global")),
    ]:
        if value not in legal:
            raise ValueError(f"{option}={value!r}, expected one of {legal}")
    if qp_scope == "per_tensor" and segments is None:
        raise ValueError("qp_scope='per_tensor' needs segments")
    if small_tensor_rule is not None and qp_scope != "per_tensor":
        raise ValueError("small_tensor_rule belongs to qp_scope='per_tensor'")


def trace(
    x0,
    cohorts,
    sizes,
    batches,
    grad,
    *,
    lr,
    server_lr=1.0,
    weights="uniform",
    variant="gradma",
    beta1=0.0,
    beta2=0.0,
    memory=0,
    qp_scope="whole",
    segments=None,
    small_tensor_rule=None,
    previous="memory",
    first_previous="x0",
) -> Trace:
    """3.4. A round in which nobody is present changes nothing."""
    _refuse(variant, qp_scope, previous, first_previous, segments, small_tensor_rule)
    on_server = variant in ("gradma_s", "gradma")
    if on_server and 0 < memory < max((len(cohort) for cohort in cohorts), default=0):
        raise ValueError(f"memory={memory} is smaller than the largest cohort")

    def qp(p, M):
        if qp_scope == "whole":
            return project(p, M)
        return project_per_tensor(p, M, segments, small_tensor_rule)

    x0 = np.array(x0, dtype=np.float64)
    x = x0
    m_tilde = np.zeros_like(x)
    count, buf, new, D = {}, [], [], {}
    last = {}  # id -> y_I of its last participation
    out = Trace(x=[x])
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        evicted = []
        if clients:
            if on_server:
                evicted = mem_red(clients, memory, count, buf, new, D)
            d = {}
            for i in clients:
                if variant == "gradma_s":
                    y = local_sgd(x, i, batches[t][i], grad, at(lr, t))
                else:
                    if previous == "reset":
                        x_prime = x
                    elif i in last:
                        x_prime = last[i]
                    else:
                        x_prime = x0 if first_previous == "x0" else x
                    y = worker_update(x, x_prime, i, batches[t][i], grad, at(lr, t), qp)
                    last[i] = y
                d[i] = x - y
            w = aggregation_weights(clients, sizes, weights)
            if on_server:
                x, m_tilde = server_update(
                    x, m_tilde, d, w, buf, new, D,
                    beta1=at(beta1, t), beta2=at(beta2, t), server_lr=at(server_lr, t), qp=qp,
                )  # fmt: skip
            else:
                x = x - at(server_lr, t) * weighted_sum(w, d)
        out.x.append(x)
        out.evicted.append(evicted)
        out.memory.append(list(buf))
        out.counts.append({i: count[i] for i in buf})
        out.momentum.append(m_tilde)
        out.rows.append({i: D[i].copy() for i in buf})
        out.previous.append(dict(last))
    return out


def run(
    x0, cohorts, sizes, batches, grad, *, lr, server_lr=1.0, weights="uniform", **hyper
) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(
        x0, cohorts, sizes, batches, grad, lr=lr, server_lr=server_lr, weights=weights, **hyper
    ).x


def gradma_w(x0, cohorts, sizes, batches, grad, **hyper) -> list[np.ndarray]:
    return run(x0, cohorts, sizes, batches, grad, variant="gradma_w", **hyper)


def gradma_s(x0, cohorts, sizes, batches, grad, **hyper) -> list[np.ndarray]:
    return run(x0, cohorts, sizes, batches, grad, variant="gradma_s", **hyper)


def gradma(x0, cohorts, sizes, batches, grad, **hyper) -> list[np.ndarray]:
    return run(x0, cohorts, sizes, batches, grad, variant="gradma", **hyper)
