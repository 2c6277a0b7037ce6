"""Validation examples of each client (`partition.val`), against NumPy on the saved parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import raysim
from raysim.data import Clients
from raysim.errors import ConfigError
from raysim.metrics import is_share, lower_is_better
from raysim.prepare.resolve import prepare
from raysim.rules import ClientRule, LocalData
from raysim.runs.artifacts.export import export

N = 9


@pytest.fixture
def setup(base: dict[str, Any]) -> dict[str, Any]:
    """A small run with test and validation examples of each client; two clients never train."""
    return base | {
        "rounds": 3,
        "algorithm": "fedavg",
        "partition": {
            "name": "dirichlet",
            "clients": N,
            "alpha": 0.3,
            "test": {"fraction": 0.2},
            "val": {"fraction": 0.25},
        },
        "model": "logistic",
        "local": {"steps": 2, "batch_size": 8, "lr": 0.3},
        "schedule": {"cohort": 4},
        "evaluate": {"every": 0, "clients": {"every": 1, "held_out": 0.2}},
        "checkpoint": {"every": 1},
    }


def logits(plan, result, positions, half="train"):
    """Return the saved net's logits of examples, and their labels, in NumPy."""
    data = plan.dataset
    x, y = (data.x, data.y) if half == "train" else (data.x_test, data.y_test)
    inputs = x[positions] * data.scale[:, None, None] + data.shift[:, None, None]
    weight, bias = (part.double().numpy() for part in result.state_dict.values())
    return inputs.reshape(len(positions), -1).astype(np.float64) @ weight.T + bias, y[positions]


def measured(z, y):
    """Return accuracy and mean cross-entropy of logits."""
    losses = np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]
    return {"accuracy": np.mean(z.argmax(1) == y), "loss": losses.mean()}


def test_clients_keep_a_share_for_validation_that_no_other_use_sees(setup):
    with_val, without = prepare(setup), prepare(setup | {"partition": setup["partition"] | {"val": None}})  # fmt: skip
    clients, before = with_val.clients, without.clients
    assert isinstance(clients, Clients) and isinstance(before, Clients)
    assert clients.val is not None and clients.test is not None and before.val is None
    every, every_before = clients.all_examples(), before.all_examples()
    for client in range(N):
        train, val = every.client(client), clients.val.client(client)
        n = len(every_before.client(client))
        assert len(val) == min(int(0.25 * n + 0.5), n - 1)
        assert sorted([*train, *val]) == every_before.client(client).tolist()
        assert np.array_equal(clients.test.client(client), before.test.client(client))
    assert with_val.config.fingerprint != without.config.fingerprint


