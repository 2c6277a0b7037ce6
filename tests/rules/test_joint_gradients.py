"""Gradients with respect to tensors beside the parameters, the classifier on other features, and
the training problem of a server without public data."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import program
from torch import nn
from torch.nn import functional as F

from raysim import testing
from raysim.errors import ContractError, RaysimError
from raysim.models.flat import Model
from raysim.rules.batch import Batch
from raysim.rules.losses import task_loss
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

RULES = program("joint_rules")
NET = program("lanes_net")


class Nested(nn.Module):
    """A net that does not consist of stages, with two linear layers of as many outputs."""

    def __init__(self):
        super().__init__()
        self.end = nn.ModuleDict({"first": nn.Linear(6, 3), "last": nn.Linear(3, 3)})
        self.start = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())

    def features(self, x):
        return self.end["first"](self.start(x)).tanh()

    def forward(self, x):
        return self.end["last"](self.features(x))


@pytest.fixture
def net() -> Nested:
    torch.manual_seed(4)
    return Nested().double().train()


@pytest.fixture
def batch() -> Batch:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(7, 5, dtype=torch.float64, generator=rng)
    mask = 2.0 * (torch.rand(7, 6, generator=rng) > 0.5).double()
    return Batch(x, torch.randint(0, 3, (7,), generator=rng), ((mask,),))


def a_task(kind: Any, net: nn.Module, at_start: bool = False) -> tuple[Any, torch.Tensor]:
    """Return a task, and the net's parameters: the vector in training if `at_start`."""
    model = Model(copy.deepcopy(net), (5,), 3, torch.float64)
    w, buffers = model.initial()
    task = (
        kind(model, LocalSettings(), buffers) if kind is PureTask else kind(model, LocalSettings())
    )
    if isinstance(task, LoopTask):
        local = task.start(LocalSettings(), w, buffers, 1)
        w = local if at_start else w
    return task, w


def apart(net: Any, batch: Batch, others: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = net.classify(net.features * others["scale"] + others["shift"])
    term = (others["scale"] ** 2).sum() * net.logits[:, 0]
    return F.cross_entropy(logits, batch.y, reduction="none") + term


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_gradients_are_those_of_autograd(kind, at_start, net, batch):
    task, w = a_task(kind, net, at_start)
    others = {"scale": torch.rand(3).double(), "shift": torch.rand(1, 3).double()}
    before = copy.deepcopy(others)
    with_more = {**others, "unused": torch.ones(2, 2).double()}
    gradient, of_others = task.joint_grad(w, batch, with_more, apart)

    net.start[2] = nn.Identity()
    hidden = net.start[1](net.start[0](batch.x)) * batch.drop[0]
    features = net.end["first"](hidden.tanh()).tanh()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in others.items()}
    logits = net.end["last"](features)
    moved = net.end["last"](features * leaves["scale"] + leaves["shift"])
    term = (leaves["scale"] ** 2).sum() * logits[:, 0]
    value = F.cross_entropy(moved, batch.y) + term.mean()
    points = [*net.parameters(), *leaves.values()]
    expected = torch.autograd.grad(value, points)
    flat = torch.cat([part.reshape(-1) for part in expected[:-2]])
    assert torch.allclose(gradient, flat, rtol=0, atol=1e-12)
    assert torch.allclose(of_others["scale"], expected[-2], rtol=0, atol=1e-12)
    assert torch.allclose(of_others["shift"], expected[-1], rtol=0, atol=1e-12)
    assert not of_others["unused"].any() and of_others["unused"].shape == (2, 2)
    assert all(torch.equal(others[name], before[name]) for name in others)
    statistics = torch.cat([net.start[1].running_mean, net.start[1].running_var])
    assert torch.allclose(task.buffers, statistics, rtol=0, atol=1e-12)
    # What is logged leaves out what a method adds.
    (logged,) = task.losses
    assert torch.allclose(logged, F.cross_entropy(logits, batch.y), rtol=1e-12)


@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_without_other_tensors_it_is_the_gradient(kind, net, batch):
    task, w = a_task(kind, net)
    gradient, of_others = task.joint_grad(
        w, batch, {}, lambda net, batch, _: 2 * task_loss(net, batch)
    )
    task, w = a_task(kind, net)
    assert torch.equal(gradient, task.grad(w, batch, lambda net, batch: 2 * task_loss(net, batch)))
    assert of_others == {}


