"""Runs of the gallery's methods that their oracles are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.examples import gallery
from support.gallery_runs import LR, SIZES, Done
from support.oracle_cases import NETS, feed


@pytest.fixture
def train(engine: Callable, ragged: Callable) -> Callable[..., Done]:
    """train(client="FAMILY/METHOD.py:Class", ...): three rounds of an MLP on the digits in float64."""

    def located(rule: Any) -> Any:
        if isinstance(rule, dict):
            return {**rule, "name": located(rule["name"])}
        return str(gallery.FOLDER / rule) if ".py:" in rule else rule

    def run(mode: str = "loop", sizes: Sequence[int] = SIZES, **sections: Any) -> Done:
        sections = {"client": "fedavg", "server": "fedavg", **sections}
        sections |= {key: located(sections[key]) for key in ("client", "server")}
        config = {
            "rounds": 3,
            "seed": 2,
            "dtype": "float64",
            "partition": {**ragged(sizes), "test": {"matched": True}},
            "evaluate": {"every": 0, "clients": {"every": 3}},
            "schedule": {"cohort": 4},
            "model": NETS["mlp"][0],
            "batching": {"mode": mode, "size": 2},
            **sections,
            "local": {"steps": 3, "batch_size": 16, "lr": LR, **sections.get("local", {})},
        }
        made, records = engine(config, states=True)
        return Done(made, records, feed(made))

    return run


@pytest.fixture
def train_method(engine: Callable, ragged: Callable) -> Callable[..., Done]:
    """train_method("loop", {"name": METHOD, ...}): five rounds of an MLP on the digits in float64,
    four clients in each."""

    def run(
        mode: str, algorithm: dict[str, Any], sizes: Sequence[int] = SIZES, **sections: Any
    ) -> Done:
        config = {
            "rounds": 5,
            "seed": 2,
            "dtype": "float64",
            "evaluate": {"every": 0, "clients": {"every": 1}},
            "model": NETS["mlp"][0],
            "batching": {"mode": mode, "size": 2},
            "algorithm": algorithm,
            **sections,
            "partition": {
                **ragged(sizes), "test": {"matched": True}, **sections.get("partition", {})
            },
            "schedule": {"cohort": 4, **sections.get("schedule", {})},
            "local": {"batch_size": 16, "lr": LR, **sections.get("local", {"steps": 3})},
        }  # fmt: skip
        made, records = engine(config, states=True)
        return Done(made, records, feed(made))

    return run
