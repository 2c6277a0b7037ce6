"""Nets that users hand over come out as plain PyTorch trains them, or are refused in one sentence.

The truth is federated averaging in PyTorch with the user's own module: its outputs, gradients and
statistics, in training and in evaluation mode."""

from __future__ import annotations

import copy
import logging
import random
import threading
import time
import warnings
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.plain_fedavg import blobs, check, cut, evaluated, fedavg, run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from raysim.errors import ConfigError
from raysim.models.checks import against_pytorch
from raysim.models.checks.against_pytorch import check_same_outputs, sample_outputs
from raysim.models.flat import Model
from raysim.prepare.resolve import prepare
from raysim.runs.python_inputs import named_source
from raysim.system.torchvision_operators import import_declaring_operators

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA, PARTS = blobs(), cut([60, 30, 20, 10])


def sequence(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


class NormAndActivation(nn.BatchNorm1d):
    def forward(self, x):
        return torch.relu(super().forward(x))


class OwnMomentum(nn.BatchNorm1d):
    def forward(self, x):
        running = self.running_mean, self.running_var
        return F.batch_norm(x, *running, self.weight, self.bias, self.training, 0.3, self.eps)


class CalledTwice(nn.BatchNorm1d):
    def __call__(self, x):
        return 2 * super().__call__(x)


class NeverTrains(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class ScalesAtTest(nn.Dropout):
    def forward(self, x):
        return x if self.training else x / 2


class OwnStatistics(nn.Module):
    """Subtracts running means that it moves in place, or puts new ones in their place."""

    def __init__(self, rebinds):
        super().__init__()
        self.register_buffer("means", torch.zeros(8))
        self.rebinds = rebinds

    def forward(self, x):
        if not self.training:
            return x - self.means
        mean = x.mean(0)
        if self.rebinds:
            self.means = 0.9 * self.means + 0.1 * mean.detach()
        else:
            self.means.mul_(0.9).add_(0.1 * mean.detach())
        return x - mean


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


class FindsItsNorms(WithNorm):
    def forward(self, x):
        h = self.body(x)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm1d):
                h = torch.relu(layer(h))
        return self.head(h)


class AsksForTheVeryType(WithNorm):
    def forward(self, x):
        h = self.body(x)
        for layer in self.children():
            if type(layer) is nn.BatchNorm1d:
                h = torch.relu(layer(h))
        return self.head(h)


class NormAsFunction(WithNorm):
    def forward(self, x):
        norm = self.norm
        running = norm.running_mean, norm.running_var
        h = F.batch_norm(
            self.body(x), *running, norm.weight, norm.bias, self.training, 0.2, norm.eps
        )
        return self.head(torch.relu(h))


class ForwardOfTheClass(WithNorm):
    def forward(self, x):
        return self.head(torch.relu(nn.BatchNorm1d.forward(self.norm, self.body(x))))


class KeepsNormInEvaluation(WithNorm):
    def __init__(self):
        super().__init__()
        self.norm.running_mean += 0.5

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()  # and returns nothing, as many forget


class NormOfLargeBatches(WithNorm):
    """Leaves its norm out on the first examples, which are few, and in passes without gradients."""

    def __init__(self, needs_gradients):
        super().__init__()
        self.needs_gradients = needs_gradients

    def forward(self, x):
        h = self.body(x)
        is_on = torch.is_grad_enabled() if self.needs_gradients else len(x) > 4
        return self.head(self.norm(h) if is_on or not self.training else h)


class MeanOfWeights(nn.Module):
    """Evaluates with an average of its weights, which starts as their copy, or trains with it."""

    def __init__(self, trains, momentum=0.1):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.trains, self.momentum = nn.Linear(6, 3), trains, momentum
        self.register_buffer("mean", self.head.weight.detach().clone())

    def forward(self, x):
        if not self.training:
            return F.linear(x, self.mean, self.head.bias)
        with torch.no_grad():
            self.mean.lerp_(self.head.weight, self.momentum)
        return self.head(x) + (F.linear(x, self.mean) if self.trains else 0)


class RestsAtFirst(OwnStatistics):
    """Moves its means where `moves` says so, of the pass and its inputs."""

    def __init__(self, moves):
        super().__init__(True)
        self.moves = moves
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            return x - self.means
        self.passes += 1
        if self.moves(self.passes, x):
            self.means = 0.9 * self.means + 0.1 * x.detach().mean(0)
        return x


def from_zero() -> nn.Module:
    """The means are those of a layer that starts at zero."""
    net = sequence(OwnStatistics(False))
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    return net


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head, self.extra = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.head(h) + self.extra(h) if self.training else self.head(h)


class Cooler(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) if self.training else self.head(x) / 4


class StoresActivations(Cooler):
    def forward(self, x):
        self.last, self.shape = self.head(x), x.shape
        return self.last


class KeepsConstants(Cooler):
    """Keeps a constant that depends only on the number of examples."""

    def forward(self, x):
        if not hasattr(self, "positions") or len(self.positions) != len(x):
            self.positions = torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None]
        return self.head(x) + self.positions


def of_a_type_for_checkers(shape: Sequence[int], classes: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], width), nn.Linear(width, classes))


def with_activation(shape, classes, last: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], classes), getattr(nn, str(last))())


