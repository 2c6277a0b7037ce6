"""Private steps: single gradients, clipping, noise, what is refused, and what the accountant says."""

from __future__ import annotations

from dataclasses import replace
from math import erf, exp, inf, log, sqrt

import numpy as np
import pytest
import torch
from support.programs import program
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import raysim
from raysim.errors import ConfigError
from raysim.models.flat import Model
from raysim.models.nets.zoo import lenet, mlp
from raysim.prepare.resolve import prepare
from raysim.rules import Batch, soft_cross_entropy
from raysim.runs.resume import resume
from raysim.training.tasks import dp_sgd
from raysim.training.tasks.dp_sgd import clipped_sum, epsilon, in_parts, passes
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.loop_task import LoopTask
from raysim.training.tasks.pure_task import PureTask


def batch(model: Model, n: int, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *model.shape, dtype=model.dtype, generator=rng)
    drop = tuple(
        (torch.rand(mask.shape(n), dtype=model.dtype, generator=rng) < mask.rate).to(model.dtype)
        for mask in model.dropouts
    )
    return Batch(x, torch.randint(0, model.classes, (n,), generator=rng), (drop,))


def dropping(shape, classes):
    net = mlp(shape, classes, (7,))
    net.insert(1, torch.nn.Sequential(torch.nn.Dropout(0.5)))
    return net


@pytest.fixture(params=["lenet", "dropout"])
def model(request) -> Model:
    shape = (1, 16, 16)
    net = lenet(shape, 4) if request.param == "lenet" else dropping(shape, 4)
    return Model(net, shape, 4, torch.float64)


def a_task(model: Model, kind: type) -> LoopTask | PureTask:
    w, buffers = model.initial()
    task = kind(model, LocalSettings(x0=w))
    task.buffers = buffers
    return task


def compared(w: torch.Tensor):
    """A loss that looks at another net, as MOON's and FedMLB's do."""

    def make(task, data):
        other = task.net(w, data, "eval")
        return lambda net, part: (
            F.mse_loss(net.features, other.features, reduction="none").sum(1) + net.logits[:, 0]
        )

    return make


@pytest.mark.parametrize("kind", [LoopTask, PureTask])
@pytest.mark.parametrize("which", ["plain", "soft", "compared"])
def test_single_gradients_are_those_of_each_example_by_itself(model, kind, which):
    task, data = a_task(model, kind), batch(model, 5)
    w = model.initial()[0] + 0.01

    def loss(part):
        if which == "compared":
            return compared(w + 0.02)(task, part)
        return (
            soft_cross_entropy
            if which == "soft"
            else lambda net, b: F.cross_entropy(net.logits, b.y, reduction="none")
        )

    rows, plain = task.sample_grads(w, data, loss(data), "train")
    for k in range(5):
        one = replace(
            data,
            x=data.x[k : k + 1],
            y=data.y[k : k + 1],
            drops=(tuple(d[k : k + 1] for d in data.drop),),
        )
        assert torch.allclose(rows[k], task.grad(w, one, loss(one), mode="frozen"), atol=1e-12)
        assert plain[k] == pytest.approx(
            float(F.cross_entropy(task.net(w, one).logits, one.y)), rel=1e-12
        )


def test_single_gradients_need_running_statistics_of_batch_norm():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = Model(net, (4,), 3, torch.float64)
    task, data = a_task(model, LoopTask), batch(model, 5)
    w = model.initial()[0]
    assert task.sample_grads(w, data)[0].any()
    for mode in ("train", "frozen"):
        with pytest.raises(ValueError, match=f"in mode '{mode}', so single .*; use mode 'eval'"):
            task.sample_grads(w, data, mode=mode)
    model.freeze_statistics()
    assert task.sample_grads(w, data, mode="train")[0].any()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x.unflatten(1, (2, 2)))[0][:, -1])


class BooleanMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.body(x)
        h = h.masked_scatter(h < 0, 0.1 * h[h < 0])
        return self.head(h)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *gradients):
        return 2 * gradients[0]


class OwnGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return Doubled.apply(self.head(x))


@pytest.mark.parametrize("net", [Recurrent, BooleanMask, OwnGradient])
def test_nets_that_vmap_cannot_map_have_single_gradients(net):
    model = Model(net(), (4,), 3, torch.float64)
    task, data = a_task(model, LoopTask), batch(model, 5)
    w = model.initial()[0]
    rows, _ = task.sample_grads(w, data)
    plain = net().double()
    nn.utils.vector_to_parameters(w, plain.parameters())
    for k in range(5):
        loss = F.cross_entropy(plain(data.x[k : k + 1]), data.y[k : k + 1])
        truth = torch.autograd.grad(loss, [*plain.parameters()])
        assert torch.allclose(rows[k], torch.cat([part.flatten() for part in truth]), atol=1e-12)