def test_the_metrics_are_those_of_the_saved_parameters(setup):
    result = raysim.run(setup, tracking=False)
    plan, last = prepare(result.run_dir / "config.yaml"), result.history[-1]
    table = result.clients
    rows = table[table["round"] == 3].set_index("client")
    n, losses, accuracies = [], [], []
    for client, row in rows.iterrows():
        positions = plan.clients.val.client(client)
        expected = measured(*logits(plan, result, positions))
        assert row["val_examples"] == len(positions) > 0
        assert row["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["val_accuracy"] == expected["accuracy"]
        on_test = measured(*logits(plan, result, plan.clients.test.client(client)))
        assert row["loss"] == pytest.approx(on_test["loss"], rel=1e-5)
        if not row["held_out"]:
            n.append(len(positions))
            losses.append(expected["loss"])
            accuracies.append(expected["accuracy"])
    for metric, values in (("val_loss", losses), ("val_accuracy", accuracies)):
        assert last[f"clients/{metric}"] == pytest.approx(np.mean(values), rel=1e-5)
        weighted = np.average(values, weights=n)
        assert last[f"clients/{metric}_weighted"] == pytest.approx(weighted, rel=1e-5)
        assert last[f"clients/{metric}_std"] == pytest.approx(np.std(values), rel=1e-4)
    worst = max(losses), min(accuracies)
    found = last["clients/val_loss_worst10"], last["clients/val_accuracy_worst10"]
    assert found == pytest.approx(worst, rel=1e-5)
    assert {"held_out/val_loss", "participation_gap/val_accuracy"} <= set(last)


def test_validation_without_tests(setup):
    """Of a client with one example, nothing is kept, so it has no metric."""
    del setup["partition"]["test"]
    setup["evaluate"]["clients"] = {"every": 3, "fine_tune": {"steps": 1}}
    setup["partition"]["val"] = {"fraction": 0.1}
    result = raysim.run(setup, tracking=False)
    assert result.config.evaluate.best_by.metric == "clients/val_accuracy"
    table = result.clients
    plan = prepare(result.run_dir / "config.yaml")
    kept = np.flatnonzero(plan.clients.val.sizes).tolist()
    assert table[table["round"] == 3]["client"].tolist() == kept
    assert (table["examples"] == 0).all() and "accuracy" not in table
    last = result.history[-1]
    assert "clients/loss" not in last and last["clients/val_loss"] > 0
    assert last.get("clients/without_val", 0) == N - len(kept)
    assert last["fine_tuned/val_loss"] < last["clients/val_loss"]


def test_clients_without_validation_examples_still_have_a_test(setup, ragged):
    """Half of an example is rounded up, and at least one example stays in training."""
    setup["partition"] = ragged((1, 2, 3, 40)) | {"test": {"matched": True}, "val": {"fraction": 0.1}}  # fmt: skip
    setup["evaluate"]["clients"] = {"every": 3}
    result = raysim.run(setup | {"schedule": {"cohort": 2}}, tracking=False)
    rows = result.clients[result.clients["round"] == 3].set_index("client")
    assert rows["val_examples"].tolist() == [0, 0, 0, 4]
    assert rows["val_loss"].isna().tolist() == [True, True, True, False]
    last = result.history[-1]
    assert last["clients/val_loss"] == last["clients/val_loss_weighted"] == rows["val_loss"][3]
    assert last["clients/without_val"] == 3


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_bits_do_not_depend_on_blocks_or_evaluations(setup, mode):
    setup["batching"] = {"mode": mode}
    whole = raysim.run(setup, {"run_dir": f"{setup['run_dir']}-a"}, tracking=False)
    setup["evaluate"] = {"every": 0, "clients": {"every": 3, "held_out": 0.2, "sample": 2}}
    other = raysim.run(setup, {"run_dir": f"{setup['run_dir']}-b"}, tracking=False)
    assert whole.digest == other.digest
    resumed = raysim.run(setup, {"run_dir": f"{setup['run_dir']}-c", "rounds": 1}, tracking=False)
    assert raysim.resume(resumed.run_dir, {"rounds": 3}).state_digest == whole.state_digest


def test_a_run_ends_by_validation_and_its_best_round_is_that_of_validation(setup):
    setup |= {
        "rounds": 40,
        "stop": {"metric": "clients/val_loss", "patience": 2},
        "local": {"steps": 20, "batch_size": 4, "lr": 1.5},  # soon overfits
    }
    setup["evaluate"]["best"] = {"metric": "clients/val_accuracy", "mode": "max"}
    setup["checkpoint"] = {"every": 1, "keep": 1}
    result = raysim.run(setup, tracking=False)
    losses = [record["clients/val_loss"] for record in result.history]
    assert result.early_stop and result.rounds < 40
    assert min(losses[-2:]) >= min(losses[:-2])
    accuracies = [record["clients/val_accuracy"] for record in result.history]
    assert result.metrics["clients/val_accuracy"]["best"] == max(accuracies)
    best = torch.load(export(result.run_dir, which="best"))
    plan = prepare(result.run_dir / "config.yaml")
    result.state_dict = best
    trains = sorted(set(range(N)) - set(plan.clients.held_out.tolist()))
    values = [
        measured(*logits(plan, result, plan.clients.val.client(client)))["accuracy"]
        for client in trains
        if plan.clients.val.sizes[client]
    ]
    assert np.mean(values) == pytest.approx(max(accuracies[1:]))


@dataclass(frozen=True)
class Chooses(ClientRule):
    """Reports the loss of the received model on the client's own validation examples."""

    def finish(self, shared, state, client_state, data, task):
        report, kept = super().finish(shared, state, client_state, data, task)
        return {**report, "metric/val_loss": task.full_loss(shared["x"], data.val)}, kept


def test_a_rule_may_choose_by_validation(setup):
    """With all clients in each cohort, its mean is that of the evaluation before the round."""
    setup |= {"client": Chooses, "server": "fedavg", "schedule": {"cohort": 7}, "rounds": 2}
    del setup["algorithm"]
    result = raysim.run(setup, tracking=False)
    for before, record in zip(result.history, result.history[1:], strict=False):
        assert record["client/val_loss"] == pytest.approx(before["clients/val_loss"], rel=1e-5)
    setup["partition"]["val"] = None
    with pytest.raises(raysim.RaysimError, match=r"data\.val: clients have no validation examples"):
        raysim.run(setup, {"run_dir": f"{setup['run_dir']}-without"}, tracking=False)


def test_a_client_without_validation_examples_has_no_batch_of_them():
    data = LocalData(3, vals=lambda: LocalData(0))
    with pytest.raises(ValueError, match=r"data\.examples: this client has no such examples; look"):
        _ = data.val.examples


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stop": {"metric": "clients/val_loss", "patience": 1}, "partition.val": None}, r"^stop\.metric: clients/val_loss needs validation examples of each client; set partition\.val"),
        ({"evaluate.best": {"metric": "clients/val_accuracy", "mode": "max"}, "partition.val": None}, r"^evaluate\.best\.metric: clients/val_accuracy needs validation ex"),
        ({"stop": {"metric": "clients/loss", "patience": 1}, "partition.test": None}, r"^stop\.metric: clients/loss needs test examples of each client; set partition\.test\.fraction=0\.2, or name clients/val_loss"),
        ({"stop": {"metric": "clients/val_loss", "patience": 1}, "evaluate.clients": None}, r"^stop\.metric: clients/val_loss needs evaluations of clients; set evaluate\.clients\.every=10$"),
        ({"stop": {"metric": "clients/val_loss", "patience": 1}, "evaluate.clients": None, "partition.val": None}, r"every=10 and partition\.val\.fraction=0\.1$"),
        ({"evaluate.every": 1, "evaluate.best": {"metric": "acuracy", "mode": "max"}}, r"^evaluate\.best\.metric: no run has a metric 'acuracy'; did you mean 'accuracy'"),
        ({"partition.val": {"fraction": 1.0}}, r"^partition\.val\.fraction"),
        ({"partition.val": 0.1}, r"^partition\.val: "),
        ({"partition": {"name": "virtual", "clients": 5, "val": {"fraction": 0.1}, "test": None}}, r"^partition\.val: virtual clients share their examples"),
        ({"partition.test": "natual"}, r"^partition\.test: 'natual' is neither natural nor matched"),
        ({"partition.test": {"natural": True, "matched": True}}, r"^partition\.test: give one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(setup, changes, said):
    with pytest.raises(ConfigError, match=said):
        prepare(setup, changes)


def test_a_metric_on_validation_examples_has_the_direction_of_the_metric():
    assert lower_is_better("clients/val_loss_worst10") and is_share("clients/val_accuracy")
    assert not lower_is_better("fine_tuned/val_accuracy")


def test_predictions_have_the_datas_own_scaling(setup):
    """The test set's accuracy and loss are those that the run logged."""
    setup["evaluate"]["every"] = 3
    for scaling in ("standard", "per_pixel", "unit"):
        keys = {"data": {"name": "digits", "scaling": scaling}, "run_dir": f"{setup['run_dir']}-{scaling}"}  # fmt: skip
        result = raysim.run(setup | keys, tracking=False)
        data = prepare(result.run_dir / "config.yaml").dataset
        outputs = result.predict(data.x_test).double().numpy()
        found = measured(outputs, data.y_test)
        assert found["accuracy"] == result.history[-1]["accuracy"]
        assert found["loss"] == pytest.approx(result.history[-1]["loss"], rel=1e-5)
        squares = result.predict(data.x_test[:3, 0])  # without the dimension of channels
        assert np.allclose(squares.numpy(), outputs[:3], atol=1e-5)
        assert torch.allclose(result.predict(data.x_test[:1, 0]), squares[:1], atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x[0, 0], r"^predict: digits has examples of shape \[1, 8, 8\], x of shape"),
        (lambda x: x / 255, r"^predict: x is float64; digits has images of uint8 pixels"),
        (lambda x: x[:, :, :5], r"^predict: digits has examples of shape \[1, 8, 8\], x of shape"),
        (lambda x: [], r"^predict: x has no examples"),
        (lambda x: "7", r"^predict: x is of type"),
    ],
)
def test_predictions_of_other_inputs_are_refused(setup, wrong, said):
    result = raysim.run(setup | {"rounds": 1}, tracking=False)
    data = prepare(result.run_dir / "config.yaml").dataset
    with pytest.raises(ConfigError, match=said):
        result.predict(wrong(data.x_test))