@pytest.mark.parametrize(
    ("make", "keys"),
    [(of_a_type_for_checkers, {"width": 4}), (with_activation, {"last": "Tanh"})],
)
def test_annotations_that_say_nothing_here_are_not_checked(make, keys):
    """One names a type that only type checkers import, the other an nn.Module."""
    assert run({"name": make, **keys}, DATA, PARTS, 1).config.model.parameters == keys


class MultipliesBy(nn.Module):
    def __init__(self, scale: torch.Tensor):
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x * self.scale


def with_shared_constant() -> nn.Module:
    scale = torch.linspace(1, 2, 8)
    return sequence(MultipliesBy(scale), nn.Tanh(), MultipliesBy(scale))


class OnlyCounts(Cooler):
    """Outputs do not depend on the counter, so it is no harm."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(x)


class HoldsGenerators(Cooler):
    """They drew its first weights, and draw nothing more."""

    def __init__(self):
        super().__init__()
        self.own, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(0)
        nn.init.normal_(self.head.weight, generator=self.own)


class ReadsItsRate(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.drop = nn.Linear(6, 3), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.head(x)) * (0.5 - self.drop.p)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.0, inplace=True), nn.Linear(8, 3)  # fmt: skip

    def forward(self, x):
        h = self.body(x)
        return self.head(self.drop(h) + h)


class ChangesInputs(Cooler):
    def forward(self, x):
        x.mul_(0.5)[:, 0] = 1
        return self.head(x)


class InputGradients(nn.Module):
    """Outputs are forces, the gradients of an energy by the inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.enable_grad():
            x.requires_grad_()
            energies = self.head(torch.tanh(self.body(x)))
            (forces,) = torch.autograd.grad(energies.square().sum(), x, create_graph=True)
        return energies - forces[:, :3]


class SetsRequiresGrad(WithNorm):
    """Freezes its body in training mode, or in evaluation mode."""

    def __init__(self, in_training):
        super().__init__()
        self.in_training = in_training
        self.body.requires_grad_(in_training)

    def train(self, mode=True):
        super().train(mode)
        self.body.requires_grad_(mode != self.in_training)
        return self


class Permutes(nn.Module):
    """Holds whole numbers as a parameter that is not trained."""

    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)
        self.numbers = nn.Parameter(torch.tensor(numbers), requires_grad=False)

    def forward(self, x):
        return self.head(x)[:, self.numbers.long()]


def with_hook(register: str, hook, *layers: nn.Module) -> nn.Module:
    net = sequence(*layers)
    getattr(net[1 if layers else 0], register)(hook)
    return net


def changed(change, index: int, *layers: nn.Module) -> nn.Module:
    net = sequence(*layers)
    change(net[index])
    return net


class Neighbours(nn.Module):
    def __init__(self, matrix, is_buffer):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)
        if is_buffer:
            self.register_buffer("neighbours", matrix)
        else:
            self.neighbours = matrix

    def forward(self, x):
        return self.head((self.neighbours @ x.T).T)


NETS = {
    "sparse attribute": lambda: Neighbours(torch.eye(6).double().to_sparse(), False),
    "norm with activation": lambda: sequence(NormAndActivation(8)),
    "norm with a momentum of its own": lambda: sequence(OwnMomentum(8)),
    "norm of PyTorch before one of the user's": lambda: sequence(
        nn.BatchNorm1d(8), nn.ReLU(), NormAndActivation(8)
    ),
    "norm with its own call": lambda: sequence(CalledTwice(8)),
    "norm that never trains": lambda: sequence(NeverTrains(8)),
    "SyncBatchNorm": lambda: sequence(nn.SyncBatchNorm(8)),
    "norm without statistics": lambda: sequence(nn.BatchNorm1d(8, track_running_stats=False)),
    "norm without weights": lambda: sequence(nn.BatchNorm1d(8, affine=False)),
    "norm that keeps its statistics": lambda: sequence(nn.BatchNorm1d(8, momentum=0.0)),
    "instance norm with statistics": lambda: sequence(
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
    ),
    "own statistics": lambda: sequence(OwnStatistics(False)),
    "own statistics, rebound": lambda: sequence(OwnStatistics(True)),
    "dropout that scales at test": lambda: sequence(ScalesAtTest(0.0)),
    "norm of large batches": lambda: NormOfLargeBatches(False),
    "norm where gradients are on": lambda: NormOfLargeBatches(True),
    "mean of weights, in evaluation": lambda: MeanOfWeights(False),
    "mean of weights, in training": lambda: MeanOfWeights(True, 1e-4),
    "statistics from the third pass": lambda: sequence(RestsAtFirst(lambda n, x: n > 2)),
    "statistics where gradients are on": lambda: sequence(
        RestsAtFirst(lambda n, x: torch.is_grad_enabled())
    ),
    "statistics of what has a gradient": lambda: sequence(
        RestsAtFirst(lambda n, x: x.requires_grad)
    ),
    "statistics of zeros": from_zero,
    "rate of a dropout": ReadsItsRate,
    "dropout in place": InPlace,
    "isinstance": FindsItsNorms,
    "type": AsksForTheVeryType,
    "norm as a function": NormAsFunction,
    "forward of the class": ForwardOfTheClass,
    "hook": lambda: with_hook("register_forward_hook", lambda m, x, h: h / 2, nn.BatchNorm1d(8)),
    "pre-hook": lambda: with_hook(
        "register_forward_pre_hook", lambda m, x: (3 * x[0],), nn.BatchNorm1d(8)
    ),
    "hook on a linear layer": lambda: with_hook("register_forward_hook", lambda m, x, h: h.tanh()),
    "backward hook": lambda: with_hook(
        "register_full_backward_hook", lambda m, g, h: (2 * g[0],), nn.Tanh()
    ),
    "weight norm": lambda: changed(parametrizations.weight_norm, 0),
    "spectral norm": lambda: changed(parametrizations.spectral_norm, 2, nn.Tanh()),
    "norm with a parametrisation": lambda: changed(
        parametrizations.weight_norm, 1, nn.BatchNorm1d(8)
    ),
    "forward of one layer": lambda: changed(
        lambda m: setattr(m, "forward", torch.relu), 1, nn.BatchNorm1d(8)
    ),
    "two heads": TwoHeads,
    "changes its inputs": ChangesInputs,
    "activation in place": lambda: nn.Sequential(nn.ReLU(inplace=True), *sequence()),
    "gradients by inputs": InputGradients,
    "train() freezes": lambda: SetsRequiresGrad(True),
    "train() melts": lambda: SetsRequiresGrad(False),
    "cooler": Cooler,
    "train() of its own": KeepsNormInEvaluation,
    "handed over in evaluation mode": lambda: sequence(nn.BatchNorm1d(8)).eval(),
    "activations": StoresActivations,
    "constants": KeepsConstants,
    "shared constant": with_shared_constant,
    "counter for a log": OnlyCounts,
    "generators for its first weights": HoldsGenerators,
    "frozen layer": lambda: changed(lambda m: m.requires_grad_(False), 0, nn.BatchNorm1d(8)),
    "parameter of integers": lambda: Permutes([2, 0, 1]),
    "parameter of true and false": lambda: Permutes([True, False, True]),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
def test_a_users_net_trains_as_in_pytorch(make):
    net = make()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    result = run(net, DATA, PARTS)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), "a check before a run changed the net"
    check(result, fedavg(make(), DATA, PARTS), DATA)


