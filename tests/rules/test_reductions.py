"""Methods that are another one at a certain value of a hyper-parameter, to the bit.

To the bit means: the sha256 of the parameters in float32 after several rounds on the same blocks.
Each pair is run on a net with BatchNorm, one client after the other and side by side on lanes;
the BatchNorm statistics are compared as well. A digest that never changes would pass all of this,
so some methods are also run at a value at which they must NOT be the other one; that every
hyper-parameter matters is the oracles' matter.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

BATCH_NORM = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, classes))
"""
DROPOUT = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes), nn.Dropout(0.7))
"""
SIZES = [30, 12, 17, 20, 45, 0, 8, 23, 16, 5, 33, 12]
NETS = ["small-loop", "small-lanes"]
MOMENTUM = {"beta1": 0.9, "beta2": 0.5}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedprox with mu 0 is fedavg": ({"name": "fedprox", "mu": 0.0}, {"name": "fedavg"}),
    "fedavgm with beta1 0 is fedavg": ({"name": "fedavgm", "beta1": 0.0}, {"name": "fedavg"}),
    "gradma_s without memory, beta1 0, is fedavg": (
        {"name": "gradma_s", "beta1": 0.0, "memory": 0}, {"name": "fedavg"}
    ),
    "gradma_s without memory is fedavgm": (
        {"name": "gradma_s", "memory": 0, **MOMENTUM}, {"name": "fedavgm", "beta1": 0.9}
    ),
    "gradma without memory, beta1 0, is gradma_w": (
        {"name": "gradma", "beta1": 0.0, "memory": 0}, {"name": "gradma_w"}
    ),
    "fedproxm with mu 0 is fedavgm": ({"name": "fedproxm", "mu": 0.0, "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}),
    "fedproxm with beta1 0 is fedprox": ({"name": "fedproxm", "mu": 0.4, "beta1": 0.0}, {"name": "fedprox", "mu": 0.4}),
    "moon with mu 0 is fedavg": ({"name": "moon", "mu": 0.0}, {"name": "fedavg"}),
    "fedmlb without hybrids is fedavg": ({"name": "fedmlb", "lambda2": 0.0, "lambda3": 0.0}, {"name": "fedavg"}),
    "fedgen with alpha 0 is fedavg": ({"name": "fedgen", "alpha": 0.0}, {"name": "fedavg"}),
    "moonm with beta1 0 is moon": ({"name": "moonm", "mu": 2.0, "beta1": 0.0}, {"name": "moon", "mu": 2.0}),
    "moonm with mu 0 is fedavgm": ({"name": "moonm", "mu": 0.0, "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}),
    "fedmlbm with beta1 0 is fedmlb": ({"name": "fedmlbm", "beta1": 0.0}, {"name": "fedmlb"}),
    "fedmlbm without hybrids is fedavgm": (
        {"name": "fedmlbm", "lambda2": 0.0, "lambda3": 0.0, "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}
    ),
    "mifam with beta1 0 is mifa": ({"name": "mifam", "beta1": 0.0}, {"name": "mifa"}),
    "mifam with beta1 0 waits as mifa": (
        {"name": "mifam", "beta1": 0.0, "wait": True, "weights": "samples"},
        {"name": "mifa", "wait": True, "weights": "samples"},
    ),
}  # fmt: skip


OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedprox": ({"name": "fedprox", "mu": 0.1}, {"name": "fedavg"}),
    "fedavgm": ({"name": "fedavgm", "beta1": 0.1}, {"name": "fedavg"}),
    "gradma_s": ({"name": "gradma_s", "beta1": 0.0, "memory": 12}, {"name": "fedavg"}),
    "fedgen": ({"name": "fedgen", "alpha": 0.1}, {"name": "fedavg"}),
    "mifa": ({"name": "mifa"}, {"name": "fedavg"}),
}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What runs gave, by their settings: many pairs have one side in common."""
    return {}


@pytest.fixture
def digest(engine, ragged, source, known):
    """digest(algorithm, net): of the parameters after 4 rounds, and the BatchNorm statistics."""

    def of(
        algorithm: dict[str, Any], net: str, sizes: list[int] = SIZES, **local: Any
    ) -> tuple[str, np.ndarray]:
        settings = json.dumps([algorithm, net, sizes, local])
        if settings not in known:
            known[settings] = run(algorithm, net, sizes, local)
        return known[settings]

    def run(
        algorithm: dict[str, Any], net: str, sizes: list[int], local: dict[str, Any]
    ) -> tuple[str, np.ndarray]:
        name, mode = net.split("-")
        models = {
            "mlp": {"name": "mlp", "hidden": [16]},
            "small": {"name": source("small", BATCH_NORM) + ":Net"},
            "dropout": {"name": source("dropout", DROPOUT) + ":Net"},
        }  # fmt: skip
        done, _ = engine({
            "rounds": 4, "model": models[name], "partition": ragged(sizes), "algorithm": algorithm,
            "schedule": {"cohort": 5}, "batching": {"mode": mode, "size": 3},
            "local": local or {"batch_size": 16, "steps": 3, "lr": 0.1},
        })  # fmt: skip
        assert done.executor.xs[-1].dtype == np.float32
        return sha256(done.executor.xs[-1].tobytes()).hexdigest(), done.executor.statistics[-1]

    return of


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("pair", SAME)
def test_to_the_bit(pair, net, digest):
    """0 · v adds nothing, and adding 0 rounds nothing: every operation that is left is the other
    method's own."""
    (one, statistics), (other, statistics_of_other) = (
        digest(algorithm, net) for algorithm in SAME[pair]
    )
    assert one == other
    np.testing.assert_array_equal(statistics, statistics_of_other)
    assert statistics.size == 14


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("pair", OTHER)
def test_and_otherwise_not(pair, net, digest):
    one, other = (digest(algorithm, net)[0] for algorithm in OTHER[pair])
    assert one != other


