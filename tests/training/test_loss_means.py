"""The mean of a user's loss is the function's own: in every mode, step and evaluation.

The truth is FedAvg in plain PyTorch, which calls the user's function as it is on the same batches.
"""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from support.plain_fedavg import averaged, sgd
from torch import nn

import raysim
from raysim.config.objects import python_objects
from raysim.errors import ConfigError, RaysimError
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, Classification, ClientRule, LocalData, cross_entropy, task_loss
from raysim.runs.python_inputs import named_inputs
from raysim.training.batches.batch_order import batch_positions
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

SIZES = [30, 17, 9, 4]
N, D, C = sum(SIZES), 5, 3
RNG = np.random.default_rng(5)
CENTRES = RNG.normal(size=(C, D))
LABELS = RNG.choice(C, N + 25, p=[0.6, 0.3, 0.1])
X = CENTRES[LABELS] + RNG.normal(size=(N + 25, D))
TARGETS = X @ RNG.normal(size=(D, 2)) + 1
HOT = np.stack([LABELS == 0, LABELS > 0, X[:, 0] > 0], 1).astype(np.int64)
SOME_IGNORED = np.where(np.arange(N + 25) % 4 == 1, -100, LABELS)
FAR_IGNORED = np.where(np.arange(N + 25) % 5 == 2, 255, LABELS)
IGNORED_IN_TESTS = np.where(np.arange(N + 25) < N, LABELS, FAR_IGNORED)
ENDS = np.cumsum([0, *SIZES])
PARTS = [list(range(a, b)) for a, b in pairwise(ENDS)]
WEIGHTS = [0.2, 1.0, 5.0]
W32, W64 = torch.tensor(WEIGHTS), torch.tensor(np.array(WEIGHTS))
POSITIVE = torch.tensor([0.5, 2.0, 3.0])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(python_objects, "_OBJECTS", {})


class LogSoftmax(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.layer = nn.Linear(D, n)

    def forward(self, x):
        return torch.log_softmax(self.layer(x), 1)


def net(loss: Any, y: np.ndarray, **_: Any) -> nn.Module:
    torch.manual_seed(1)
    n = C if y.ndim == 1 else y.shape[1]
    is_nll = isinstance(loss, nn.NLLLoss) or getattr(loss, "func", loss) is F.nll_loss
    return LogSoftmax(n) if is_nll else nn.Sequential(nn.Linear(D, n))


def fedavg(loss, y, rounds=2, steps=3, size=None, accumulate=1, lr=0.1, parts=PARTS):
    """Plain PyTorch: the loss function as it is on every batch."""
    function = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    x = torch.tensor(X)
    targets = torch.tensor(y) if y.ndim == 1 else torch.tensor(y).double()

    def losses(local, t, client):
        part = np.array(parts[client])
        order = batch_positions(0, client, len(part), size or len(part), t * steps, steps)
        batches = [part[chosen] for chosen in order]
        for start in range(0, steps, accumulate):
            group = batches[start : start + accumulate]
            values = [function(local(x[batch]), targets[batch]).mean() for batch in group]
            yield sum(values) / len(group)

    weights = [len(part) for part in parts]
    return averaged(net(loss, y), weights, rounds, losses, sgd(lr)), function


def config(loss, y, steps=3, size=None, accumulate=1, mode="auto", rounds=2, **keys) -> dict:
    return {
        "data": (X[:N], y[:N], X[N:], y[N:]), "model": net(loss, y), "task": loss, "partition": PARTS,
        "rounds": rounds, "dtype": "float64", "seed": 0,
        "local": {"steps": steps, "batch_size": size or "full", "lr": 0.1, "accumulate": accumulate},
        "schedule": {"cohort": len(PARTS)}, "algorithm": {"name": "fedavg", "weights": "samples"},
        "batching": {"mode": mode, "size": 4}, "resources": {"executor": "inline"}, **keys,
    }  # fmt: skip


def trained(loss, y, **keys):
    return raysim.run(config(loss, y, **keys), tracking=False)


def assert_equal(loss, y, oracle=None, tolerance=1e-9, **keys):
    result = trained(loss, y, **keys)
    settings = {k: v for k, v in keys.items() if k in ("steps", "size", "accumulate", "rounds")}
    server, function = fedavg(oracle or loss, y, **settings)
    expected = nn.utils.parameters_to_vector(server.parameters()).detach()
    torch.testing.assert_close(result.parameters.double(), expected, rtol=tolerance, atol=tolerance)
    x, targets = torch.tensor(X[N:]), torch.tensor(y[N:])
    with torch.no_grad():
        right = function(server(x), targets if y.ndim == 1 else targets.double()).mean()
    assert result.history[-1]["loss"] == pytest.approx(float(right), rel=max(tolerance, 1e-9))
    return result, server


# -- what a user may hand over ---------------------------------------------------------------------


def focal(outputs, y, gamma=2.0, weights=None):
    """The focal loss with a mean that is balanced over classes."""
    ce = F.cross_entropy(outputs, y, reduction="none")
    w = torch.tensor(WEIGHTS, dtype=outputs.dtype)[y] if weights is None else weights[y]
    return (w * (1 - torch.exp(-ce)) ** gamma * ce).sum() / w.sum()


def weighted_first(weights, outputs, y):
    return F.cross_entropy(outputs, y, weight=weights.to(outputs.dtype))


class Inner(nn.Module):
    """A criterion inside of a module without `reduction`."""

    def __init__(self, **keys):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**keys)
        self.shift = 0.1

    def forward(self, outputs, y):
        return self.inner(2 * outputs, y) + self.shift


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", W32.clone())

    def forward(self, outputs, y):
        w: Any = self.w
        w = w[y]
        return (w * F.cross_entropy(outputs, y, reduction="none")).sum() / w.sum()