def test_a_norm_kept_in_evaluation_needs_no_second_example():
    assert not Model(KeepsNormInEvaluation(), (6,), 3).needs_two_examples
    assert Model(WithNorm(), (6,), 3).needs_two_examples


@pytest.mark.parametrize("share", [1e-6, 1e-2])
def test_gradients_that_cancel_differ_by_rounding_of_their_terms(share, monkeypatch):
    """That of a bias before BatchNorm is rounding alone, which need not be the same twice."""
    passes, original, net = count(), against_pytorch._pass, sequence(nn.BatchNorm1d(8))

    def with_rounding(*arguments):
        made = original(*arguments)
        if next(passes) % 2:
            terms = max(float(g.abs().max()) for g in made.gradients)
            made.gradients = [
                g + share * terms * (2 * torch.rand(g.shape) - 1) for g in made.gradients
            ]
        return made

    monkeypatch.setattr(against_pytorch, "_pass", with_rounding)
    if share < 1e-5:
        run(net, DATA, PARTS, rounds=1, dtype="float32")
    else:
        with pytest.raises(ConfigError, match="another gradient"):
            run(net, DATA, PARTS, rounds=1, dtype="float32")


# -- nets that couple the examples of a batch


class Coupled(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how

    def forward(self, x):
        return self.head(torch.relu(self.how(self.body(x))))


class ChangesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, change):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.change = change
        return h.clone()

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.change(g), None


def with_gradient(change):
    return lambda h: ChangesGradient.apply(h, change)


COUPLINGS = {
    "mean of the batch": lambda h: h - h.mean(0),
    "a little of it": lambda h: h - 0.02 * h.mean(0),
    "attention among examples": lambda h: torch.softmax(h @ h.transpose(-1, -2), -1) @ h,
    "norm of a gradient": with_gradient(lambda g: g / g.norm()),
    "sign of a gradient": with_gradient(lambda g: 0.01 * g.sign()),
    "clipped gradient": with_gradient(lambda g: g.clamp(-0.001, 0.001)),
}


@pytest.mark.parametrize("how", COUPLINGS.values(), ids=COUPLINGS)
def test_pooling_leaves_out_nets_that_couple_examples(how):
    sizes = np.random.default_rng(2).integers(2, 58, 39).tolist()
    data, parts = blobs(1200), cut([*sizes, 1200 - sum(sizes)])
    result = run(Coupled(how), data, parts, 2)
    assert result.config.batching.mode == "loop"
    check(result, fedavg(Coupled(how), data, parts, 2), data)
    on_lanes = run(Coupled(how), data, parts, 2, batching={"mode": "lanes"})
    check(on_lanes, fedavg(Coupled(how), data, parts, 2), data)
    one_step = {"steps": 1, "batch_size": "full", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"batching\.mode"):
        run(Coupled(how), data, parts, 2, local=one_step, batching={"mode": "pooled"})
    check(
        run(Coupled(how), data, parts, 2, local=one_step),
        fedavg(Coupled(how), data, parts, 2, steps=1),
        data,
    )


class CoupledIfLarge(Coupled):
    """Its examples meet in batches of more than 16 only, or where inputs are large."""

    def forward(self, x):
        z = self.body(x)
        if self.how == "many":
            return self.head(z - z[:16].mean(0) if len(x) > 16 else z)
        return self.head(z * (2.5 / z.detach().norm(dim=1).max()).clamp(max=1))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("how", ["many", "large"])
