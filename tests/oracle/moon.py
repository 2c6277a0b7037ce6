"""MOON (Li Q., He, Song, CVPR 2021) and MOONM, on the nets of `Blocks`; z is the input of the last
linear layer.

loss      mean over the batch of  CE + mu l_con,   l_con = -log( e^{c_g/T} / (e^{c_g/T} + e^{c_p/T}) )
          c_g = cos(z, z_g), c_p = cos(z, z_p);   z_g of the x received, z_p of the client's last local model
          a cosine with a vector no longer than 1e-8 is 0, value and gradient
gradient  through z alone:  dl/dc_g = (p_g - 1)/T, dl/dc_p = p_p/T with (p_g, p_p) = softmax(c_g/T, c_p/T);
          dcos(z, a)/dz = a / (|z| |a|) - cos(z, a) z / |z|^2
previous  a client never seen: the x received
BatchNorm both frozen nets in eval mode: x with the statistics received, the last local model with those it ended with
server    FedAvg's, or with momentum: m <- beta1 m + d,  x <- x - server_lr m
"""

import numpy as np

from . import averaging
from .fedavg import at
from .nets import Blocks, cross_entropy_gradient

EPS = 1e-8


def cosine(z: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos(z, a) [n] row by row, and its gradient in z [n, k]."""
    value, gradient = np.zeros(len(z)), np.zeros_like(z)
    for row, (p, q) in enumerate(zip(z, a, strict=True)):
        length, other = np.sqrt(p @ p), np.sqrt(q @ q)
        if length > EPS and other > EPS:
            value[row] = p @ q / (length * other)
            gradient[row] = q / (length * other) - value[row] * p / length**2
    return value, gradient


def contrast(z, z_g, z_p, T: float) -> tuple[float, np.ndarray]:
    """Mean of l_con, and its gradient in z [n, k]."""
    c_g, dc_g = cosine(z, z_g)
    c_p, dc_p = cosine(z, z_p)
    top = np.maximum(c_g, c_p) / T
    log_sum = top + np.log(np.exp(c_g / T - top) + np.exp(c_p / T - top))
    p_g, p_p = np.exp(c_g / T - log_sum), np.exp(c_p / T - log_sum)
    dz = ((p_g - 1) / T)[:, None] * dc_g + (p_p / T)[:, None] * dc_p
    return float((log_sum - c_g / T).mean()), dz / len(z)


def gradient(net: Blocks, w, x, y, z_g, z_p, *, mu, temperature) -> tuple[np.ndarray, list]:
    """Gradient [P], and what each BatchNorm saw of the batch: (mean, unbiased var)."""
    out = net.forward(w, x)
    dz = mu * contrast(out.levels[-1], z_g, z_p, temperature)[1]
    return net.backward(w, out, cross_entropy_gradient(out.logits, y), {len(net.hidden): dz})[
        0
    ], out.seen


def trace(
    x0,
    cohorts,
    sizes,
    batches,
    net: Blocks,
    data,
    *,
    lr,
    mu=1.0,
    temperature=0.5,
    server_lr=1.0,
    weights="uniform",
    beta1=None,
    previous="local",
) -> tuple[list[np.ndarray], list[averaging.Statistics]]:
    """x_0 .. x_T and the server's running statistics 0 .. T. data[i] = (x, y) of client i;
    beta1=None: no momentum.

    previous="received": the last local parameters, but with the statistics received (a mistake to
    tell apart).
    """
    if previous not in ("local", "received"):
        raise ValueError(f"previous={previous!r}, expected 'local' or 'received'")
    last = {}  # id -> y_i and its statistics after its last participation

    def local(t, x, received, i):
        images, labels = data[i]
        old, statistics_of_old = last.get(i, (x, received))
        if previous == "received":
            statistics_of_old = received
        y, statistics = x, received
        for batch in batches[t][i]:
            z_g = net.forward(x, images[batch], running=received).levels[-1]
            z_p = net.forward(old, images[batch], running=statistics_of_old).levels[-1]
            g, seen = gradient(
                net, y, images[batch], labels[batch], z_g, z_p, mu=mu, temperature=temperature
            )
            y, statistics = y - at(lr, t) * g, averaging.moved(statistics, seen)
        last[i] = y, statistics
        return y, statistics

    start = averaging.fresh(net)
    return averaging.run(
        x0, cohorts, sizes, batches, local, start, server_lr=server_lr, weights=weights, beta1=beta1
    )


def run(x0, cohorts, sizes, batches, net: Blocks, data, **hyper) -> list[np.ndarray]:
    """x_0, ..., x_T. Hyper-parameters as for `trace`."""
    return trace(x0, cohorts, sizes, batches, net, data, **hyper)[0]