class Ignored(nn.Module):
    """`reduction` is there and has no effect."""

    reduction = "mean"

    def forward(self, outputs, y):
        return F.cross_entropy(outputs, y, weight=W32.to(outputs.dtype))


class OfReduction(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs, y):
        values = F.cross_entropy(outputs, y, reduction="none") ** 2
        return {"mean": values.mean, "sum": values.sum}.get(self.reduction, lambda: values)()


def per_example(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none") * (1.0 + y)


pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args")

LABEL_LOSSES = {
    "plain": nn.CrossEntropyLoss(),
    "weight": nn.CrossEntropyLoss(weight=W32),
    "weight 64": nn.CrossEntropyLoss(weight=W64),
    "weight 0": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 3.0])),
    "ignore": nn.CrossEntropyLoss(ignore_index=0),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weight, smoothing": nn.CrossEntropyLoss(weight=W64, label_smoothing=0.2),
    "all": nn.CrossEntropyLoss(weight=W32, label_smoothing=0.1, ignore_index=1),
    "sum": nn.CrossEntropyLoss(weight=W32, reduction="sum"),
    "none": nn.CrossEntropyLoss(weight=W32, reduction="none"),
    "nll": nn.NLLLoss(weight=W32),
    "nll function": functools.partial(F.nll_loss, weight=W64, ignore_index=2),
    "partial": functools.partial(F.cross_entropy, weight=W64),
    "partial sum": functools.partial(F.cross_entropy, weight=W64, reduction="sum"),
    "legacy": functools.partial(F.cross_entropy, weight=W64, size_average=False),
    "positional": functools.partial(weighted_first, W32),
    "margin": nn.MultiMarginLoss(weight=W64),
    "lambda": lambda o, y: F.cross_entropy(o, y, W32.to(o.dtype), ignore_index=1),
    "focal": focal,
    "focal partial": functools.partial(focal, gamma=1.0, weights=W64),
    "inner": Inner(weight=W64),
    "buffers": Buffers(),
    "no effect": Ignored(),
    "of reduction": OfReduction(),
    "of reduction sum": OfReduction("sum"),
    "per example": per_example,
}  # fmt: skip


def as_double(loss):
    """The same loss with float64 tensors, for the oracle."""
    if not isinstance(loss, functools.partial):
        return loss
    convert = {
        k: v.double() if isinstance(v, torch.Tensor) else v for k, v in loss.keywords.items()
    }
    return functools.partial(loss.func, *loss.args, **convert)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_the_mean_of_a_loss_of_labels_is_its_own(name, mode):
    """In mini-batches and accumulated; of weights with a 0, a small batch may have no mean."""
    loss = LABEL_LOSSES[name]
    batches = {} if name == "weight 0" else {"steps": 4, "size": 5, "accumulate": 3}
    assert_equal(loss, LABELS, mode=mode, oracle=as_double(loss), **batches)


@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_pooled_clients_have_each_their_own_denominator(name):
    loss = LABEL_LOSSES[name]
    assert_equal(loss, LABELS, mode="pooled", oracle=as_double(loss), steps=1)


@pytest.mark.parametrize("name", ["smoothing", "of reduction", "of reduction sum", "per example"])
def test_a_gradient_has_the_bits_of_one_call_for_the_batch(name):
    loss = LABEL_LOSSES[name]
    task, w, module = task_of(loss, LABELS, "loop")
    x, y = torch.tensor(X[:7]), torch.tensor(LABELS[:7])
    nn.utils.vector_to_parameters(w, module.parameters())
    expected = torch.autograd.grad(loss(module(x), y).mean(), list(module.parameters()))
    found = task.grad(w, Batch(x, y))
    assert torch.equal(found, nn.utils.parameters_to_vector(expected))


@pytest.mark.parametrize("name", ["weight", "all", "sum", "focal"])
def test_every_mode_logs_the_functions_own_loss(name):
    loss = LABEL_LOSSES[name]
    first = net(loss, LABELS).double()
    function = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    with torch.no_grad():
        values = [
            function(first(torch.tensor(X[p])), torch.tensor(LABELS[p])).item() for p in PARTS
        ]
    for mode in ("loop", "lanes", "pooled"):
        record = trained(loss, LABELS, mode=mode, steps=1, rounds=1).history[-1]
        assert record["train_loss"] == pytest.approx(np.mean(values), rel=1e-9)


