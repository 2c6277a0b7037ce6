"""What is done the fast way comes out as if it had been done the plain way: blocks of clients
trained as one gradient, weighted sums taken piece by piece, uploads that are looked at one by one
only where their sum is not sound."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import BAD, poisoned, without
from support.cohorts import sample_cohort
from support.fixed_sums import fixed_sum, same
from support.programs import program
from torch import Tensor, nn

from raysim.data import Examples
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.engine.process_setup import make_trainer
from raysim.engine.round_clients import make_cohort, make_tasks
from raysim.errors import ClientError, ConfigError, RaysimError
from raysim.models.flat import Model
from raysim.numerics import NonFiniteError, combine, to_float
from raysim.numerics.fixed_point import BlockSum, FixedSum, FixedTotal
from raysim.prepare.resolve import prepare
from raysim.randomness import generator
from raysim.schedule import synchronous_round
from raysim.training.batches import client_batches as feeding
from raysim.training.batches.client_batches import ClientBatches, PrefetchedBatches
from raysim.training.messages import Block, Broadcast, ClientTask, cut_blocks
from raysim.training.trainers import pooled as one_gradient
from raysim.training.trainers.loop_trainer import LoopTrainer
from raysim.training.trainers.pooled import PooledTrainer

# -- blocks as one gradient

SIZES = [20, 1, 9, 0, 14, 2, 7, 17]
"""Beside batches of 6: whole and partial ones; one sample, two, none."""

NETS = program("fast_paths_nets")

RULES = program("fast_paths_rules")


@pytest.fixture
def config(ragged, source) -> Callable[..., dict[str, Any]]:
    """config(**sections): four rounds of FedSGD, five clients of eight, unequal, one of them empty."""

    def make(**sections: Any) -> dict[str, Any]:
        return {
            "rounds": 4, "seed": 1, "dtype": "float64", "model": {"name": source("nets", NETS) + ":net"},
            "partition": ragged(SIZES), "schedule": {"cohort": 5}, "algorithm": {"name": "fedsgd"},
            "local": {"steps": 1, "batch_size": "full", "lr": 0.3}, "batching": {"mode": "pooled", "size": 3}, **sections,
        }  # fmt: skip

    return make


@pytest.fixture
def found(source) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """found(sections): the same, where `nets:` and `rules:` mean files with what stands above;
    without what is None."""
    paths = {"nets": source("nets", NETS), "rules": source("rules", RULES)}

    def make(given: dict[str, Any]) -> dict[str, Any]:
        given = copy.deepcopy({k: v for k, v in given.items() if v is not None})
        for section in ("model", "client", "server"):
            if (
                isinstance(named := given.get(section), dict)
                and named["name"].split(":")[0] in paths
            ):
                file, _, name = named["name"].partition(":")
                named["name"] = f"{paths[file]}:{name}"
        return given

    return make


def no_loop(*args: Any) -> None:
    raise AssertionError("clients are trained one by one")


def both(
    engine: Any, config: Any, monkeypatch: Any, change: Any = lambda plan: plan, **given: Any
) -> list[Engine]:
    """The same run looped and pooled, found alike. While pooled, nobody is trained alone."""
    looped, records = engine(config(**given, batching={"mode": "loop", "size": 3}), change=change)
    with monkeypatch.context() as patch:

        def without_loop(plan: Plan) -> Plan:  # from here on: the dry run of a user's rule loops
            patch.setattr(LoopTrainer, "train_block", no_loop)
            return change(plan)

        pooled, records_pooled = engine(config(**given), change=without_loop)
    assert looped.plan.mode == "loop" and pooled.plan.mode == "pooled"
    alike(pooled, looped)
    agree(records_pooled, records)
    assert np.abs(looped.executor.xs[-1] - looped.executor.xs[0]).max() > 1e-3
    return [looped, pooled]


def alike(ours: Engine, theirs: Engine) -> None:
    assert len(ours.executor.xs) == len(theirs.executor.xs) == ours.config.rounds + 1
    for t, (a, b) in enumerate(zip(ours.executor.xs, theirs.executor.xs, strict=True)):
        assert np.abs(a - b).max() < 1e-10, f"before round {t}"


def agree(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """All that is said of rounds, but for how long they took."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in (k for k in b if not k.endswith(("seconds", "per_second"))):
            assert a[key] == pytest.approx(b[key], rel=1e-9, abs=1e-10, nan_ok=True), key


