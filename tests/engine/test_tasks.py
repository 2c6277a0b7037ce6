"""Runs of every learning task: loop against lanes, ragged clients, one process against actors, and
mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import program

import raysim
from raysim.attacks import gradient_inversion
from raysim.cli.progress import summary
from raysim.data import Dataset, load_dataset
from raysim.data.partition.clients import Clients
from raysim.distributed.ray_executor import RayExecutor
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.state.checkpoint import available_checkpoints
from raysim.errors import ConfigError, RaysimError
from raysim.metrics import find_metric
from raysim.prepare.resolve import resolve_plan
from raysim.sweeps.early_stopping import EarlyStopping
from raysim.sweeps.preparation import prepare_sweep

FEATURES, LABELS, COLUMNS, VOCABULARY, T = 6, 4, 3, 9, 5
SIZES = [7, 3, 12, 1, 5, 8, 2, 6, 4, 9, 3, 5]
"""Examples of the clients, so that batches of 4 are ragged."""
N, N_TEST = sum(SIZES), 40


def dataset(kind: str, padding: int = 0) -> Dataset:
    """Examples that a net can learn from, of a task."""
    rng = np.random.default_rng(1)
    n = N + N_TEST
    x = rng.standard_normal((n, FEATURES)).astype(np.float32)
    signal = x @ rng.standard_normal((FEATURES, LABELS))
    classes: tuple[str, ...] = ()
    if kind == "classification":
        y, classes = signal.argmax(1), tuple("abcd")
    elif kind == "multilabel":
        y = (signal > 0.5).astype(np.uint8)
    elif kind == "regression":
        y = signal[:, :COLUMNS]
    else:
        start = rng.integers(0, VOCABULARY, (n, 1))
        tokens = (
            start + 2 * np.arange(T + 1)
        ) % VOCABULARY  # the next token is the last one plus 2
        lengths = rng.integers(1, T + 1, n)[:, None]
        x, y = tokens[:, :-1], np.where(np.arange(T) < lengths, tokens[:, 1:], -100)
        x = np.pad(x, ((0, 0), (0, padding)), constant_values=3)
        y = np.pad(y, ((0, 0), (0, padding)), constant_values=-100)
    return Dataset(kind, x[:N], y[:N], x[N:], y[N:], classes)


NETS: dict[str, Any] = {
    "classification": {"name": "mlp", "hidden": [8]},
    "multilabel": {"name": "mlp", "hidden": [8]},
    "regression": {"name": "mlp", "hidden": [8]},
    "next_token": {"name": "lstm", "embedding": 4, "hidden": 6, "layers": 1},
}
TRANSFORMER = {"name": "transformer", "width": 8, "heads": 2, "layers": 1}


@pytest.fixture
def plan_of(base, tmp_path) -> Callable[..., Plan]:
    """plan_of(task, changes, data) -> the plan of a small run with ragged clients."""
    ends = np.cumsum([0, *SIZES]).tolist()
    lists = [list(range(start, stop)) for start, stop in pairwise(ends)]
    path = tmp_path / "ragged.json"
    path.write_text(str(lists))

    def make(kind: str, data: Dataset | None = None, /, **changes: Any) -> Plan:
        config: dict[str, Any] = {
            **base, "task": kind, "model": NETS[kind], "rounds": 4, "algorithm": "fedavg",
            "partition": {"name": "file", "path": str(path)}, "schedule": {"cohort": 6}, "dtype": "float64",
            "local": {"steps": 3, "batch_size": 4, "lr": 0.05}, "evaluate": {"every": 1},
        } | changes  # fmt: skip
        return resolve_plan(
            config,
            lambda section: load_dataset(section) if "data" in changes else data or dataset(kind),
        )

    return make


def run(plan: Plan, executor: Any = None) -> tuple[list[dict[str, float]], np.ndarray]:
    """Records of a whole run, and its final parameters."""
    executor = executor or Inline()
    executor.open(plan)
    try:
        engine = Engine(plan, executor)
        records = list(engine.rounds())
        return records, executor.snapshot().get()["state/x"].numpy()
    finally:
        executor.close()


TASKS = ["classification", "multilabel", "regression", "next_token"]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_and_logs_the_metrics_of_its_task(task, plan_of):
    lr = {"regression": 0.05, "next_token": 1.0}.get(task, 0.3)
    plan = plan_of(task, rounds=12, local={"steps": 20, "batch_size": 4, "lr": lr})
    records, _ = run(plan)
    first, last = records[0], records[-1]
    assert (
        last["loss"] < 0.7 * first["loss"] and last["train_loss"] < 0.7 * records[1]["train_loss"]
    )
    for metric in plan.metrics:
        entry = find_metric(metric.name)
        assert (
            entry is not None
            and entry.larger_is_better is metric.larger_is_better
            and not entry.users_own
        )
        better = last[metric.name] > first[metric.name]
        assert better is metric.larger_is_better, metric.name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "moon"])
def test_loop_and_lanes_agree_on_ragged_clients(task, algorithm, plan_of):
    if (task, algorithm) == ("next_token", "moon"):
        pytest.skip("MOON needs one representation for each example")
    xs = []
    for mode in ("loop", "lanes"):
        plan = plan_of(task, algorithm=algorithm, batching={"mode": mode, "size": 4})
        assert plan.mode == mode
        xs.append(run(plan)[1])
    assert not np.array_equal(plan.initial[0].numpy(), xs[0])
    assert np.allclose(*xs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_transformer_agrees_in_both_modes_and_dropout_is_keyed(dropout, plan_of):
    model = TRANSFORMER | {"dropout": dropout}
    xs = [
        run(plan_of("next_token", model=model, batching={"mode": mode, "size": 4}))[1] for mode in ("loop", "lanes", "loop")
    ]  # fmt: skip
    assert np.allclose(xs[0], xs[1], rtol=1e-9, atol=1e-12) and np.array_equal(xs[0], xs[2])


@pytest.mark.parametrize("task", ["regression", "next_token"])
def test_pooled_clients_agree_with_the_loop(task, plan_of):
    local = {"steps": 1, "batch_size": 4, "lr": 0.2}
    xs = [
        run(plan_of(task, local=local, batching={"mode": mode}))[1] for mode in ("loop", "pooled")
    ]
    assert np.allclose(*xs, rtol=1e-9, atol=1e-12)


def test_a_sequence_without_a_token_to_predict_is_refused(plan_of):
    data = dataset("next_token")
    data.y_test[3] = -100
    with pytest.raises(ConfigError, match="y of test example 3 has no token to predict, as 1 of"):
        plan_of("next_token", data)


@pytest.mark.parametrize("model", [NETS["next_token"], TRANSFORMER], ids=["lstm", "transformer"])
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_the_length_of_the_padding_does_not_matter(model, mode, plan_of):
    found = [
        run(plan_of("next_token", dataset("next_token", padding), model=model, batching={"mode": mode, "size": 4}))
        for padding in (0, 4)
    ]  # fmt: skip
    (short, x), (long, padded_x) = found
    assert np.allclose(x, padded_x, rtol=1e-9, atol=1e-12)
    for name in ("loss", "train_loss", "accuracy", "perplexity"):
        assert math.isclose(short[-1][name], long[-1][name], rel_tol=1e-9)


def test_an_evaluations_batches_do_not_change_its_metrics(plan_of):
    records = [
        run(plan_of("multilabel", evaluate={"every": 1, "batch_size": size}))[0][-1]
        for size in (1, 7, 1000)
    ]
    for name in ("subset_accuracy", "f1", "f1_micro", "auc"):
        assert len({record[name] for record in records}) == 1


def test_private_training_of_another_task(plan_of):
    privacy = {"max_grad_norm": 0.5, "noise_multiplier": 0.1}
    xs = [
        run(plan_of("regression", privacy=privacy, batching={"mode": m, "size": 4}))[1]
        for m in ("loop", "lanes")
    ]
    assert np.allclose(*xs, rtol=1e-9, atol=1e-12)


@pytest.mark.ray
@pytest.mark.parametrize("task", ["multilabel", "next_token"])
def test_actors_give_the_same_bits(task, plan_of, recycled_actors):
    alone = run(plan_of(task))
    plan = plan_of(task, resources={"executor": "ray", "actors": 2, "threads": 1})
    records, x = run(plan, RayExecutor(lambda line: None))
    assert x.tobytes() == alone[1].tobytes()
    for name in ("loss", *(metric.name for metric in plan.metrics)):
        assert records[-1][name] == alone[0][-1][name]


# -- identity --------------------------------------------------------------------------------------


def test_classification_is_no_part_of_the_identity_and_other_tasks_are(plan_of):
    plain, named = (
        plan_of("classification"),
        plan_of("classification", evaluate={"metrics": ["auc"], "every": 1}),
    )
    assert (
        "task" not in plain.config.identity()
        and plain.config.fingerprint == named.config.fingerprint
    )
    sequences = [
        plan_of("next_token"),
        plan_of("next_token", task={"name": "next_token", "vocabulary": 20}),
    ]
    assert len({plan.config.fingerprint for plan in sequences}) == 2
    assert sequences[1].problem.classes == 20


def test_recorded_updates_and_attacks_need_class_labels(plan_of):
    with pytest.raises(ConfigError, match=r"record_updates: .* task 'regression' has not"):
        plan_of("regression", record_updates={"rounds": [0]})
    with pytest.raises(ConfigError, match=r"attack: .* task 'multilabel' has not"):
        gradient_inversion._refuse(plan_of("multilabel"), [])


def test_what_a_run_measures_is_written_out(plan_of):
    written = plan_of("regression").config.evaluate
    assert written.metrics == ("mse", "mae", "r2")
    assert written.best is not None and (written.best.metric, written.best.mode) == ("mse", "min")
    chosen = plan_of("regression", evaluate={"metrics": "r2"}).config.evaluate
    assert chosen.best is not None and (chosen.best.metric, chosen.best.mode) == ("r2", "max")
    clients = {"evaluate": {"every": 0, "clients": {"every": 2}}}
    of_clients = plan_of(
        "regression", **clients, partition={"clients": 6, "test": {"fraction": 0.2}}
    )
    best = of_clients.config.evaluate.best
    assert best is not None and (best.metric, best.mode) == ("clients/mse", "min")
    best = {"metric": "val/loss", "mode": "min"}
    partition = {"name": "iid", "clients": 6, "val_fraction": 0.1}
    measured = plan_of("classification", evaluate={"best": best}, partition=partition)
    kept = measured.config.evaluate.best
    assert kept is not None and kept.model_dump() == best


# -- the metric that says which model is best -----------------------------------------------------

LINE = program("tasks_line")


def regression(base: dict[str, Any], path: str, **changes: Any) -> dict[str, Any]:
    return {
        **base, "data": f"{path}:load", "task": "regression", "model": "logistic", "algorithm": "fedavg",
        "partition": {"clients": 4}, "schedule": {"cohort": 2}, "rounds": 6, "evaluate": {"every": 1},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.05}, "checkpoint": {"every": 1, "keep": 1},
    } | changes  # fmt: skip


def test_the_best_model_is_that_of_the_smallest_error(base, source):
    # The step size of the last rounds is far too large, so that a middle round has the best model.
    local = {"steps": 2, "batch_size": 8, "lr": [[0, 0.05], [4, 1.2]]}
    result = raysim.run(regression(base, source("line", LINE), local=local))
    errors = [record["mse"] for record in result.history]
    best = int(np.argmin(errors))
    assert 0 < best < result.rounds
    assert result.metrics["mse"] == {"last": errors[-1], "best": errors[best]}
    assert result.metrics["r2"]["best"] == max(record["r2"] for record in result.history)
    kept = [path.name for path in available_checkpoints(result.run_dir)]
    assert kept == [f"round-{t:06d}" for t in (best, result.rounds)]
    assert f"mse {errors[-1]:.4f}, best mse {errors[best]:.4f} in round {best}" in summary(result)
    assert raysim.load(result.run_dir).metrics == result.metrics


def test_early_stopping_judges_by_the_tasks_metric(base, source):
    config = regression({k: v for k, v in base.items() if k != "run_dir"}, source("line", LINE))
    asked = {"seed": [0, 1]}

    def judged(**stopping: Any) -> EarlyStopping | None:
        return prepare_sweep(
            {**config, "sweep": asked | {"early_stopping": {"grace_period": 2, **stopping}}}
        ).settings.early_stopping

    by_default, chosen = judged(), judged(metric="r2")
    assert by_default is not None and by_default.metric == "mse" and by_default.lower
    assert chosen is not None and chosen.metric == "r2" and not chosen.lower
    with pytest.raises(ConfigError, match="no run has a metric 'accurace'"):
        judged(metric="accurace")
    with pytest.raises(ConfigError, match="no run has a metric 'accuracy'"):
        judged(metric="accuracy")


# -- a task and a metric of one's own --------------------------------------------------------------

OWN = program("tasks_own")


def test_a_task_and_a_metric_of_ones_own(plan_of, source):
    path = source("own_task", OWN)
    task = {"name": f"{path}:Quantile", "q": 0.5}
    plan = plan_of(
        "regression", task=task, evaluate={"metrics": ["mae", f"{path}:Bias"], "every": 1}
    )
    records, x = run(plan)
    assert records[-1]["mae"] < records[0]["mae"] and records[-1]["bias"] >= 0
    # The pinball loss of the median is half of the absolute error.
    assert math.isclose(records[-1]["loss"], records[-1]["mae"] / 2, rel_tol=1e-12)
    other = plan_of("regression", task=task | {"q": 0.9})
    assert other.config.fingerprint != plan.config.fingerprint and not np.array_equal(
        run(other)[1], x
    )
    assert {"task", "evaluate.metrics.1"} <= set(plan.config.files or {})


def test_a_metric_of_changed_inputs_and_of_some_examples(plan_of, source):
    path = source("own_task", OWN)
    model = {"name": "mlp", "hidden": []}
    plan = plan_of("regression", model=model, evaluate={"metrics": ["mse", f"{path}:Shifted"]})
    records, w = run(plan)
    data = dataset("regression")
    weight, bias = w[:-COLUMNS].reshape(COLUMNS, FEATURES), w[-COLUMNS:]

    def outputs(x):
        return x @ weight.T + bias

    x, y = data.x_test.astype(np.float64), data.y_test
    assert math.isclose(records[-1]["mse"], np.mean((outputs(x) - y) ** 2), rel_tol=1e-9)
    expected = outputs(x + 1)[y[:, 0] > 0].sum(1).mean()
    assert math.isclose(records[-1]["shifted"], expected, rel_tol=1e-9)


def test_a_metric_that_fails_is_named(plan_of, source):
    path = source("own_task", OWN)
    plan = plan_of("regression", evaluate={"metrics": [f"{path}:Broken"]})
    with pytest.raises(RaysimError, match=r"metric 'broken' failed: ValueError: not today"):
        run(plan)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("regresion", {}, "task.name: unknown task 'regresion'.*regression"),
    ("OWN:NoTask", {}, "task.name: '.*NoTask' is not a subclass of raysim.rules.LearningTask"),
    ("OWN:OneNumber", {}, r"task: loss of 'OneNumber' returns \[\] for two examples, expected one number for each"),
    ("regression", {"task": {"name": "regression", "q": 1}}, "task.q: unknown key"),
    ("next_token", {"task": {"name": "next_token", "vocabulary": 8}}, "task: 'next_token' does not fit data 'next_token': x of training example 3 has the token 8 at position 1, but the task.vocabulary is 8"),
    ("regression", {"model": "tinynn", "task": "classification"}, "task: 'classification' does not fit data 'regression': .*expected one integer label"),
    ("next_token", {"model": {"name": "lstm"}, "evaluate": {"metrics": ["auc"]}}, "evaluate.metrics: task 'next_token' has no metric 'auc'"),
    ("classification", {"evaluate": {"metrics": ["top4"]}}, "evaluate.metrics: 'top4' does not fit the data: there are 4 classes"),
    ("classification", {"evaluate": {"metrics": ["f1", "f1"]}}, "'f1' occurs twice"),
    ("regression", {"evaluate": {"metrics": ["OWN:Accuracy"]}}, "has the name of raysim's metric 'accuracy'"),
    ("regression", {"evaluate": {"metrics": ["OWN:Used"]}}, "has the name of raysim's metric 'clients/used'"),
    ("regression", {"evaluate": {"metrics": ["OWN:NoTask"]}}, "nor a subclass of raysim.rules.TaskMetric"),
    ("regression", {"evaluate": {"metrics": ["OWN:Noisy"]}}, r"evaluate.metrics: 'noisy' draws from torch's global generator, .*; use keyed numbers, such as .*random_numbers\.md"),
    ("regression", {"evaluate": {"metrics": ["OWN:Resampled"]}}, "evaluate.metrics: 'resampled' draws from NumPy's global generator"),
    ("OWN:Jittered", {}, "task.name: loss of 'Jittered' draws from Python's global generator"),
    ("regression", {"evaluate": {"per_class": True}}, "evaluate.per_class: task 'regression' has no class labels"),
    ("regression", {"algorithm": "fedreg"}, "client rule 'fedreg' needs class labels, which task 'regression' has not"),
    ("multilabel", {"algorithm": "fedmlb"}, "client rule 'fedmlb' needs class labels"),
    ("multilabel", {"evaluate": {"metrics": ["backdoor"]}}, "evaluate.metrics: 'backdoor' does not fit the data: the trigger is for images"),
    ("classification", {"algorithm": "fedopt"}, "unknown algorithm 'fedopt'; did you mean fedadagrad or fedadam.*`raysim list algorithms` names all"),
    ("classification", {"groups": {"bad": {"share": 0.4, "client": "model_replacement"}}}, "did you mean backdoor"),
    ("next_token", {"algorithm": "moon"}, "moon"),
    ("multilabel", {"partition": {"name": "dirichlet", "clients": 5, "alpha": 1.0}}, "partition"),
    ("classification", {"model": "lstm"}, r"model: 'lstm' fails on two examples of shape \[6\]"),
    ("classification", {"model": "lstm", "data": "digits", "partition": "iid"}, r"model.name: 'lstm' is for sequences of tokens"),
    ("next_token", {"model": TRANSFORMER | {"heads": 3}}, "model.width: 8 is not an even multiple of model.heads"),
]  # fmt: skip


@pytest.mark.parametrize("task, changes, message", MISTAKES, ids=[m[:50] for *_, m in MISTAKES])
def test_mistakes_are_named(task, changes, message, plan_of, source):
    path = source("own_task", OWN)

    def located(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: located(v) for k, v in value.items()}
        if isinstance(value, list):
            return [located(v) for v in value]
        return value.replace("OWN", path) if isinstance(value, str) else value

    kind = task if task in TASKS else "regression"
    with pytest.raises(ConfigError, match=message):
        plan_of(kind, **{"task": located(task), **located(changes)})


FLAT = """
from torch import nn

