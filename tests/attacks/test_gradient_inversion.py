"""What must hold of gradient inversion: its costs are the formulas, what it simulates is what a
client sends, it finds images that a gradient determines, and a run that cannot be attacked is one
clear message."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import CommandResult, assert_one_message
from support.programs import program

from raysim.attacks import gradient_inversion, gradient_simulator, reconstructions
from raysim.attacks.attack_options import AttackOptions
from raysim.attacks.gradient_inversion import invert
from raysim.attacks.gradient_simulator import GradientSimulator
from raysim.attacks.reconstructions import PixelRange
from raysim.by_key import by_key
from raysim.diagnostics import recorded_updates
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.tracking import mlflow_client
from raysim.tracking.late_sending import replay_spool
from raysim.tracking.mlflow_process import store
from raysim.training.messages import Broadcast
from raysim.training.tasks.pure_task import PureTask

SMOOTH = program("gradient_inversion_smooth")


@dataclass
class Seen:
    plan: Plan
    observations: list[recorded_updates.Observation]

    def simulation(self, **options: Any) -> GradientSimulator:
        return GradientSimulator(self.plan, self.observations, AttackOptions(**options))

    def images(self) -> torch.Tensor:
        """The true ones, [K, b, C, H, W]."""
        return torch.stack([one.x for one in self.observations])


@pytest.fixture
def observe(engine, tmp_path) -> Callable[..., Seen]:
    """observe(**config): four clients of one image each, or as the configuration says, observed by
    the real engine."""

    def run(local: dict[str, Any] | None = None, **config: Any) -> Seen:
        folder = tmp_path / "observed"
        folder.mkdir(exist_ok=True)
        whole = {
            "rounds": 1,
            "dtype": "float64",
            "model": {"name": "mlp", "hidden": [8]},
            "algorithm": "fedavg",
            "partition": {"name": "iid", "clients": 100},
            "local": {"steps": 1, "batch_size": 1, "lr": 0.1, **(local or {})},
            "schedule": {"cohort": 4},
            "record_updates": {"rounds": [0]},
            "checkpoint": {"every": 0},
        }
        made, _ = engine(
            {**whole, **config}, before=lambda engine: setattr(engine, "run_dir", folder)
        )
        return Seen(made.plan, recorded_updates.read_observations(folder))

    return run


# -- formulas --------------------------------------------------------------------------------------


def test_costs_and_total_variation_are_their_formulas():
    rng = np.random.default_rng(0)
    g, h, x = rng.standard_normal(50), rng.standard_normal(50), rng.standard_normal((2, 3, 4, 5))
    tensors = torch.from_numpy(g), torch.from_numpy(h)
    assert float(gradient_simulator.squared_distance(*tensors)) == pytest.approx(
        sum((a - b) ** 2 for a, b in zip(g, h, strict=True))
    )
    cosine = 1 - g @ h / np.linalg.norm(g) / np.linalg.norm(h)
    assert float(gradient_simulator.cosine_distance(*tensors)) == pytest.approx(cosine)
    assert float(gradient_simulator.cosine_distance(tensors[0], 3 * tensors[0])) == pytest.approx(
        0, abs=1e-12
    )
    rows = np.abs(np.diff(x, axis=3)).mean()
    columns = np.abs(np.diff(x, axis=2)).mean()
    assert float(gradient_simulator.total_variation(torch.from_numpy(x))) == pytest.approx(
        rows + columns
    )


def test_a_cosine_with_nothing_is_one_and_has_a_gradient():
    nothing = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    cost = gradient_simulator.cosine_distance(torch.ones(3, dtype=torch.float64), nothing)
    assert float(cost.detach()) == 1 and torch.isfinite(torch.autograd.grad(cost, nothing)[0]).all()


def test_psnr_is_of_images_in_the_unit_range():
    """Digits have pixels 0..16: input 0 -> 0, input of pixel 16 -> 1, so an error of 4 pixels is a
    quarter."""
    dataset = prepare({"data": "digits", "rounds": 1, "algorithm": "fedavg"}).dataset
    pixels = PixelRange.of(dataset, torch.float64)
    raw = np.full((3, 1, 8, 8), 6.0)
    inputs = torch.from_numpy(raw * dataset.scale[:, None, None] + dataset.shift[:, None, None])
    image = pixels.image(inputs)
    np.testing.assert_allclose(image.numpy(), 6 / 16, atol=1e-6)
    other = image.clone()
    other[0] += 4 / 16
    other[1, 0, 0, 0] += 0.5
    near, single, same = reconstructions.psnr(image, other)
    assert near == pytest.approx(10 * math.log10(16)) and single == pytest.approx(
        10 * math.log10(64 / 0.25)
    )
    assert same == math.inf


def test_images_return_from_inputs_whose_pixels_are_each_standardised():
    """A pixel that is alike in all training images of digits, as some at the border, is 0."""
    config = {
        "data": {"name": "digits", "scaling": "per_pixel"},
        "rounds": 1,
        "algorithm": "fedavg",
    }
    dataset = prepare(config).dataset
    assert (dataset.scale == 0).any()
    raw = np.full((1, 1, 8, 8), 6.0)
    image = PixelRange.of(dataset, torch.float64).image(
        torch.from_numpy(raw * dataset.scale + dataset.shift)
    )
    np.testing.assert_allclose(image.numpy()[0], np.where(dataset.scale > 0, 6 / 16, 0), atol=1e-5)


def test_mean_psnr_leaves_out_and_counts_what_is_exact_or_failed():
    def one(client: int, cost: float, *psnr: float) -> reconstructions.Reconstruction:
        return reconstructions.Reconstruction(
            client, (0,) * len(psnr), cost, psnr, 0, torch.zeros(1), torch.zeros(1)
        )

    clients = [one(3, 0.1, 10.0, math.inf), one(5, 0.1, 20.0), one(7, math.nan, math.nan)]
    result = reconstructions.AttackResult(AttackOptions(), 0, clients, 1.0)
    assert (result.psnr, result.exact, result.failed) == (15.0, 1, [7])
    said = json.loads(json.dumps(result.as_object(), allow_nan=False))
    assert said["clients"][0]["psnr"] == [10.0, None] and said["clients"][2]["cost"] is None


@pytest.mark.parametrize("n", range(1, 7))
def test_no_other_matching_has_a_smaller_error(n):
    """Of all n! orders of images that have nothing to do with the originals."""
    torch.manual_seed(n)
    original, found = (
        torch.rand(n, 1, 2, 2, dtype=torch.float64),
        torch.rand(n, 1, 2, 2, dtype=torch.float64),
    )
    order = reconstructions.matching(original, found, [7] * n)
    assert sorted(order) == list(range(n))
    least = min(
        float(((original - found[list(p)]) ** 2).sum()) for p in itertools.permutations(range(n))
    )
    assert float(((original - found[order]) ** 2).sum()) == pytest.approx(least)


def test_images_are_matched_within_their_label():
    torch.manual_seed(0)
    original, labels = torch.rand(6, 1, 4, 4), (3, 1, 3, 3, 1, 2)
    mixed = [2, 4, 3, 0, 1, 5]  # of each label its own images, in another order
    found = original[mixed] + 0.01 * torch.rand(6, 1, 4, 4)
    order = reconstructions.matching(original, found, labels)
    assert [mixed[k] for k in order] == list(range(6))
    foreign = original[[1, 0, 2, 3, 4, 5]]  # an image under another label stays there
    assert reconstructions.matching(original, foreign, labels)[5] == 5
    assert {reconstructions.matching(original, foreign, labels)[k] for k in (1, 4)} == {1, 4}


# -- what is simulated is what is sent -------------------------------------------------------------

PAIRS = {"name": "iid", "clients": 719}  # 1438 digits: two for each client
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "weight decay and clipping": {
        "local": {"weight_decay": 0.1, "max_grad_norm": 0.05, "batch_size": 2},
        "partition": PAIRS,
    },
    "clipped examples": {
        "privacy": {"max_grad_norm": 0.3, "noise_multiplier": 0},
        "local": {"batch_size": 2},
        "partition": PAIRS,
    },
    "clipped clients": {"privacy": {"unit": "client", "clip_norm": 0.01, "noise_multiplier": 0}},
    "batch norm": {"model": "tinynn", "local": {"batch_size": 2}, "partition": PAIRS},
    "frozen statistics": {
        "model": "tinynn",
        "local": {"batch_size": 2, "buffers": "frozen"},
        "partition": PAIRS,
    },
    "fedprox": {"algorithm": "fedprox"},
    "fedcurv": {"algorithm": "fedcurv"},
    "fedreg": {"algorithm": {"name": "fedreg", "pairing": "own"}},
    "modified": {"algorithm": {"name": "fedreg_mg", "pairing": "own", "eta_s": 0.05}},
    "modified, one batch": {
        "algorithm": {"name": "fedreg_mg", "pairing": "index", "eta_s": 0.05},
        "local": {"batch_size": 2},
        "partition": PAIRS,
    },
    "modified, reference": {
        "algorithm": {"name": "fedreg_mg", "preset": "authors_code", "ascent": 3},
        "local": {"batch_size": 2},
        "partition": PAIRS,
    },
}
PLAIN = {"fedavg", "fedprox", "fedcurv", "batch norm", "frozen statistics", "fedreg"}
"""In the first step of the first round. (FedReg's two corrections do nothing where they would be
negative.)"""


@pytest.mark.parametrize("method", METHODS)
def test_at_the_true_images_the_adaptive_attacker_sees_what_was_sent(observe, method):
    seen = observe(**METHODS[method])
    adaptive = seen.simulation(attacker="adaptive", cost="l2")
    adaptive.dry_run()
    for i, x in enumerate(seen.images()):
        sent = adaptive._one(i)(x, adaptive.y[i])
        assert float((sent - adaptive.g[i]).norm() / adaptive.g[i].norm()) < 1e-6
    oblivious = seen.simulation(cost="l2")
    distance = oblivious.costs(seen.images()).sqrt() / oblivious.g.norm(dim=1)
    if method not in PLAIN:
        assert (distance > 1e-3).all(), "a plain gradient is something else"
    elif method != "fedreg":
        assert (distance < 1e-6).all()


GROUPS: dict[str, dict[str, Any]] = {
    "step size": {"local": {"lr": 0.5}},
    "weight decay": {"local": {"weight_decay": 0.3}},
    "clipping": {"local": {"max_grad_norm": 0.05}},
    "rule": {"client": {"name": "fedreg_mg", "pairing": "own", "eta_s": 0.05}},
}


@pytest.mark.parametrize("own", GROUPS)
def test_clients_of_a_group_are_simulated_with_its_rule_and_settings(observe, own):
    seen = observe(groups={"own": {"share": 0.5, **GROUPS[own]}}, schedule={"cohort": 8})
    options = AttackOptions(attacker="adaptive", cost="l2", iterations=2)
    groups = by_key(seen.observations, lambda one: seen.plan.group(one.client).name)
    assert set(groups) == {"", "own"}
    for part in groups.values():
        simulation = GradientSimulator(seen.plan, part, options)
        simulation.dry_run()
        costs = simulation.costs(torch.stack([one.x for one in part]))
        assert (costs < 1e-12 * simulation.g.square().sum(1)).all()
    mixed = invert(seen.plan, seen.observations, options)
    for found, one in zip(mixed.clients, seen.observations, strict=True):
        (alone,) = invert(seen.plan, [one], options).clients
        assert found.client == one.client and found.cost == pytest.approx(alone.cost, rel=1e-6)


def test_an_optimizer_of_a_group_is_refused_where_its_clients_were_observed(observe):
    own = {"share": 0.5, "local": {"optimizer": "adam"}}
    seen = observe(groups={"own": own}, schedule={"cohort": 8})
    groups = by_key(seen.observations, lambda one: seen.plan.group(one.client).name)
    with pytest.raises(ConfigError, match=r"of group 'own' stepped with local\.optimizer 'adam'"):
        invert(seen.plan, seen.observations, AttackOptions())
    assert invert(seen.plan, groups[""], AttackOptions(iterations=1)).clients


@pytest.mark.parametrize("cost", ["l2", "cosine"])
def test_for_fedavg_both_attackers_are_one(observe, cost):
    seen = observe(model="lenet")
    costs, gradients, results = [], [], []
    for attacker in ("oblivious", "adaptive"):
        simulation = seen.simulation(attacker=attacker, cost=cost)
        simulation.dry_run()
        now, gradient = simulation.gradient(simulation.starts(0))
        costs.append(now)
        gradients.append(gradient)
        results.append(
            invert(
                seen.plan,
                seen.observations,
                AttackOptions(attacker=attacker, cost=cost, iterations=5),
            )
        )
    torch.testing.assert_close(*costs, rtol=0, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
    for a, b in zip(*(result.clients for result in results), strict=True):
        assert a.cost == pytest.approx(b.cost, abs=1e-10)


def test_signs_are_constants_so_nothing_is_lost_by_not_following_them(observe, monkeypatch):
    seen = observe(algorithm={"name": "fedreg_mg", "eta_s": 0.05, "ascent": 3})
    x = seen.simulation().starts(0)
    found = []
    for input_grad in (gradient_simulator._AttackTask.input_grad, PureTask.input_grad):
        monkeypatch.setattr(gradient_simulator._AttackTask, "input_grad", input_grad)
        simulation = seen.simulation(attacker="adaptive", cost="l2")
        simulation.dry_run()
        found.append(simulation.gradient(x)[1])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert found[0].abs().max() > 0


def test_the_gradient_of_the_cost_is_its_slope(observe):
    """Through modified gradients too, by finite differences in a few pixels."""
    seen = observe(algorithm={"name": "fedreg_mg", "eta_s": 0.05, "ascent": 3}, model="logistic")
    simulation = seen.simulation(attacker="adaptive", cost="cosine", tv=0)
    simulation.dry_run()
    x = simulation.starts(0)
    _, gradient = simulation.gradient(x)
    for row, column in ((0, 3), (4, 4), (7, 1)):
        step = torch.zeros_like(x)
        step[..., row, column] = 1e-6
        slope = (simulation.costs(x + step) - simulation.costs(x - step)) / 2e-6
        torch.testing.assert_close(
            gradient[..., row, column].flatten(), slope, rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("attacker", ["oblivious", "adaptive"])
def test_side_by_side_is_one_after_the_other(observe, attacker, monkeypatch):
    monkeypatch.setattr(gradient_simulator, "VECTORS_PER_GRADIENT", 40_000)  # two at a time
    seen = observe(
        algorithm={"name": "fedreg_mg", "ascent": 3}, partition=PAIRS, local={"batch_size": 2}
    )
    options = AttackOptions(attacker=attacker, iterations=4, lr=0.1, tv=1e-3)
    many = invert(seen.plan, seen.observations, options)
    with monkeypatch.context() as patch:
        patch.setattr(GradientSimulator, "_why_not_side_by_side", lambda *given: "asked for")
        alone = invert(seen.plan, seen.observations, options)
        simulation = GradientSimulator(seen.plan, seen.observations, options)
        simulation.dry_run()
        assert not simulation.vmap
    (last,) = invert(seen.plan, seen.observations[3:], options).clients
    for a, b in [*zip(many.clients, alone.clients, strict=True), (many.clients[3], last)]:
        assert a.client == b.client and a.cost == pytest.approx(b.cost, rel=1e-6, abs=1e-10)
        torch.testing.assert_close(a.reconstructed, b.reconstructed, rtol=1e-5, atol=1e-6)
    simulation = GradientSimulator(seen.plan, seen.observations, options)
    simulation.dry_run()
    assert simulation.vmap and 1 < simulation.chunk < 4


def test_clients_of_several_sizes_and_a_rule_that_looks_at_sizes(observe, ragged):
    """Batches of one and of two images; FedCurv's finish sees the data, so its clients go one by
    one."""
    seen = observe(algorithm="fedcurv", partition=ragged([1, 2, 2, 5]), local={"batch_size": 2})
    result = invert(seen.plan, seen.observations, AttackOptions(attacker="adaptive", iterations=3))
    plain = invert(seen.plan, seen.observations, AttackOptions(iterations=3))
    assert [one.client for one in result.clients] == [one.client for one in seen.observations]
    assert sorted(len(one.labels) for one in result.clients) == [1, 2, 2, 2]
    for a, b in zip(result.clients, plain.clients, strict=True):
        assert a.cost == pytest.approx(b.cost, abs=1e-9)


# -- what is found ---------------------------------------------------------------------------------


def test_a_gradient_of_one_image_determines_it(observe):
    """Logistic regression: ∇_W = (p - y) xᵀ and ∇_b = p - y, so each row of the one over the entry
    of the other is x; what can be read off must be found."""
    seen = observe(model="logistic")
    plan, one = seen.plan, seen.observations[0]
    g = one.uploads["delta"] / plan.config.local.lr
    weights, biases = g[:640].view(10, 64), g[640:]
    torch.testing.assert_close(weights[0] / biases[0], one.x.flatten(), rtol=1e-6, atol=1e-6)
    result = invert(
        plan, seen.observations, AttackOptions(cost="l2", tv=0, iterations=400, lr=0.1, box=True)
    )
    assert len(result.clients) == 4 and not result.failed
    assert all(client.psnr[0] > 30 for client in result.clients), [
        client.psnr for client in result.clients
    ]
    nothing = invert(plan, seen.observations, AttackOptions(cost="l2", tv=0, iterations=1, lr=1e-6))
    assert all(client.psnr[0] < 15 for client in nothing.clients), "random images are nowhere near"


@pytest.mark.parametrize("cost", ["l2", "cosine"])
def test_a_smooth_net_gives_its_images_away(observe, source, cost):
    seen = observe(model=f"{source('smooth', SMOOTH)}:Net")
    options = AttackOptions(cost=cost, tv=0, iterations=150, lr=0.1)
    result = invert(seen.plan, seen.observations, options)
    simulation = GradientSimulator(seen.plan, seen.observations, options)
    before = simulation.costs(simulation.starts(0))
    assert all(one.cost < 0.05 * float(b) for one, b in zip(result.clients, before, strict=True))


def test_several_images_are_found_in_some_order(observe, ragged):
    """Three images of one digit and two of another, by a wide net that separates them."""
    model = {"name": "mlp", "hidden": [300]}
    seen = observe(
        model=model, partition=ragged([5]), schedule={"cohort": 1}, local={"batch_size": 5}
    )
    one = seen.observations[0]
    assert len(one.y) == 5 and len(set(one.y.tolist())) < 5
    result = invert(seen.plan, [one], AttackOptions(iterations=300, lr=0.1, box=True))
    best = result.clients[0]
    again = reconstructions.psnr(best.original, best.reconstructed)
    assert best.psnr == pytest.approx(again) and best.labels == tuple(one.y.tolist())
    order = reconstructions.matching(best.original, best.reconstructed, best.labels)
    assert order == list(range(5)), "what is found comes in the order that matches"


def test_the_box_keeps_images_valid_and_signs_move_all_pixels_alike(observe):
    seen = observe(local={"batch_size": 1})
    pixels = PixelRange.of(seen.plan.dataset, torch.float64)
    clamped: list[torch.Tensor] = []
    for box in (True, False):
        simulation_options = AttackOptions(iterations=3, box=box)
        kept: dict[str, Any] = {}

        class Kept(GradientSimulator):
            def costs(self, x: torch.Tensor, kept: dict[str, Any] = kept) -> torch.Tensor:
                kept["x"] = x.clone()
                return super().costs(x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_inversion, "GradientSimulator", Kept)
            invert(seen.plan, seen.observations, simulation_options)
        clamped.append(pixels.image(kept["x"]))
    assert clamped[0].min() >= -1e-9 and clamped[0].max() <= 1 + 1e-9
    assert clamped[1].min() < -0.1 or clamped[1].max() > 1.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_inversion, "GradientSimulator", Kept)
        invert(seen.plan, seen.observations, AttackOptions(iterations=1, signed=True, lr=0.5))
    moved = (kept["x"] - seen.simulation().starts(0)).abs()
    moved = moved[moved > 0]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5), rtol=1e-6, atol=1e-6)


def test_the_best_start_is_kept_and_starts_are_keyed(observe):
    seen = observe()
    simulation = seen.simulation()
    assert torch.equal(simulation.starts(1), seen.simulation().starts(1))
    assert not torch.equal(simulation.starts(0), simulation.starts(1))
    assert not torch.equal(simulation.starts(0), seen.simulation(seed=1).starts(0))
    assert not torch.equal(simulation.starts(0)[0], simulation.starts(0)[1])
    assert abs(float(simulation.starts(0).std()) - 1) < 0.2
    one, three = (
        invert(seen.plan, seen.observations, AttackOptions(iterations=10, restarts=n))
        for n in (1, 3)
    )
    assert all(b.cost <= a.cost for a, b in zip(one.clients, three.clients, strict=True))
    assert {client.restart for client in three.clients} != {0}
    assert all(
        (a.cost == b.cost) == (b.restart == 0)
        for a, b in zip(one.clients, three.clients, strict=True)
    )


def test_the_step_falls_three_times(observe):
    seen = observe()
    moves: list[float] = []
    before: list[torch.Tensor] = []

    class Kept(GradientSimulator):
        def gradient(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before.append(x.detach().clone())
            return torch.zeros(len(x), dtype=x.dtype), torch.ones_like(x)  # Adam then moves by lr

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_inversion, "GradientSimulator", Kept)
        invert(seen.plan, seen.observations, AttackOptions(iterations=80))
    before = before[-80:]
    moves = [float((a - b).abs().mean()) for a, b in itertools.pairwise(before)]
    np.testing.assert_allclose(
        moves, [1.0] * 30 + [0.1] * 20 + [0.01] * 20 + [0.001] * 9, rtol=1e-3
    )


def test_what_is_not_finite_is_said_by_client(observe):
    seen = observe()
    broken = replace(
        seen.observations[1], uploads={"delta": seen.observations[1].uploads["delta"] * math.nan}
    )
    mixed = [seen.observations[0], broken, *seen.observations[2:]]
    result = invert(seen.plan, mixed, AttackOptions(iterations=5, restarts=2))
    assert result.failed == [broken.client] and math.isnan(result.clients[1].psnr[0])
    whole = invert(seen.plan, seen.observations, AttackOptions(iterations=5, restarts=2))
    assert result.clients[0].cost == whole.clients[0].cost and math.isfinite(result.psnr)


# -- what cannot be attacked -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["scaffold", "moon", "feddyn", "ditto"])
def test_rules_that_keep_something_are_refused_by_name(observe, rule):
    seen = observe(algorithm=rule)
    with pytest.raises(ConfigError, match=f"client rule '{rule}' keeps"):
        invert(seen.plan, seen.observations, AttackOptions(attacker="adaptive", iterations=1))
    assert not invert(seen.plan, seen.observations, AttackOptions(iterations=1)).failed


OWN = program("gradient_inversion_own")


@pytest.mark.parametrize(
    ("rule", "why"), [("Rounded", "cannot be simulated"), ("Whole", "all of the client's data")]
)
def test_rules_that_cannot_be_simulated_are_refused_by_name(observe, source, rule, why):
    seen = observe(algorithm=f"{source('own', OWN)}:{rule}")
    with pytest.raises(
        ConfigError, match=f"client rule '{rule.lower()}'.*{why}.*attacker=oblivious"
    ):
        invert(seen.plan, seen.observations, AttackOptions(attacker="adaptive", iterations=1))


def test_a_rule_that_wants_all_data_works_where_the_batch_is_all(observe, source):
    seen = observe(
        algorithm=f"{source('own', OWN)}:Whole", partition=PAIRS, local={"batch_size": 2}
    )
    simulation = seen.simulation(attacker="adaptive", cost="l2")
    simulation.dry_run()
    torch.testing.assert_close(
        simulation.costs(seen.images()), torch.zeros(4, dtype=torch.float64), atol=1e-15, rtol=0
    )


def test_a_rule_that_reads_the_labels_of_other_batches_is_refused_by_name(observe, ragged):
    """Also where the first client has no other batch."""
    seen = observe(algorithm="fedlc", partition=ragged([1, 4, 4, 4]))
    seen.observations.sort(key=lambda one: one.client)
    with pytest.raises(ConfigError, match=r"client rule 'fedlc'.*all of the client's data"):
        invert(seen.plan, seen.observations, AttackOptions(attacker="adaptive", iterations=1))


def test_stages_of_uploads_are_refused_by_name(observe):
    seen = observe(local={"upload": [{"name": "topk", "share": 0.1}]})
    with pytest.raises(ConfigError, match=r"stage TopK of local\.upload.*attacker=oblivious"):
        seen.simulation(attacker="adaptive")
    assert seen.simulation(attacker="oblivious").clip_norm is None


def test_several_steps_and_other_uploads_are_refused(observe):
    seen = observe(local={"steps": 3})
    client = seen.observations[0].client
    with pytest.raises(ConfigError, match=rf"client {client} made 3 local steps.*local\.steps=1"):
        invert(seen.plan, seen.observations, AttackOptions())
    unlabelled = replace(seen.observations[0], steps=1, y=torch.tensor([-100]))
    with pytest.raises(ConfigError, match=f"client {client} has an example with label -100"):
        invert(seen.plan, [unlabelled], AttackOptions())
    nova = observe(algorithm="fednova")
    with pytest.raises(ConfigError, match="server rule 'fednova' takes normalised"):
        invert(nova.plan, nova.observations, AttackOptions())
    with pytest.raises(ConfigError, match="no client was recorded"):
        invert(nova.plan, [], AttackOptions())


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def attacked(raysim_, tmp_path, base, monkeypatch) -> Callable[..., CommandResult]:
    """attacked(...): the command on a small run. The run is in tmp_path/run."""
    config = {
        "name": "small",
        **base,
        "record_updates": {"rounds": [0], "clients": 3},
        "checkpoint": {"every": 0},
    }
    config |= {
        "rounds": 1,
        "algorithm": "fedavg",
        "model": "logistic",
        "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert raysim_("run", tmp_path / "config.json").code == 0
    return lambda *arguments: raysim_("attack", tmp_path / "run", *arguments)


@pytest.mark.usefixtures("pictures")
def test_the_command_writes_shows_and_tracks(attacked, tmp_path, caplog, monkeypatch):
    run = tmp_path / "run"
    said = attacked("cost=l2", "iterations=300", "lr=0.1", "tv=0", "--json")
    assert said.code == 0, said.err
    folder = run / "attack" / "l2-oblivious"
    assert (
        said.last["folder"] == str(folder)
        and "iteration 300/300" in said.err
        and "mean PSNR" in said.err
    )
    assert (folder / "attack.png").read_bytes().startswith(b"\x89PNG")
    options = json.loads((folder / "options.json").read_text())
    assert (
        options["cost"] == "l2"
        and options["tv"] == 0
        and options["round"] == 0
        and options["seed"] == 0
    )
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    seen = recorded_updates.read_observations(run)
    assert [(int(r["client"]), int(r["label"])) for r in rows] == [
        (one.client, int(one.y[0])) for one in seen
    ]
    assert [float(r["psnr"]) for r in rows] == [
        client["psnr"][0] for client in said.last["clients"]
    ]
    assert (
        said.last["psnr"] == pytest.approx(np.mean([float(r["psnr"]) for r in rows]))
        and said.last["psnr"] > 20
    )

    def tracked() -> tuple[Any, list[str], dict[int, float]]:
        start = json.loads((run / "spool.jsonl").read_text().splitlines()[0])
        client = mlflow_client.connected(start["uri"])
        (info,) = client.search_runs(["1"])
        files = [a.path for a in client.list_artifacts(info.info.run_id, "attack")]
        points = client.get_metric_history(info.info.run_id, "attack/psnr_l2_oblivious")
        return info.info, files, {point.step: point.value for point in points}

    info, files, points = tracked()
    assert info.status == "FINISHED" and files == ["attack/l2-oblivious"]
    assert points == {1: pytest.approx(said.last["psnr"])}

    with monkeypatch.context() as patch:  # the tracking server cannot be reached
        patch.setattr(
            store, "open_experiment", lambda *_: (_ for _ in ()).throw(ConnectionError("refused"))
        )
        with caplog.at_level(logging.WARNING):
            again = attacked("cost=l2", "iterations=3")
    assert again.code == 0 and (run / "attack" / "l2-oblivious-2" / "table.csv").is_file()
    assert "does not show this attack" in caplog.text and "refused" in caplog.text
    assert tracked()[1:] == (files, points)
    assert replay_spool(run) == 2
    _, files, points = tracked()
    assert files == ["attack/l2-oblivious", "attack/l2-oblivious-2"] and set(points) == {1, 2}


def test_mistakes_are_one_message(attacked, raysim_, tmp_path):
    for argument, hint in (
        ("iteration=5", "did you mean 'iterations'?"),
        ("cost=l3", "cost: "),
        ("iterations=0", "iterations: "),
        ("iterations=true", "iterations: "),
        ("lr=nan", "lr: "),
        ("round=4", "only of 0"),
        ("lr", "expected key=value"),
    ):
        said = attacked(argument)
        assert_one_message(said)
        assert hint in said.err, said.err
    assert not (tmp_path / "run" / "attack").exists()
    said = raysim_("attack", tmp_path / "nowhere")
    assert_one_message(said)
    assert "holds no run" in said.err
    for file in (tmp_path / "run" / "updates").iterdir():
        file.unlink()
    said = attacked()
    assert_one_message(said)
    assert "record_updates.rounds=[0]" in said.err


def test_observations_keep_what_was_sent_down(observe):
    """The model that a client began with, which the attack needs, is x_0 in round 0."""
    seen = observe()
    assert isinstance(seen.observations[0].broadcast, Broadcast)
    torch.testing.assert_close(
        seen.observations[0].broadcast.global_params, seen.plan.initial[0], rtol=0, atol=0
    )
    assert Path(seen.plan.config.run_dir or "").name == "run"