def cohorts(engine: Engine) -> list[list[int]]:
    return [sample_cohort(engine.schedule, t) for t in range(engine.config.rounds)]


FULL = {"steps": 1, "batch_size": "full", "lr": 0.3}
SOME = {"steps": 1, "batch_size": 6, "lr": 0.3}
ALIKE: dict[str, dict[str, Any]] = {
    "fedsgd": {},
    "by samples": {"algorithm": {"name": "fedsgd", "weights": "samples"}},
    "fedavg": {"algorithm": {"name": "fedavg"}, "local": SOME},
    "fedavg by samples": {"algorithm": {"name": "fedavg", "weights": "samples"}, "local": SOME},
    "one epoch": {
        "algorithm": {"name": "fedavg"},
        "local": {"epochs": 1, "batch_size": "full", "lr": 0.3},
    },
    "one example": {"algorithm": {"name": "fedavg"}, "local": {**SOME, "batch_size": 1}},
    "momentum": {"algorithm": {"name": "fedavgm"}},
    "adam": {"algorithm": {"name": "fedadam", "lr": 0.01}},
    "a client of no weight": {
        "algorithm": None,
        "client": {"name": "fedavg"},
        "server": {"name": "rules:NothingServer"},
    },
    "server lr": {"algorithm": {"name": "fedsgd", "lr": 0.5}},
    "dirichlet": {
        "partition": {"name": "dirichlet", "clients": 12, "alpha": 0.1, "min_samples": 0}
    },
    "steps by rounds": {"local": {**FULL, "lr": [[0, 0.5], [2, 0.1], [3, 0.03]]}},
    "mlp": {"model": {"name": "mlp", "hidden": [7]}},
    "lenet": {"model": "lenet"},
    "everybody": {"schedule": {"cohort": 8}},
    "virtual": {"partition": {"name": "virtual", "clients": 1000, "samples": 4}},
}


@pytest.mark.parametrize("case", ALIKE)
def test_pooled_is_looped(case, engine, config, found, monkeypatch):
    looped, _ = both(engine, lambda **given: found(config(**given)), monkeypatch, **ALIKE[case])
    if "partition" not in ALIKE[case]:
        assert {1, 5} <= {
            i for cohort in cohorts(looped) for i in cohort
        }  # one sample, two samples


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_pooled_in_blocks_of_any_size(size, engine, config):
    looped, records = engine(config(batching={"mode": "loop", "size": 2}))
    pooled, records_pooled = engine(config(batching={"mode": "pooled", "size": size}))
    alike(pooled, looped)
    agree(records_pooled, records)


@pytest.mark.parametrize("model", ["net", "grouped"])
@pytest.mark.parametrize("local", [FULL, SOME], ids=["full", "some"])
def test_pooled_clients_keep_their_own_crops_and_masks(
    model, local, engine, config, source, monkeypatch
):
    """Two rounds of the same clients under the same parameters would look alike but for these."""

    def cropped(plan: Plan) -> Plan:
        return replace(plan, dataset=replace(plan.dataset, pad=2, flip=True))

    given = {"model": {"name": source("nets", NETS) + f":{model}"}, "local": local}
    looped, _ = both(engine, config, monkeypatch, cropped, **given)
    plain, _ = engine(config(**given))
    assert np.abs(looped.executor.xs[-1] - plain.executor.xs[-1]).max() > 1e-4


@pytest.mark.parametrize("clients", [1, 3])
def test_pooled_clients_of_many_examples(clients, engine, config, monkeypatch):
    """More than are passed through the net at one time, in one block and in one client; with masks
    and crops."""

    def cropped(plan: Plan) -> Plan:
        assert len(plan.dataset.y) > 1024
        return replace(plan, dataset=replace(plan.dataset, pad=1, flip=True))

    both(engine, config, monkeypatch, cropped, rounds=2,
         partition={"name": "dirichlet", "clients": clients, "alpha": 1.0}, schedule={"cohort": clients})  # fmt: skip