@pytest.mark.parametrize("mode", ["frozen", "eval"])
@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_the_classifier_alone_is_that_of_the_module(kind, mode, net, batch):
    """The last linear layer with an output per class, wherever the net has it."""
    task, w = a_task(kind, net)
    h = torch.randn(4, 3).double().requires_grad_()
    ours = task.net(w, batch, mode).classify(h)
    expected = net.end["last"](h)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), h)[0] for out in (ours, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    without_batch = task.net(w, mode=mode)
    assert torch.equal(without_batch.classify(h), ours)
    with pytest.raises(ValueError, match="no batch"):
        _ = without_batch.logits
    passed = task.net(w, batch, mode)
    assert torch.allclose(passed.classify(passed.features), passed.logits, rtol=0, atol=1e-12)


def test_a_net_without_a_classifier_classifies_no_features(batch):
    model = Model(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2), nn.ZeroPad1d((0, 1))), (5,), 3
    )
    task = LoopTask(model, LocalSettings())
    task.start(LocalSettings(), *model.initial(), 1)
    with pytest.raises(ValueError, match="does not end in a linear classifier"):
        task.net(model.initial()[0], batch).classify(torch.zeros(2, 4))


# --- in runs


@pytest.fixture
def run(engine, source, ragged):
    """run(batching, **sections): four rounds of a rule with a scale and a shift of each client's."""
    rules, net = source("joint_rules", RULES), source("net", NET)

    def trained(batching: dict[str, Any], **sections: Any) -> Any:
        return engine({
            "rounds": 4, "seed": 1, "client": f"{rules}:Shifted", "server": "fedavg",
            "model": {"name": f"{net}:net", "norm": "privacy" not in sections},
            "partition": ragged([20, 1, 9, 0, 14, 2, 7, 17]), "schedule": {"cohort": 5},
            "batching": {"size": 5, **batching}, "checkpoint": {"every": 0}, **sections,
            "local": {"steps": 3, "batch_size": 6, "lr": 0.05, **sections.get("local", {})},
        })[0]  # fmt: skip

    return trained


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_lanes_have_the_bits_of_loop_captured_or_not(precision, run):
    local = {"precision": precision}
    looped = run({"mode": "loop"}, local=local)
    captured = run({"mode": "lanes"}, local=local)
    uncaptured = run({"mode": "lanes", "capture": False}, local=local)
    (trainer,) = captured.executor.trainer.trainers
    assert trainer.has_captured and not trainer.refusals
    for other in (captured, uncaptured):
        for a, b in zip(looped.executor.xs, other.executor.xs, strict=True):
            assert a.tobytes() == b.tobytes()
    kept = [looped.store.get(client) for client in range(8)]
    assert any(state and np.abs(state["z"]).max() > 0 for state in kept)


def test_under_privacy_it_is_refused(run):
    privacy = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    with pytest.raises(
        RaysimError, match=r"privacy does not cover task\.joint_grad.*use task\.grad"
    ):
        run({"mode": "loop"}, privacy=privacy)


def test_a_server_computes_with_the_clients_models_without_public_data(run, source):
    server = f"{source('joint_rules', RULES)}:Ensemble"
    # With one client the ensemble is the model after the round.
    alone = {"server": server, "client": "fedavg", "rounds": 1, "dtype": "float64"}
    done = run({"mode": "loop"}, schedule={"cohort": 1}, **alone)
    state = done.executor.server.state
    W, b = state["x"][-90:-10].reshape(10, 8), state["x"][-10:]
    p = torch.softmax(W.sum(1) + b, 0)
    p[0] -= 1
    assert torch.allclose(state["h"], 1 - 0.5 * (p @ W), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "server, error", [("Unasked", "needs_task = True"), ("Public", "task.public: set needs_public")]
)
def test_what_a_server_did_not_ask_for_is_refused(server, error, run, source):
    with pytest.raises((ContractError, RaysimError), match=error):
        run({"mode": "loop"}, client="fedavg", server=f"{source('joint_rules', RULES)}:{server}")


@pytest.mark.parametrize("algorithm", ["fedgen", "pfedhn"])
def test_a_servers_nets_have_the_same_bits_after_a_resume(algorithm):
    """Their tensors come from a file, where memory is aligned otherwise."""
    testing.check_resume(algorithm=algorithm)
