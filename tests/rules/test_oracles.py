"""The engine against the papers, number by number: x_t after every round equals the NumPy oracle's
to 1e-9 relative.

The oracles in tests/oracle/ were written from the papers. They get the engine's own cohorts and
mini-batches (there is no other way to see the same randomness) but compute every gradient,
correction and update themselves. Everything runs in float64, one client after the other and side by
side on lanes, on clients of very unequal sizes.

An option that changes nothing in a run is not tested by it. So `matters` names for each case other
values of its hyper-parameters with which the oracle must disagree with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import batchnorm, fedavg, gradma
from oracle.batches import batch_sizes
from oracle.nets import MLPBatchNorm, Softmax
from support.oracle_cases import (
    BATCH_NORM,
    MODES,
    NETS,
    ROOMY,
    SAMPLES,
    SIZES,
    STEPS,
    UNIFORM,
    Case,
    Feed,
    Watching,
    assert_papers_rounds,
    by_round,
    configuration,
    distance,
    feed,
)
from support.programs import program

from raysim.training.batches.batch_order import batch_positions, batches_per_pass


def test_data_are_ragged_and_clients_disagree(ragged, engine):
    """What the rest of the file takes for granted of its runs."""
    run, _ = engine(
        {"rounds": 8, "partition": ragged(SIZES), "algorithm": "fedavg", "schedule": {"cohort": 5}}
    )
    f = feed(run)
    assert f.sizes == SIZES
    assert all(
        len(set(cohort)) == len(cohort) and 5 not in cohort for cohort in f.cohorts
    )  # 5 has nothing
    assert min(map(len, f.cohorts)) < max(map(len, f.cohorts)) == 5  # it was sampled, and left out
    assert any(1 in cohort for cohort in f.cohorts)  # the client of one sample takes part
    assert len({tuple(cohort) for cohort in f.cohorts}) == 8
    assert max(sum(i in cohort for cohort in f.cohorts) for i in range(12)) >= 4  # clients return


# --- the methods


def gradma_case(
    variant: str, settings: dict, hyper: dict, matters: list[dict], *, lr: Any = 1.0, **more: Any
) -> Case:
    """`settings` are raysim's, `hyper` the oracle's. Both sides' QPs must have bound."""
    binds = {"gradma_w": ("client/qp_active",), "gradma_s": ("server/qp_active",)}
    both = ("client/qp_active", "server/qp_active")
    segments = NETS[more.get("net", "mlp")][1].segments
    lr_of_oracle = by_round(lr) if isinstance(lr, list) else lr
    hyper = {"variant": variant, "lr": lr_of_oracle, "segments": segments, **hyper}
    if variant != "gradma_s":
        more = {"sizes": ROOMY, "seed": 5, **more}
    return Case(
        {"name": variant, **settings},
        gradma.run,
        hyper,
        matters,
        {"lr": lr},
        binds.get(variant, both),
        **more,
    )


S = {"beta1": 0.8, "beta2": 0.6, "memory": 12}
TENSORS = {"qp_scope": "per_tensor"}
WHOLE = {"qp_scope": "whole"}
EVICTING = {**S, "memory": 5}

