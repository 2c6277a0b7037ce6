"""Plain functions of outputs and targets as metrics: their values on the whole set of examples."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from support.plain_fedavg import blobs, cut, fedavg, run
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.errors import ConfigError, RaysimError
from raysim.rules import TaskMetric
from raysim.rules.tasks.function_metric import FunctionMetric
from raysim.rules.tasks.shipped_tasks import Classification

DATA, PARTS = blobs(), cut([60, 30, 20, 10])


def hits(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(1) == y


def brier(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.softmax(1) - F.one_hot(y, 3)).square().sum(1).mean()


def root(outputs: Tensor, y: Tensor) -> float:
    """A number that is no mean over the examples."""
    return float(brier(outputs, y).sqrt())


def macro_f1(outputs: Tensor, y: Tensor) -> float:
    from sklearn.metrics import f1_score

    return f1_score(y, outputs.argmax(1), average="macro")


def is_near(outputs: Tensor, y: Tensor, k: int) -> Tensor:
    return (outputs.topk(k).indices == y[:, None]).any(1)


class Error(nn.Module):
    larger_is_better = False

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.argmax(1) != y).double().mean()


FUNCTIONS = {
    "hits": hits,
    "brier": brier,
    "root": root,
    "macro_f1": macro_f1,
    "is_near": functools.partial(is_near, k=2),
    "error": Error(),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(6, 3)


def test_values_are_those_on_all_examples_whatever_the_batches():
    truth = fedavg(net(), DATA, PARTS)
    outputs, y = truth(torch.tensor(DATA[2])).detach(), torch.tensor(DATA[3])
    for size in (7, 1000):
        evaluate = {"metrics": [*FUNCTIONS.values()], "batch_size": size}
        last = run(net(), DATA, PARTS, evaluate=evaluate).history[-1]
        for name, function in FUNCTIONS.items():
            expected = np.asarray(function(outputs, y)).mean()
            assert last[name] == pytest.approx(expected, rel=1e-9), name


class Counting:
    """Adds up what it sees over its calls, as objects with a state do."""

    hits, n = 0, 0

    def __call__(self, outputs: Tensor, y: Tensor) -> float:
        self.hits, self.n = self.hits + int(hits(outputs, y).sum()), self.n + len(y)
        return self.hits / self.n


def test_what_an_object_counts_is_of_one_set_of_examples():
    history = run(net(), DATA, PARTS, evaluate={"metrics": ["accuracy", Counting()]}).history
    assert len({row["accuracy"] for row in history}) > 1
    assert [row["counting"] for row in history] == [row["accuracy"] for row in history]


def test_a_client_has_the_value_on_its_own_examples():
    keys: dict[str, Any] = {
        "partition": {"clients": 4, "test": "matched", "name": "iid"},
        "evaluate": {"metrics": [root, "accuracy"], "clients": {"every": 1}},
    }
    last = run(net(), DATA, PARTS, **keys).history[-1]
    assert 0 < last["clients/root"] < 1 and last["clients/root_worst10"] <= last["clients/root"]


def test_the_best_model_needs_a_direction():
    best = run(net(), DATA, PARTS, evaluate={"metrics": [hits]}).config.evaluate.best
    assert best is not None and (best.metric, best.mode) == ("loss", "min")
    best = run(net(), DATA, PARTS, evaluate={"metrics": [Error()]}).config.evaluate.best
    assert best is not None and (best.metric, best.mode) == ("error", "min")


def test_a_function_of_a_file_is_a_metric(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def hits(outputs, y):\n    return outputs.argmax(1) == y\n")
    keys = {"metrics": ["accuracy", f"{file}:hits"]}
    last = run(net(), DATA, PARTS, evaluate=keys).history[-1]
    assert last["hits"] == last["accuracy"]


def test_a_metric_reaches_workers():
    metric = pickle.loads(pickle.dumps(FunctionMetric(Classification(), 3, "hits", hits)))
    assert metric.value((np.eye(3), np.arange(3))) == 1.0  # pyright: ignore


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs, y: 1.0, "is a lambda, which has no name for its values; define"),
        (functools.partial(np.mean, axis=0), "metric 'mean' failed: "),
        (torch.softmax, "metric 'softmax' failed: "),
    ],
)
def test_what_is_no_metric_is_refused(function, message):
    with pytest.raises(RaysimError, match=message):
        run(net(), DATA, PARTS, evaluate={"metrics": [function]})


def test_a_function_that_takes_targets_first_is_refused():
    """Its value may be another one for swapped arguments, without an error."""
    advice = r"^evaluate.metrics: .*\(y_true, y_pred\).*my_accuracy_score\(outputs, y\)"
    with pytest.raises(ConfigError, match=advice):
        run(net(), DATA, PARTS, evaluate={"metrics": [sklearn.metrics.accuracy_score]})


class WithoutRows(TaskMetric):
    metric_name = "empty"


def misspelled(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmaxx(1) == y  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            misspelled,
            r"'misspelled' failed: AttributeError: .*test_function_metrics\.py, line \d+: ",
        ),
        (WithoutRows, "'empty' failed: NotImplementedError: WithoutRows defines no rows"),
    ],
)
def test_a_mistake_in_a_metric_is_found_before_the_run(metric, message):
    with pytest.raises(ConfigError, match=f"^evaluate.metrics: metric {message}"):
        run(net(), DATA, PARTS, evaluate={"metrics": [metric]})


def test_outputs_are_no_metric():
    def same(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs

    with pytest.raises(RaysimError, match=r"numbers of shape \[6, 3\] for 6 examples; return one"):
        run(net(), DATA, PARTS, evaluate={"metrics": [same]})


def test_a_name_of_raysim_is_refused():
    def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.argmax(1) == y

    with pytest.raises(
        ConfigError, match="name of raysim's metric 'accuracy'; rename the function"
    ):
        run(net(), DATA, PARTS, evaluate={"metrics": [accuracy]})


def rmse(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean().sqrt()


@pytest.mark.parametrize(
    "function",
    [
        rmse,
        lambda outputs, y: rmse(outputs.squeeze(1), y),
        lambda outputs, y: rmse(outputs[:, 0], y),
        lambda outputs, y: rmse(outputs, y[:, None]),
        lambda outputs, y: rmse(outputs, y.view_as(outputs)),
        lambda outputs, y: float(F.mse_loss(outputs.flatten(), y.flatten())) ** 0.5,
    ],
)
def test_an_output_in_a_column_belongs_to_its_own_target(function):
    rng = np.random.default_rng(0)
    y, outputs = rng.normal(size=(2, 50)).astype(np.float32)
    metric = FunctionMetric(Classification(), 1, "rmse", function)
    expected = np.sqrt(np.mean((outputs.astype(float) - y) ** 2))
    assert metric.value((outputs[:, None], y)) == pytest.approx(expected, rel=1e-6)
    if function is rmse:
        assert metric.value((outputs, y[:, None])) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, y: ((outputs > 0.5) == (y > 0.5)).double().mean(),
        lambda outputs, y: (outputs > 0.5) == (y > 0.5),
        lambda outputs, y: (outputs - y).abs().mean(),
    ],
    ids=["hits", "hits-of-each", "mae"],
)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
def test_few_different_values_belong_to_their_own_targets(function, rate):
    """Many orders of such targets have as many hits, by chance."""
    metric = FunctionMetric(Classification(), 1, "own", function)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n = [10, 15, 40, 100][seed % 4]
        outputs, y = (rng.random(n) < 0.5).astype(float), (rng.random(n) < rate).astype(float)
        expected = float(function(torch.from_numpy(outputs), torch.from_numpy(y)).double().mean())
        assert metric.value((outputs[:, None], y)) == pytest.approx(expected, abs=1e-12)


def test_a_metric_of_all_outputs_needs_no_pairs():
    metric = FunctionMetric(Classification(), 1, "bias", lambda outputs, y: (outputs - y).mean())
    y, outputs = np.arange(8.0), np.arange(8.0) ** 2
    assert metric.value((outputs[:, None], y)) == pytest.approx(np.mean(outputs - y))
