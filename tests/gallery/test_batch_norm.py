"""Personal models on a net with BatchNorm: the gallery against plain PyTorch.

Each client is a module of its own with its own statistics: `train()` and backward passes in its
local steps, `eval()` for its test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.documents import blocks
from support.gallery_runs import LR, Done
from support.oracle_cases import BATCH_NORM, MODES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
SIZES = [30, 9, 17, 12, 45, 8]
"""A batch of 17 is one: BatchNorm needs two examples."""
TRAINED_BY_CLIENT = 4
"""Clients of a round; with three rounds some come again, and some may never come."""


@pytest.fixture
def fitted(train: Callable[..., Done], source: Callable[[str, str], str]) -> Callable[..., Done]:
    """fitted(mode, **sections): three rounds on the net with BatchNorm, every client evaluated."""

    def run(mode: str, **sections: Any) -> Done:
        model = {"name": source("batch_norm", BATCH_NORM) + ":Net"}
        return train(
            mode, sizes=SIZES, model=model, schedule={"cohort": TRAINED_BY_CLIENT}, **sections
        )

    return run


class Simulation:
    """FedAvg in plain PyTorch around a method's local training, with the batches of a run.

    `own[i]` are the modules that client i has trained, after its first round.
    """

    def __init__(self, done: Done):
        self.done = done
        self.server = copy.deepcopy(done.engine.plan.net).double()
        self.start = copy.deepcopy(self.server)
        self.own: dict[int, Any] = {}

    def run(
        self, local: Callable[[nn.Module, int, list[tuple[Tensor, Tensor]]], nn.Module]
    ) -> None:
        """Train all rounds; `local` gets a copy of the server's module and returns its upload."""
        for t, cohort in enumerate(self.done.feed.cohorts):
            self.t = t
            states = []
            for i in cohort:
                batches = [tensors(b) for b in self.done.batches(t, i)]
                trained = local(copy.deepcopy(self.server).train(), i, batches)
                states.append({k: v.double() for k, v in trained.state_dict().items()})
            mean = {k: torch.stack([state[k] for state in states]).mean(0) for k in states[0]}
            self.server.load_state_dict(mean)

    def check(self, model: Callable[[int], nn.Module], shared: bool = True) -> None:
        """Compare the server's module, and every client's loss and accuracy with its model."""
        engine = self.done.engine
        if shared:
            ours = engine.plan.model().state_dict(
                torch.from_numpy(self.done.xs[-1]), engine.executor.server.buffers
            )
            for key, value in self.server.state_dict().items():
                if not key.endswith("num_batches_tracked"):
                    assert torch.allclose(ours[key], value, rtol=0, atol=1e-6), key
        losses, accuracies = [], []
        data, tests = engine.plan.dataset, engine.plan.clients.test
        scale, shift = (v.astype(np.float64)[:, None, None] for v in (data.scale, data.shift))
        for i in range(len(tests)):
            chosen = tests.client(i)
            x = torch.from_numpy(data.x_test[chosen].astype(np.float64) * scale + shift)
            y = torch.from_numpy(data.y_test[chosen].astype(np.int64))
            module = model(i).eval()
            with torch.no_grad():
                out = module(x)
            losses.append(cross_entropy(out, y).item())
            accuracies.append((out.argmax(1) == y).double().mean().item())
        record = self.done.records[-1]
        for name, values in (("loss", losses), ("accuracy", accuracies)):
            assert record[f"clients/{name}"] == pytest.approx(np.mean(values), abs=1e-6)
            assert record[f"clients/{name}_std"] == pytest.approx(np.std(values), abs=1e-6)

    def check_kept(self, key: str, module: Callable[[int], nn.Module]) -> None:
        """Compare the statistics that clients keep with those of their modules."""
        for i in self.own:
            bn: Any = module(i).bn
            statistics = torch.cat([bn.running_mean, bn.running_var])
            assert np.allclose(self.done.kept(i)[key], statistics, rtol=0, atol=1e-6)


def tensors(batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1]).long()


