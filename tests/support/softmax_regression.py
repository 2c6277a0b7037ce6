"""Softmax regression in NumPy on forty examples of three classes, and a run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Y = np.arange(40) % 3
X = np.random.default_rng(7).normal(size=(40, 5)) + 2 * np.eye(3, 5)[Y]
"""Forty examples [40, 5]: the first `sum(SIZES)` are the clients', the others public."""
SIZES = [6, 5, 4, 5, 4, 4]
"""Examples of each client."""
N = sum(SIZES)
LR, STEPS, SEED = 0.3, 2, 4


def config(
    folder: Path, base: dict[str, Any], without: Sequence[str] = (), **sections: Any
) -> dict[str, Any]:
    """Return the configuration of clients of SIZES with full batches, in float64."""
    rest = {"x_test": X[:3], "y_test": Y[:3], "user": np.repeat(np.arange(len(SIZES)), SIZES)}
    arrays = {"x": X[:N], "y": Y[:N], **rest, "public_x": X[N:], "public_y": Y[N:]}
    np.savez(folder / "arrays.npz", **{k: v for k, v in arrays.items() if k not in without})
    return {
        **base, "rounds": 3, "seed": SEED, "dtype": "float64", "model": "logistic",
        "data": {"name": "arrays", "path": str(folder / "arrays.npz")}, "partition": "natural",
        "client": "fedavg", "server": "fedavg", "schedule": {"cohort": len(SIZES)}, "batching": {"mode": "loop"},
        "local": {"steps": STEPS, "batch_size": "full", "lr": LR}, **sections,
    }  # fmt: skip


def logits(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the logits [n, 3] of w = (W [3, 5], b [3])."""
    return x @ w[:-3].reshape(3, -1).T + w[-3:]


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(w: np.ndarray, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy with the probabilities `target` [n, 3]."""
    g = (softmax(logits(w, x)) - target) / len(x)
    return np.concatenate([(g.T @ x).ravel(), g.sum(0)])


def examples_of(client: int) -> np.ndarray:
    return np.split(np.arange(N), np.cumsum(SIZES)[:-1])[client]


def local_models(w0: np.ndarray, pull: Callable[[np.ndarray], Any] = lambda w: 0.0) -> np.ndarray:
    """Return each client's parameters after its local steps, [6, P]; `pull` is added to its
    gradients."""
    ends = []
    for rows in map(examples_of, range(len(SIZES))):
        w = w0
        for _ in range(STEPS):
            w = w - LR * (gradient(w, X[rows], np.eye(3)[Y[rows]]) + pull(w))
        ends.append(w)
    return np.array(ends)
