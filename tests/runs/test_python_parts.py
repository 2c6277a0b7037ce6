"""Tasks, losses, functions, metrics, probes, stages and groups that are given from Python, as objects."""

from __future__ import annotations

import functools
import linecache
import shutil
import sys
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raysim
from raysim.algorithms.fedavg import FedAvgClient
from raysim.config.objects import python_objects
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import (
    Batch,
    Classification,
    ClientSampling,
    LearningTask,
    Regression,
    TaskMetric,
    UploadStage,
)
from raysim.rules.tasks.loss_task import task_like, with_loss
from raysim.runs.python_inputs import named_inputs

RNG = np.random.default_rng(4)
X, Y = RNG.normal(size=(40, 4)), np.arange(40) % 3
WEIGHTS = torch.tensor([0.5, 1.0, 2.0])


@pytest.fixture
def config(base: dict[str, Any], tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(python_objects, "_OBJECTS", {})
    return {
        **base,
        "rounds": 1,
        "data": (X[:30], Y[:30], X[30:], Y[30:]),
        "model": "logistic",
        "algorithm": "fedavg",
        "partition": {"clients": 4},
        "local": {"steps": 2, "batch_size": 4, "lr": 0.1},
        "schedule": {"cohort": 3},
        "evaluate": {"every": 1},
        "run_dir": None,
    }


def trained(config: dict[str, Any], **keys: Any) -> raysim.RunResult:
    return raysim.run({**config, **keys}, tracking=False)


# -- losses ----------------------------------------------------------------------------------------


def mean_loss(outputs, y):
    return F.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(), mean_loss, lambda o, y: F.cross_entropy(o, y)]
)
@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_cross_entropy_of_any_form_is_classification(config, loss, mode):
    keys = {"batching": {"mode": mode}}
    own, shipped = trained(config, task=loss, **keys), trained(config, **keys)
    torch.testing.assert_close(own.parameters, shipped.parameters, rtol=1e-5, atol=1e-6)
    assert own.history[-1]["accuracy"] == shipped.history[-1]["accuracy"]
    assert own.history[-1]["loss"] == pytest.approx(shipped.history[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "loss", [F.mse_loss, nn.MSELoss(reduction="none"), lambda o, y: (o - y) ** 2]
)
def test_a_squared_error_is_regression_also_of_whole_numbers(config, loss):
    data = (X[:30], 3 * Y[:30], X[30:], 3 * Y[30:])
    own = trained(config, task=loss, data=data)
    shipped = trained(config, task="regression", data=data)
    assert own.parameters.shape == (5,)
    torch.testing.assert_close(own.parameters, shipped.parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=WEIGHTS), functools.partial(F.cross_entropy, weight=WEIGHTS)],
)
def test_weights_of_classes_count(loss):
    """Each example is weighted by its class; a mean within one example would cancel the weight."""
    task = with_loss(loss, "classification", "weighted")()
    logits, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    expected = WEIGHTS[y] * F.cross_entropy(logits, y, reduction="none")
    for dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(
            task.loss(logits.to(dtype), Batch(torch.zeros(6), y)), expected.to(dtype)
        )


def test_a_task_of_tokens_or_of_zeros_and_ones_is_told_by_its_data(config):
    plan = prepare(
        named_inputs(
            {
                **config,
                "data": (Y[:, None], Y[:, None]) * 2,
                "task": F.cross_entropy,
                "model": "lstm",
            }
        )
    )
    assert plan.config.task.parameters["like"] == "next_token"
    hot = np.eye(3)[Y]
    plan = prepare(
        named_inputs({**config, "data": (X, hot, X, hot), "task": nn.BCEWithLogitsLoss()})
    )
    assert plan.config.task.parameters["like"] == "multilabel"
    assert (
        prepare(plan.config.model_dump(mode="json")).config.fingerprint == plan.config.fingerprint
    )
    assert task_like.__module__ == "raysim.rules.tasks.loss_task"


