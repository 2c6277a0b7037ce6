"""The families of shipped methods: their files, and their commands with small settings."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

from raysim.prepare.resolve import read_run_config
from support.documents import parse
from support.programs import program

EXTENSION = Path(__file__).resolve().parents[2] / "docs" / "_ext" / "example_pages.py"


def _extension() -> Any:
    spec = importlib.util.spec_from_file_location("example_pages", EXTENSION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gallery = _extension()
"""The module of the documentation that reads the gallery."""

CLIENTS = 6
DATA = program("examples_data")
"""Images of the shape of the digits, in four classes."""


def small_config(command: str, data: str, cohort: int = 4) -> dict[str, Any]:
    """Return the configuration of a command with few clients, rounds and steps, and a small net.

    What an example sets itself stays, except for sizes.

    Args:
        command: `raysim run CONFIG KEY=VALUE ...`.
        data: replaces the digits.
        cohort: clients of a round, where the command has fewer than 100.
    """
    program, run, *words = shlex.split(command)
    assert (program, run) == ("raysim", "run"), command
    given = parse([run, *words])
    raw = read_run_config(given["config"], given["overrides"] or [])
    clients = max(CLIENTS, cohort)
    partition = {**_section(raw["partition"]), "clients": clients}
    if partition["name"] == "dirichlet":
        partition["alpha"] = 1.0
    schedule = _section(raw["schedule"])
    local = _section(raw["local"])
    model = _section(raw["model"])
    return {
        **raw,
        "rounds": 2,
        "seed": 3,
        "dtype": "float64",
        "data": data if _section(raw["data"])["name"] == "digits" else raw["data"],
        "partition": partition,
        "model": {"name": "mlp", "hidden": [5]} if model["name"] == "mlp" else model,
        "local": local | ({"steps": min(local["steps"], 2)} if local.get("steps") else {}) | {
            "batch_size": 8 if local.get("batch_size") != "full" else "full"
        },
        "schedule": schedule | {"cohort": clients if schedule["cohort"] >= 100 else cohort},
        "resources": {"executor": "inline", "threads": 1},
        "evaluate": _small_evaluation(raw.get("evaluate") or {}),
        "batching": {"mode": "lanes", "size": 2, **(raw.get("batching") or {})},
    }  # fmt: skip


def _small_evaluation(evaluate: dict[str, Any]) -> dict[str, Any]:
    clients = evaluate.get("clients")
    return {"every": 0} | ({"clients": {**clients, "every": 1}} if clients else {})


def _section(value: Any) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value)
