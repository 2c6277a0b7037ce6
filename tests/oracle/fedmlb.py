"""FedMLB (Kim, Kim, Han, ICML 2022) and FedMLBM, on the nets of `Blocks`: levels are the outputs of
the L blocks.

hybrid    o_l = the rest of the net after block l, with the parameters of the x received, of the local level h_l;
          frozen parameters, but gradients through h_l. BatchNorm there uses the batch and leaves no trace
loss      lambda1 CE(o) + lambda2 (1/L) sum_l CE(o_l) + lambda3 (1/L) sum_l KL(P_l || Q)
          P_l = softmax(o_l / T), Q = softmax(o / T); KL averaged over the batch, no T^2, gradient through both
gradient  dKL/do = (Q - P_l) / T,   dKL/do_l = P_l (log P_l - log Q - KL) / T,   each over n
server    FedAvg's, or with momentum: m <- beta1 m + d,  x <- x - server_lr m
"""

import numpy as np

from . import averaging
from .fedavg import at
from .nets import Blocks, cross_entropy_gradient, log_softmax


def divergence(o_l, o, T: float) -> tuple[float, np.ndarray, np.ndarray]:
    """KL(softmax(o_l/T) || softmax(o/T)), averaged over the batch, and its gradients in o_l and in
    o."""
    log_P, log_Q = log_softmax(o_l / T), log_softmax(o / T)
    P, Q = np.exp(log_P), np.exp(log_Q)
    each = (P * (log_P - log_Q)).sum(axis=1, keepdims=True)
    n = len(o)
    return float(each.mean()), P * (log_P - log_Q - each) / (T * n), (Q - P) / (T * n)


def gradient(
    net: Blocks,
    w,
    x_t,
    x,
    y,
    *,
    lambda1=1.0,
    lambda2=1.0,
    lambda3=1.0,
    temperature=1.0,
    detach=False,
):
    """Gradient in w [P], and what each BatchNorm of the local net saw: (mean, unbiased var).
    `detach` is a mistake to tell apart: the target softmax(o_l / T) as a constant."""
    out = net.forward(w, x)
    L = len(net.hidden)
    dz = lambda1 * cross_entropy_gradient(out.logits, y)
    dlevels = {}
    for l in range(1, L + 1):
        tail = net.forward(x_t, out.levels[l - 1], start=l)
        _, dKL_l, dKL = divergence(tail.logits, out.logits, temperature)
        dz = dz + lambda3 / L * dKL
        dz_l = lambda2 / L * cross_entropy_gradient(tail.logits, y) + (
            0.0 if detach else lambda3 / L * dKL_l
        )
        dlevels[l] = net.backward(x_t, tail, dz_l)[1]
    return net.backward(w, out, dz, dlevels)[0], out.seen


def trace(
    x0,
    cohorts,
    sizes,
    batches,
    net: Blocks,
    data,
    *,
    lr,
    server_lr=1.0,
    weights="uniform",
    beta1=None,
    **hyper,
) -> tuple[list[np.ndarray], list[averaging.Statistics]]:
    """x_0 .. x_T and the server's running statistics 0 .. T. data[i] = (x, y) of client i;
    beta1=None: no momentum; `hyper` as for `gradient`."""

    def local(t, x, received, i):
        images, labels = data[i]
        y, statistics = x, received
        for batch in batches[t][i]:
            g, seen = gradient(net, y, x, images[batch], labels[batch], **hyper)
            y, statistics = y - at(lr, t) * g, averaging.moved(statistics, seen)
        return y, statistics

    start = averaging.fresh(net)
    return averaging.run(
        x0, cohorts, sizes, batches, local, start, server_lr=server_lr, weights=weights, beta1=beta1
    )


def run(x0, cohorts, sizes, batches, net: Blocks, data, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, net, data, **hyper)[0]
