"""What must hold of `task.log`: numbers of clients become metrics of the round, the same in every
mode and block."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import pytest
import torch
from torch.nn import functional

import raysim
from raysim import ClientRule
from raysim.errors import RaysimError
from raysim.training.tasks.server_task import ServerTask


@dataclass(frozen=True)
class Logs(ClientRule):
    """FedAvg that logs at every place where a client trains."""

    def init(self, shared, client_state, data, task):
        task.log(n=data.n, moved=-1.0)
        return {}

    def loss(self, shared, state, net, batch, task):
        values = functional.cross_entropy(net.logits, batch.y, reduction="none")
        task.log(step_loss=batch.mean(values))
        return values

    def direction(self, shared, state, batch, task):
        direction = super().direction(shared, state, batch, task)
        task.log(w_norm=0.0)
        task.log(w_norm=state["w"].norm(), step_max=state["w"].norm())
        return direction

    def finish(self, shared, state, client_state, data, task):
        task.log(moved=(shared["x"] - state["w"]).norm(), n_max=data.n, twice=torch.tensor([2]))
        report, kept = super().finish(shared, state, client_state, data, task)
        return {**report, "metric/twice": torch.tensor(3.0)}, kept


def logged(rule: Any = Logs, rounds: int = 2, **keys: Any) -> list[dict[str, float]]:
    """The metrics of each round's clients."""
    keys = {"resources.executor": "inline", "batching.mode": "loop", **keys}
    done = raysim.run(
        "quickstart", keys, client=rule, server="fedavg", rounds=rounds, tracking=False
    )
    return [
        {k: v for k, v in record.items() if k.startswith(("client/", "train_loss"))}
        for record in done.history[1:]
    ]


def test_numbers_of_clients_are_averaged_over_steps_and_clients():
    first, second = logged()
    assert set(first) == {
        *("client/n", "client/moved", "client/step_loss", "client/w_norm", "client/step_max"),
        *("client/n_max", "client/twice", "train_loss"),
    }
    for record in (first, second):
        assert record["client/step_loss"] == pytest.approx(record["train_loss"])
        assert record["client/n"] < record["client/n_max"] == int(record["client/n_max"])
        assert 0 < record["client/w_norm"] < record["client/step_max"]
        assert record["client/moved"] > 0, "finish counts more than init"
        assert record["client/twice"] == 3, "the report counts more than the log"


def test_blocks_do_not_change_what_is_logged_and_lanes_only_rounds():
    whole = logged()
    assert logged(**{"batching.size": 3}) == whole
    lanes = logged(**{"batching.mode": "lanes", "batching.size": 4})
    assert lanes == [pytest.approx(record) for record in whole]


@pytest.mark.ray
def test_actors_do_not_change_what_is_logged():
    assert logged(**{"resources.executor": "ray", "resources.actors": 2}) == logged()


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_steps_are_counted_where_gradients_are_accumulated(mode):
    @dataclass(frozen=True)
    class Counts(ClientRule):
        """Logs the number of the client in each mini-batch."""

        def direction(self, shared, state, batch, task):
            task.log(number=task.client, number_max=task.client)
            return super().direction(shared, state, batch, task)

    (record,) = logged(
        Counts,
        1,
        **{"batching.mode": mode, "local.accumulate": 2, "schedule.cohort": 20},
        partition={"name": "iid", "clients": 20},
    )
    assert record["client/number"] == pytest.approx(9.5) and record["client/number_max"] == 19


def test_the_clients_of_other_groups_do_not_count():
    groups = {"loud": {"share": 0.5, "client": Logs}}
    (record,) = logged("fedavg", 1, groups=groups, **{"schedule.cohort": 20})
    assert record["client/twice"] == 3 and record["client/moved"] > 0


def test_a_client_that_logs_nan_has_no_number():
    @dataclass(frozen=True)
    class Sometimes(ClientRule):
        """Logs NaN for one client of three, and for all of them."""

        def finish(self, shared, state, client_state, data, task):
            number = float("nan") if task.client == 1 else float(task.client)
            task.log(some=number, some_max=number, none=float("nan"))
            return super().finish(shared, state, client_state, data, task)

    keys: dict[str, Any] = {"partition.clients": 3, "schedule.cohort": 3}
    (record,) = logged(Sometimes, 1, **keys)
    assert (record["client/some"], record["client/some_max"]) == (1, 2)
    assert isnan(record["client/none"]) and record["train_loss"] > 0


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (torch.zeros(2), r"task.log: number is a tensor of shape \[2\]"),
        (torch.tensor(1j), "task.log: number is .*complex"),
    ],
)
def test_what_is_no_real_number_is_refused_before_the_run(number, error):
    @dataclass(frozen=True)
    class Wrong(ClientRule):
        """Logs something else."""

        def finish(self, shared, state, client_state, data, task):
            task.log(number=number)
            return super().finish(shared, state, client_state, data, task)

    with pytest.raises(RaysimError, match=error):
        logged(Wrong)


def test_the_log_is_refused_where_no_client_trains():
    @dataclass(frozen=True)
    class InState(ClientRule):
        """Logs in `state`."""

        def state(self, task):
            task.log(number=1)
            return {}

    with pytest.raises(RaysimError, match=r"task.log\(number\): not here"):
        logged(InState)

    server_task = ServerTask.__new__(ServerTask)
    with pytest.raises(ValueError, match=r"on the server use reports\.log"):
        server_task.log(number=1)
