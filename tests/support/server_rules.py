"""Rules of the gallery by path, and uploads of a round for rule and oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raysim.config.references import load_object
from raysim.randomness import generator
from raysim.rules import Reports
from support.examples import gallery

SEED = 4


def rule(reference: str, **parameters: Any) -> Any:
    """Return a rule of a family in algorithms/, "FAMILY/METHOD.py:Class"."""
    return load_object(f"{gallery.FOLDER}/{reference}", "rule")(**parameters)


def reports(deltas: np.ndarray, weights: Sequence[float] | None = None, t: int = 0) -> Reports:
    """Return the uploads "delta" [K, P] of round t, with uniform weights by default."""
    k = len(deltas)
    p = np.full(k, 1 / k) if weights is None else np.array(weights)
    return Reports(
        t, list(range(k)), k, weights=p.tolist(), seed=SEED,
        rows={"delta": list(torch.from_numpy(deltas))},
        totals={("mean", "delta"): torch.from_numpy(p @ deltas)},
    )  # fmt: skip


def step(server: Any, deltas: np.ndarray, *arguments: Any) -> np.ndarray:
    """Return the update that a server rule without a state of its own applies to x: x_t - x_{t+1}."""
    x = torch.zeros(deltas.shape[1], dtype=torch.float64)
    return -server.update({"x": x}, reports(deltas, *arguments))["x"].numpy()


def noise(stream: str, t: int, size: int) -> np.ndarray:
    """Return the normal numbers of `reports.rng(stream)`."""
    return generator(SEED, f"server rule {stream}", t).standard_normal(size)
