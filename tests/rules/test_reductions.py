"""Methods that are another one at a certain value of a hyper-parameter, to the bit; at the end
those to rounding only.

To the bit means: the sha256 of the parameters in float32 after several rounds on the same blocks.
Each pair is run on a net with BatchNorm, one client after the other and side by side on lanes;
the BatchNorm statistics are compared as well. A digest that never changes would pass all of this, so each method is also run at a value at
which it must NOT be the other one.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from support.programs import program

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
    "gradma_s, momentum": (
        {"name": "gradma_s", "memory": 12, "qp_scope": "per_tensor", **MOMENTUM},
        {"name": "fedavgm", "beta1": 0.9},
    ),
    "gradma_s, no memory": ({"name": "gradma_s", "memory": 0, "beta1": 0.1}, {"name": "fedavg"}),
    "gradma": ({"name": "gradma", "beta1": 0.0, "memory": 0}, {"name": "fedavg"}),
    "moon": ({"name": "moon", "mu": 0.1}, {"name": "fedavg"}),
    "fedmlb, cross-entropy": (
        {"name": "fedmlb", "lambda2": 0.1, "lambda3": 0.0},
        {"name": "fedavg"},
    ),
    "fedmlb, divergence": ({"name": "fedmlb", "lambda2": 0.0, "lambda3": 0.1}, {"name": "fedavg"}),
    "fedgen": ({"name": "fedgen", "alpha": 0.1}, {"name": "fedavg"}),
    "moonm": ({"name": "moonm", "beta1": 0.1}, {"name": "moon"}),
    "moonm, momentum": (
        {"name": "moonm", "mu": 0.1, "beta1": 0.9},
        {"name": "fedavgm", "beta1": 0.9},
    ),
    "fedmlbm": ({"name": "fedmlbm", "beta1": 0.1}, {"name": "fedmlb"}),
    "mifam": ({"name": "mifam", "beta1": 0.1}, {"name": "mifa"}),
    "mifam, waiting": ({"name": "mifam", "beta1": 0.0, "wait": True}, {"name": "mifa"}),
    "mifa": ({"name": "mifa"}, {"name": "fedavg"}),
    "fedavg's weights": ({"name": "fedavg", "weights": "samples"}, {"name": "fedavg"}),
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


@pytest.mark.parametrize(
    ("pair", "net"),
    [*((pair, "mlp-loop") for pair in OTHER), *(("fedprox", net) for net in NETS)],
)
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


# --- and those that floating point does not keep to the bit

ONE = [30]
ALL = [30, 12, 17, 20, 45, 8]
SAMPLES = {"weights": "samples"}
STALE = {"name": "kasync", "k": 4}
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], dict[str, Any]]] = {
    "scaffold of one client is fedavg": ({"name": "scaffold"}, {"name": "fedavg"}, ONE, {}),
    "scaffold of one client is fedavg, epochs": ({"name": "scaffold"}, {"name": "fedavg"}, ONE, {"epochs": 2}),
    "mifa of everybody is fedavg": ({"name": "mifa"}, {"name": "fedavg"}, ALL, {}),
    "mifa of everybody is fedavg, samples": ({"name": "mifa", **SAMPLES}, {"name": "fedavg", **SAMPLES}, ALL, {}),
    "mifa of everybody need not wait": ({"name": "mifa", "wait": True}, {"name": "fedavg"}, ALL, {}),
    "mifam of everybody is fedavgm": ({"name": "mifam", "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}, ALL, {}),
    "fednova with equal steps is fedavg": ({"name": "fednova"}, {"name": "fedavg", **SAMPLES}, SIZES, {}),
    "fednova with equal steps is fedavg, uniform": (
        {"name": "fednova", "weights": "uniform"}, {"name": "fedavg"}, SIZES, {}
    ),
    "fednova with equal steps is fedavgm": (
        {"name": "fednova", "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9, **SAMPLES}, SIZES, {}
    ),
    "fednova with equal steps and mu is fedprox": (
        {"name": "fednova", "mu": 0.4}, {"name": "fedprox", "mu": 0.4, **SAMPLES}, SIZES, {}
    ),
    "mimelite without momentum is fedavg": ({"name": "mimelite", "beta": 0.0}, {"name": "fedavg"}, SIZES, {}),
    "feddyn of one client takes its first step twice": (
        {"name": "feddyn", "alpha": 1e-9}, {"name": "fedavg", "lr": 2.0}, ONE, {"rounds": 1}
    ),
    "fedbuff in step is fedavg": ({"name": "fedbuff"}, {"name": "fedavg"}, SIZES, {}),
    "fedbuff in step with momentum is fedavgm": (
        {"name": "fedbuff", "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}, SIZES, {}
    ),
    "dynsgd in step is fedavg": ({"name": "dynsgd", **SAMPLES}, {"name": "fedavg", **SAMPLES}, SIZES, {}),
    "twafl in step is fedavg": ({"name": "twafl"}, {"name": "fedavg", **SAMPLES}, SIZES, {}),
    "refl in step is fedavg": ({"name": "refl"}, {"name": "fedavg"}, SIZES, {}),
    "wkafl that keeps everybody is twafl": (
        {"name": "wkafl", "alpha": 0, "theta": -1, "clip": None, "stage2": None, "sharpness": 0, "decay": 0},
        {"name": "twafl", "weights": "uniform"}, SIZES, {"schedule": STALE},
    ),
    "refl without boost is dynsgd": ({"name": "refl", "beta": 0.0}, {"name": "dynsgd"}, SIZES, {"schedule": STALE}),
    "fedhist without its memory and ina is twafl": (
        {"name": "fedhist", "length": 0, "ina": False}, {"name": "twafl", "weights": "uniform"}, SIZES,
        {"schedule": STALE},
    ),
    "fedhist whose parts are off is twafl": (
        {"name": "fedhist", "length": 3, "a": 0, "b": 0, "ina": False}, {"name": "twafl", "weights": "uniform"}, SIZES,
        {"schedule": STALE},
    ),
    "fedasync of one client in step is fedavg": (
        {"name": "fedasync", "alpha": 1.0, "mu": 0}, {"name": "fedavg"}, ONE, {}
    ),
}  # fmt: skip
APART: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], dict[str, Any]]] = {
    "scaffold of several": ({"name": "scaffold"}, {"name": "fedavg"}, ALL, {}),
    "mifa of some": ({"name": "mifa"}, {"name": "fedavg"}, SIZES, {}),
    "mifam of some": ({"name": "mifam", "beta1": 0.9}, {"name": "fedavgm", "beta1": 0.9}, SIZES, {}),
    "fednova with unequal steps": ({"name": "fednova"}, {"name": "fedavg", **SAMPLES}, SIZES, {"epochs": 2}),
    "fednova with other weights": ({"name": "fednova"}, {"name": "fedavg"}, SIZES, {}),
    "fednova with client momentum": ({"name": "fednova", "rho": 0.1}, {"name": "fedavg", **SAMPLES}, SIZES, {}),
    "mimelite": ({"name": "mimelite", "beta": 0.1}, {"name": "fedavg"}, SIZES, {}),
    "fedbuff": ({"name": "fedbuff"}, {"name": "fedavg"}, SIZES, {"schedule": STALE}),
    "dynsgd": ({"name": "dynsgd"}, {"name": "fedavg"}, SIZES, {"schedule": STALE}),
    "twafl": ({"name": "twafl"}, {"name": "fedavg", **SAMPLES}, SIZES, {"schedule": STALE}),
    "refl": ({"name": "refl"}, {"name": "dynsgd"}, SIZES, {"schedule": STALE}),
    "fedhist, egs": (
        {"name": "fedhist", "length": 3, "b": 0, "ina": False}, {"name": "twafl", "weights": "uniform"}, SIZES,
        {"schedule": STALE},
    ),
    "fedhist, haa": (
        {"name": "fedhist", "length": 3, "a": 0, "ina": False}, {"name": "twafl", "weights": "uniform"}, SIZES,
        {"schedule": STALE},
    ),
}  # fmt: skip


@pytest.fixture
def apart(engine, ragged, known):
    """apart(pair, mode): the largest difference of any round, in float64, relative to that round's
    largest entry."""

    def of(pair: tuple[dict, dict, list[int], dict], mode: str) -> float:
        one, other, sizes, more = pair
        local = {
            "batch_size": 16,
            "lr": 0.1,
            **({"epochs": more["epochs"]} if "epochs" in more else {"steps": 3}),
        }
        xs = []
        for algorithm in (one, other):
            settings = json.dumps([algorithm, mode, sizes, more])
            if settings not in known:
                known[settings] = engine({
                    "rounds": more.get("rounds", 4), "dtype": "float64", "model": {"name": "mlp", "hidden": [16]},
                    "partition": ragged(sizes), "algorithm": algorithm,
                    "schedule": more.get("schedule", {"name": "sync", "cohort": min(len(sizes), 6)}),
                    "batching": {"mode": mode, "size": 3}, "local": local,
                })[0].executor.xs  # fmt: skip
            xs.append(known[settings])
        assert np.abs(xs[1][-1] - xs[1][0]).max() > 1e-2
        return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(*xs, strict=True))

    return of


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("pair", ROUNDED)
def test_to_rounding(pair, mode, apart):
    """(g - c) + c is not g, nor 5 (d / 5) = d, in floating point: equal to 1e-6, in fact to about
    1e-11.

    SCAFFOLD with N = S = 1: c = c_1 after every round, since both have received the same. MIFA with
    S = N: the table is the round's own. FedNova with a_i = a for all: τ_eff Σ q_i d_i / a = a Σ q_i
    d_i / a. MimeLite with β = 0: the step is (1 - 0) ∇f. FedDyn of one client, hardly any α, one
    round: a = y and h = y - x, so a + h = x + 2 (y - x)."""
    assert apart(ROUNDED[pair], mode) < 1e-6


@pytest.mark.parametrize("pair", APART)
def test_and_otherwise_far_apart(pair, apart):
    assert apart(APART[pair], "loop") > 1e-4


TWAFL_WITH_INA = program("reductions_twafl_with_ina")


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_fedhist_without_a_memory_is_twafl_without_sizes_and_ina(mode, apart, source):
    own = {"name": source("ina", TWAFL_WITH_INA) + ":WithINA", "weights": "uniform"}
    fedhist = {"name": "fedhist", "length": 0, "rho": 0.99}
    assert apart((fedhist, own, SIZES, {"schedule": STALE}), mode) < 1e-6
    assert apart(({**fedhist, "rho": 0.9}, own, SIZES, {"schedule": STALE}), mode) > 1e-4


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