@dataclass(frozen=True)
class Quantile(Regression):
    q: float = 0.5

    def loss(self, outputs, batch):
        error = batch.y.reshape(outputs.shape) - outputs
        return torch.maximum(self.q * error, (self.q - 1) * error).mean(1)


def test_a_task_is_a_class_or_an_instance(config):
    data = (X, X[:, 0], X, X[:, 0])
    plan = prepare(named_inputs({**config, "data": data, "task": Quantile(q=0.9)}))
    assert vars(plan.learning_task) == {"q": 0.9} and plan.learning_task.name == "Quantile"
    plan = prepare(named_inputs({**config, "data": data, "task": {"name": Quantile, "q": 0.2}}))
    assert vars(plan.learning_task) == {"q": 0.2}
    assert (
        prepare(named_inputs({**config, "data": data, "task": Regression()})).config.task.name
        == "regression"
    )


# -- other parts -----------------------------------------------------------------------------------


class Hits(TaskMetric):
    def rows(self, outputs, y):
        return outputs.argmax(1) == y


@dataclass(frozen=True)
class Halved(UploadStage):
    factor: float = 0.5

    def encode(self, update, rng):
        return self.factor * update


@dataclass(frozen=True)
class First(ClientSampling):
    def sample(self, pool, size, t, rng):
        return pool.ids[:size].tolist()


@dataclass(frozen=True)
class Flipped(raysim.ClientRule):
    factor: float = -1.0

    def direction(self, shared, state, batch, task):
        return self.factor * task.grad(state["w"], batch)


@pytest.mark.parametrize("form", ["class", "instance", "mapping"])
@pytest.mark.parametrize(
    ("parent", "key"),
    [
        (Quantile, "task"),
        (Halved, "local.upload"),
        (First, "schedule.sampling"),
        (raysim.Probe, "evaluate.probes"),
        (raysim.ClientRule, "client"),
    ],
)
def test_a_field_that_a_section_cannot_hold_beside_its_name_is_refused(config, parent, key, form):
    part = dataclass(frozen=parent is not raysim.Probe)(
        type("Labelled", (parent,), {"__annotations__": {"name": str}, "name": "cohorts.jsonl"})
    )
    value = {"class": part, "instance": part(), "mapping": {"name": part}}[form]
    algorithm = {"algorithm": None, "server": "fedavg"} if key == "client" else {}
    overrides = {key: [value] if key in ("local.upload", "evaluate.probes") else value, **algorithm}
    with pytest.raises(ConfigError, match=rf"^{key}.*name: Labelled has the field 'name'"):
        raysim.run(config, overrides, tracking=False)


def test_functions_metrics_stages_sampling_and_groups_may_be_objects(config):
    result = trained(
        config,
        data={"name": lambda n: (X[:n], Y[:n], X[n:], Y[n:]), "n": 30},
        partition={
            "name": lambda y, clients, rng: np.array_split(np.arange(len(y)), clients),
            "clients": 3,
        },
        evaluate={"every": 1, "metrics": ["accuracy", Hits]},
        local={"steps": 1, "upload": [Halved(factor=0.25)]},
        schedule={"cohort": 2, "sampling": First()},
        groups={"bad": {"ids": [1], "client": Flipped(factor=-2.0)}},
    )
    assert result.history[-1]["hits"] == result.history[-1]["accuracy"]
    assert result.config.local.upload[0].parameters["factor"] == 0.25
    group = result.config.groups["bad"].client
    assert group is not None and group.parameters["factor"] == -2.0


def test_positions_of_each_clients_examples_are_a_partition(config):
    plan = prepare(
        named_inputs({**config, "partition": [[0, 5], np.array([1, 2, 3]), range(7, 9)]})
    )
    assert [plan.clients.client(i).tolist() for i in range(3)] == [[0, 5], [1, 2, 3], [7, 8]]