@pytest.mark.parametrize("name", ["kasync", "buffered"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_pooled_clients_that_began_with_different_versions(
    name, weights, engine, config, monkeypatch
):
    """Also in rounds with different step sizes."""
    given = {
        "rounds": 8, "schedule": {"name": name, {"kasync": "k", "buffered": "buffer_size"}[name]: 3, "concurrency": 6},
        "algorithm": {"name": "fedavg", "weights": weights}, "local": {**SOME, "lr": [[0, 0.3], [3, 0.1]]},
    }  # fmt: skip
    mixed = []
    pooled = PooledTrainer._add_as_one

    def seen(self: PooledTrainer, broadcasts: Any, block: Block, total: Any) -> bool:
        mixed.append(len({task.base for task in block.tasks}))
        return pooled(self, broadcasts, block, total)

    monkeypatch.setattr(PooledTrainer, "_add_as_one", seen)
    looped, _ = both(engine, config, monkeypatch, **given)
    assert max(record["staleness/max"] for record in looped.history[1:]) >= 2
    assert max(mixed) >= 2


def test_an_empty_client_in_a_pooled_block_sends_nothing(engine, config):
    """It makes no step; alone, and beside others, as looped."""
    run, _ = engine(config(rounds=1))
    everybody = make_tasks(
        run.plan, run.store, make_cohort(run.plan, synchronous_round(0, [0, 2, 3, 5]))
    )
    tasks = [replace(task, weight=0.25) for task in everybody]
    assert [task.steps for task in tasks] == [1, 1, 0, 1]
    broadcast = {0: Broadcast({"x": run.plan.initial[0]}, run.plan.initial[1])}
    for which in (tasks, tasks[2:3]):
        ours, theirs = (
            make_trainer(replace(run.plan, mode=m), "cpu").train(broadcast, cut_blocks(which, 4))
            for m in ("pooled", "loop")
        )
        assert ours.ids == theirs.ids == [task.client for task in which]
        sums = [to_float(one.sums["mean delta"], torch.float64) for one in (ours, theirs)]
        assert (sums[0] - sums[1]).abs().max() < 1e-10
        losses = [[done.loss for done in one.clients] for one in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12, nan_ok=True)
        assert [done.error for done in ours.clients] == [None] * len(which)
        assert [done.bytes for done in ours.clients] == [done.bytes for done in theirs.clients]


@pytest.mark.parametrize("lr", [None, 1e-9, 1e-200])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pooled_blocks_have_the_same_bits_whoever_trains_them(dtype, lr, engine, config):
    """One worker or two, in any order, one that has trained other things before; updates of any
    size."""
    run, _ = engine(config(rounds=1, dtype=dtype))
    if lr is not None:
        step_sizes = {"local": run.plan.config.local.model_copy(update={"lr": lr})}
        run.plan = replace(run.plan, config=run.plan.config.model_copy(update=step_sizes))
    broadcast = {0: Broadcast({"x": run.plan.initial[0]}, run.plan.initial[1])}
    blocks = cut_blocks(
        make_tasks(
            run.plan,
            run.store,
            make_cohort(run.plan, synchronous_round(0, [i for i in range(8) if SIZES[i]])),
        ),
        2,
    )
    assert len(blocks) == 4

    def total(*shares: list[Block]) -> FixedTotal:
        outcomes = [make_trainer(run.plan, "cpu").train(broadcast, share) for share in shares]
        assert sorted(i for one in outcomes for i in one.ids) == [0, 1, 2, 4, 5, 6, 7]
        return combine([one.sums["mean delta"] for one in outcomes])

    expected = total(blocks)
    assert same(total(blocks[::-1]), expected)
    for shares in (
        [blocks[:1], blocks[1:]],
        [blocks[1::2], blocks[::2]],
        [[block] for block in blocks],
    ):
        assert same(total(*shares), expected)
    one = make_trainer(run.plan, "cpu")
    one.train(broadcast, blocks[2:])
    assert same(one.train(broadcast, blocks).sums["mean delta"], expected)


def test_a_net_that_takes_no_more_examples_than_a_client_has_trains_all_the_same(
    engine, config, source
):
    """What goes wrong only when clients are put together is nobody's fault."""
    model = {"name": source("nets", NETS) + ":narrow"}
    looped, records = engine(config(model=model, batching={"mode": "loop", "size": 3}))
    pooled, records_pooled = engine(config(model=model))
    assert pooled.plan.mode == "pooled" and all(
        record.get("clients/failed", 0) == 0 for record in records_pooled[1:]
    )
    alike(pooled, looped)
    agree(records_pooled, records)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_lack_of_memory_does_not_change_the_bits(error, engine, config, monkeypatch):
    """It may pass, and be another one in a repeated run."""
    made = one_gradient.gradient

    def fails_once(*arguments):
        monkeypatch.setattr(one_gradient, "gradient", made)
        raise error("no room")

    monkeypatch.setattr(one_gradient, "gradient", fails_once)
    with pytest.raises(RaysimError, match=r"one gradient of \d clients fails: .* no room"):
        engine(config())


# -- where clients may be trained as one

CAN: dict[str, dict[str, Any]] = {
    "fedsgd": {},
    "fedavg": {"algorithm": "fedavg", "local": {"steps": 1, "batch_size": 6}},
    "one epoch": {"algorithm": "fedavg", "local": {"epochs": 1, "batch_size": "full"}},
    "momentum": {"algorithm": "fedavgm"},
    "adam": {"algorithm": "fedadam"},
    "kasync": {"schedule": {"name": "kasync", "k": 3}},
    "a rule like it": {"algorithm": None, "client": {"name": "rules:Same"}, "server": {"name": "fedavg"}},
    "what could go side by side": {"partition": {"name": "iid", "clients": 50}, "schedule": {"cohort": 40}},
    "logistic": {"model": "logistic"},
    "lenet": {"model": "lenet"},
    "GroupNorm": {"model": {"name": "nets:grouped"}},
}  # fmt: skip


def rule(client: str = "fedavg", server: str = "fedavg") -> dict[str, Any]:
    return {"algorithm": None, "client": {"name": client}, "server": {"name": server}}


CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "two steps": ({"local": {"steps": 2, "batch_size": 6}}, "more than one step"),
    "two epochs": ({"local": {"epochs": 2, "batch_size": "full"}}, "more than one step"),
    "an epoch in batches": ({"local": {"epochs": 1, "batch_size": 6}}, "more than one step"),
    "fedprox": (rule("fedprox"), "client rule 'fedprox' has a direction of its own"),
    "scaffold": ({"algorithm": "scaffold"}, "client rule 'scaffold'"),
    "a direction": (rule("rules:Direction"), "client rule 'direction' has a direction of its own"),
    "an inherited direction": (rule("rules:Inherited"), "client rule 'inherited' has a direction of its own"),
    "a step": (rule("rules:Step"), "client rule 'step' has a step of its own"),
    "a finish": (rule("rules:Finish"), "client rule 'finish' has a finish of its own"),
    "an init": (rule("rules:Init"), "client rule 'init' has a init of its own"),
    "something kept": (rule("rules:Kept"), "client rule 'kept'"),
    "dropout_masks": (rule("rules:DropoutMasks"), "client rule 'dropoutmasks' has a dropout_masks of its own"),
    "prepare": (rule("rules:Prepare"), "client rule 'prepare' has a prepare of its own"),
    "clip": ({"local": {**FULL, "max_grad_norm": 1.0}}, "each client's gradient is changed"),
    "an optimizer": ({"local": {**FULL, "optimizer": "adam"}}, "local.optimizer 'adam' changes"),
    "weight decay": ({"local": {**FULL, "weight_decay": 0.1}}, "each client's gradient is changed"),
    "privacy": ({"privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0}}, "each client's gradient is changed"),
    "BatchNorm": ({"model": "tinynn"}, "examples meet"),
    "BatchNorm of one's own": ({"model": {"name": "nets:meeting", "how": "norm"}}, "examples meet"),
    "BatchNorm that keeps nothing": ({"model": {"name": "nets:meeting", "how": "untracked"}}, "examples meet"),
    "a batch's mean": ({"model": {"name": "nets:meeting", "how": "mean"}}, "examples meet"),
    "BatchNorm below zeros": ({"model": {"name": "nets:meeting", "zero": True}}, "examples meet"),
    "BatchNorm that keeps nothing below zeros": (
        {"model": {"name": "nets:meeting", "how": "untracked", "zero": True}},
        "examples meet",
    ),
    "BatchNorm that stays in evaluation mode": ({"model": {"name": "nets:Evaluated"}}, "the net has statistics"),
    "gradma": ({"algorithm": "gradma_s"}, "server rule 'gradma_?s?' takes more than the mean"),
    "mifa": ({"algorithm": "mifa"}, "server rule 'mifa' takes more than the mean"),
    "each": (rule("fedavg", "rules:EachServer"), "server rule 'each' takes more than the mean"),
    "two modes": (rule("fedavg", "rules:TwoServer"), "server rule 'two' takes more than the mean"),
    "observed": ({"record_updates": {"rounds": [0], "clients": 2}}, "looked at"),
    "forgetting": ({"evaluate": {"every": 1, "forgetting": {"every": 1}}}, "looked at"),
}  # fmt: skip


@pytest.fixture
def planned(base, config, found) -> Callable[[dict[str, Any], str], Plan]:
    """planned(sections, mode)."""
    return lambda sections, mode: prepare(
        found({**base, **config(), "batching": {"mode": mode}, **sections})
    )


@pytest.mark.parametrize("case", CAN)
def test_auto_pools_where_it_can(case, planned):
    for mode in ("auto", "pooled"):
        plan = planned(CAN[case], mode)
        assert plan.mode == plan.config.batching.mode == "pooled"
        assert plan.config.batching.size == plan.block_size
        again = prepare(plan.config.model_dump(mode="json", exclude_none=True))
        assert again.mode == "pooled" and again.config.fingerprint == plan.config.fingerprint
    assert planned(CAN[case], "loop").config.batching.mode == "loop"


@pytest.mark.parametrize("case", CANNOT)
def test_auto_does_not_pool_where_it_cannot_and_is_told_why(case, planned):
    sections, reason = CANNOT[case]
    plan = planned(sections, "auto")
    assert plan.mode == plan.config.batching.mode == "loop"
    with pytest.raises(ConfigError, match=rf"^batching\.mode: .*{reason}"):
        planned(sections, "pooled")


@pytest.mark.parametrize("how", ["norm", "untracked", "mean"])
@pytest.mark.parametrize("zero", [False, True], ids=["any", "zeros"])
def test_examples_that_meet_in_the_net_are_never_pooled_silently(how, zero, engine, config, source):
    """Whatever `auto` chooses gives what the loop gives; also where the classifier is zero at
    first."""
    given = {
        "model": {"name": source("nets", NETS) + ":meeting", "how": how, "zero": zero},
        "rounds": 3,
    }
    partition = {
        "partition": {"name": "iid", "clients": 60}
    }  # clients of two samples are chaotic under BatchNorm
    looped, _ = engine(config(**given, **partition, batching={"mode": "loop", "size": 3}))
    auto, _ = engine(config(**given, **partition, batching={"mode": "auto", "size": 3}))
    alike(auto, looped)


# -- who is at fault


FAULTS = {"inf": {}, "raises": {"raises": True}}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_client_that_fails_in_a_pooled_block_is_named_as_in_a_loop(
    fault, size, engine, config, source
):
    given = {"model": {"name": source("nets", NETS) + ":net", **FAULTS[fault]}}
    first = next(t for t, cohort in enumerate(cohorts(engine(config(**given))[0])) if BAD in cohort)
    said = []
    for mode in ("loop", "pooled"):
        with pytest.raises(
            ClientError, match=rf"client {BAD} failed in round {first + 1}\b"
        ) as caught:
            engine(config(**given, batching={"mode": mode, "size": size}), change=poisoned)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert ("too bright" if fault == "raises" else "non-finite delta") in said[0]


def dropped(caplog: Any) -> list[str]:
    """What the log says so far of clients that are dropped."""
    return [message for message in caplog.messages if "continues without" in message]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("server", ["uniform", "samples", "no weight"])
def test_a_client_that_fails_in_a_pooled_block_is_dropped_alone(
    fault, server, engine, config, found, caplog
):
    """Also where it weighs nothing."""
    name = (
        {"name": "rules:NothingServer"}
        if server == "no weight"
        else {"name": "fedavg", "weights": server}
    )
    given = {
        "model": {"name": "nets:net", **FAULTS[fault]}, "rounds": 5, "faults": {"on_client_error": "drop"},
        "algorithm": None, "client": {"name": "fedavg"}, "server": name,
    }  # fmt: skip
    pooled, records = engine(found(config(**given)), change=poisoned)
    named = dropped(caplog)
    looped, expected = engine(
        found(config(**given, batching={"mode": "loop", "size": 3})), change=poisoned
    )
    times = [BAD in cohort for cohort in cohorts(pooled)]
    assert any(times) and not all(times)
    assert len(named) == sum(times) and all(f"client {BAD} " in message for message in named)
    assert [record["clients/failed"] for record in records[1:]] == [float(bad) for bad in times]
    alike(pooled, looped)
    agree(records, expected)
    left_out, _ = engine(found(config(**given)), before=without)
    alike(pooled, left_out)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_that_fails_among_others_of_other_versions_is_dropped_alone(
    fault, engine, config, source
):
    given = {
        "model": {"name": source("nets", NETS) + ":net", **FAULTS[fault]}, "rounds": 8, "local": SOME,
        "schedule": {"name": "kasync", "k": 3}, "faults": {"on_client_error": "drop"},
    }  # fmt: skip
    pooled, records = engine(config(**given), change=poisoned)
    looped, expected = engine(
        config(**given, batching={"mode": "loop", "size": 3}), change=poisoned
    )
    assert {record["clients/failed"] for record in records[1:]} == {0.0, 1.0}
    alike(pooled, looped)
    agree(records, expected)


def test_a_step_far_too_large_names_the_same_client_as_in_a_loop(engine, config):
    said = []
    for mode in ("loop", "pooled"):
        with pytest.raises(
            ClientError, match=r"client \d+ failed in round 1\b.*non-finite"
        ) as caught:
            engine(config(local={**FULL, "lr": 1e300}, batching={"mode": mode, "size": 3}))
        said.append(str(caught.value))
    assert said[0] == said[1]


# -- sums piece by piece

PIECE = 2**15
WIDE = 2 * PIECE + 777


def vectors(seed: int, k: int, P: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(k, P, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def exact(rows: Tensor, weights: list[float]) -> np.ndarray:
    columns = (rows.double() * torch.tensor(weights, dtype=torch.float64)[:, None]).T.tolist()
    return np.array([math.fsum(column) for column in columns])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("P", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, WIDE])
def test_a_sum_in_pieces_is_right_to_half_a_unit(P, dtype):
    rows, weights = vectors(P, 4, P, dtype), [0.4, 0.1, 1.3, -0.7]
    wanted = exact(rows, weights)
    for given in (rows, list(rows)):
        found = to_float(fixed_sum(given, weights), torch.float64).numpy()
        assert found.shape == (P,) and np.abs(found - wanted).max() <= 2.0**-41 + 1e-14


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE, WIDE - 1])
@pytest.mark.parametrize("k", [1, 4])
def test_what_is_not_finite_is_noticed_wherever_it_is(value, at, k):
    good = vectors(1, k, WIDE, torch.float32)
    total = FixedSum()
    total.add(BlockSum(good, [0.5] * k))
    before, bound = total.total[-40].clone(), total.bound
    for row in range(k):
        bad = good.clone()
        bad[row, at] = value
        for weights in ([0.5] * k, [0.0] * k, [float(i != row) for i in range(k)]):
            with pytest.raises(NonFiniteError):
                total.add(BlockSum(list(bad), weights))
    assert list(total.total) == [-40]
    assert torch.equal(total.total[-40], before) and total.bound == bound


@pytest.mark.parametrize("at", [0, PIECE, WIDE - 1])
@pytest.mark.parametrize(
    "pair", [(math.inf, -math.inf), (-math.inf, math.inf), (math.nan, 1.0), (math.inf, 1.0)]
)
def test_infinities_that_meet_are_noticed(pair, at):
    rows = vectors(2, 5, WIDE)
    rows[1, at], rows[4, at] = pair
    for weights in ([0.2] * 5, [0.2, -1.0, 0.2, 0.2, 1.0]):
        with pytest.raises(NonFiniteError):
            fixed_sum(rows, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [1.0, 0.3, -2.5, 1 / 3, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e7])
def test_a_block_of_one_row_is_the_row_times_its_weight(weight, dtype, scale):
    row = scale * vectors(6, 1, PIECE + 5, dtype)
    kept = row.clone()
    block = BlockSum(row, [weight])
    product = weight * row[0].double()
    assert block.size == pytest.approx(float(product.abs().max()), rel=1e-15)
    found = to_float(fixed_sum(row, [weight]), torch.float64)
    assert (found - product).abs().max() <= 2.0**-41 + 1e-14 * scale
    beside_nothing = to_float(
        fixed_sum([row[0], torch.zeros_like(row[0])], [weight, 1.0]), torch.float64
    )
    assert (found - beside_nothing).abs().max() <= 2.0**-40 + 1e-14 * scale
    assert torch.equal(row, kept)


def test_a_sum_changes_nothing_that_it_was_given():
    rows = vectors(8, 3, WIDE)
    kept = rows.clone()
    total = FixedSum()
    for k in (3, 1):
        total.add(BlockSum(rows[:k], [0.3] * k))
    assert torch.equal(rows, kept)


# -- uploads are judged by their sums

SPOILT = program("fast_paths_spoilt")


@pytest.fixture
def spoilt(config, source) -> Callable[..., dict[str, Any]]:
    """spoilt(mode, takes, sizes, **fields): a run in which clients of these sizes spoil what they
    send or keep."""
    path = source("spoilt", SPOILT)

    def make(
        mode: str, takes: str, sizes: tuple[int, ...], size: int = 8, **fields: Any
    ) -> dict[str, Any]:
        return config(
            algorithm=None, client={"name": f"{path}:SpoiltClient", "sizes": list(sizes), **fields},
            server={"name": f"{path}:TakingServer", "takes": takes}, schedule={"cohort": 6},
            batching={"mode": mode, "size": size}, faults={"on_client_error": "drop"}, local={**SOME, "steps": 2},
        )  # fmt: skip

    return make


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize(
    ("takes", "kinds"),
    [
        ("mean", [("delta", "nan"), ("delta", "-inf"), ("kept", "nan"), ("extra", "nan")]),
        ("sum", [("extra", "-inf")]),
        ("per_client", [("extra", "nan"), ("extra", "-inf")]),
        ("difference", [("extra", "nan"), ("extra", "-inf")]),
    ],
    ids=["mean", "sum", "per_client", "difference"],
)
def test_only_who_spoils_something_is_refused(mode, takes, kinds, engine, spoilt, caplog):
    """All are in one block; whatever of it is spoilt, nothing of that client goes in, and all of
    the others."""
    expected, _ = engine(spoilt(mode, takes, ()), before=without)
    for where, value in kinds:
        caplog.clear()
        run, records = engine(spoilt(mode, takes, (SIZES[BAD],), where=where, value=value))
        messages = dropped(caplog)
        times = [BAD in cohort for cohort in cohorts(run)]
        assert any(times)
        assert [record["clients/failed"] for record in records[1:]] == [float(bad) for bad in times]
        assert len(messages) == sum(times)
        what = rf"non-finite {'kept kept' if where == 'kept' else where}"
        assert all(f"client {BAD} " in message and what in message for message in messages)
        for a, b in zip(run.executor.xs, expected.executor.xs, strict=True):
            assert np.isfinite(a).all() and np.abs(a - b).max() < 1e-9
        assert run.store.get(BAD) is None and not run.store.seen[BAD]
        for client in range(8):
            for key, kept in (run.store.get(client) or {}).items():
                others = expected.store.get(client)[key]
                np.testing.assert_allclose(kept, others, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["loop", "lanes"])
@pytest.mark.parametrize("where", ["delta", "extra", "kept"])
def test_two_who_spoil_the_same_number_by_opposite_infinities_are_both_refused(
    mode, where, engine, spoilt, caplog
):
    two = [4, 7]
    run, records = engine(
        spoilt(mode, "sum", tuple(SIZES[i] for i in two), where=where, value="inf")
    )
    times = [[i for i in two if i in cohort] for cohort in cohorts(run)]
    assert max(map(len, times)) == 2
    assert [record["clients/failed"] for record in records[1:]] == [
        float(len(bad)) for bad in times
    ]
    assert [record["clients/used"] for record in records[1:]] == [
        len(cohort) - len(bad) for cohort, bad in zip(cohorts(run), times, strict=True)
    ]
    said = [f"client {i} failed in round {t + 1}" for t, bad in enumerate(times) for i in bad]
    assert sorted(message.split(":")[0] for message in dropped(caplog)) == sorted(said)
    assert np.isfinite(run.executor.xs[-1]).all()


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_finite_upload_that_is_too_large_is_refused_alone(mode, engine, spoilt, caplog):
    """Beside it, as large as fits: that is no reason to refuse anybody."""
    run, records = engine(spoilt(mode, "sum", (SIZES[BAD],), where="extra", value="1e18"))
    assert (
        sum(record["clients/failed"] for record in records[1:])
        == sum(BAD in cohort for cohort in cohorts(run))
        > 0
    )
    assert all(f"client {BAD} " in message and "extra" in message for message in dropped(caplog))
    large, records = engine(
        spoilt(mode, "sum", tuple(n for n in SIZES if n), where="extra", value="1e17")
    )
    assert sum(record["clients/failed"] for record in records[1:]) == 0
    assert np.isfinite(large.executor.xs[-1]).all()


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_a_state_whose_sum_overflows_is_finite(mode, engine, spoilt):
    run, records = engine(
        spoilt(mode, "sum", (SIZES[BAD],), where="kept", value="1e308", entries=2)
    )
    assert [record["clients/failed"] for record in records[1:]] == [0.0] * 4
    assert (run.store.get(BAD)["kept"][-2:] > 1e307).all()


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_who_spoils_something_is_named_and_stops_the_run(mode, engine, spoilt):
    for where, what in (("delta", "delta"), ("extra", "extra"), ("kept", "kept kept")):
        given = {
            **spoilt(mode, "per_client", (SIZES[BAD],), where=where),
            "faults": {"on_client_error": "stop"},
        }
        with pytest.raises(
            ClientError, match=rf"client {BAD} failed in round \d+: non-finite {what} \("
        ):
            engine(given)


def test_all_spoilt_is_a_round_of_nobody(engine, spoilt):
    config = spoilt("loop", "sum", tuple(n for n in SIZES if n), where="delta", value="nan")
    run, records = engine(
        config | {"faults": {"on_client_error": "drop", "on_empty_run": "finish"}}
    )
    assert [record["clients/used"] for record in records[1:]] == [0.0] * 4
    assert np.array_equal(run.executor.xs[0], run.executor.xs[-1])


# -- batches that are gathered together


@pytest.mark.parametrize("shape", [(3, 5, 5), (1, 8, 8)])
@pytest.mark.parametrize("gather", [1, 10, 1000])
def test_batches_that_are_gathered_together_are_each_clients_own(monkeypatch, shape, gather):
    """With its own crops and masks, at a boundary of memory, also where the one before it stopped
    early."""
    monkeypatch.setattr("raysim.training.batches.client_batches.PREFETCH_EXAMPLES", gather)
    plan, rng = (
        prepare("quickstart", {"local.batch_size": 4, "local.steps": 3}),
        np.random.default_rng(0),
    )
    scale, shift = np.full(shape[0], 0.01, np.float32), np.full(shape[0], -0.5, np.float32)
    pixels, labels = rng.integers(0, 256, (60, *shape), dtype=np.uint8), rng.integers(0, 10, 60)
    examples = Examples(pixels, labels, scale, shift, pad=1, flip=True)
    net = Model(
        nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 10), nn.Dropout(0.5)), shape, 10
    )
    feed = ClientBatches(plan.config, net, examples, 2, channels_last=False)
    sizes = [9, 4, 0, 2, 11, 17]
    mine = np.split(rng.permutation(60)[: sum(sizes)], np.cumsum(sizes)[:-1])
    tasks = [
        ClientTask(client, base=7, cursor=client, weight=1.0, steps=3 * (n > 0))
        for client, n in enumerate(sizes)
    ]
    gathered = PrefetchedBatches(feed, tasks, mine)
    for k, (task, own) in enumerate(zip(tasks, mine, strict=True)):
        crops = generator(plan.config.seed, "augment", 7, task.client)
        dropped = generator(plan.config.seed, "dropout", 7, task.client)
        wanted = list(
            feeding.batch_positions(
                plan.config.seed, task.client, len(own), 4, task.cursor, task.steps
            )
        )
        for where, batch in zip(wanted[: 1 + k % 3], gathered.batches(k), strict=False):
            x, y = examples.batch(own[where], crops.random((len(where), 3)))
            assert (
                torch.equal(batch.x, x) and torch.equal(batch.y, y) and batch.x.data_ptr() % 64 == 0
            )
            for masks in batch.drops:
                kept = dropped.random((len(where), 10), dtype=np.float32) >= 0.5
                assert torch.equal(masks[0], torch.from_numpy(kept * np.float32(2)))
            assert len(batch.drops) == 2
