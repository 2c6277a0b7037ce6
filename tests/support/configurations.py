"""Shared small configurations, and the names that a configuration may hold."""

from __future__ import annotations

from typing import Any

DIGITS_MLP: dict[str, Any] = {
    "data": "digits",
    "partition": {"clients": 8},
    "schedule": {"cohort": 4},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "resources": {"executor": "inline"},
    "algorithm": "fedavg",
    "model": {"name": "mlp", "hidden": [12]},
    "rounds": 2,
}
"""FedAvg on the digits, with a net that learns something in a few rounds."""

IID_MLP: dict[str, Any] = {
    "rounds": 3,
    "data": "digits",
    "partition": {"name": "iid", "clients": 20},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": "fedavg",
    "local": {"steps": 1, "batch_size": 8, "lr": 0.05},
    "schedule": {"cohort": 4},
}
"""FedAvg on the digits, for tests of what stands around a run."""

TO_CHANGE: dict[str, Any] = {
    "rounds": 1,
    "data": "digits",
    "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": "fedavg",
    "local": {"steps": 1, "batch_size": 8, "lr": 0.05},
    "schedule": {"cohort": 4},
    "resources": {"executor": "inline"},
}
"""A valid configuration whose keys and values tests replace."""

NAMES = [
    *("sync", "kasync", "buffered"),
    *("iid", "shards", "dirichlet", "heavy_tail", "natural", "file", "virtual", "slow_class"),
    *("logistic", "mlp", "tinynn", "lenet5"),
    *("constant", "two_speed", "data", "trace"),
]
"""Schedules, partitions, models and client speeds."""