@pytest.mark.parametrize(
    "lists", [np.arange(6).reshape(3, 2), np.array([[0, 1], [2], [4, 5]], object)]
)
def test_an_array_of_positions_has_a_row_for_each_client(config, lists):
    plan = prepare(named_inputs({**config, "partition": lists}))
    assert [plan.clients.client(i).tolist() for i in range(3)] == [list(row) for row in lists]


@pytest.mark.parametrize("number", [int, np.int64])
def test_a_mapping_of_positions_is_a_partition_in_the_order_of_the_clients(config, number):
    lists = {number(2): [7, 8], number(0): np.array([0, 5]), number(1): torch.tensor([1, 2, 3])}
    plan = prepare(named_inputs({**config, "partition": lists}))
    assert [plan.clients.client(i).tolist() for i in range(3)] == [[0, 5], [1, 2, 3], [7, 8]]


def test_a_function_may_return_positions_that_clients_share(config):
    shared = {"name": lambda y, clients, rng: [[0, 1], [1, 2]], "clients": 2, "overlap": True}
    plan = prepare(named_inputs({**config, "partition": shared, "schedule": {"cohort": 2}}))
    assert [plan.clients.client(i).tolist() for i in range(2)] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"ann": [0], "bob": [1]}, "a mapping of index lists has .* 0 to 1 as keys, this one has 'a"),
        ({1: [0], 2: [1]}, r"this one has 1, 2; give list\(partition.values\(\)\)"),
        ([[0, 1], [1, 2]], "client 1 has example 1 which is also client 0's; .*overlap is true"),
        ({0: [0, 1], 1: [1, 2]}, "client 1 has example 1 which is also client 0's"),
        ([[0], [1, 1]], "client 1 has example 1 twice"),
        ([[0], [1, 30]], "client 1 has example 30, outside 0 to 29"),
        ({0: [30], 1: [0]}, "client 0 has example 30, outside 0 to 29"),
        ([[0], [-1]], "client 1 has example -1, outside 0 to n - 1"),
        ([[], []], "no client has an example"),
        ([[0], [1.0]], "expected the positions of client 1's examples: expected whole numbers in a"),
        ([np.arange(30) < 9], "client 0's .*: expected whole numbers, found true and false; take np"),
        ([np.ma.masked_equal([0, 1], 1)], "client 0's examples: .* found masked ones"),
        ([{1, 2}], "client 0's examples: expected whole numbers in a row, found a set"),
    ],
)  # fmt: skip
def test_positions_that_are_no_partition_are_refused(config, lists, message):
    with pytest.raises(ConfigError, match=f"^partition: .*{message}"):
        raysim.run({**config, "partition": lists}, tracking=False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": nn.CrossEntropyLoss}, "task.name: .* is a class; give an instance of it"),
        ({"task": 3}, "task: a int is neither a LearningTask nor a loss function"),
        ({"task": lambda o, y: o.foo}, "task: loss of .* fails on two examples: AttributeError"),
        ({"task": lambda o, y: F.cross_entropy(o, y).item()}, "^task: .* returns float, and not a t"),
        ({"task": lambda o, y: o.detach().numpy().mean()}, "^task: .* returns float32, and not a t"),
        ({"task": lambda o, y: None}, "^task: .* returns NoneType, and not a tensor"),
        ({"task": lambda o, y: F.cross_entropy(o, y).detach()}, "^task: .* without a gradient"),
        ({"task": lambda o, y: torch.tensor(1.0)}, "^task: .* without a gradient"),
        ({"data": Path("t.csv")}, r"data.name: .*'t.csv'.* returns \(x, y, x_test, y_test\)"),
        ({"data": Path("arrays.npz")}, "data.name: .* data={name: arrays, path: FILE.npz}"),
        ({"partition": 3}, "partition: a int is neither a function"),
        ({"evaluate": {"metrics": [3]}}, "evaluate.metrics: 3 is neither a name, a function"),
        ({"local": {"upload": [Hits]}}, "local.upload: .*Hits.* is neither a name nor derived"),
        ({"client": {"name": Flipped, "factor": torch.ones(2)}}, "client.factor: a Tensor is no val"),
        ({"data": {"name": lambda: None}}, "data.name: .*: expected x, y, .*; got a NoneType"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_key(config, keys, message):
    with pytest.raises(ConfigError, match=message):
        raysim.run({**config, **keys}, tracking=False)


@pytest.mark.parametrize("held", ["argument", "variable"])
def test_a_loss_with_tensors_of_another_type_is_blamed_and_not_the_net(config, held):
    weighted = {
        "argument": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
        "variable": lambda o, y: F.cross_entropy(o @ torch.eye(3), y),
    }
    with pytest.raises(ConfigError, match=r"^task: loss of .*the key dtype.*weight\.to\(outputs\)"):
        trained(config, task=weighted[held], dtype="float64")
    advised = lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS.to(o))  # noqa: E731
    assert trained(config, task=advised, dtype="float64").rounds == 1


def in_place(outputs, y):
    probabilities = outputs.exp().div_(2)
    return F.cross_entropy(probabilities.log(), y)


@dataclass(frozen=True)
class InPlace(Classification):
    def loss(self, outputs, batch):
        return super().loss(outputs.mul_(2), batch)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda o, y: in_place(o.exp_(), y), "modified by an inplace operation"),
        (lambda o, y: F.cross_entropy(o.softmax(1).mul_(2), y), "modified by an inplace operation"),
        (InPlace(), "changes the outputs in place, and the net's gradient needs them; copy them"),
    ],
)
def test_a_loss_without_a_gradient_is_blamed_and_not_the_net(config, task, message):
    net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    with pytest.raises(ConfigError, match=rf"^task: loss of .*{message}"):
        trained(config, task=task, model=net)


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        values = self.linear(x).sigmoid()
        return values.mul_(2) + 1


