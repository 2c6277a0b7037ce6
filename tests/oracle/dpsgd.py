"""The gradient of DP-SGD (Abadi et al., CCS 2016), to be put in the place of any method's
mini-batch gradient.

    g^ = (1/B) ( sum_k g_k min(1, C/|g_k|) + σ C z )      g_k of one sample each, |.| over all parameters together
                                                          B samples in this batch;  z standard normal [P]

C = None: no clipping, and no noise (its size counts in units of C). What a method adds to the
gradient, a proximal term or curvature, comes after and is neither clipped nor noisy.

A batch here is a pair (places, z), so that each step finds its noise; `with_noise` makes the
batches of a run so.
"""

from collections.abc import Callable

import numpy as np

MISTAKES = (None, "mean", "unscaled", "per tensor", "over n")
"""The mean gradient clipped; noise σ instead of σC; each tensor clipped by itself; noise divided by
n_i."""


def each(net, w, x, y) -> np.ndarray:
    """The gradients g_k [B, P]."""
    return np.stack([net.grad(w, x[k : k + 1], y[k : k + 1]) for k in range(len(x))])


def clipped(g: np.ndarray, C: float | None) -> np.ndarray:
    """One vector; g = 0 stays."""
    length = np.sqrt(g @ g)
    return g if C is None or length <= C else g * (C / length)


def gradient(net, w, x, y, z, *, clip, sigma, mistake=None, n=None) -> np.ndarray:
    if mistake not in MISTAKES:
        raise ValueError(f"mistake={mistake!r}")
    g, B = each(net, w, x, y), len(x)
    if mistake == "mean":
        total = B * clipped(g.mean(axis=0), clip)
    elif mistake == "per tensor":
        cuts = np.cumsum(net.segments)[:-1]
        total = sum(
            np.concatenate([clipped(part, clip) for part in np.split(g_k, cuts)]) for g_k in g
        )
    else:
        total = sum(clipped(g_k, clip) for g_k in g)
    scale = 0.0 if clip is None else sigma * (1.0 if mistake == "unscaled" else clip)
    return total / B + scale * z / (n if mistake == "over n" else B)


def with_noise(batches, z: Callable[[int, int], list]) -> list[dict]:
    """z(t, i): the noise of client i's steps in round t, one vector for each."""
    return [
        {i: list(zip(mine, z(t, i), strict=True)) for i, mine in of_round.items()}
        for t, of_round in enumerate(batches)
    ]


def private(net, data, *, clip, sigma, mistake=None) -> Callable:
    """grad(w, client, batch) as FedAvg and the rest ask for it."""

    def grad(w, client, batch):
        places, z = batch
        x, y = data[client]
        return gradient(
            net, w, x[places], y[places], z, clip=clip, sigma=sigma, mistake=mistake, n=len(x)
        )

    return grad