CASES: dict[str, Case] = {
    "fedavg": Case({"name": "fedavg"}, fedavg.fedavg, {"lr": 0.3}, [SAMPLES], {"lr": 0.3}),
    "fedavg samples": Case(
        {"name": "fedavg", **SAMPLES}, fedavg.fedavg, {"lr": 0.3, **SAMPLES}, [UNIFORM], {"lr": 0.3}
    ),
    "fedavg epochs": Case({"name": "fedavg"}, fedavg.fedavg, {"lr": 0.3}, [], {"lr": 0.3, "epochs": 2}),
    "fedavg schedules": Case(
        {"name": "fedavg", "lr": [[0, 1.5], [3, 0.5]]},
        fedavg.fedavg,
        {"lr": by_round(STEPS), "server_lr": by_round([[0, 1.5], [3, 0.5]])},
        [{"lr": 0.2}, {"server_lr": 1.5}],
        {"lr": STEPS},
    ),
    "fedsgd": Case({"name": "fedsgd"}, fedavg.fedsgd, {"lr": 0.5}, [SAMPLES], {"lr": 0.5}, net="logistic"),
    "fedprox": Case(
        {"name": "fedprox", "mu": 0.7}, fedavg.fedprox, {"lr": 0.3, "mu": 0.7}, [{"mu": 1.4}, {"mu": 0.35}], {"lr": 0.3}
    ),
    "fedprox reference": Case(
        {"name": "fedprox", "mu": 0.7, "preset": "authors_code"}, fedavg.fedprox, {"lr": 0.3, "mu": 0.7, **SAMPLES},
        [UNIFORM], {"lr": 0.3},
    ),
    "fedavgm": Case(
        {"name": "fedavgm", "beta1": 0.6, "lr": 0.7},
        fedavg.fedavgm,
        {"lr": 0.3, "beta1": 0.6, "server_lr": 0.7},
        [{"beta1": 0.0}, {"server_lr": 1.0}, SAMPLES],
        {"lr": 0.3},
    ),
    "fedavgm schedules": Case(
        {"name": "fedavgm", "beta1": STEPS, "lr": [[0, 1.0], [4, 0.3]], "preset": "authors_code"},
        fedavg.fedavgm,
        {"lr": by_round(STEPS), "beta1": by_round(STEPS), "server_lr": by_round([[0, 1.0], [4, 0.3]]), **SAMPLES},
        [{"beta1": 0.2}, {"server_lr": 1.0}, {"lr": 0.2}, UNIFORM],
        {"lr": STEPS},
    ),
    "fedproxm": Case(
        {"name": "fedproxm", "beta1": 0.6, "mu": 0.7},
        fedavg.fedproxm,
        {"lr": 0.3, "beta1": 0.6, "mu": 0.7},
        [{"mu": 0.0}, {"beta1": 0.0}],
        {"lr": 0.3},
    ),
    # GradMA-W. x' binds only where steps overshoot: lr 4 on the convex problem.
    "gradma_w": gradma_case(
        "gradma_w", {}, {}, [{"previous": "reset"}, {"first_previous": "global"}, TENSORS, SAMPLES],
        seed=10, lr=4.0, net="logistic",
    ),
    "gradma_w reset": gradma_case(
        "gradma_w", {"previous": "reset"}, {"previous": "reset"}, [{"previous": "memory"}], lr=4.0, net="logistic"
    ),
    "gradma_w reference": gradma_case(
        "gradma_w",
        {"preset": "authors_code"},
        {**TENSORS, **SAMPLES, "first_previous": "global"},
        [WHOLE, UNIFORM, {"first_previous": "x0"}, {"previous": "reset"}],
        seed=15, lr=4.0,
        net="logistic",
    ),
    "gradma_w schedules": gradma_case(
        "gradma_w", {"lr": STEPS}, {"server_lr": by_round(STEPS)}, [{"server_lr": 0.2}, {"lr": 1.0}],
        lr=[[0, 1.0], [3, 3.0]],
    ),
    # GradMA-S
    "gradma_s": gradma_case("gradma_s", S, S, [{"beta1": 0.0}, {"beta2": 0.1}, {"memory": 5}, SAMPLES, TENSORS]),
    "gradma_s evictions": gradma_case(
        "gradma_s", EVICTING, EVICTING, [{"memory": 6}, {"memory": 12}, {"beta2": 0.1}], rounds=12
    ),
    "gradma_s reference": gradma_case(
        "gradma_s", {**S, "preset": "authors_code"}, {**S, **TENSORS, **SAMPLES}, [WHOLE, UNIFORM]
    ),
    "gradma_s schedules": gradma_case(
        "gradma_s",
        {"memory": 5, "beta1": STEPS, "beta2": [[0, 0.9], [4, 0.2]], "lr": [[0, 1.0], [3, 0.5]]},
        {"memory": 5, "beta1": by_round(STEPS), "beta2": by_round([[0, 0.9], [4, 0.2]]),
         "server_lr": by_round([[0, 1.0], [3, 0.5]])},
        [{"beta1": 0.2}, {"beta2": 0.9}, {"server_lr": 1.0}],
        rounds=12,
    ),
    "gradma_s small tensors": gradma_case(
        "gradma_s",
        {**S, **TENSORS, "small_tensor_rule": "sum"},
        {**S, **TENSORS, "small_tensor_rule": "sum"},
        [{"small_tensor_rule": None}],
        lr=2e-4,
    ),
    # GradMA
    "gradma": gradma_case(
        "gradma", S, S,
        [{"previous": "reset"}, {"first_previous": "global"}, {"beta2": 0.1}, {"beta1": 0.0}, SAMPLES, TENSORS],
        seed=19, lr=4.0, net="logistic",
    ),
    "gradma reference": gradma_case(
        "gradma", {**S, "preset": "authors_code"}, {**S, **TENSORS, **SAMPLES, "previous": "reset"},
        [WHOLE, UNIFORM, {"previous": "memory"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_papers(name, engine, ragged):
    assert_papers_rounds(CASES[name], engine, ragged)


@pytest.mark.parametrize("name", ["gradma_s evictions", "gradma_s reference", "gradma_s schedules"])
def test_the_memory_is_the_papers(name, engine, ragged):
    """mem_red and Server_Update, from inside: who is in memory and how often sampled, who was
    evicted when, D and m̃."""
    case = CASES[name]
    model, net = NETS[case.net]
    run, records = engine(configuration(case, "loop", ragged, model))
    f = feed(run)
    theirs = gradma.trace(*f.args(net.grad), **case.hyper)
    assert [record["server/memory_evictions"] for record in records[1:]] == [
        len(evicted) for evicted in theirs.evicted
    ]
    state = run.executor.server.state
    owner, count = state["memory/owner"].tolist(), state["memory/count"].tolist()
    counts = {i: c for i, c in zip(owner, count, strict=True) if i >= 0}
    assert counts == theirs.counts[-1]
    assert len(set(counts.values())) > 1
    rows = state["memory/scale"][:, None] * state["memory/rows"][:, : net.size]
    for i, row in theirs.rows[-1].items():
        np.testing.assert_allclose(
            rows[owner.index(i)].numpy(), row, rtol=0, atol=1e-9 * np.abs(row).max()
        )
    m = theirs.momentum[-1]
    np.testing.assert_allclose(state["m"].numpy(), m, rtol=0, atol=1e-9 * np.abs(m).max())


FAINT = program("oracles_faint")


@pytest.mark.parametrize("mode", MODES)
def test_small_tensors_of_a_client_are_amplified_if_asked(mode, engine, ragged, source):
    """`small_tensor_rule: sum` on the client (algorithms.md 7.6): where g, a, b and c of a tensor
    are all shorter than 2e-4, the step is g + a + b + c. Logits 1e-4 (W x + b) do that: gradients
    1e-4 times those of W x + b at 1e-4 w."""
    settings = {"qp_scope": "per_tensor", "small_tensor_rule": "sum"}
    run, records = engine({
        "rounds": 6, "dtype": "float64", "model": {"name": source("faint", FAINT) + ":Net"},
        "partition": ragged(ROOMY), "algorithm": {"name": "gradma_w", **settings}, "schedule": {"cohort": 5},
        "batching": {"mode": mode, "size": 3}, "local": {"batch_size": 16, "steps": 4, "lr": 1.0},
    })  # fmt: skip
    f, net = feed(run), Softmax(64, 10)
    args = f.args(lambda w, x, y: 1e-4 * net.grad(1e-4 * w, x, y))
    hyper = {"lr": 1.0, "segments": net.segments, "qp_scope": "per_tensor"}
    moved = [x - run.executor.xs[0] for x in run.executor.xs[1:]]

    def distance_to(rule: str | None) -> float:
        return distance(
            moved, [x - f.x0 for x in gradma.gradma_w(*args, small_tensor_rule=rule, **hyper)[1:]]
        )

    assert distance_to("sum") < 1e-6
    assert distance_to(None) > 0.1
    assert (
        max(record.get("client/qp_active", 0.0) for record in records) > 0
    )  # other tensors are projected


# --- BatchNorm


def statistics_of(
    watching: Watching, f: Feed, passes: int, weights: str
) -> list[batchnorm.Statistics]:
    """The server's statistics after every round, from what an oracle's clients saw. Of the `passes`
    gradients of a local step only the first is that of the model in training; the others must leave
    no trace."""
    now, history, call = batchnorm.initial(watching.net), [], 0
    history.append(now)
    for t, cohort in enumerate(f.cohorts):
        uploaded = {}
        for i in cohort:
            mean, var = now.mean, now.var
            for _ in f.batches[t][i]:
                of_batch, call = watching.seen[call], call + passes
                mean = (1 - batchnorm.MOMENTUM) * mean + batchnorm.MOMENTUM * of_batch[0]
                var = (1 - batchnorm.MOMENTUM) * var + batchnorm.MOMENTUM * of_batch[1]
            uploaded[i] = batchnorm.Statistics(mean, var, 0)
        now = batchnorm.average(uploaded, f.sizes, weights)
        history.append(now)
    assert call == len(watching.seen)
    return history


BATCH_NORM_CASES: dict[str, tuple[dict, list[int], Callable, dict, int]] = {
    "fedavg": ({"name": "fedavg", "lr": 0.5}, SIZES, fedavg.fedavg, {"server_lr": 0.5}, 1),
    "fedavgm": (
        {"name": "fedavgm", "beta1": 0.7, "lr": 0.5}, SIZES, fedavg.fedavgm, {"beta1": 0.7, "server_lr": 0.5}, 1
    ),
    "gradma reference": (
        {"name": "gradma", **S, "preset": "authors_code"}, ROOMY, gradma.gradma,
        {**S, **TENSORS, **SAMPLES, "previous": "reset", "segments": MLPBatchNorm(64, 6, 10).segments}, 3,
    ),
    "gradma": ({"name": "gradma", **S}, ROOMY, gradma.gradma, S, 3),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BATCH_NORM_CASES)
def test_batch_norm_statistics_travel_beside_the_parameters(name, mode, engine, ragged, source):
    """A user's net with BatchNorm, clients with one sample among them. Statistics start from the
    server's, move in the one training pass of each step, and are averaged with the round's weights:
    no server lr, no momentum, no QP."""
    algorithm, sizes, oracle, hyper, passes = BATCH_NORM_CASES[name]
    run, records = engine({
        "rounds": 6, "seed": 5, "dtype": "float64", "model": {"name": source("batch_norm", BATCH_NORM) + ":Net"},
        "partition": ragged(sizes), "algorithm": algorithm, "schedule": {"cohort": 5},
        "batching": {"mode": mode, "size": 3}, "local": {"batch_size": 16, "steps": 3, "lr": 0.2},
    })  # fmt: skip
    f, net = feed(run), MLPBatchNorm(64, 6, 10)
    ones = [
        batch
        for of_round in f.batches
        for batches in of_round.values()
        for batch in batches
        if len(batch) == 1
    ]
    assert bool(ones) == (sizes is SIZES)
    watching = Watching(net)
    theirs = oracle(*f.args(watching), lr=0.2, **hyper)
    statistics = statistics_of(watching, f, passes, hyper.get("weights", "uniform"))
    assert distance(run.executor.xs, theirs) < 1e-9
    model, x = run.plan.model(), run.executor.server.state["x"]
    named = [model.state_dict(x, torch.tensor(b)) for b in run.executor.statistics]
    assert (
        distance(
            [s["bn.running_mean"].numpy() for s in named[1:]], [s.mean for s in statistics[1:]]
        )
        < 1e-9
    )
    assert (
        distance([s["bn.running_var"].numpy() for s in named], [s.var for s in statistics]) < 1e-9
    )
    if (
        name.startswith("fedavg") and oracle is fedavg.fedavg
    ):  # the transcription of BatchNorm's own rules agrees
        literal, history = batchnorm.run(
            f.x0, f.cohorts, f.sizes, f.batches, net, f.data, lr=0.2, server_lr=hyper.get("server_lr", 1.0),
            weights=hyper.get("weights", "uniform"),
        )  # fmt: skip
        assert distance(run.executor.xs, literal) < 1e-9
        assert (
            distance([s["bn.running_var"].numpy() for s in named], [s.var for s in history]) < 1e-9
        )
    if passes == 3:
        assert max(record.get("client/qp_active", 0.0) for record in records) > 0


# --- mini-batches


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_a_pass_covers_every_example_once_in_the_batches_of_a_data_loader(size, batch_norm):
    """With BatchNorm a single example that is left joins the batch before."""
    for n in range(1, 40):
        expected = batch_sizes(n, size, batch_norm)
        if not batch_norm:
            examples = torch.utils.data.TensorDataset(torch.arange(n))
            loader = torch.utils.data.DataLoader(examples, batch_size=size)
            assert expected == [len(batch) for (batch,) in loader]
        assert batches_per_pass(n, size, batch_norm) == len(expected), n
        for number in range(3):
            first = number * len(expected)
            batches = list(batch_positions(3, 7, n, size, first, len(expected), batch_norm))
            assert [len(batch) for batch in batches] == expected, n
            assert sorted(np.concatenate(batches).tolist()) == list(range(n))
    assert batches_per_pass(0, size, batch_norm) == batches_per_pass(0, 0, batch_norm) == 0


def test_a_round_goes_on_where_the_last_one_stopped():
    """The stream of batches of a client does not depend on how rounds cut it."""
    whole = list(batch_positions(0, 4, 33, 8, 0, 23))
    cut = [
        *batch_positions(0, 4, 33, 8, 0, 3),
        *batch_positions(0, 4, 33, 8, 3, 9),
        *batch_positions(0, 4, 33, 8, 12, 11),
    ]
    for a, b in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(a, b)


def test_passes_are_reshuffled_and_clients_differ():
    """One pass of 200 samples in batches of 10, seen as one permutation: another one in every pass,
    for every client and seed, none of them in order; and each of 41 samples is in the last batch, of
    one, of some pass in batches of 10."""

    def one_pass(seed, client, number):
        return tuple(np.concatenate(list(batch_positions(seed, client, 200, 10, 20 * number, 20))))

    drawn = {
        one_pass(seed, client, number)
        for seed in (0, 1)
        for client in (0, 1, 2)
        for number in range(4)
    }
    assert len(drawn) == 24
    assert tuple(range(200)) not in drawn
    last = [list(batch_positions(0, 0, 41, 10, 5 * number, 5))[-1] for number in range(400)]
    assert {batch.item() for batch in last} == set(range(41))