def test_a_net_without_a_gradient_is_blamed_and_not_the_loss(config):
    with pytest.raises(ConfigError, match=r"^model: .*modified by an inplace operation"):
        trained(config, task=F.cross_entropy, model=Overwriting())


@pytest.mark.parametrize(
    ("y", "outputs", "fix"),
    [
        (Y, 5, r"give their number with the data, classes=5, or set task\.like to any"),
        (Y[:, None], 3, r"set task\.like to any .* whole numbers \[n\], as y\[:, 0\]"),
    ],
)
@pytest.mark.parametrize("task", [nn.CrossEntropyLoss(), lambda o, y: F.cross_entropy(o, y)])
def test_labels_that_do_not_fit_the_outputs_of_an_own_loss_have_a_fix(
    config, task, y, outputs, fix
):
    with pytest.raises(ConfigError, match=rf"\[2, {outputs}\], but task .*; .*{fix}"):
        trained(config, task=task, data=(X, y, X, y), model=nn.Linear(4, outputs))


class Pairs(nn.Module):
    """Outputs of a shape that no shipped task has, [B, 2, 3]."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        return self.linear(x).view(-1, 2, 3)


def loss_of_pairs(outputs, y):
    return ((outputs.sum((1, 2)) - y) ** 2).mean()


@dataclass(frozen=True)
class TaskOfPairs(LearningTask):
    def outputs(self, data):
        return 3

    def output_shape(self, shape, outputs):
        return (2, 3)

    def loss(self, outputs, batch):
        return (outputs.sum((1, 2)) - batch.y) ** 2


@pytest.mark.parametrize(("like", "known"), [(None, "classification"), ("regression",) * 2])
def test_outputs_that_no_shipped_task_has_are_those_of_the_loss_or_of_an_own_task(
    config, like, known
):
    task = {"name": loss_of_pairs, **({"like": like} if like else {})}
    expected = rf"\[2, 2, 3\].*like task '{known}'; set task\.like to any if .*regression"
    with pytest.raises(ConfigError, match=expected):
        trained(config, task=task, model=Pairs())
    net = Pairs()
    of_any = trained(config, task={"name": loss_of_pairs, "like": "any"}, model=net)
    of_own = trained(config, task=TaskOfPairs(), model=net)
    assert torch.allclose(of_any.parameters, of_own.parameters)


def test_a_class_that_only_the_test_half_has_needs_the_number_of_classes(config):
    data = (X[:30], Y[:30], X[30:], np.append(Y[30:-1], 3))
    with pytest.raises(ConfigError, match=r"test example 9 has the label 3.*`classes` of the data"):
        trained(config, data=data)
    whole = dict(zip(("x", "y", "x_test", "y_test"), data, strict=True))
    assert trained(config, data={**whole, "classes": 4}).parameters.shape == (4 * 4 + 4,)


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("bacd", "column 0 of x is 'a', that of {half} 'b'; "),
        ("abc", "column 3 of x is 'd', that of {half} None; "),
        ("abcdefghijk", "column 4 of x is None, that of {half} 'e'; "),
    ],
)
@pytest.mark.parametrize("half", ["x_test", "public"])
def test_tables_of_other_columns_are_refused(config, columns, said, half):
    train = pd.DataFrame(X[:30], columns=list("abcd"))
    test = pd.DataFrame(X[30:], columns=list("abcd"))
    data = {"x": train, "y": Y[:30], "x_test": test, "y_test": Y[30:]}
    plain = trained(config, data=data).digest
    assert trained(config, data={**data, "x_test": test.to_numpy()}).digest == plain
    said = said.format(half={"public": "public x"}.get(half, half))
    with pytest.raises(ConfigError, match=f": {said}give both the same columns in the same order"):
        trained(config, data={**data, half: test.reindex(columns=list(columns), fill_value=0.0)})


def test_targets_of_other_columns_are_refused(config):
    y = pd.DataFrame({"u": X[:, 0], "v": X[:, 1]})
    data = (X[:30], y[:30], X[30:], y[["v", "u"]][30:])
    with pytest.raises(ConfigError, match="column 0 of y is 'u', that of y_test 'v'"):
        trained(config, data=data, task="regression")


def test_a_function_is_known_by_the_tables_and_texts_that_it_uses():
    def named(table, texts):
        return python_objects.reference(lambda: (table, texts))

    table, texts = pd.DataFrame({"a": [1.0, 2.0], "b": ["u", "v"]}), np.array(["u", None])
    name = named(table, texts)
    assert named(table.copy(), np.array(["".join("u"), None])) == name
    others = [table.rename(columns={"a": "c"}), table.assign(a=3.0), table.assign(b="w")]
    assert name not in {named(other, texts) for other in others}
    assert named(table, np.array(["w", None])) != name


# -- identity --------------------------------------------------------------------------------------


def test_objects_of_different_content_have_different_names():
    weighted = [functools.partial(F.cross_entropy, weight=w) for w in (WEIGHTS, 2 * WEIGHTS)]
    pair = (lambda o, y: o - y, lambda o, y: o + y)
    losses = [*weighted, *pair, functools.partial(F.mse_loss), functools.partial(F.l1_loss)]
    assert len({python_objects.reference(loss) for loss in losses}) == len(losses)
    again = functools.partial(F.cross_entropy, weight=WEIGHTS.clone())
    assert python_objects.reference(again) == python_objects.reference(weighted[0])


def named(source: str) -> str:
    """Return the name of what a cell of a notebook defines as `made`."""
    file = f"<cell {len(linecache.cache)}>"
    source = f"import functools, torch\n{source}"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), space)
    return python_objects.reference(space["made"])


CLASS = "class made:\n    {}\n    def forward(self, x):\n        return x"
HELPER = "def helper(x=0):\n    return x + 1\n"
FUNCTION = "def made(x):\n    return {}"
PARTIAL = "def f(): pass\nmade = functools.partial(f, {})"
DISPATCHED = """@functools.singledispatch
def scaled(v):
    return v
