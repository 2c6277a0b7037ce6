"""Many features in one run: the same bits on any number of actors, and after a resume."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import raysim

FEEDBACK = [
    {"name": "topk", "share": 0.2, "error_feedback": True},
    {"name": "qsgd", "bits": 6, "error_feedback": True},
]
EVERYTHING = {
    "algorithm": "fedavg",
    "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5, "test": {"fraction": 0.3}},
    "local": {
        "steps": 2,
        "batch_size": 8,
        "lr": 0.1,
        "optimizer": {"name": "sgd", "momentum": 0.9, "state": "keep"},
        "personal": "classifier",
        "upload": FEEDBACK,
    },
    "groups": {
        "adaptive": {
            "share": 0.4,
            "local": {
                "lr": 0.01,
                "optimizer": {"name": "adam", "state": "keep"},
                "upload": [{"name": "signsgd", "error_feedback": True}],
            },
        }
    },
    "evaluate": {
        "every": 1,
        "clients": {"every": 1, "held_out": 0.2, "fine_tune": {"steps": 1}},
    },
}
PRIVATE = {
    "algorithm": "fedavg",
    "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.5, "test": {"fraction": 0.3}},
    "local": {"steps": 2, "batch_size": 8, "lr": 0.1, "optimizer": {"momentum": 0.9}},
    "groups": {"small": {"share": 0.4, "local": {"batch_size": 4, "optimizer": "adam"}}},
    "privacy": {
        "unit": "client",
        "clip_norm": 0.1,
        "noise_multiplier": 0.5,
        "adaptive": {"quantile": 0.5, "lr": 0.5},
    },
    "evaluate": {"every": 1, "clients": {"every": 1}},
}


def deterministic(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return records without what depends on the machine."""
    return [
        {k: v for k, v in record.items() if not k.startswith("system/") and "seconds" not in k}
        for record in history
    ]


@pytest.mark.ray
@pytest.mark.parametrize("features", [EVERYTHING, PRIVATE], ids=["everything", "private"])
def test_actors_and_a_resume_do_not_change_a_run(
    features: dict[str, Any], base: dict[str, Any], recycled_actors: None
) -> None:
    config = {
        **base,
        **features,
        "rounds": 4,
        "model": {"name": "mlp", "hidden": [6]},
        "schedule": {"cohort": 5, "sampling": "poisson"},
        "batching": {"size": 2},
        "checkpoint": {"every": 1},
    }
    inline = raysim.run(config)
    runs = []
    for actors in (1, 2, 3):
        config["run_dir"] = f"{base['run_dir']}-{actors}"
        config["resources"] = {"executor": "ray", "actors": actors, "cpus": 1, "threads": 1}
        stop = (lambda record: record["round"] == 2) if actors == 2 else None
        run = raysim.run(config, progress=stop)
        assert bool(run.stopped) == (actors == 2)
        runs.append(raysim.resume(run.run_dir) if run.stopped else run)
    assert inline.history[-1]["clients/loss"] != inline.history[0]["clients/loss"]
    for run in runs:
        assert run.digest == inline.digest
        assert deterministic(run.history) == deterministic(inline.history)
        pd.testing.assert_frame_equal(run.clients, inline.clients)