def test_examples_that_meet_only_sometimes_are_not_mixed_with_those_of_others(how, steps):
    sizes = np.random.default_rng(2).integers(2, 58, 39).tolist()
    data, parts = blobs(1200), cut([*sizes, 1200 - sum(sizes)])
    local = {"steps": steps, "batch_size": "full", "lr": 0.1}
    right = fedavg(CoupledIfLarge(how), data, parts, 2, steps=steps)
    check(run(CoupledIfLarge(how), data, parts, 2, local=local), right, data)


def test_private_gradients_are_refused_for_a_net_that_couples_examples():
    privacy = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ConfigError, match="gradient of an example depend on the other examples"):
        run(Coupled(COUPLINGS["mean of the batch"]), DATA, PARTS, privacy=privacy)


# -- parameters without gradient


class TwoBranches(nn.Module):
    """A batch uses one of two heads; `never` is used by none."""

    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(1)
        self.warm, self.cold = nn.Linear(6, 3), nn.Linear(6, 3)
        if unused:
            self.never = nn.Linear(6, 3)

    def forward(self, x):
        return self.warm(x) if x[:, 0].mean() > 0 else self.cold(x)


OPTIMIZERS = {
    "sgd": ({"name": "sgd", "weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (
        {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "dampening": (
        {"name": "sgd", "momentum": 0.9, "dampening": 0.5},
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5},
    ),
    "adam": ({"name": "adam", "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": ({"name": "adamw", "weight_decay": 0.5}, torch.optim.AdamW, {"weight_decay": 0.5}),
    "rmsprop": (
        {"name": "rmsprop", "momentum": 0.5},
        torch.optim.RMSprop,
        {"momentum": 0.5},
    ),
    "adagrad": (
        {"name": "adagrad", "weight_decay": 0.1},
        torch.optim.Adagrad,
        {"weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize(
    ("section", "optimizer", "keys", "unused"),
    [*((*given, False) for given in OPTIMIZERS.values()), (*OPTIMIZERS["adam"], True)],
    ids=[*OPTIMIZERS, "adam, unused"],
)
def test_parameters_without_gradient_are_left_alone(section, optimizer, keys, unused):
    x, y, *test = DATA
    x = x.copy()
    x[:, 0] = np.where(np.arange(120) < 60, 1, -1) * np.abs(x[:, 0])
    data, parts = (x, y, *test), [list(range(60)), list(range(60, 120))]
    local = {"steps": 3, "batch_size": "full", "lr": 0.1, "optimizer": section}
    right = fedavg(
        TwoBranches(unused), data, parts, 4, steps=3,
        optimizer=lambda net: optimizer(net.parameters(), lr=0.1, **keys),
    )  # fmt: skip
    check(run(TwoBranches(unused), data, parts, 4, local=local), right, data)


def test_a_branch_that_changes_between_steps_counts_its_own_steps():
    """Adam's bias correction is that of each parameter's own steps."""

    class Alternates(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.warm, self.cold = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            # The first layer's own weights decide, so that local steps take both ways.
            return self.warm(x) if self.warm.weight.sum() > 0.2 else self.cold(x) + 0 * self.warm(x)

    local = {"steps": 6, "batch_size": "full", "lr": 0.1, "optimizer": {"name": "adamw", "weight_decay": 0.1}}  # fmt: skip
    right = fedavg(
        Alternates(), DATA, PARTS, 3, steps=6,
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1),
    )  # fmt: skip
    check(run(Alternates(), DATA, PARTS, 3, local=local), right, DATA)


# -- refused in one sentence


class Head(nn.Module):
    """A head whose outputs `change` changes."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.change, self.calls = nn.Linear(6, 3), change, 0

    def forward(self, x):
        return self.head(x) * self.change(self)


class Counts(Head):
    def forward(self, x):
        self.calls += 1
        return self.head(x) / (1 + (self.calls > 1000))


class Toggles(Head):
    def forward(self, x):
        self.change = not self.change
        return self.head(x) if self.change else 2 * self.head(x)


class CountsWithGradients(Head):
    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        return self.head(x) * (1 + self.calls % 2)


class Teacher(Head):
    """Moves frozen parameters, which start as a copy, towards the trained ones."""

    def __init__(self, evaluates):
        super().__init__(None)
        self.evaluates = evaluates
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x):
        if not self.training:
            return (self.teacher if self.evaluates else self.head)(x)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 1e-4)
        return self.head(x) + self.teacher(x)


def moved_by_backward() -> nn.Module:
    layer = OwnStatistics(True)

    def move(layer, gradients, of_outputs):
        layer.means += of_outputs[0].norm(dim=0)

    layer.register_full_backward_hook(move)
    return sequence(layer)


class CountsInABuffer(Head):
    def __init__(self):
        super().__init__(None)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        return self.head(x) / (1 + self.seen)


class CountsInItsClass(Head):
    passes = 0

    def forward(self, x):
        CountsInItsClass.passes += 1
        return self.head(x) / (1 + (self.passes > 1000))


class Queue(Head):
    """Subtracts the mean of its last inputs; a buffer or an attribute says where the next go."""

    def __init__(self, in_a_buffer):
        super().__init__(None)
        self.register_buffer("last", torch.zeros(32, 6))
        if in_a_buffer:
            self.register_buffer("next", torch.zeros((), dtype=torch.int64))
        else:
            self.next = 0

    def forward(self, x):
        if self.training:
            self.last[(int(self.next) + torch.arange(len(x))) % 32] = x.detach()
            self.next += len(x)
        return self.head(x - self.last.mean(0))


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(sequence(), torch.ones(2, 6))  # pyright: ignore


class Locked(Head):
    def __init__(self):
        super().__init__(None)
        self.lock = threading.Lock()


class Keeps(Head):
    """Keeps the outputs of all passes, or those of the last one."""

    def __init__(self, start):
        super().__init__(None)
        self.register_buffer("kept", start)

    def forward(self, x):
        h = self.head(x)
        if self.training:
            self.kept = h.detach() if self.kept is None else torch.cat([self.kept, h.detach()])
        return h


class Clamps(Head):
    def forward(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-self.change, self.change)
        return self.head(x)


class ListOfParameters(Head):
    def __init__(self):
        super().__init__(None)
        self.scales = [nn.Parameter(torch.ones(3))]

    def forward(self, x):
        return self.head(x) * self.scales[0]


class LeavesOutItsBody(WithNorm):
    def parameters(self, recurse=True):
        return self.head.parameters(recurse)


class Detached(Head):
    @torch.no_grad()
    def forward(self, x):
        return self.head(x)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3, dtype=torch.cfloat))

    def forward(self, x):
        return (x.to(self.w.dtype) @ self.w).abs()


class DropsInEvaluation(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


class MovesInEvaluation(OwnStatistics):
    def forward(self, x):
        self.means.add_(x.mean(0).detach())
        return x - self.means


def renormalised() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 3))

    def divide(layer, inputs):
        layer.weight.data.div_(layer.weight.data.norm())

    net[0].register_forward_pre_hook(divide)
    return net


class KeepsFirstMean(Head):
    """Centres all inputs by its first batch."""

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.mean = x.mean(0).detach()
        return self.head(x - self.mean)


class CountsInATensor(Head):
    """Is warm after many passes."""

    def __init__(self, change):
        super().__init__(change)
        self.passes = torch.tensor(0)

    def forward(self, x):
        self.passes = self.passes + 1
        return self.head(x) * (2 if self.passes > 900 else 1)


class SavesItsHead(Head):
    def state_dict(self, *args, **keys):
        return self.head.state_dict(*args, **keys)


class SavesNothing(Head):
    def state_dict(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        return {}


def renamed_by_a_hook() -> nn.Module:
    net = Head(None)

    def rename(module, state, prefix, metadata):
        for key in list(state):
            state[key.replace("head", "top")] = state.pop(key)

    net.register_state_dict_post_hook(rename)
    return net


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 3)), {nn.Linear})


class RandomFeatures(nn.Module):
    """Its features come from `generator`, by default one of its own, which nobody seeds."""

    def __init__(self, draw=lambda *shape: np.random.default_rng().normal(size=shape)):
        super().__init__()
        self.features, self.head = torch.tensor(draw(6, 9)), nn.Linear(9, 3)

    def forward(self, x):
        return self.head(torch.cos(x @ self.features))


class HooksInForward(Head):
    """Its weight is a leaf, so that the hooks of all passes stay."""

    def forward(self, x):
        if torch.is_grad_enabled():
            self.head.weight.register_hook(lambda g: g / 2)
        return self.head(x)


class Unfreezes(WithNorm):
    """Its body is trained after a number of passes."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        self.body.requires_grad_(self.passes > 100)
        return super().forward(x)


class SparseRows(Head):
    def forward(self, x):
        return F.embedding((x[:, 0] > 0).long(), self.head.weight, sparse=True)[:, :3]


class SparseLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(2, 3, sparse=True)

    def forward(self, x):
        return self.rows((x[:, 0] > 0).long())


class Observes(nn.Module):
    """Its range comes to rest on the same inputs, as that of torch.ao.quantization.FakeQuantize."""

    def __init__(self):
        super().__init__()
        self.register_buffer("top", torch.tensor(0.0))

    def forward(self, x):
        self.top.copy_(torch.maximum(self.top, x.detach().max()))
        return x.clamp(max=self.top)


class Unsaved(OwnStatistics):
    def __init__(self):
        super().__init__(True)
        self.register_buffer("means", torch.zeros(8), persistent=False)


def tied_by_data() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    net[1].weight.data = net[0].weight.data
    return net


class AnotherName(Head):
    """Has its first weight under another name, too."""

    def __init__(self, is_buffer: bool):
        super().__init__(lambda m: 1.0)
        if is_buffer:
            self.register_buffer("again", None)
        self.again = self.head.weight.data


def with_shared_statistics() -> nn.Module:
    net = sequence(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    net[2].running_mean = net[1].running_mean
    return net


class RemembersTraining(Cooler):
    """Notes in training mode that it was trained, and asks for it in evaluation mode."""

    def __init__(self, how):
        super().__init__()
        self.how, self.flag = how, False
        self.register_buffer("trained", torch.tensor(False))
        self.register_buffer("level", torch.tensor(0))

    def train(self, mode=True):
        self.flag |= mode and self.how == "train"
        return super().train(mode)

    def forward(self, x):
        if not self.training:
            return self.head(x) * (1 + self.flag + self.trained + self.level)
        self.flag |= self.how == "attribute"
        self.trained.logical_or_(torch.tensor(self.how == "buffer"))
        self.level.fill_(self.how == "integer")
        return self.head(x)


class DrawsFromItsOwn(Cooler):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x):
        return self.head(x) + torch.rand(3, generator=self.own)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises its parametrisations
        return changed(nn.utils.weight_norm, 0)


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return changed(nn.utils.spectral_norm, 2, nn.Tanh())


def pruned() -> nn.Module:
    net = sequence(nn.Tanh())
    for index, name in ((0, "weight"), (0, "weight"), (2, "bias")):
        prune.l1_unstructured(net[index], name, amount=2)
    return net


def detached_copy(net: nn.Module) -> nn.Module:
    """A net whose computed weights can be copied; its hooks compute them anew before each pass."""
    for layer in net.modules():
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                vars(layer)[name] = value.detach()
    return net


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("make", [old_weight_norm, old_spectral_norm, pruned])
def test_weights_that_hooks_compute_train_as_in_pytorch(make, mode):
    result = run(make(), DATA, PARTS, batching={"mode": mode})
    check(result, fedavg(detached_copy(make()), DATA, PARTS), DATA)


def hooked_tensor() -> nn.Module:
    net = sequence()
    net[0].weight.register_hook(lambda g: g / 2)
    return net


OWN_GENERATOR = np.random.default_rng(0)

REFUSED = {
    "torch": (lambda: Head(lambda m: torch.rand(())), "generator in evaluation mode, in the net"),
    "torch in evaluation": (
        lambda: Head(lambda m: 1 if m.training else torch.rand(())),
        "generator in evaluation mode",
    ),
    "Python": (lambda: Head(lambda m: random.random()), "Python's global generator"),
    "NumPy": (lambda: Head(lambda m: np.random.rand()), "NumPy's global generator"),
    "own generator": (lambda: Head(lambda m: OWN_GENERATOR.random()), "two outputs for the same"),
    "clock": (lambda: Head(lambda m: 1 + time.perf_counter()), "two outputs for the same"),
    "subclass of dropout": (lambda: sequence(DropsInEvaluation(0.5)), r"1 \(DropsInEvaluation\)"),
    "switch": (lambda: Toggles(False), "attribute 'change' of the net"),
    "counter": (lambda: Counts(None), "attribute 'calls' of the net"),
    "counter where gradients are on": (
        lambda: CountsWithGradients(None),
        "attribute 'calls' of the net",
    ),
    "teacher": (lambda: Teacher(False), "parameter 'teacher.weight' .* make a mean .* a buffer"),
    "teacher in evaluation": (lambda: Teacher(True), "changes its parameter 'teacher.weight'"),
    "moved by backward": (moved_by_backward, "moves '1.means' .*, not in the backward pass"),
    "counter of a class": (lambda: CountsInItsClass(None), "attribute 'passes' of class"),
    "clamps": (lambda: Clamps(0.1), "changes its parameter 'head.weight'"),
    "would clamp later": (lambda: Clamps(1.0), "changes its parameter 'head.weight'"),
    "hook that divides": (renormalised, "changes its parameter '0.weight'"),
    "moves in evaluation": (lambda: sequence(MovesInEvaluation(False)), "buffer '1.means' in eval"),
    "list of parameters": (ListOfParameters, "not registered in it"),
    "own parameters()": (LeavesOutItsBody, r"'body.weight', which its own method .* freeze it"),
    "no gradient": (lambda: Detached(None), "depends on none of its trained parameters"),
    "hook of a tensor": (hooked_tensor, "'0.weight' has a hook"),
    "hook in forward": (lambda: HooksInForward(None), "a hook of 'head.weight' in a forward pass"),
    "keeps a mean": (lambda: KeepsFirstMean(None), "training mode after a pass on other examples"),
    "unfreezes": (Unfreezes, "sets requires_grad of 'body.weight' in a forward pass"),
    "sparse gradient": (lambda: SparseRows(None), "sparse gradient of 'head.weight'"),
    "sparse layer": (SparseLayer, "sparse gradient of 'rows.weight'"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0 \(LazyLinear\) has no shape"),
    "lazy norm": (lambda: sequence(nn.LazyBatchNorm1d()), r"1 \(LazyBatchNorm1d\) has no shape"),
    "counter in a buffer": (CountsInABuffer, "buffer 'seen' of type torch.int64"),
    "place in a queue": (lambda: Queue(False), "attribute 'next' of the net .* or statistics"),
    "place in a queue, in a buffer": (lambda: Queue(True), "buffer 'next' .* or statistics depend"),
    "buffer that grows": (lambda: Keeps(torch.zeros(0, 3)), "buffer 'kept', or changes its shape"),
    "buffer to come": (lambda: Keeps(None), "makes the buffer 'kept', or changes its shape"),
    "traced": (traced, "compiled to TorchScript"),
    "cannot be copied": (Locked, "Locked cannot be copied, .*lock' object; leave out what holds"),
    "complex": (Complex, "'w' is complex"),
    "sparse buffer": (
        lambda: Neighbours(torch.eye(6).to_sparse(), True),
        "'neighbours' is sparse, and parameters and buffers",
    ),
    "observes in evaluation": (lambda: sequence(Observes()), "buffer '1.top' in evaluation mode"),
    "statistics that are not saved": (lambda: sequence(Unsaved()), "'means' in training, which is"),
    "tied by data": (tied_by_data, "'0.weight' and '1.weight' share their memory"),
    "parameter and buffer": (lambda: AnotherName(True), "'again' and 'head.weight' share their"),
    "parameter and attribute": (lambda: AnotherName(False), "'again' and 'head.weight' share"),
    "shared statistics": (
        with_shared_statistics,
        "'1.running_mean' and '2.running_mean' share their memory, which training moves",
    ),
    "no values": (lambda: nn.Linear(6, 3, device="meta"), "'weight' has no values"),
    "bfloat16": (lambda: sequence().bfloat16(), "'0.weight' is bfloat16, and all parameters"),
    "remembers by an attribute": (lambda: RemembersTraining("attribute"), "in training mode, with"),
    "remembers by a buffer": (lambda: RemembersTraining("buffer"), "in training mode, with"),
    "remembers by an integer": (lambda: RemembersTraining("integer"), "in training mode, with"),
    "remembers in train": (lambda: RemembersTraining("train"), "in training mode, with the same"),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(9, 3, max_norm=100.0)),
        r"0 \(Embedding\) has max_norm",
    ),
    "max_norm of a bag": (lambda: nn.EmbeddingBag(9, 3, max_norm=100.0), "has max_norm, by which"),
    "draws from its own": (
        DrawsFromItsOwn,
        "draws from the attribute 'own' of the net .*, a gener",
    ),
    "counter in a tensor": (
        lambda: CountsInATensor(None),
        "changes the attribute 'passes' of the n",
    ),
    "own state_dict": (
        lambda: SavesItsHead(None),
        "state_dict of SavesItsHead .* as 'head.bias' sh",
    ),
    "state_dict without arguments": (
        lambda: SavesNothing(None),
        r"state_dict\(keep_vars=True\) fails",
    ),
    "hook of the state_dict": (renamed_by_a_hook, "state_dict of Head .* 'head.bias' shows"),
    "quantised": (quantised, r"'0\._packed_params\.dtype' of the state_dict is no tensor"),
    "features of a generator": (
        lambda: RandomFeatures,
        r"first in head .* in __init__ for numbers from a",
    ),
    "function in C": (lambda: torch.relu, "neither a torch.nn.Module nor a function"),
    "momentum": (
        lambda: sequence(nn.BatchNorm1d(8, momentum=None)),
        r"1 \(BatchNorm1d\) has momentum=None",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_net_that_cannot_be_simulated_is_refused(make, message):
    with pytest.raises(ConfigError, match=f"^model.*{message}") as error:
        run(make(), DATA, PARTS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["mlp", sequence], ids=["shipped", "own"])
def test_the_default_type_of_a_script_is_named(model):
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"is float64, .* call torch\.set_default_dtype\("):
            run(model, DATA, PARTS, dtype="float32")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["local", "groups"])
def test_batches_of_one_are_refused_where_pytorch_refuses_them(where):
    one = {"batch_size": 1, "steps": 1, "lr": 0.1}
    keys = {"local": one} if where == "local" else {"groups": {"a": {"share": 0.5, "local": one}}}
    with pytest.raises(ConfigError, match=r"^local\.batch_size: .* Expected more than 1 value per"):
        run(sequence(nn.BatchNorm1d(8)), DATA, PARTS, 1, **keys)
    run(sequence(nn.LayerNorm(8)), DATA, PARTS, 1, **keys)
    # Several positions of one example have a mean and a variance.
    positions = (nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten())
    run(sequence(*positions), DATA, PARTS, 1, **keys)


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 8)])
def test_a_note_counts_clients_on_whose_single_example_pytorch_does_not_train(sizes, caplog):
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    with caplog.at_level(logging.INFO, "raysim"):
        run(sequence(nn.LayerNorm(8)), DATA, parts, 1)
        assert "single training example" not in caplog.text
        run(sequence(nn.BatchNorm1d(8)), DATA, parts, 1)
    said = (
        "single training example: 2; PyTorch does not train this net on one (Expected more than 1"
    )
    assert (said in caplog.text) == (1 in sizes)


def test_a_note_says_that_metrics_depend_on_the_batches_of_an_evaluation(caplog):
    def net(**options):
        return sequence(nn.BatchNorm1d(8, **options))

    with caplog.at_level(logging.INFO, "raysim"):
        run(net(track_running_stats=False), DATA, PARTS, 1)
        run(net(), DATA, PARTS, 1, evaluate={"batch_size": 7})
        assert "evaluate.batch_size" not in caplog.text
        run(net(track_running_stats=False), DATA, PARTS, 1, evaluate={"batch_size": 7})
    assert "metrics depend on evaluate.batch_size, 7, and 60 takes all" in caplog.text


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), None])
def test_a_note_says_that_outputs_are_probabilities(last, caplog):
    layers = (nn.Linear(6, 3),) if last is None else (nn.Linear(6, 3), last)
    with caplog.at_level(logging.INFO, "raysim"):
        run(nn.Sequential(*layers), DATA, PARTS, 1)
    assert ("leave out the net's own softmax" in caplog.text) == isinstance(last, nn.Softmax)


