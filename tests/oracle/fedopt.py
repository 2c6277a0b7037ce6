"""FedAdagrad, FedAdam, FedYogi (Reddi et al., ICLR 2021) and FedAMS (Wang Y. et al., ICML 2022).

client    FedAvg's
server    Delta = -sum_i w_i d_i                           (= the mean of y_i - x)
          m <- beta1 m + (1 - beta1) Delta
Adagrad   v <- v + Delta^2
Adam      v <- beta2 v + (1 - beta2) Delta^2
Yogi      v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)
AMS       v as Adam's,  vhat <- max(vhat, v, tau)
step      x <- x + server_lr m / (sqrt(v) + tau);   AMS: x <- x + server_lr m / sqrt(vhat)
          m_0 = 0, v_0 = tau^2, vhat_0 = 0; no bias correction; everything elementwise
"""

import numpy as np

from .fedavg import aggregation_weights, at, local_sgd, present, weighted_sum


def run(
    x0,
    cohorts,
    sizes,
    batches,
    grad,
    *,
    rule,
    lr,
    server_lr,
    beta1,
    tau,
    beta2=None,
    weights="uniform",
) -> list[np.ndarray]:
    """x_0, ..., x_T. `rule`: adagrad | adam | yogi | ams. A round with nobody present changes
    nothing."""
    if rule not in ("adagrad", "adam", "yogi", "ams"):
        raise ValueError(f"rule={rule!r}, expected 'adagrad', 'adam', 'yogi' or 'ams'")
    x = np.array(x0, dtype=np.float64)
    m, v, v_hat = np.zeros_like(x), np.full_like(x, tau**2), np.zeros_like(x)
    xs = [x]
    for t, cohort in enumerate(cohorts):
        clients = present(cohort, sizes, batches[t])
        if clients:
            d = {i: x - local_sgd(x, i, batches[t][i], grad, at(lr, t)) for i in clients}
            Delta = -weighted_sum(aggregation_weights(clients, sizes, weights), d)
            m = at(beta1, t) * m + (1 - at(beta1, t)) * Delta
            if rule == "adagrad":
                v = v + Delta**2
            elif rule == "yogi":
                v = v - (1 - at(beta2, t)) * Delta**2 * np.sign(v - Delta**2)
            else:
                v = at(beta2, t) * v + (1 - at(beta2, t)) * Delta**2
            if not (v > 0).all():
                raise ValueError(f"round {t}: v is not positive")
            if rule == "ams":
                v_hat = np.maximum(np.maximum(v_hat, v), tau)
                x = x + at(server_lr, t) * m / np.sqrt(v_hat)
            else:
                x = x + at(server_lr, t) * m / (np.sqrt(v) + tau)
        xs.append(x)
    return xs


def fedadagrad(x0, cohorts, sizes, batches, grad, *, beta1=0.0, tau=1e-3, **hyper):
    return run(x0, cohorts, sizes, batches, grad, rule="adagrad", beta1=beta1, tau=tau, **hyper)


def fedadam(x0, cohorts, sizes, batches, grad, *, beta1=0.9, beta2=0.99, tau=1e-3, **hyper):
    return run(
        x0, cohorts, sizes, batches, grad, rule="adam", beta1=beta1, beta2=beta2, tau=tau, **hyper
    )


def fedyogi(x0, cohorts, sizes, batches, grad, *, beta1=0.9, beta2=0.99, tau=1e-3, **hyper):
    return run(
        x0, cohorts, sizes, batches, grad, rule="yogi", beta1=beta1, beta2=beta2, tau=tau, **hyper
    )


def fedams(x0, cohorts, sizes, batches, grad, *, beta1=0.9, beta2=0.99, tau=1e-3, **hyper):
    return run(
        x0, cohorts, sizes, batches, grad, rule="ams", beta1=beta1, beta2=beta2, tau=tau, **hyper
    )
