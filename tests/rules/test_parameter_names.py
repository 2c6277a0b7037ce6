"""A rule's methods are called with positions, so their parameters may have any names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.programs import program

OWN_NAMES = program("parameter_names_own_names")


@pytest.fixture
def given(base) -> dict[str, Any]:
    return {
        **base,
        "rounds": 1,
        "model": "logistic",
        "partition": {"name": "iid", "clients": 4},
        "schedule": {"cohort": 2},
        "client": "fedavg",
        "server": "fedavg",
        "local": {"steps": 1, "batch_size": 8, "lr": 0.1},
    }


def test_parameters_and_hyperparameters_may_have_any_names(given, source, engine):
    client = {"name": source("own", OWN_NAMES) + ":Client", "free": 0.0}
    for mode in ("loop", "lanes"):
        run, _ = engine(given | {"client": client, "batching": {"mode": mode}})
        assert torch.equal(run.final["state/x"], run.plan.model().initial()[0])
