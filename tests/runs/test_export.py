"""What must hold of exported nets: other programs compute what the run's evaluation has computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configurations import DIGITS_MLP
from torch import nn

import raysim
from raysim.data.examples import Examples
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.runs.artifacts.export import export
from raysim.runs.result import RunResult
from raysim.tracking.models import log_model

BASE = DIGITS_MLP | {"checkpoint": {"every": 1, "keep": 1}, "rounds": 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("exported")
    uri = f"sqlite:///{folder}/mlflow.db"
    tracking = {"uri": uri, "models": ["final", "best"]}
    return raysim.run(BASE | {"tracking": tracking}, run_dir=str(folder / "run"))


@pytest.fixture(scope="module")
def test_half(trained: RunResult) -> tuple[np.ndarray, np.ndarray]:
    examples = Examples.of(prepare(trained.run_dir / "config.yaml").dataset, "test")
    x, y = examples.batch(torch.arange(len(examples)))
    return x.numpy(), y.numpy()


@pytest.fixture
def mlflow(trained: RunResult) -> Iterator[Any]:
    """MLflow as the user of a script has it: the store of the run, and another run is active."""
    import mlflow

    mlflow.set_tracking_uri(trained.config.tracking.uri)
    with mlflow.start_run():
        yield mlflow
    mlflow.set_tracking_uri(None)  # pyright: ignore[reportArgumentType]  # as it was


def accuracy(logits: Any, y: np.ndarray) -> float:
    return float((np.asarray(logits).argmax(1) == y).mean())


def test_onnx_runtime_is_as_accurate_as_the_run(trained: RunResult, test_half: Any, tmp_path: Path):
    import onnxruntime

    path = export(trained.run_dir, "onnx", out=tmp_path / "nets" / "net.onnx")
    [logits] = onnxruntime.InferenceSession(path).run(None, {"inputs": test_half[0]})
    assert accuracy(logits, test_half[1]) == pytest.approx(trained.history[-1]["accuracy"])


def test_a_state_dict_fits_the_net(trained: RunResult, test_half: Any):
    net = trained.net()
    for value in net.parameters():
        value.data.zero_()
    path = export(trained.run_dir)
    assert path == str(trained.run_dir / "final.pt")
    net.load_state_dict(torch.load(path, weights_only=True))
    with torch.no_grad():
        logits = net(torch.from_numpy(test_half[0]))
    assert accuracy(logits, test_half[1]) == pytest.approx(trained.history[-1]["accuracy"])


def test_the_best_checkpoint_is_exported(trained: RunResult, test_half: Any, tmp_path: Path):
    best = max(record["accuracy"] for record in trained.history[1:])
    net = trained.net()
    net.load_state_dict(torch.load(export(trained.run_dir, "torch", "best", tmp_path / "b.pt")))
    with torch.no_grad():
        assert accuracy(net(torch.from_numpy(test_half[0])), test_half[1]) == pytest.approx(best)


def test_a_better_round_without_a_checkpoint_is_named(tmp_path: Path, caplog: Any):
    done = raysim.run(
        BASE, tracking=False, run_dir=str(tmp_path), checkpoint={"every": 6}, local={"lr": 3.0}
    )
    values = [record["accuracy"] for record in done.history]
    best = max(range(7), key=values.__getitem__)
    assert values[best] > values[6]
    export(done.run_dir, "torch", "best")
    assert caplog.messages == [
        f"the best checkpoint is that of round 6, accuracy {values[6]:.4f}; round {best} had "
        f"{values[best]:.4f}, but no checkpoint was written after it; a smaller checkpoint.every "
        "writes more"
    ]


def test_mlflow_has_the_model_with_its_signature(trained: RunResult, test_half: Any, mlflow: Any):
    from raysim.tracking.mlflow_client import connected

    address = export(trained.run_dir, "mlflow")
    model = mlflow.pyfunc.load_model(address)
    assert accuracy(model.predict(test_half[0]), test_half[1]) == pytest.approx(
        trained.history[-1]["accuracy"]
    )
    assert str(model.metadata.signature.inputs) == "[Tensor('float32', (-1, 1, 8, 8))]"
    run = connected(trained.config.tracking.uri).get_run(trained.run_id)
    assert run.info.status == "FINISHED" and run.outputs.model_outputs


def test_a_script_goes_on_with_its_own_mlflow(trained: RunResult, tmp_path: Path, mlflow: Any):
    """A run that logs models in another store neither ends the script's run nor moves its store."""
    mine = mlflow.get_tracking_uri()
    store = f"sqlite:///{tmp_path}/mlflow.db"
    done = raysim.run(
        BASE, rounds=1, run_dir=str(tmp_path / "r"), tracking={"uri": store, "models": "final"}
    )
    client = mlflow.MlflowClient(store)
    run = client.get_run(done.run_id)
    [model] = client.search_logged_models([run.info.experiment_id])
    assert model.source_run_id == done.run_id and model.status == "READY"
    assert run.info.status == "FINISHED" and len(run.outputs.model_outputs) == 1
    mlflow.log_metric("own", 1.0)
    assert mlflow.get_tracking_uri() == mine == os.environ["MLFLOW_TRACKING_URI"]


