"""Helpers to stop runs and compare histories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import raysim
from raysim.engine.state import checkpoint

TIMES = {
    "system/round_seconds",
    "system/clients_per_second",
    "system/train_seconds",
    "system/overhead_seconds",
    "system/worker_utilization",
}


def same(one: list[dict[str, float]], other: list[dict[str, float]]) -> bool:
    """Return whether two histories are equal except for times."""

    def timeless(history: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{k: v for k, v in record.items() if k not in TIMES} for record in history]

    return timeless(one) == timeless(other)


def stopped_and_resumed(config: dict[str, Any], folder: Path, after: int = 2) -> raysim.RunResult:
    """Run a configuration on two actors, stop it after some rounds, and resume it."""
    on_actors = {"executor": "ray", "actors": 2, "threads": 1}
    config = {**config, "resources": on_actors, "checkpoint": {"every": 1}}
    part = raysim.run(config, run_dir=str(folder), progress=lambda record: record["round"] == after)
    assert part.stopped
    return raysim.resume(part.run_dir)


def stop_at(number: int) -> Callable[[dict[str, float]], None]:
    def progress(record: dict[str, float]) -> None:
        if record["round"] == number:
            raise KeyboardInterrupt

    return progress


def checkpoint_rounds(folder: Path) -> list[int]:
    """Return the rounds after which a run has checkpoints."""
    checkpoints = checkpoint.available_checkpoints(folder)
    return [int(path.name.removeprefix("round-")) for path in checkpoints]