def test_a_net_that_computes_again_has_no_single_gradients():
    """The layer that is computed again would have other parameters than those of the example."""

    class Checkpointed(OwnGradient):
        def forward(self, x):
            return checkpoint(self.head, x, use_reentrant=False)

    model = Model(Checkpointed(), (4,), 3, torch.float64)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint.*; leave it out"):
        a_task(model, LoopTask).sample_grads(model.initial()[0], batch(model, 5))


def test_parts_are_the_whole(model, monkeypatch):
    data = batch(model, 7)
    monkeypatch.setattr(dp_sgd, "MAX_GRADIENT_BLOCK_NUMBERS", 3 * model.size)
    parts = list(in_parts(data, model.size))
    assert [len(part.y) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.x for part in parts]), data.x)
    assert all(
        torch.equal(torch.cat(d), whole)
        for *d, whole in zip(*(p.drop for p in parts), data.drop, strict=True)
    )


def test_no_single_gradient_is_longer_than_clip():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]], dtype=torch.float64)
    assert torch.allclose(
        clipped_sum(rows, 2.0),
        torch.tensor([1.2 + 0.3 + 1.2, 1.6 + 0.4 + 1.6], dtype=torch.float64),
    )
    assert torch.equal(clipped_sum(rows, None), rows.sum(0))
    for row in rows:
        assert clipped_sum(row[None], 2.0).norm() <= 2.0 + 1e-12
    broken = torch.tensor([[inf, 1.0]], dtype=torch.float64)
    assert not torch.isfinite(clipped_sum(broken, 2.0)).all()  # an overflow must not vanish


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_noise_has_the_scale_of_clip_and_is_keyed(mode, engine, base):
    """Two runs that differ in the noise alone differ by lr sigma C / B z, with z of variance 1."""
    many = {
        "dtype": "float64", "rounds": 1, "algorithm": "dpsgd", "local": {"lr": 0.5}, "schedule": {"cohort": 1},
        "partition": {"name": "iid", "clients": 20}, "batching": {"mode": mode},
    }  # fmt: skip
    ends = [
        engine({**many, "privacy": {"max_grad_norm": 0.3, "noise_multiplier": sigma}})[
            0
        ].executor.xs[-1]
        for sigma in (0.0, 2.0, 2.0, 4.0)
    ]
    z = (ends[1] - ends[0]) / (0.5 * 2.0 * 0.3)
    n = prepare({**base, **many}).clients.sizes[0]
    assert abs(np.std(z) * n - 1) < 0.05 and abs(np.mean(z) * n) < 0.05
    assert np.array_equal(ends[1], ends[2])
    assert np.allclose(ends[3] - ends[0], 2 * (ends[1] - ends[0]), atol=1e-12)


def exact_delta(eps: float, sigma: float) -> float:
    """Of the Gaussian mechanism (Balle and Wang 2018, theorem 8)."""

    def phi(t: float) -> float:
        return (1 + erf(t / sqrt(2))) / 2

    return phi(1 / (2 * sigma) - eps * sigma) - exp(eps) * phi(-1 / (2 * sigma) - eps * sigma)


@pytest.mark.parametrize(("sigma", "uses"), [(1.0, 1), (2.0, 10), (8.0, 100), (0.5, 3)])
def test_epsilon_lies_between_the_exact_value_and_the_textbooks_bound(sigma, uses):
    """Gaussian mechanisms compose into one of sigma / √uses; Rényi's bound is min_α uses α / 2σ² +
    log(1/δ)/(α - 1)."""
    delta, found = 1e-5, epsilon(sigma, 1e-5, uses)
    assert exact_delta(found, sigma / sqrt(uses)) <= delta
    loose = uses / (2 * sigma**2) + sqrt(2 * uses * log(1 / delta)) / sigma
    assert found <= loose * 1.02
    assert epsilon(sigma, delta, 2 * uses) > found > epsilon(2 * sigma, delta, uses)


def test_epsilon_at_the_ends():
    assert epsilon(1.0, 1e-5, 0) == 0.0
    assert epsilon(0.0, 1e-5, 1) == inf


def test_passes_count_who_was_used_most():
    assert passes(np.array([0, 0]), np.array([3, 1])) == 0
    assert passes(np.array([4, 0]), np.array([3, 1])) == 2  # the second pass has begun
    assert passes(np.array([3, 2]), np.array([3, 1])) == 2
    assert passes(np.array([0]), np.array([0])) == 0  # a client without data


def test_what_was_spent_is_told_and_survives_a_resume(base):
    config = {
        **base,
        "algorithm": "dpsgd",
        "privacy": {"noise_multiplier": 2.0},
        "checkpoint": {"every": 2},
        "seed": 3,
    }
    config |= {"partition": {"name": "iid", "clients": 12}, "schedule": {"cohort": 6}}
    whole = raysim.run({**config, "rounds": 6, "run_dir": base["run_dir"] + "-whole"})
    raysim.run({**config, "rounds": 3})
    again = resume(base["run_dir"], ["rounds=6"])
    told = [record["privacy/epsilon"] for record in whole.history[1:]]
    assert told == [record["privacy/epsilon"] for record in again.history[1:]]
    assert told == sorted(told) and told[0] == epsilon(2.0, 1e-5, 1)
    assert again.digest == whole.digest