class Pooled(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.embedding, self.out = nn.Embedding(classes, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))
"""


def test_a_net_whose_output_does_not_fit_is_named_with_both_shapes(plan_of, source):
    model = f"{source('flat', FLAT)}:Pooled"
    expected = rf"model: '.*Pooled' turns two examples into \[2, 9\], but task 'next_token' expects outputs of shape \[2, {T}, 9\]"
    with pytest.raises(ConfigError, match=expected):
        plan_of("next_token", model=model)


def test_the_net_is_checked_with_real_examples(plan_of, source):
    """Made-up numbers would not be tokens of the embedding."""
    code = FLAT.replace("mean(1)", "clone()")
    records, _ = run(plan_of("next_token", model=f"{source('real', code)}:Pooled"))
    assert records[-1]["perplexity"] < records[0]["perplexity"]


LOSSES = program("tasks_losses")


def test_a_rule_that_uses_the_cross_entropy_of_labels_is_refused_elsewhere(plan_of, source):
    rule = {
        "client": f"{source('labelled', LOSSES)}:Labelled",
        "server": "fedavg",
        "algorithm": None,
    }
    plan = plan_of("classification", **rule)
    assert np.array_equal(run(plan)[1], run(plan_of("classification"))[1])
    with pytest.raises(
        RaysimError, match="cross_entropy needs class labels, which task 'multilabel' has not"
    ):
        run(plan_of("multilabel", **rule))


def test_clients_without_examples_take_part_in_any_task(plan_of):
    plan = plan_of("next_token")
    clients = plan.clients
    assert isinstance(clients, Clients)
    offsets = np.insert(clients.offsets, 3, clients.offsets[3])[
        :-1
    ]  # client 3 is empty, the last one is gone
    x = run(replace(plan, clients=Clients(clients.indices, offsets)))[1]
    assert np.isfinite(x).all() and torch.is_tensor(plan.initial[0])
