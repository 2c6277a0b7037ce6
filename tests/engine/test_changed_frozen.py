"""A server rule that changes frozen parameters (FLoRA), against a plain PyTorch program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.programs import program
from torch.nn import functional as F

import raysim
from raysim.data import Examples
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.runs.artifacts.export import export
from raysim.runs.resume import resume
from raysim.schedule import make_schedule

LR = 0.2
KASYNC = {"name": "kasync", "k": 2, "concurrency": 5, "client_speeds": "lognormal"}
SHAPES = [(4, 64), (16, 4), (4, 16), (16, 4), (10, 16), (10,)]
"""A and B of two layers, then the classifier."""


@pytest.fixture
def setup(base: dict[str, Any], source) -> dict[str, Any]:
    """A run of FLoRA in which half of the clients have rank 2."""
    file = source("flora", program("flora"))
    return base | {
        "data": "digits",
        "rounds": 5,
        "algorithm": f"{file}:flora",
        "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5},
        "model": f"{file}:Net",
        "dtype": "float64",
        "groups": {"small": {"ids": [0, 2, 4, 6], "client": {"name": f"{file}:FLoRAClient", "rank": 2}}},
        "local": {"steps": 1, "batch_size": "full", "lr": LR},
        "schedule": {"cohort": 4},
        "evaluate": {"every": 1},
    }  # fmt: skip


def outputs(
    x: torch.Tensor, weights: list[torch.Tensor], parts: list[torch.Tensor]
) -> torch.Tensor:
    """The net of FLoRA, written out."""
    for W, A, B in zip(weights, parts[0:4:2], parts[1:4:2], strict=True):
        x = (x @ (W + B @ A).T).relu()
    return x @ parts[4].T + parts[5]


def flora(plan: Plan) -> tuple[list[np.ndarray], list[list[torch.Tensor]]]:
    """Return x and the frozen weights of each round, by Wang et al. 2024."""
    net = plan.net
    weights = [p.detach().double() for p in net.parameters() if not p.requires_grad]
    parts = [p.detach().double() for p in net.parameters() if p.requires_grad]
    assert [tuple(p.shape) for p in parts] == SHAPES
    xs, frozen = [parts], [weights]
    examples = Examples.of(plan.dataset, "train", "cpu", torch.float64)
    schedule = make_schedule(plan.config, plan.clients.sizes)
    for t in range(plan.config.rounds):
        arrivals = schedule.next_round(t).arrivals
        trained = []
        for arrival in arrivals:
            inputs, y = examples.batch(plan.clients.client(arrival.client))
            rank = 2 if arrival.client % 2 == 0 else 4
            own = [p.clone().requires_grad_() for p in xs[arrival.base]]
            loss = F.cross_entropy(outputs(inputs.flatten(1), frozen[arrival.base], own), y)
            gradients = torch.autograd.grad(loss, own)
            moved = [p.detach() - LR * g for p, g in zip(own, gradients, strict=True)]
            before = xs[arrival.base]
            for i in (0, 2):
                moved[i][rank:], moved[i + 1][:, rank:] = before[i][rank:], before[i + 1][:, rank:]
            trained.append(moved)
        K = len(trained)
        stacked_A = [torch.cat([w[i] for w in trained]) for i in (0, 2)]
        stacked_B = [torch.cat([w[i] / K for w in trained], 1) for i in (1, 3)]
        added = [B @ A for A, B in zip(stacked_A, stacked_B, strict=True)]
        frozen.append([W + product for W, product in zip(frozen[-1], added, strict=True)])
        rng = generator(plan.config.seed, "server rule A", t)
        means = [torch.stack(values).mean(0) for values in zip(*trained, strict=True)]
        for i in (0, 2):
            r, n = means[i].shape
            means[i] = torch.from_numpy(rng.standard_normal(r * n) / n**0.5).view(r, n)
            means[i + 1] = torch.zeros_like(means[i + 1])
        xs.append(means)
    return [torch.cat([p.flatten() for p in parts]).numpy() for parts in xs], frozen


@pytest.mark.parametrize("schedule", [{"cohort": 4}, KASYNC])
def test_clients_train_on_the_frozen_weights_of_their_version(schedule, setup, engine):
    run, records = engine({**setup, "schedule": schedule}, states=True)
    xs, frozen = flora(run.plan)
    test = Examples.of(run.plan.dataset, "test", "cpu", torch.float64)
    inputs, y = test.batch(torch.arange(len(test)))
    for t in range(6):
        assert np.allclose(run.executor.xs[t], xs[t], rtol=0, atol=1e-10)
        now = torch.cat([W.flatten() for W in frozen[t]])
        assert torch.allclose(run.executor.states[t]["state/frozen"], now, rtol=0, atol=1e-10)
        # The evaluator has the frozen weights of the version that it evaluates.
        parts = torch.from_numpy(xs[t]).split([int(np.prod(s)) for s in SHAPES])
        parts = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
        loss = F.cross_entropy(outputs(inputs.flatten(1), frozen[t], parts), y)
        assert records[t]["loss"] == pytest.approx(float(loss), abs=1e-9)
    assert not torch.allclose(frozen[0][0], frozen[5][0], atol=1e-5)


def test_frozen_weights_are_resumed_returned_and_counted(setup):
    config = {**setup, "checkpoint": {"every": 1}}
    config["evaluate"] = {"every": 1, "best": {"metric": "loss", "mode": "min"}}
    whole = raysim.run({**config, "run_dir": config["run_dir"] + "-whole"})
    stopped = raysim.run({**config, "rounds": 2})
    resumed = resume(stopped.run_dir, {"rounds": 5})
    assert resumed.state_digest == whole.state_digest
    weight = whole.state_dict["1.weight"]
    assert torch.equal(resumed.state_dict["1.weight"], weight)
    plan = prepare(setup)
    assert torch.allclose(weight, flora(plan)[1][-1][0], rtol=0, atol=1e-10)
    best = min(range(1, 6), key=lambda t: whole.history[t]["loss"])
    exported = torch.load(export(whole.run_dir, which="best"), weights_only=True)["1.weight"]
    assert torch.allclose(exported, flora(plan)[1][best][0], rtol=0, atol=1e-10)
    of_client = torch.load(export(whole.run_dir, which="best", client=0), weights_only=True)
    assert torch.equal(of_client["1.weight"], exported)
    size, n_frozen = plan.problem.size, 64 * 16 + 16 * 16
    assert plan.bytes_down == 8 * (size + n_frozen)
    assert whole.history[1]["bytes_down"] == 4 * 8 * (size + n_frozen)
    assert whole.history[1]["bytes_up"] == 4 * 8 * size


@pytest.mark.ray
@pytest.mark.parametrize("schedule", [{"cohort": 4}, KASYNC])
def test_two_actors_compute_the_same(schedule, setup, recycled_actors: None):
    setup |= {"schedule": schedule, "local": {"steps": 2, "batch_size": 8, "lr": LR}}
    alone = raysim.run(setup)
    resources = {"executor": "ray", "actors": 2, "threads": 1}
    two = raysim.run({**setup, "resources": resources, "run_dir": setup["run_dir"] + "-ray"})
    assert two.state_digest == alone.state_digest
    assert [r.get("loss") for r in two.history] == [r.get("loss") for r in alone.history]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "mlp", "hidden": [8]}}, "^model: .* has none"),
        ({"batching": {"mode": "lanes"}}, "^batching.mode: .* lanes share"),
        ({"batching": {"mode": "pooled"}}, "^batching.mode: 'pooled' is not possible"),
    ],
)
def test_what_cannot_work_is_refused(sections, message, setup):
    with pytest.raises(ConfigError, match=message):
        prepare({**setup, **sections})