class Rounded(nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16()


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_the_mean_loss_of_the_steps_is_not_rounded_to_the_outputs_type(mode):
    torch.manual_seed(1)
    keys = config(F.cross_entropy, LABELS, mode=mode, steps=7, rounds=1)
    keys |= {"model": Rounded(D, C), "partition": [range(N)], "schedule": {"cohort": 1}}
    local, losses = copy.deepcopy(keys["model"]).double(), []
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(7):
        optimizer.zero_grad()
        loss = F.cross_entropy(local(torch.tensor(X[:N])), torch.tensor(LABELS[:N]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    record = raysim.run(keys, tracking=False).history[-1]
    assert record["train_loss"] == pytest.approx(np.mean(losses), rel=1e-9)


def test_the_users_object_is_not_changed():
    loss = nn.CrossEntropyLoss(weight=W32.clone())
    trained(loss, LABELS)
    assert loss.reduction == "mean" and loss.weight is not None
    assert loss.weight.dtype == torch.float32 and torch.equal(loss.weight, W32)


NUMBER_LOSSES = {
    "mse": nn.MSELoss(), "mse sum": nn.MSELoss(reduction="sum"), "huber": nn.HuberLoss(delta=0.5),
    "elementwise": lambda o, y: (o - y) ** 2, "function": F.l1_loss,
    "per example": lambda o, y: ((o - y) ** 2).sum(1),
    "scalar": lambda o, y: ((o - y).abs() ** 1.5).mean(), "total": lambda o, y: ((o - y) ** 2).sum(),
    "by target": lambda o, y: (y.abs() * (o - y) ** 2).sum() / y.abs().sum(),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "lanes"])
@pytest.mark.parametrize("name", NUMBER_LOSSES)
def test_the_mean_of_a_loss_of_numbers_is_its_own(name, mode):
    assert_equal(NUMBER_LOSSES[name], TARGETS, mode=mode, steps=2, size=6)


@pytest.mark.parametrize(
    "loss",
    [
        nn.BCEWithLogitsLoss(pos_weight=POSITIVE),
        nn.BCEWithLogitsLoss(weight=POSITIVE.double(), reduction="sum"),
        functools.partial(F.binary_cross_entropy_with_logits, pos_weight=POSITIVE.double()),
        nn.MultiLabelSoftMarginLoss(weight=POSITIVE),
        functools.partial(
            lambda f, o, y: f(torch.log_softmax(o, 1), y / 3), nn.KLDivLoss(reduction="batchmean")
        ),
    ],
)
@pytest.mark.parametrize("mode", ["loop", "auto"])
def test_the_mean_of_a_loss_of_several_labels_is_its_own(loss, mode):
    assert_equal(loss, HOT, mode=mode, oracle=as_double(loss), size=7)


# -- losses of whole batches -----------------------------------------------------------------------


def against_the_batch(outputs, y):
    values = F.cross_entropy(outputs, y, reduction="none")
    return (values * torch.softmax(values, 0)).sum()


def hardest(outputs, y):
    values = F.cross_entropy(outputs, y, reduction="none")
    return values.topk((len(values) + 1) // 2).values.mean()


def contrastive(outputs, y):
    z = F.normalize(outputs, dim=1)
    logits = z @ z.T - 1e9 * torch.eye(len(y), dtype=z.dtype)
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    log_p = torch.log_softmax(logits, 1)
    return -(log_p * same).sum() / same.sum().clamp(min=1)


class MinusMean(nn.Module):
    def forward(self, outputs, y):
        values = F.cross_entropy(outputs, y, reduction="none")
        return values * (values - values.mean()).detach()


COUPLED = [against_the_batch, hardest, contrastive, MinusMean()]


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: getattr(loss, "__name__", "module"))
def test_a_loss_that_couples_examples_is_computed_as_it_is(loss):
    plan = prepare(named_inputs(config(loss, LABELS)))
    assert plan.mode == "loop"
    assert_equal(loss, LABELS, evaluate={"every": 1, "batch_size": 7})
    assert_equal(loss, LABELS, steps=4, size=7, accumulate=2)


def capped(outputs, y):
    assert len(y) <= 64
    return F.cross_entropy(outputs, y)


def test_a_loss_that_takes_no_large_set_stays_a_mean():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(110, D)), rng.integers(0, C, 110)
    keys = config(capped, y) | {
        "data": (x[:30], y[:30], x[30:], y[30:]),
        "partition": {"clients": 1},
        "schedule": {"cohort": 1},
    }
    assert prepare(named_inputs(keys)).learning_task.reading.is_cross_entropy


def hardest_of_many(outputs, y):
    values = F.cross_entropy(outputs, y, reduction="none")
    return values.topk(min(len(y), max(64, len(y) // 2))).values.mean()


@pytest.mark.parametrize(
    ("n", "n_test", "val_fraction"),
    [(30, 20, 0), (80, 20, 0), (120, 20, 0.6), (30, 80, 0)],
    ids=["no large set", "large client", "large validation set", "large test set"],
)
def test_a_loss_may_couple_the_examples_of_large_sets_only(n, n_test, val_fraction):
    """Up to 64 examples the function is the mean of their losses."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n + n_test, D)), rng.integers(0, C, n + n_test)
    keys = config(hardest_of_many, y, steps=1, rounds=1) | {
        "data": (x[:n], y[:n], x[n:], y[n:]),
        "partition": {"clients": 1, "val_fraction": val_fraction},
        "schedule": {"cohort": 1},
    }
    plan = prepare(named_inputs(keys))
    assert plan.learning_task.reading.is_cross_entropy == (n <= 64 and n_test <= 64)
    result = raysim.run(keys, tracking=False)
    nets = {"train_loss": net(hardest_of_many, y), "val/loss": result.net(), "loss": result.net()}
    validation = plan.clients.validation
    client = np.setdiff1d(np.arange(n), validation)
    sets = {"train_loss": client, "val/loss": validation, "loss": np.arange(n, n + n_test)}
    for name, positions in sets.items():
        if len(positions):
            outputs = nets[name].double()(torch.tensor(x[positions]))
            expected = float(hardest_of_many(outputs.detach(), torch.tensor(y[positions])))
            assert result.history[-1][name] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "pooled", "steps": 1}, "'pooled' is not possible.*of all examples of a batch"),
        (
            {"privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}},
            "privacy: .*of all examples of a batch together",
        ),
    ],
)  # fmt: skip
def test_what_needs_single_examples_refuses_a_loss_of_batches(keys, message):
    with pytest.raises(ConfigError, match=message):
        trained(hardest, LABELS, **keys)


class Counting(nn.Module):
    def __init__(self, buffer: bool):
        super().__init__()
        self.calls = 0
        self.buffer = buffer
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs, y):
        if self.buffer:
            self.seen += 1
        else:
            self.calls += 1
        return F.cross_entropy(outputs, y) * (1 + self.calls + self.seen)


class Annealed:
    """A function with a state that is no module."""

    calls = 0

    def __call__(self, outputs, y):
        self.calls += 1
        return F.cross_entropy(outputs, y) / self.calls


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (Counting(True), "seen of the loss"),
        (Counting(False), "calls of the loss"),
        (Annealed(), "the loss"),
    ],
)
def test_a_loss_with_a_state_is_refused(loss, what):
    with pytest.raises(ConfigError, match=f"task: {what} changes when it is called.* without a s"):
        trained(loss, LABELS)


class KeepsWeights(nn.Module):
    """Weights of classes are those of the first batch; they couple its examples."""

    def __init__(self, of_batch: bool):
        super().__init__()
        self.of_batch = of_batch

    def forward(self, outputs, y):
        if not hasattr(self, "weights"):
            self.weights = torch.bincount(y, minlength=C) + 1.0 if self.of_batch else W64
        values = F.cross_entropy(outputs, y, self.weights.to(outputs), reduction="none")
        return (values * torch.softmax(values, 0)).sum()


def test_a_loss_that_keeps_its_first_batch_is_refused():
    with pytest.raises(ConfigError, match=r"^task: the loss keeps something of the first batch"):
        trained(KeepsWeights(True), LABELS)
    assert_equal(KeepsWeights(False), LABELS)


def test_a_random_loss_is_refused():
    with pytest.raises(ConfigError, match=r"the loss changes when it is called, .* random numbers"):
        trained(lambda o, y: F.cross_entropy(o + torch.randn_like(o), y), LABELS)


def test_weights_for_another_number_of_classes_are_refused():
    with pytest.raises(ConfigError, match=r"fails on two examples: .*either for all 3 classes"):
        trained(nn.CrossEntropyLoss(weight=torch.ones(4)), LABELS)


def test_a_task_with_its_reading_goes_to_another_process():
    plan = prepare(named_inputs(config(LABEL_LOSSES["all"], LABELS)))
    task: Any = plan.learning_task
    again = pickle.loads(cloudpickle.dumps(task))
    assert again.reading == task.reading and again.reading.weights is not None


# -- ignored labels --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.CrossEntropyLoss(), SOME_IGNORED),
        (nn.CrossEntropyLoss(weight=W32, label_smoothing=0.1), SOME_IGNORED),
        (nn.CrossEntropyLoss(ignore_index=255), FAR_IGNORED),
        (nn.CrossEntropyLoss(ignore_index=255), IGNORED_IN_TESTS),
        (nn.CrossEntropyLoss(), np.where(IGNORED_IN_TESTS == 255, -100, LABELS)),
        (functools.partial(F.cross_entropy, ignore_index=255, reduction="sum"), FAR_IGNORED),
        (lambda o, y: F.cross_entropy(o, y, ignore_index=255), FAR_IGNORED),
        (nn.NLLLoss(), SOME_IGNORED),
    ],
)
def test_labels_outside_of_the_classes_are_ignored(loss, y, mode):
    steps = 1 if mode == "pooled" else 3
    result, server = assert_equal(loss, y, mode=mode, steps=steps)
    with torch.no_grad():
        hits = server(torch.tensor(X[N:])).argmax(1).numpy() == y[N:]
    real = (y[N:] >= 0) & (y[N:] < C)
    assert result.history[-1]["accuracy"] == pytest.approx(hits[real].mean())


def test_ignored_labels_beside_declared_classes_leave_every_figure_out():
    halves = {"x": X[:N], "x_test": X[N:], "y": SOME_IGNORED[:N], "y_test": SOME_IGNORED[N:]}
    metrics = ["accuracy", "f1", "f1_micro", "auc", "top2"]
    evaluate = {"every": 1, "metrics": metrics, "per_class": True}
    loss = nn.CrossEntropyLoss()
    result = trained(loss, SOME_IGNORED, data={**halves, "classes": C}, evaluate=evaluate)
    server, _ = fedavg(loss, SOME_IGNORED)
    real = SOME_IGNORED[N:] >= 0
    with torch.no_grad():
        outputs = server(torch.tensor(X[N:])).numpy()[real]
    y, last = SOME_IGNORED[N:][real], result.history[-1]
    assert last["f1"] == pytest.approx(sk.f1_score(y, outputs.argmax(1), average="macro"))
    assert last["top2"] == pytest.approx((y[:, None] == np.argsort(-outputs)[:, :2]).any(1).mean())
    for c in range(C):
        right = (outputs[y == c].argmax(1) == c).mean()
        assert last[f"accuracy/class_{c}"] == pytest.approx(right)


def test_other_labels_outside_of_the_classes_are_refused():
    y = np.where(np.arange(N + 25) % 4 == 1, -1, LABELS)
    with pytest.raises(ConfigError, match="training example 1 has the label -1"):
        trained(nn.CrossEntropyLoss(), y)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_batch_of_ignored_labels_makes_no_step(mode):
    """torch's gradient of it is 0, and its loss 0 / 0."""
    y = LABELS.copy()
    y[PARTS[3]] = -100
    result, _ = assert_equal(nn.CrossEntropyLoss(), y, mode=mode)
    assert np.isfinite(result.history[-1]["train_loss"])
    assert_equal(nn.CrossEntropyLoss(), y, mode=mode, steps=3, size=3)


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weight", "all", "sum", "focal", "lambda", "none"])
def test_an_evaluation_in_batches_is_the_functions_value_on_the_whole_set(name):
    assert_equal(
        LABEL_LOSSES[name], LABELS, evaluate={"every": 1, "batch_size": 4}, oracle=as_double(LABEL_LOSSES[name])
    )  # fmt: skip


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=W32), hardest])
def test_clients_are_evaluated_by_the_functions_own_value(loss):
    """So are those with a few examples: each client has the function's value on its own."""
    sections = {
        "partition": {"name": "iid", "clients": 3, "test": {"fraction": 0.4}},
        "evaluate": {"every": 1, "clients": {"every": 1}, "batch_size": 4},
        "schedule": {"cohort": 3},
    }
    source = {**config(loss, LABELS, rounds=1), **sections}
    clients: Any = prepare(named_inputs(source)).clients
    result = raysim.run(source, tracking=False)
    function = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    server = net(loss, LABELS).double()
    nn.utils.vector_to_parameters(result.parameters, server.parameters())
    parts = [clients.test.client(client) for client in range(3)]
    with torch.no_grad():
        values = [
            float(function(server(torch.tensor(X[p])), torch.tensor(LABELS[p]))) for p in parts
        ]
    assert result.history[-1]["clients/loss"] == pytest.approx(np.mean(values), rel=1e-9)


def of_first(outputs, y, least=1):
    """The mean over the examples of class 0; 0 without any."""
    counted = y == 0
    values = F.cross_entropy(outputs, y, reduction="none") * counted
    return values.sum() / counted.sum().clamp(min=least)


def of_first_or_five(outputs, y):
    return of_first(outputs, y) + 5.0 * (y != 0).all()


def of_real(outputs, y):
    values = F.cross_entropy(outputs, y, ignore_index=-100, reduction="sum")
    return values / (y >= 0).sum().clamp(min=1)


@pytest.mark.parametrize("mode", ["loop", "pooled"])
@pytest.mark.parametrize(
    ("loss", "y", "uncounted"),
    [
        (of_first, LABELS, 1),
        (of_first_or_five, LABELS, 2),
        (functools.partial(of_first, least=5), LABELS, 1),
        (of_real, SOME_IGNORED, -100),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 3.0]).double()), LABELS, 1),
        (nn.CrossEntropyLoss(ignore_index=0), LABELS, 0),
        (nn.CrossEntropyLoss(), SOME_IGNORED, -100),
    ],
)
def test_a_set_without_targets_that_count_has_the_functions_own_value(loss, y, uncounted, mode):
    y = y.copy()
    y[N:] = y[PARTS[3]] = uncounted
    is_of_batches = loss is of_first_or_five or isinstance(loss, functools.partial)
    source = config(loss, y, mode="loop" if is_of_batches else mode, steps=1, rounds=1)
    result = raysim.run(source, tracking=False)
    trained_net, first = result.net().double(), net(loss, y).double()
    with torch.no_grad():
        value = loss(trained_net(torch.tensor(X[N:])), torch.tensor(y[N:]))
        of_clients = [loss(first(torch.tensor(X[p])), torch.tensor(y[p])) for p in PARTS]
    np.testing.assert_allclose(result.history[-1]["loss"], value, rtol=1e-9)
    # Where torch divides 0 by 0, there is no step, and its loss counts as 0.
    of_clients = np.nan_to_num(of_clients)
    assert result.history[-1]["train_loss"] == pytest.approx(np.mean(of_clients), rel=1e-9)


