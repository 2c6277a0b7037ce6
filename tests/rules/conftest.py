"""Fixtures of the tests of rules."""

from __future__ import annotations

from typing import Any

import pytest
from support.oracle_cases import NETS


@pytest.fixture
def small_mlp(ragged, source):
    """small_mlp(rules, ...) -> config(mode, **sections): a configuration of a small MLP in float64;
    FILE is the file of the rules."""

    def of(rules: str, **common: Any):
        path = source("own", rules)

        def make(mode: str = "loop", **sections: Any) -> dict[str, Any]:
            for key, value in sections.items():
                if isinstance(value, str):
                    sections[key] = value.replace("FILE", path)
            return {
                "seed": 2,
                "dtype": "float64",
                "partition": ragged([30, 9, 17, 12, 45, 8]),
                "schedule": {"cohort": 4},
                "model": NETS["mlp"][0],
                "client": "fedavg",
                "server": "fedavg",
                "local": {"steps": 2, "batch_size": 16, "lr": 0.2},
                "batching": {"mode": mode, "size": 3},
                **common,
                **sections,
            }

        return make

    return of