SECOND_LOOK = program("privacy_second_look")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "fedavg", "model": "tinynn"}, ("tinynn", "BatchNorm", "GroupNorm")),
        ({"algorithm": "gradma_w"}, ("gradma", "fedavg")),
        ({"algorithm": "fedreg_mg"}, ("fedreg_mg", "fedavg")),
        (
            {"algorithm": "fedavg", "privacy": {"noise_multiplier": -0.1}},
            ("privacy.noise_multiplier", "-0.1"),
        ),
        (
            {"algorithm": "fedavg", "privacy": {"max_grad_norm": None, "noise_multiplier": 0.1}},
            ("noise_multiplier", "max_grad_norm"),
        ),
        ({"algorithm": "fedavg", "privacy": {"max_grad_norm": 0}}, ("privacy.max_grad_norm",)),
        ({"algorithm": "fedavg", "privacy": {"delta": 1}}, ("privacy.delta",)),
    ],
)
def test_what_cannot_be_private_is_refused(change, words, base):
    with pytest.raises(ConfigError) as refused:
        prepare({**base, "rounds": 1, "privacy": {"noise_multiplier": 0.1}, **change})
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_rule_that_looks_twice_is_stopped_by_name(base, source):
    mine = source("twice", SECOND_LOOK)
    with pytest.raises(
        ConfigError, match=r"client.name: .*privacy covers the gradient in mode 'train'"
    ):
        raysim.run(
            {
                **base,
                "rounds": 1,
                "client": f"{mine}:TwiceClient",
                "server": "fedavg",
                "privacy": {"noise_multiplier": 0.1},
            }
        )


MEETING = """
from dataclasses import dataclass

from raysim.rules import ClientRule, task_loss


def meeting(net, batch):
    h = net.features
    return task_loss(net, batch) + (h - h.mean(0)).square().sum(1)


@dataclass(frozen=True)
class Loss(ClientRule):
    def loss(self, shared, state, net, batch, task):
        return meeting(net, batch)


@dataclass(frozen=True)
class Direction(ClientRule):
    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch, meeting)


@dataclass(frozen=True)
class OwnAlone(ClientRule):
    def loss(self, shared, state, net, batch, task):
        return task_loss(net, batch) + net.features.square().sum(1)
"""


def test_a_rule_whose_loss_couples_examples_is_refused_under_example_privacy(base, source):
    path = source("meeting", MEETING)
    keys = {"rounds": 1, "server": "fedavg", "model": {"name": "mlp", "hidden": [4]}}
    privacy = {"max_grad_norm": 0.01, "noise_multiplier": 0.1}
    for name in ("Loss", "Direction"):
        config = {**base, **keys, "client": f"{path}:{name}"}
        with pytest.raises(
            ConfigError,
            match=r"^client\.name: .*changes with the other examples .*meeting\.py, line",
        ):
            prepare({**config, "privacy": privacy})
        prepare(config)
    prepare({**base, **keys, "client": f"{path}:OwnAlone", "privacy": privacy})


LOOK = program("privacy_look")


@pytest.mark.parametrize(("rule", "method"), [("Leak", "sample_grads"), ("Whole", "full_grad")])
def test_a_rule_that_looks_another_way_is_stopped_unless_it_says_so(
    rule, method, base, source, caplog
):
    config = {
        **base,
        "rounds": 1,
        "client": {"name": f"{source('look', LOOK)}:{rule}"},
        "server": "fedavg",
    }
    config |= {"privacy": {"noise_multiplier": 1}}
    with pytest.raises(
        ConfigError, match=rf"client.name: .*privacy does not cover what comes of task.{method}"
    ):
        raysim.run(config)
    if rule == "Leak":
        config["client"] = {**config["client"], "said": True}
        raysim.run({**config, "run_dir": base["run_dir"] + "-said"})
        assert "uploads delta without protection" in caplog.text


def test_what_stays_unprotected_is_said_and_tagged(base, caplog):
    from raysim.runs.tracked_start import run_tags

    plan = prepare(
        {**base, "rounds": 1, "algorithm": "fedcurv", "privacy": {"noise_multiplier": 0.1}}
    )
    assert "fedcurv" in caplog.text and "fisher" in caplog.text
    assert run_tags(plan)["privacy.unprotected"] == "fisher"
    assert "privacy.unprotected" not in run_tags(
        prepare({**base, "rounds": 1, "algorithm": "fedavg"})
    )


def test_integers_have_no_gradient_of_inputs():
    net = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3))
    model = Model(
        net, (4,), 3, torch.float64, sample=Batch(torch.zeros(2, 4).long(), torch.zeros(2).long())
    )
    data = Batch(torch.randint(0, 9, (5, 4)), torch.randint(0, 3, (5,)))
    with pytest.raises(ValueError, match=r"task\.input_grad: inputs of type torch\.int64"):
        a_task(model, LoopTask).input_grad(model.initial()[0], data)