@pytest.mark.parametrize("net", NETS)
def test_equal_sizes_make_both_weights_one(net, digest):
    """n / (K n) is 1 / K, also when rounded: the quotient of two integers is rounded once, whatever
    they are."""
    sizes = [24] * 12
    uniform, statistics = digest({"name": "fedavg", "weights": "uniform"}, net, sizes)
    samples, statistics_of_samples = digest({"name": "fedavg", "weights": "samples"}, net, sizes)
    assert uniform == samples
    np.testing.assert_array_equal(statistics, statistics_of_samples)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spelled", [{"steps": 1}, {"epochs": 1}], ids=str)
def test_fedsgd_is_fedavg_with_one_full_step(net, spelled, digest):
    """One step over all of a client's data is one epoch of one batch. FedSGD brings both settings
    with it."""
    fedsgd, _ = digest({"name": "fedsgd"}, net, lr=0.1)
    fedavg, _ = digest({"name": "fedavg"}, net, lr=0.1, batch_size="full", **spelled)
    assert fedsgd == fedavg
    assert fedsgd != digest({"name": "fedavg"}, net, lr=0.1, batch_size="full", steps=2)[0]
    assert fedsgd != digest({"name": "fedavg"}, net, lr=0.1, batch_size=16, steps=1)[0]


def test_the_first_local_step_of_fedprox_is_that_of_fedavg(digest):
    """y = x there, so the proximal gradient is mu · 0, whatever mu; one step a round, and nothing
    is left of it."""
    one_step = {"batch_size": 16, "steps": 1, "lr": 0.1}
    fedprox, _ = digest({"name": "fedprox", "mu": 0.7}, "mlp-loop", **one_step)
    assert fedprox == digest({"name": "fedavg"}, "mlp-loop", **one_step)[0]
    assert fedprox != digest({"name": "fedavg"}, "mlp-loop", **{**one_step, "steps": 2})[0]


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_the_first_local_step_of_gradma_is_that_of_fedavg(mode, digest):
    """One step a round from x' = x: a and b are g itself, taken on the same batch under the same
    dropout masks, and c = 0. So nothing is violated and g̃ = g, to the bit. With masks of their own
    a and b are other gradients: where a mask takes away one logit of seven in ten, and a batch has
    two samples of different digits, they do contradict g."""
    one_step = {"batch_size": 2, "steps": 1, "lr": 0.5}
    net, reset = f"dropout-{mode}", {"name": "gradma_w", "previous": "reset"}
    fedavg, _ = digest({"name": "fedavg"}, net, **one_step)
    assert digest(reset, net, **one_step)[0] == fedavg
    assert digest({**reset, "dropout": "independent"}, net, **one_step)[0] != fedavg
    assert (
        digest({"name": "gradma", "previous": "reset", "beta1": 0.0, "memory": 0}, net, **one_step)[
            0
        ]
        == fedavg
    )


@pytest.mark.parametrize("net", NETS)
def test_k_async_with_everybody_is_in_step(net, engine, ragged, source):
    """All N arrive in a round, so all begin with the version that it ends with: the bits of a round
    of everybody, with what clients keep (MOON), what the server remembers (GradMA), whatever their
    speeds."""
    mode = net.removeprefix("small-")
    model = source("small", BATCH_NORM) + ":Net"
    for algorithm in ("fedavg", "moon", "gradma"):
        bits = []
        for schedule in ({"name": "sync", "cohort": 12}, {"name": "kasync", "k": 11}):
            run, _ = engine({
                "rounds": 3, "model": model, "partition": ragged(SIZES), "algorithm": algorithm, "schedule": schedule,
                "batching": {"mode": mode, "size": 3}, "local": {"batch_size": 16, "steps": 3, "lr": 0.1},
            })  # fmt: skip
            bits.append((run.executor.xs[-1].tobytes(), run.executor.statistics[-1].tobytes()))
        assert bits[0] == bits[1], algorithm
