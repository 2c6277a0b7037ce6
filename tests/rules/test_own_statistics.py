"""BatchNorm statistics of models that clients keep: how a rule moves them, and what is refused."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.oracle_cases import BATCH_NORM, MODES
from support.programs import program
from torch.nn.functional import cross_entropy

import raysim
from raysim.errors import ConfigError
from raysim.models.flat import Model
from raysim.prepare.resolve import prepare
from raysim.rules.batch import Batch
from raysim.rules.losses import task_loss
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask

RULES = program("own_statistics_rules")


@pytest.fixture
def rules(source):
    return source("own_rules", RULES)


@pytest.fixture
def given(base, ragged, source, rules):
    """given(client, ...): a small run on the net with BatchNorm, which evaluates its clients."""
    small = source("batch_norm", BATCH_NORM)

    def config(client: str, **sections):
        untracked = {k: v for k, v in base.items() if k not in ("run_dir", "tracking")}
        return {
            **untracked, "rounds": 1, "partition": {**ragged([9, 12, 7, 14]), "test": {"matched": True}},
            "evaluate": {"every": 0, "clients": {"every": 1}}, "schedule": {"cohort": 3},
            "model": {"name": f"{small}:Net"}, "server": "fedavg",
            "client": f"{rules}:{client}" if client[0].isupper() else client, **sections,
            "local": {"steps": 2, "batch_size": 6, "lr": 0.1, **sections.get("local", {})},
        }  # fmt: skip

    return config


@pytest.fixture
def net():
    """A net with two layers of BatchNorm in float64, as raysim's model and as PyTorch's module."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6, momentum=0.3), torch.nn.ReLU(),
        torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3),
    ).double()  # fmt: skip
    return Model(copy.deepcopy(module), (5,), 3, torch.float64), module


@pytest.mark.parametrize("loss", [task_loss, lambda net, batch: 2 * task_loss(net, batch)])
@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_a_pass_moves_the_statistics_that_it_is_given_as_a_module_does(kind, loss, net):
    """Three passes, at other parameters than those in training; the client's own stay."""
    model, module = net
    task = kind(model, LocalSettings())
    task.buffers = before = model.initial_buffers() + 0.5
    w, buffers = model.initial()[0], task.initial_buffers
    module.train()
    for _ in range(3):
        x, y = torch.randn(7, 5).double(), torch.randint(0, 3, (7,))
        module.zero_grad()
        cross_entropy(module(x), y).backward()
        g = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        given = buffers.clone()
        ours, moved = task.grad_and_buffers(w, Batch(x, y), buffers, loss)
        assert torch.equal(buffers, given)
        buffers = moved
        factor = 1 if loss is task_loss else 2
        assert torch.allclose(ours, factor * g, rtol=0, atol=1e-10)
        statistics = [
            module[1].running_mean,
            module[1].running_var,
            module[4].running_mean,
            module[4].running_var,
        ]
        assert torch.allclose(buffers, torch.cat(statistics), rtol=0, atol=1e-10)
    assert not task.losses and torch.equal(task.buffers, before)


@pytest.mark.parametrize("kind", [LoopTask, PureTask])
def test_a_net_without_statistics_has_none_to_move(kind):
    model = Model(torch.nn.Linear(5, 3), (5,), 3)
    task, batch = kind(model, LocalSettings()), Batch(torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    w = model.initial()[0]
    gradient, buffers = task.grad_and_buffers(w, batch, task.initial_buffers)
    assert torch.equal(gradient, task.grad(w, batch, mode="frozen")) and not len(buffers)


def test_statistics_of_another_shape_are_named(given):
    with pytest.raises(
        raysim.RaysimError, match=r"buffers is \[3\]; give .*\[12\], such as task\.initial_buffers"
    ):
        raysim.run(given("Wrong"), tracking=False)


@pytest.mark.parametrize("client", ["Own", "OnceSeen", "Stepped", "Begun"])
def test_a_model_of_the_clients_own_without_statistics_is_refused_before_the_run(client, given):
    """Also where the first evaluation, before a client has trained, would be right."""
    method = "begin" if client == "Begun" else "evaluated"
    with pytest.raises(ConfigError, match=rf"client\.name: {method} of client rule '{client.lower()}' returns parameters .* without BatchNorm statistics; .*task\.grad_and_buffers.*task\.buffers.*local\.buffers=personal") as refused:  # fmt: skip
        prepare(given(client))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("client", ["Named", "BegunNamed", "Received"])
def test_statistics_may_be_those_received(client, given):
    assert "clients/loss" in raysim.run(given(client), tracking=False).history[-1]


@pytest.mark.parametrize(
    "sections",
    [
        {"local": {"buffers": "personal"}},
        {"local": {"buffers": "frozen"}},
        {"model": {"name": "mlp", "hidden": [4]}},
        {"evaluate": {"every": 1}},
    ],
)
@pytest.mark.parametrize("client", ["Own", "Begun"])
def test_where_statistics_are_the_clients_or_none_parameters_do(client, sections, given):
    assert raysim.run(given(client, **sections), tracking=False).history


def test_averaged_statistics_of_different_models_are_pointed_out(given, rules, caplog):
    def warnings(**sections):
        caplog.clear()
        prepare(given("fedavg", **sections))
        return " ".join(r.message for r in caplog.records if r.levelno == logging.WARNING)

    pairs = {"server": f"{rules}:Pairs"}
    assert "server rule 'pairs' sends clients different models" in warnings(**pairs)
    assert not warnings(**pairs, local={"buffers": "personal"})
    assert not warnings(**pairs, model={"name": "mlp", "hidden": [4]})


def test_part_of_the_batch_norms_is_pointed_out(given, caplog, source):
    net = BATCH_NORM.replace(
        "nn.Linear(hidden, classes)",
        "nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, classes))",
    )
    model = {"name": source("two", net) + ":Net"}
    plan = prepare(given("fedavg", model=model, local={"personal": "bn"}))
    assert "the parameters of BatchNorm layer 'bn' are personal, but its statistics" in caplog.text
    assert plan.personal.statistics == "averaged"
    caplog.clear()
    plan = prepare(given("fedavg", model=model, local={"personal": "norm"}))
    assert plan.personal.statistics == "personal" and not caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_personal_norm_layers_keep_their_statistics(mode, given):
    """FedBN without `local.buffers`, and the same with it."""
    common = {"batching": {"mode": mode, "size": 2}, "rounds": 2, "dtype": "float64"}
    plain = raysim.run(given("fedavg", **common, local={"personal": "norm"}), tracking=False)
    both = {"personal": "norm", "buffers": "personal"}
    named = raysim.run(given("fedavg", **common, local=both), tracking=False)
    assert plain.digest == named.digest
    assert plain.history[-1]["clients/loss"] == named.history[-1]["clients/loss"]
