"""Clients that keep all parameters to themselves train alone, as documented for local-only training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import raysim

RNG = np.random.default_rng(2)
X = RNG.normal(size=(90, 4))
Y = (X @ RNG.normal(size=(4, 3))).argmax(1)
OF_FIRST = list(range(20))


@pytest.fixture
def train(base: dict[str, Any], tmp_path):
    def run(others: list[list[int]], **keys: Any) -> raysim.RunResult:
        config = {
            **base,
            "rounds": 3,
            "data": (X[:60], Y[:60], X[60:], Y[60:]),
            "model": "logistic",
            "algorithm": "fedavg",
            "partition": [OF_FIRST, *others],
            "local": {"steps": 4, "batch_size": 5, "lr": 0.2},
            "schedule": {"cohort": 1 + len(others)},
            "evaluate": {"every": 1, "clients": {"every": 1}},
            "run_dir": str(tmp_path / f"{len(list(tmp_path.iterdir()))}"),
        }
        return raysim.run(config, {"partition.test.fraction": 0.25, **keys}, tracking=False)

    return run


def losses_of_first(result: raysim.RunResult) -> list[float]:
    table = result.clients
    return table[table.client == 0].sort_values("round").loss.tolist()


def test_a_client_trains_alone_as_in_a_run_of_its_own(train):
    alone = losses_of_first(train([]))
    assert len(set(alone)) == len(alone), "it learns"
    for others in ([list(range(20, 40))], [list(range(40, 60)), list(range(20, 35))]):
        local_only = train(others, **{"local.personal": "*"})
        assert losses_of_first(local_only) == pytest.approx(alone, rel=1e-4)
        averaged = train(others)
        assert losses_of_first(averaged)[-1] != pytest.approx(alone[-1], rel=1e-4)


def test_the_model_of_the_server_stays_the_initial_one_and_nothing_is_sent(train):
    local_only = train([list(range(20, 40))], **{"local.personal": "*"})
    assert {record["loss"] for record in local_only.history} == {local_only.history[0]["loss"]}
    assert {record["bytes_up"] for record in local_only.history[1:]} == {0}