def test_parameters_in_float64_need_the_key_dtype():
    check(run(sequence().double(), DATA, PARTS), fedavg(sequence(), DATA, PARTS), DATA)
    with pytest.raises(ConfigError, match=r"'0\.weight' is float64, .* set dtype: float64"):
        run(sequence().double(), DATA, PARTS, dtype="float32")


def normal_numbers_of_python(*shape: int) -> np.ndarray:
    return np.array([[random.gauss(0, 1) for _ in range(shape[1])] for _ in range(shape[0])])


@pytest.mark.parametrize("draw", [np.random.randn, normal_numbers_of_python])
def test_what_a_net_draws_when_it_is_built_is_drawn_again_when_it_is_read(draw):
    """Also by NumPy's and Python's global generators, and not from where they are."""
    before = np.random.get_state()[1].tolist()  # pyright: ignore[reportIndexIssue]
    first, second = (run(lambda: RandomFeatures(draw), DATA, PARTS) for _ in range(2))
    assert first.digest == second.digest
    assert np.random.get_state()[1].tolist() == before  # pyright: ignore[reportIndexIssue]
    _, loss = evaluated(first.net(), DATA)
    assert first.history[-1]["loss"] == pytest.approx(loss)


class ForgetsInit(nn.Module):
    def __init__(self):
        pass