@scaled.register
def _(v: torch.Tensor):
    return v / T
"""
DEFAULTS = """from collections import defaultdict
def filled():
    n = 1
    return defaultdict(lambda: n)
D = filled()
"""
DECORATOR = """def times(f):
    @functools.wraps(f)
    def inner(*x):
        return f(*x) * 1
    return inner
"""


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (PARTIAL.format("a=[[16], [16, 16]]"), "[16], [16, 16]", "[16, 16], [16]"),
        (PARTIAL.format("a={1: 2}"), "{1: 2}", "[1, 2]"),
        (PARTIAL.format("a=(3, 3), b=(2, 2), c=(2, 2)"), "c=(2", "c=(3"),
        (f"PLAN = [[1], [2, 3]]\n{FUNCTION.format('PLAN')}", "[1], [2, 3]", "[1, 2], [3]"),
        (f"@functools.cache\n{HELPER}{FUNCTION.format('helper()')}", "+ 1", "+ 2"),
        (f"{DECORATOR}@times\n{FUNCTION.format('x')}", "* 1", "* 2"),
        (f"{DECORATOR}{CLASS.format('@times')}", "* 1", "* 2"),
        (f"{HELPER}{CLASS.format('act = staticmethod(helper)')}", "+ 1", "+ 2"),
        (f"{HELPER}{CLASS.format('f = functools.partialmethod(helper, [1, [2]])')}", "[2]", "2"),
        (f"class Block:\n    n = 1\n{CLASS.format('_block = Block')}", "= 1", "= 2"),
        (f"class Meta(type):\n    n = 1\n{CLASS}".replace("e:\n    {}", "e(metaclass=Meta):"), "= 1", "= 2"),
        (f"W = torch.ones(2)\n{CLASS.format('w = W')}", "ones", "zeros"),
        (f"T = 1\n{DISPATCHED}{FUNCTION.format('scaled(x)')}", "T = 1", "T = 2"),
        (f"T = 1\n{DISPATCHED}{FUNCTION.format('scaled(x)')}", "v / T", "v * T"),
        (f"{DEFAULTS}{FUNCTION.format('D[x]')}", "= 1", "= 2"),
        (f"class Own(dict): pass\nD = Own()\nD.n = 1\n{FUNCTION.format('D')}", "= 1", "= 2"),
        ("made = torch.nn.Sequential()\nmade.plan = [[0, 1], [2]]", "1], [", "], [1, "),
        ("n = torch.nn\nmade = n.Sequential(n.PReLU(), n.PReLU())\n#made[0].weight = made[1].weight", "#", ""),
    ],
)  # fmt: skip
def test_each_edit_gives_an_object_of_a_notebook_another_name(source, old, new):
    assert named(source) == named(source) != named(source.replace(old, new))


@pytest.mark.parametrize(
    ("outside", "inside", "use"),
    [
        ("import own_helper as h", "", "h.scale"),
        ("", "import own_helper as h", "h.scale"),
        ("", "from own_helper import scale as s", "s"),
        ("", "import own_helper, torch, no_such_module", "own_helper.scale"),
        ("", "from . import own_helper", "own_helper.scale"),
    ],
)
def test_an_edited_module_that_is_imported_gives_another_name(
    outside, inside, use, source, tmp_path, monkeypatch
):
    """Also by an import inside the function."""
    package = tmp_path / "own_package"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(package)
    names = set()
    for factor in "112":
        text = f"FACTOR = {factor}\ndef scale(x):\n    return x * FACTOR\n"
        source("own_package/own_helper", text)
        for module in ("own_helper", "own_package", "own_package.own_helper"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        if "from ." in inside:
            outside = "__package__ = 'own_package'"
        names.add(named(f"{outside}\ndef made(x):\n    {inside}\n    return {use}(x)"))
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
    assert len(names) == 2


def test_what_python_may_do_otherwise_in_the_next_process_does_not_change_a_name():
    """Constants are one object or several, sets have any order, and a cache is filled."""
    shared = PARTIAL.format("a=((1, 2), {2.0, 'b', made_of}, P('u'))")
    shared = f"from re import compile as P\nmade_of = (1, 2)\n{shared}"
    assert named(shared) == named(shared.replace("((1, 2)", "(tuple([1, 2])"))
    cached = f"@functools.cache\n{HELPER}{FUNCTION.format('helper()')}"
    assert named(cached) == named(f"{cached}\nmade(1)")
    assert python_objects.UNREADABLE not in named(shared)


def test_a_run_with_an_unreadable_object_says_why_it_is_not_resumed(config, monkeypatch, tmp_path):
    with open(tmp_path / "log", "w") as file:

        def loss(outputs, y):
            return F.cross_entropy(outputs, y) if file else None

        done = trained(config, task=loss, run_dir=str(tmp_path / "a"), rounds=2)
    monkeypatch.setattr(python_objects, "_OBJECTS", {})
    for again in ({}, {"task": loss}):  # with the file closed, too
        with pytest.raises(
            ConfigError, match=r"task.name: .* holds a TextIOWrapper, .* be read; start a new run"
        ):
            raysim.resume(done.run_dir, {"rounds": 3, **again})


def test_a_net_is_loaded_with_its_object(config, monkeypatch, tmp_path):
    net = nn.Linear(4, 3)
    done = trained(config, model=net, run_dir=str(tmp_path / "a"))
    monkeypatch.setattr(python_objects, "_OBJECTS", {})
    with pytest.raises(ConfigError, match=r"raysim.load\(.*, model=Linear\)"):
        raysim.load(done.run_dir).net()
    loaded: Any = raysim.load(done.run_dir, model=net).net()
    torch.testing.assert_close(loaded.weight.flatten(), done.parameters[:12])


@pytest.mark.ray
def test_a_sweep_trains_objects_as_single_runs_do(config, monkeypatch, tmp_path, local_ray):
    monkeypatch.chdir(tmp_path)
    config |= {"task": lambda outputs, y: F.cross_entropy(outputs, y)}
    done = raysim.sweep(config, {"local.lr": [0.1, 0.2]}, parallel=1)
    assert done.counts == {"finished": 2, "stopped_early": 0, "failed": 0}
    digests = [raysim.load(trial.folder).digest for trial in done.sweep.trials]
    alone = [
        trained(config, local={**config["local"], "lr": lr}, run_dir=str(tmp_path / str(lr))).digest
        for lr in (0.1, 0.2)
    ]
    assert digests == alone and len(set(digests)) == 2


def test_a_rule_of_a_script_can_be_built_where_it_was_sent_to(config, monkeypatch):
    """A worker gets the class by its content: its fields, with and without defaults."""
    from ray import cloudpickle

    @dataclass(frozen=True)
    class Pulled(FedAvgClient):
        strength: float = 0.5
        layers: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    name = python_objects.reference(Pulled)
    sent = cloudpickle.dumps(python_objects.find(name, "client.name"))
    # In another process, nothing is known of the class.
    monkeypatch.setattr(python_objects, "_OBJECTS", {})
    known = "_DYNAMIC_CLASS_TRACKER_BY_ID"
    monkeypatch.setattr(cloudpickle.cloudpickle, known, weakref.WeakValueDictionary())
    cloudpickle.loads(sent)
    plan = prepare(
        named_inputs(config) | {"algorithm": None, "client": {"name": name}, "server": "fedavg"}
    )
    assert (plan.client.strength, plan.client.layers) == (0.5, (1, 2))  # pyright: ignore[reportAttributeAccessIssue]
    assert type(plan.client) is not Pulled


def test_a_long_text_is_a_parameter_and_no_path(config):
    """Nor is one with the home of a user that there is not, or with a character that no path has."""

    @dataclass(frozen=True)
    class Tagged(FedAvgClient):
        tag: str = ""

    name = python_objects.reference(Tagged)
    for tag in ("x" * 5000, "~nobody_here/x", "a\0b"):
        client = {"name": name, "tag": tag}
        plan = prepare(
            named_inputs(config) | {"algorithm": None, "client": client, "server": "fedavg"}
        )
        assert plan.client.tag == tag  # pyright: ignore[reportAttributeAccessIssue]