def vector(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


def at(module: nn.Module, w: Tensor) -> nn.Module:
    """Set the parameters of a module, in training mode; its statistics stay."""
    vector_to_parameters(w, module.parameters())
    return module.train()


def gradient(module: nn.Module, x: Tensor, y: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Backward pass of a module in training mode, which moves its statistics."""
    module.zero_grad()
    cross_entropy(module(x) + shift, y).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


def descend(module: nn.Module, batches: list[tuple[Tensor, Tensor]], shift: Any = 0.0) -> nn.Module:
    """Local SGD."""
    for x, y in batches:
        at(module, vector(module) - LR * gradient(module, x, y, shift))
    return module


def classifier(module: nn.Module) -> Tensor:
    """Return a mask of the last layer, 1 in its parameters."""
    return torch.cat(
        [torch.full((p.numel(),), float("lin2" in n)) for n, p in module.named_parameters()]
    ).double()


@pytest.fixture
def shown(source: Callable[[str, str], str]) -> Callable[[str, str], str]:
    """shown(page, file): the file that a how-to page shows, written to a folder."""

    def write(page: str, file: str) -> str:
        texts = {block.file: block.text for block in blocks(HOW_TO / page)}
        return source(file.removesuffix(".py"), texts[file])

    return write


@pytest.mark.parametrize("mode", MODES)
def test_ditto(mode, fitted, shown):
    rule = shown("personalisation.md", "ditto.py")
    done = fitted(mode, client={"name": f"{rule}:DittoClient", "lam": 0.7})
    sim = Simulation(done)

    def local(module, i, batches):
        x0, own = vector(module), sim.own.setdefault(i, copy.deepcopy(sim.start))
        for x, y in batches:
            v = vector(own)
            v = v - LR * (gradient(own.train(), x, y) + 0.7 * (v - x0))
            at(own, v)
        return descend(module, batches)

    sim.run(local)
    sim.check(lambda i: sim.own.get(i, sim.server))
    sim.check_kept("buffers", lambda i: sim.own[i])


@pytest.mark.parametrize("mode", MODES)
def test_apfl(mode, fitted):
    """The mixture of both models is a module with statistics of its own."""
    done = fitted(mode, client={"name": "personalised/apfl.py:APFLClient", "alpha": 0.3})
    sim = Simulation(done)

    def local(module, i, batches):
        mixed, v, alpha = sim.own.get(i, (copy.deepcopy(sim.start), vector(sim.start), 0.3))
        for x, y in batches:
            w = vector(module)
            g = gradient(at(mixed, alpha * v + (1 - alpha) * w), x, y)
            after = float(np.clip(alpha - LR * (g @ (v - w)).item(), 0, 1))
            v, alpha = v - LR * alpha * g, after
            descend(module, [(x, y)])
        sim.own[i] = mixed, v, alpha
        return module

    def model(i):
        if i not in sim.own:
            return sim.server
        mixed, v, alpha = sim.own[i]
        return at(mixed, alpha * v + (1 - alpha) * vector(sim.server))

    sim.run(local)
    sim.check(model)
    sim.check_kept("buffers", lambda i: sim.own[i][0])


@pytest.mark.parametrize("mode", MODES)
def test_pfedme(mode, fitted):
    """theta is a module with statistics of its own; those of w move in one pass at w."""
    client = {"name": "personalised/pfedme.py:PFedMeClient", "lam": 2.0, "personal_lr": 0.1, "K": 3}
    sim = Simulation(fitted(mode, client=client))

    def local(module, i, batches):
        theta = sim.own.setdefault(i, copy.deepcopy(sim.start))
        for x, y in batches:
            w = vector(module)
            gradient(module, x, y)
            at(theta, w)
            for _ in range(3):
                now = vector(theta)
                at(theta, now - 0.1 * (gradient(theta, x, y) + 2.0 * (now - w)))
            at(module, w - LR * 2.0 * (w - vector(theta)))
        return module

    sim.run(local)
    sim.check(lambda i: sim.own.get(i, sim.server))
    sim.check_kept("buffers", lambda i: sim.own[i])


@pytest.mark.parametrize("mode", MODES)
def test_perfedavg(mode, fitted):
    """A client adapts a copy of the server's module in one step, whose passes move its statistics."""
    client = {"name": "personalised/perfedavg.py:PerFedAvgClient", "alpha": 0.3}
    done = fitted(mode, client=client)
    sim = Simulation(done)

    def local(module, i, batches):
        for (x, y), first in zip(batches, done.prepared_batches(sim.t, i), strict=True):
            w, once = vector(module), copy.deepcopy(module)
            u = w - 0.3 * gradient(once, *tensors(first))
            at(module, w - LR * gradient(at(module, u), x, y))
        return module

    def adapted(i):
        module, (x, y) = copy.deepcopy(sim.server), tensors(done.feed.data[i])
        w, cuts = vector(module), list(range(0, len(y), 16))
        if len(cuts) > 1 and len(y) - cuts[-1] == 1:
            cuts.pop()
        total = torch.zeros_like(w)
        for a, b in zip(cuts, [*cuts[1:], len(y)], strict=True):
            total += (b - a) / len(y) * gradient(module.train(), x[a:b], y[a:b])
        return at(module, w - 0.3 * total)

    sim.run(local)
    sim.check(adapted)


@pytest.mark.parametrize("mode", MODES)
def test_fedala(mode, fitted):
    """A client's module keeps its statistics when the server's parameters come."""
    client = {"name": "personalised/fedala.py:FedALAClient", "eta": 3.0, "passes": 2}
    done = fitted(mode, client=client)
    sim = Simulation(done)

    def begun(server, i):
        """Return the client's module at the start of a round, and its weights."""
        if i not in sim.own:
            return copy.deepcopy(server), torch.ones_like(vector(server))
        own, W = sim.own[i]
        own = copy.deepcopy(own)
        v, (X, Y) = vector(own), tensors(done.feed.data[i])
        apart, cuts = vector(server) - v, list(range(0, len(Y), 16))
        if len(cuts) > 1 and len(Y) - cuts[-1] == 1:
            cuts.pop()
        for a, b in 2 * list(zip(cuts, [*cuts[1:], len(Y)], strict=True)):
            g = gradient(at(copy.deepcopy(own), v + W * apart), X[a:b], Y[a:b])
            W = (W - 3.0 * classifier(own) * apart * g).clamp(0, 1)
        return at(own, v + W * apart), W

    def local(module, i, batches):
        own, W = begun(module, i)
        sim.own[i] = descend(own.train(), batches), W
        return own

    sim.run(local)
    sim.check(lambda i: begun(sim.server, i)[0])
    sim.check_kept("buffers", lambda i: sim.own[i][0])


@pytest.mark.parametrize("mode", MODES)
def test_fedrod(mode, fitted):
    """The personal model is a module, body and both heads, with statistics of its own."""
    done = fitted(mode, client="personalised/fedrod.py:FedRoDClient")
    sim = Simulation(done)

    def local(module, i, batches):
        n = np.bincount(done.feed.data[i][1], minlength=10)
        log_n = torch.from_numpy(np.log(np.maximum(n, 1e-8)))
        own, head = sim.own.get(i, (copy.deepcopy(sim.start), torch.zeros_like(vector(module))))
        for x, y in batches:
            g = gradient(at(own, vector(module) + head), x, y)
            head = head - LR * classifier(module) * g
            descend(module, [(x, y)], log_n)
        sim.own[i] = own, head
        return module

    def model(i):
        if i not in sim.own:
            return sim.server
        own, head = sim.own[i]
        return at(own, vector(sim.server) + head)

    sim.run(local)
    sim.check(model)
    sim.check_kept("buffers", lambda i: sim.own[i][0])


@pytest.mark.parametrize("mode", MODES)
def test_lgfedavg(mode, fitted):
    """A personal body is a module of the client's own, statistics included."""
    sim = Simulation(fitted(mode, client="personalised/lgfedavg.py:LGFedAvgClient"))

    def begun(server, i):
        own = copy.deepcopy(sim.own.get(i, sim.start))
        mask = classifier(own)
        return at(own, mask * vector(server) + (1 - mask) * vector(own))

    def local(module, i, batches):
        sim.own[i] = descend(begun(module, i), batches)
        return sim.own[i]

    sim.run(local)
    sim.check(lambda i: begun(sim.server, i), shared=False)
    sim.check_kept("personal statistics", lambda i: sim.own[i])


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_all_personal_keeps_its_statistics(mode, fitted):
    sim = Simulation(fitted(mode, local={"personal": "*"}))

    def local(module, i, batches):
        sim.own[i] = descend(sim.own.get(i, copy.deepcopy(sim.start)).train(), batches)
        return module

    sim.run(local)
    sim.check(lambda i: sim.own.get(i, sim.start), shared=False)
    sim.check_kept("personal statistics", lambda i: sim.own[i])


@pytest.mark.parametrize("mode", MODES)
def test_mixtures_mix_the_statistics_too(mode, fitted, shown):
    """A client starts from the mean of its last module and the server's, statistics included."""
    rule = shown("personalisation.md", "mixed.py")
    sim = Simulation(fitted(mode, client=f"{rule}:MixedClient"))

    def begun(server, i):
        own = sim.own.get(i, server).state_dict()
        mixed = copy.deepcopy(server)
        mixed.load_state_dict(
            {k: (v + own[k].double()) / 2 for k, v in server.state_dict().items()}
        )
        return mixed.train()

    def local(module, i, batches):
        sim.own[i] = descend(begun(module, i), batches)
        return sim.own[i]

    sim.run(local)
    sim.check(lambda i: begun(sim.server, i))
    sim.check_kept("buffers", lambda i: sim.own[i])


@pytest.mark.parametrize("mode", MODES)
def test_interpolated(mode, fitted, shown):
    """Clients use a mixture of the server's module and their last one."""
    rule = shown("clients_evaluated.md", "interpolated.py")
    sim = Simulation(fitted(mode, client={"name": f"{rule}:Interpolated", "share": 0.25}))

    def local(module, i, batches):
        sim.own[i] = descend(module, batches)
        return module

    def model(i):
        own = sim.own.get(i, sim.server).state_dict()
        mixed = copy.deepcopy(sim.server)
        mixed.load_state_dict(
            {k: 0.75 * v + 0.25 * own[k].double() for k, v in sim.server.state_dict().items()}
        )
        return mixed

    sim.run(local)
    sim.check(model)
