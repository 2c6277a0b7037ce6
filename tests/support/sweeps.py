"""Shared by the tests of sweeps: a run of a second, files of it, and the values of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raysim.sweeps import Sweep
from support.configurations import IID_MLP

SMALL = {
    **IID_MLP,
    "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
    "checkpoint": {"every": 0},
    "tracking": {"experiment": "swept"},
}


def written(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **sections}))
    return path


def values(planned: Sweep) -> list[dict[str, Any]]:
    return [trial.values for trial in planned.trials]