def test_a_net_whose_init_is_not_a_modules_is_refused():
    with pytest.raises(ConfigError, match=r"ForgetsInit\.__init__ does not call super"):
        run(ForgetsInit, DATA, PARTS)


def test_another_default_type_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match="set the key dtype"):
            run(sequence(), DATA, PARTS)
    finally:
        torch.set_default_dtype(torch.float32)


class Scaled(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) * (Scaled.factor if self.training else 1.0)


def test_a_net_that_computes_something_else_in_another_process_is_refused(monkeypatch):
    """Here a value of its class that the process of the user has changed, and a worker has not."""
    config = {"data": DATA, "model": Scaled(), "partition": PARTS, "rounds": 1, "algorithm": "fedavg",
              "schedule": {"cohort": 4}, "resources": {"executor": "inline"}}  # fmt: skip
    plan = prepare(named_source(config))
    check_same_outputs(plan.model(), sample_outputs(plan.model()))
    monkeypatch.setattr(Scaled, "factor", 2.0)
    with pytest.raises(ConfigError, match="other outputs in a worker"):
        plan.model()


# -- nets are what they hold


def test_nets_that_differ_in_something_they_hold_are_two_nets():
    """Two runs in one process each train the net that they were given."""

    class Tuned(nn.Module):
        def __init__(self, value):
            super().__init__()
            torch.manual_seed(1)
            self.head, self.value = nn.Linear(6, 3), value

        def forward(self, x):
            value = self.value(x) if callable(self.value) else self.value[0]
            return self.head(x) * value

    pairs = [
        (lambda x: x.mean(), lambda x: x.std()),
        ([1.0], [2.0]),
        (torch.tensor([1.0]), torch.tensor([2.0])),
    ]
    for values in pairs:
        for value in values:
            check(run(Tuned(value), DATA, PARTS, 1), fedavg(Tuned(value), DATA, PARTS, 1), DATA)
    for factor in (2.0, 3.0):

        def hook(layer, inputs, outputs, factor=factor):
            return factor * outputs

        def make(hook=hook):
            return with_hook("register_forward_hook", hook)

        check(run(make(), DATA, PARTS, 1), fedavg(make(), DATA, PARTS, 1), DATA)