# -- what a rule asks for --------------------------------------------------------------------------


def task_of(loss, y, mode, **keys):
    plan = prepare(named_inputs(config(loss, y, **keys)))
    model = plan.model()
    settings = LocalSettings(lr=0.1, privacy=plan.config.example_privacy)
    task = LoopTask(model, settings) if mode == "loop" else PureTask(model, settings)
    w = plan.initial[0].clone()
    module = net(loss, y).double()
    return task, w, module


def local_data(y, sizes):
    ends = np.cumsum([0, *sizes])
    batches = [
        Batch(torch.tensor(X[a:b]), torch.tensor(y[a:b])) for a, b in pairwise(ends)
    ]  # fmt: skip
    return LocalData(int(ends[-1]), 1.0, lambda augment=False: iter(batches))


ALL_OF_A_CLIENT = {**LABEL_LOSSES, "hardest": hardest, "contrastive": contrastive}


@pytest.mark.parametrize("name", ALL_OF_A_CLIENT)
def test_full_loss_and_gradient_are_the_functions_own_over_all_examples(name):
    loss = ALL_OF_A_CLIENT[name]
    task, w, module = task_of(loss, LABELS, "loop")
    data = local_data(LABELS, [13, 8, 1, 10])
    function = as_double(copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss)
    value = function(module(torch.tensor(X[:32])), torch.tensor(LABELS[:32])).mean()
    gradient = torch.autograd.grad(value, list(module.parameters()))
    flat = torch.cat([part.flatten() for part in gradient])
    torch.testing.assert_close(task.full_grad(w, data), flat, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(task.full_loss(w, data), value.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["weight", "all", "sum", "lambda", "plain"])
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_private_gradients_are_those_of_single_examples(name, mode):
    """Clipped, one example changes their sum by at most the norm: no denominator of others."""
    loss = LABEL_LOSSES[name]
    privacy = {"max_grad_norm": 0.3, "noise_multiplier": 0.0}
    task, w, module = task_of(loss, LABELS, mode, privacy=privacy)
    batch = Batch(torch.tensor(X[:9]), torch.tensor(LABELS[:9]))
    function = as_double(copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss)
    weights = torch.ones(C).double()
    if name in PRIVATE_WEIGHTS:
        weights = W32.double() * torch.tensor(PRIVATE_WEIGHTS[name])
    total, losses = torch.zeros_like(w), torch.zeros(()).double()
    for x, y in zip(batch.x, batch.y, strict=True):
        if weights[y] == 0:
            continue
        value = function(module(x[None]), y[None])
        if name != "sum":  # a mean of one example leaves its weight out
            value = value * weights[y] / weights[weights > 0].mean()
        losses += value.detach()
        g = torch.cat([p.flatten() for p in torch.autograd.grad(value, list(module.parameters()))])
        total += g * min(1.0, 0.3 / float(g.norm()))
    divisor = 1 if name == "sum" else 9
    torch.testing.assert_close(task.grad(w, batch), total / divisor, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(task.losses[-1], losses / divisor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["weight", "sum", "plain"])
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_gradients_by_inputs_are_those_of_single_examples(name, mode):
    task, w, module = task_of(LABEL_LOSSES[name], LABELS, mode)
    x, y = torch.tensor(X[:9]).requires_grad_(), torch.tensor(LABELS[:9])
    function = as_double(copy.deepcopy(LABEL_LOSSES[name]).double())
    total = torch.zeros(()).double()
    for k in range(9):
        weight = 1 if name != "weight" else W64[y[k]] / W64.mean()
        total = total + weight * function(module(x[k : k + 1]), y[k : k + 1])
    (expected,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(task.input_grad(w, Batch(x.detach(), y)), expected)


PRIVATE_WEIGHTS = {"weight": [1, 1, 1], "all": [1, 0, 1], "lambda": [1, 0, 1]}


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [W32, W64], ids=["32", "64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "make", [nn.CrossEntropyLoss, functools.partial(functools.partial, F.cross_entropy)]
)
def test_weights_have_the_type_of_the_run(weight, dtype, make):
    loss = make(weight=weight)
    oracle = as_double(loss)
    tolerance = 1e-5 if dtype == "float32" else 1e-8
    assert_equal(loss, LABELS, dtype=dtype, oracle=oracle, tolerance=tolerance)


# -- losses of tokens ------------------------------------------------------------------------------

VOCABULARY, LENGTH = 6, 5
TOKENS = RNG.integers(0, VOCABULARY, (N + 25, LENGTH))
NEXT = (TOKENS + 1) % VOCABULARY
REAL = np.arange(LENGTH) < RNG.integers(1, LENGTH + 1, (N + 25, 1))
TOKEN_WEIGHTS = torch.tensor(RNG.uniform(0.5, 3, VOCABULARY))


class TokenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.out = nn.Linear(4, VOCABULARY)

    def forward(self, x):
        return self.out(self.embedding(x))


TOKEN_LOSSES = {
    "plain": (nn.CrossEntropyLoss(), -100, "flat"),
    "another ignored": (nn.CrossEntropyLoss(ignore_index=-1), -1, "flat"),
    "ignored in the vocabulary": (nn.CrossEntropyLoss(ignore_index=0), 0, "flat"),
    "weights": (nn.CrossEntropyLoss(weight=TOKEN_WEIGHTS.float().double()), -100, "flat"),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), -100, "flat"),
    "guarded": (of_real, -100, "flat"),
    "flat inside": (lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-1), -1, "as it is"),
    "classes first": (lambda o, y: F.cross_entropy(o.transpose(1, 2), y), -100, "as it is"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_loss_of_tokens_is_the_functions_mean_over_all_of_them(name, mode):
    loss, ignored, form = TOKEN_LOSSES[name]
    y = np.where(REAL, NEXT, ignored)

    def value(module, part):
        outputs, targets = module(torch.tensor(TOKENS[part])), torch.tensor(y[part])
        if form == "flat":
            outputs, targets = outputs.flatten(0, 1), targets.flatten()
        return loss(outputs, targets)

    torch.manual_seed(2)
    module = TokenNet()
    server = copy.deepcopy(module).double()
    steps = 1 if mode == "pooled" else 2
    states = []
    for part in PARTS:
        local = copy.deepcopy(server)
        optimizer = torch.optim.SGD(local.parameters(), 0.02)
        for _ in range(steps):
            optimizer.zero_grad()
            value(local, part).backward()
            optimizer.step()
        states.append(nn.utils.parameters_to_vector(local.parameters()).detach())
    mean = sum(len(part) / N * state for part, state in zip(PARTS, states, strict=True))
    source = config(loss, LABELS, rounds=1, steps=steps, mode=mode)
    source |= {"data": (TOKENS[:N], y[:N], TOKENS[N:], y[N:]), "model": module}
    source["local"]["lr"] = 0.02
    source["evaluate"] = {"every": 1, "batch_size": 4}
    result = raysim.run(source, tracking=False)
    torch.testing.assert_close(result.parameters, mean, rtol=1e-9, atol=1e-9)
    nn.utils.vector_to_parameters(result.parameters, server.parameters())
    with torch.no_grad():
        right = float(value(server, np.arange(N, N + 25)))
    assert result.history[-1]["loss"] == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("loss", [of_real, nn.CrossEntropyLoss()])
def test_sequences_of_padding_alone_have_the_functions_own_value(loss):
    y = np.where(REAL[:N], NEXT[:N], -100)
    padding = np.full((4, LENGTH), -100)
    data = TOKENS[:N], y, TOKENS[:4], padding
    result = trained(loss, LABELS, rounds=1, steps=1, data=data, model=TokenNet())
    outputs = torch.zeros(padding.size, VOCABULARY)
    expected = loss(outputs, torch.tensor(padding.flatten()))
    np.testing.assert_allclose(result.history[-1]["loss"], expected)


def test_a_loss_that_couples_tokens_is_refused():
    with pytest.raises(
        ConfigError, match="neither the mean nor the sum of losses of single tokens"
    ):
        trained(
            hardest,
            NEXT,
            **{"data": (TOKENS[:N], NEXT[:N], TOKENS[N:], NEXT[N:]), "model": TokenNet()},
        )


# -- methods, groups and tasks of a user's own -----------------------------------------------------


@dataclass(frozen=True)
class Balanced(Classification):
    """A task with weights of its own."""

    rare: float = 4.0

    def loss(self, outputs, batch):
        return self.mean_weights(batch.y) * F.cross_entropy(outputs, batch.y, reduction="none")

    def mean_weights(self, y):
        return torch.where(y == 2, self.rare, 1.0).double()


@pytest.mark.parametrize("mode", ["loop", "lanes", "pooled"])
def test_a_task_may_give_the_weights_of_its_mean(mode):
    steps = 1 if mode == "pooled" else 3
    oracle = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 4.0]).double())
    result = trained(nn.CrossEntropyLoss(), LABELS, task=Balanced(), mode=mode, steps=steps)
    server, function = fedavg(oracle, LABELS, steps=steps)
    expected = nn.utils.parameters_to_vector(server.parameters()).detach()
    torch.testing.assert_close(result.parameters, expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        right = float(function(server(torch.tensor(X[N:])), torch.tensor(LABELS[N:])))
    assert result.history[-1]["loss"] == pytest.approx(right, rel=1e-9)


@dataclass(frozen=True)
class Scaled(Classification):
    """A task whose loss couples a batch and depends on its inputs."""

    @property
    def loss_reduction(self):
        return "batch"

    def loss(self, outputs, batch):
        size = batch.x.square().mean()
        return (size * F.cross_entropy(outputs, batch.y)).expand(len(outputs))


def test_a_tasks_coupled_loss_sees_the_inputs_in_training_and_in_evaluation():
    def scaled(outputs, y, x):
        return torch.as_tensor(x).square().mean() * F.cross_entropy(outputs, y)

    result = trained(nn.CrossEntropyLoss(), LABELS, task=Scaled(), mode="loop", steps=1)
    net = result.net().double()
    with torch.no_grad():
        expected = scaled(net(torch.tensor(X[N:])), torch.tensor(LABELS[N:]), X[N:])
    assert result.history[-1]["loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_terms_of_a_method_are_added_to_the_functions_mean(mode):
    """A method's own loss with a term for each example: here the squared norm of the outputs."""
    loss = nn.CrossEntropyLoss(weight=W64)

    def both(outputs, y):
        return loss(outputs, y) + 0.3 * outputs.square().sum(1).mean()

    result = trained(
        loss,
        LABELS,
        mode=mode,
        algorithm=None,
        client=WithTerm,
        server={"name": "fedavg", "weights": "samples"},
    )
    server, _ = fedavg(both, LABELS)
    expected = nn.utils.parameters_to_vector(server.parameters()).detach()
    torch.testing.assert_close(result.parameters, expected, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class WithTerm(ClientRule):
    def loss(self, shared, state, net, batch, task):
        return task_loss(net, batch) + 0.3 * net.logits.square().sum(1)


def test_groups_with_other_steps_have_the_functions_mean():
    loss = nn.CrossEntropyLoss(weight=W64, ignore_index=1)
    groups = {"late": {"ids": [1, 3], "local": {"lr": 0.1}}}
    assert_equal(loss, LABELS, groups=groups)


def test_a_label_flip_trains_by_the_loss_of_the_run():
    flipped, attacker = SOME_IGNORED.copy(), PARTS[1]
    flipped[attacker] = np.where(flipped[attacker] < 0, -100, C - 1 - flipped[attacker])
    loss = nn.CrossEntropyLoss(weight=W64)
    groups = {"bad": {"ids": [1], "client": "label_flip"}}
    result = trained(loss, SOME_IGNORED, groups=groups, size=7)
    expected = nn.utils.parameters_to_vector(fedavg(loss, flipped, size=7)[0].parameters())
    torch.testing.assert_close(result.parameters, expected.detach(), rtol=1e-9, atol=1e-9)


def test_a_method_that_computes_cross_entropy_by_itself_refuses_another_loss():
    with pytest.raises((ConfigError, RaysimError), match="is not the loss"):
        trained(
            nn.CrossEntropyLoss(weight=W64),
            LABELS,
            algorithm=None,
            client=PlainCrossEntropy,
            server="fedavg",
        )
    with pytest.raises(ConfigError, match="'fedreg' trains by a cross-entropy of its own"):
        trained(nn.CrossEntropyLoss(weight=W64), LABELS, algorithm="fedreg")
    rules = {"algorithm": None, "client": PlainCrossEntropy, "server": "fedavg"}
    trained(nn.CrossEntropyLoss(), LABELS, **rules)


@dataclass(frozen=True)
class PlainCrossEntropy(ClientRule):
    def loss(self, shared, state, net, batch, task):
        return cross_entropy(net, batch)


# -- losses that change their arguments, or have parameters


def sharpened(outputs, y):
    outputs.mul_(2.0)[:, 0] -= 1
    return F.cross_entropy(outputs, y)


def relabelled(outputs, y):
    y[y == 2] = 1
    return F.cross_entropy(outputs, y)


def destroys_outputs(outputs, y):
    value = F.cross_entropy(outputs, y)
    outputs.data.zero_()
    return value


@pytest.mark.parametrize("mode", ["loop", "auto"])
@pytest.mark.parametrize("loss", [sharpened, relabelled, destroys_outputs])
def test_what_a_loss_does_to_its_arguments_is_its_own_business(loss, mode):
    def on_copies(outputs, y):
        return loss(outputs.clone(), y.clone())

    def pure(outputs, y):
        return F.cross_entropy(outputs, y)

    steps = 1 if mode == "auto" else 2
    oracle = pure if loss is destroys_outputs else on_copies
    assert_equal(loss, LABELS, mode=mode, steps=steps, oracle=oracle)
    result = trained(loss, LABELS, steps=2)
    same = trained(on_copies, LABELS, steps=2)
    assert result.history[-1]["accuracy"] == same.history[-1]["accuracy"]


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, outputs, y):
        return F.cross_entropy(outputs * self.log.exp(), y)


def test_a_loss_with_parameters_to_train_is_refused():
    with pytest.raises(ConfigError, match="the loss has the parameter 'log', and clients train"):
        trained(Temperature(), LABELS)
    assert_equal(Temperature().requires_grad_(False), LABELS, oracle=F.cross_entropy)


def test_a_penalty_of_the_parameters_of_another_net_is_refused():
    other = nn.Linear(3, 3)

    def penalised(outputs, y):
        return F.cross_entropy(outputs, y) + other.weight.square().sum()

    with pytest.raises(ConfigError, match=r"^task: loss of .* parameter of shape \[3, 3\]"):
        trained(penalised, LABELS)