def test_a_run_logs_its_final_and_its_best_net(trained: RunResult, test_half: Any, mlflow: Any):
    """`tracking.models`: loaded by MLflow they compute what the nets compute, with types and shapes in the signature."""
    from raysim.tracking.mlflow_client import connected

    client = connected(trained.config.tracking.uri)
    run = client.get_run(trained.run_id)
    logged = {m.name: m for m in client.search_logged_models([run.info.experiment_id])}
    accuracies = [record["accuracy"] for record in trained.history[1:]]
    for name, expected in (("final", accuracies[-1]), ("best", max(accuracies))):
        model = mlflow.pyfunc.load_model(logged[name].model_uri)
        assert accuracy(model.predict(test_half[0]), test_half[1]) == pytest.approx(expected)
        assert str(model.metadata.signature.outputs) == "[Tensor('float32', (-1, 10))]"
    with torch.no_grad():
        net: Any = trained.net()
        outputs = net(torch.from_numpy(test_half[0])).numpy()
    final = mlflow.pyfunc.load_model(logged["final"].model_uri).predict(test_half[0])
    np.testing.assert_allclose(np.asarray(final), outputs, rtol=1e-5, atol=1e-6)
    assert run.info.status == "FINISHED"
    with pytest.raises(ConfigError, match=r"tracking\.models: 'best' .* set checkpoint\.every"):
        prepare(BASE, {"tracking.models": "best", "checkpoint.every": 0})


def test_one_test_example_is_enough(trained: RunResult, tmp_path: Path):
    from raysim.runs.artifacts.export import _example

    plan = prepare(trained.run_dir / "config.yaml")
    data = plan.dataset
    one = replace(data, x_test=data.x_test[:1], y_test=data.y_test[:1])
    assert _example(replace(plan, dataset=one)).shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "pickle"], "--format: nothing called 'pickle'"),
        (["--which", "last"], "--which: nothing called 'last'"),
        (["--format", "mlflow", "--out", "x"], "--out: a model in MLflow has no file"),
    ],
)
def test_bad_options_are_named(trained: RunResult, arguments: list[str], said: str, raysim_):
    result = raysim_("export", trained.run_dir, *arguments)
    assert result.code == 2 and said in result.err


def test_a_run_without_checkpoints_has_no_best(tmp_path: Path):
    folder = tmp_path / "run"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    raysim.run(BASE, rounds=1, run_dir=str(folder), **{"tracking.uri": uri, "checkpoint.every": 0})
    with pytest.raises(ConfigError, match="no checkpoint of an evaluated round is kept"):
        export(folder, which="best")


class Branches(nn.Module):
    """A net that torch.export refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) if x.sum() > 0 else x.flatten(1) + 1


def test_a_net_that_cannot_be_exported_is_not_blamed_on_the_store(trained: RunResult):
    with pytest.raises(
        RaysimError, match=r"the net cannot be logged as a model: torch\.export"
    ) as e:
        log_model(trained.run_dir, Branches(), torch.ones(2, 1, 8, 8), "branches", 1)
    assert "sqlite" not in str(e.value)