@pytest.mark.parametrize("what", ["model", "task"])
def test_a_net_or_loss_that_was_changed_in_place_is_not_taken_for_a_new_one(what):
    """The new one has the content that the first one had in an earlier run."""

    def parts() -> dict[str, Any]:
        torch.manual_seed(1)
        return {
            "model": nn.Linear(6, 3),
            "task": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])),
        }

    first, second = parts(), parts()
    expected = run(first["model"], DATA, PARTS, 1, task=first["task"])
    with torch.no_grad():
        first[what].weight[0] *= 5
    again = run(second["model"], DATA, PARTS, 1, task=second["task"])
    assert again.digest == expected.digest


# -- timm

FAMILIES = [
    "test_resnet",
    "test_byobnet",
    "test_efficientnet",
    "test_efficientnet_gn",
    "test_convnext",
    "test_vit",
    "test_mambaout",
    "test_nfnet",
    "mobilenetv3_small_050",
    "regnetx_002",
    "ghostnet_050",
    "densenet121",
]


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_timm_trains_as_in_pytorch(name):
    timm = import_declaring_operators(lambda: pytest.importorskip("timm"))
    options = {"img_size": 32} if "vit" in name else {}
    if "ghostnet" in name:
        options = {"drop_rate": 0.0}  # its F.dropout draws numbers without keys, which is refused
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3, 32, 32)), np.arange(20) % 3
    data, parts = (x[:16], y[:16], x[16:], y[16:]), [[*range(8)], [*range(8, 13)], [*range(13, 16)]]
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=3, **options)
    local = {"steps": 1, "batch_size": "full", "lr": 0.05}
    check(run(net, data, parts, 1, local=local), fedavg(net, data, parts, 1, 0.05, 1), data, 1e-7)


NETS_WITH_PARAMETERS = """
import math

from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes, scales=None, sizes=(3, 3), bound: float = math.inf,
                 width: int = 0.5, pair: tuple = ((1, 2), 3)):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
        self.given = scales, sizes, bound, width, pair
"""


def test_a_resumed_run_builds_its_net_with_the_same_values(base, source, tmp_path):
    model = {"name": source("nets", NETS_WITH_PARAMETERS) + ":Net", "scales": {1: 4.0, "all": (1,)}}
    given = {**base, "rounds": 1, "algorithm": "fedavg", "model": model}
    plan = prepare(given)
    values = {1: 4.0, "all": [1]}, (3, 3), float("inf"), 0.5, ((1, 2), 3)
    assert plan.net.given == values
    (tmp_path / "config.yaml").write_text(plan.config.dump())
    again = prepare(tmp_path / "config.yaml")
    assert again.net.given == values and again.config == plan.config
    model["scales"] = {(1, 2): 4.0}
    with pytest.raises(ConfigError, match=r"^model\.scales: the key \(1, 2\) of a mapping is"):
        prepare(given)
