"""What must hold of lanes: a client's bits depend neither on its block, nor on the number of lanes,
nor on whether its steps are captured; and they are those of mode loop. There is a CPU here, so
PyTorch's operations are recorded, and called again on the same memory, as a graph would."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from support.batteries import (
    algorithm_of_each_client_rule,
    captured_trainer,
    is_usual,
    small,
)
from support.programs import program
from torch import Tensor

from raysim.prepare.resolve import prepare
from raysim.rules.contract import ALGORITHMS
from raysim.training.messages import ClientTask
from raysim.training.trainers import lane, lane_trainer
from raysim.training.trainers.host_graphs import HostGraphs, rehearsal, rehearses
from raysim.training.trainers.lane_trainer import LaneTrainer

NET = program("lanes_net")
DRAWING_NET = program("drawing_net")
RULES = program("rule_dry_run_rules") + program("lanes_rules")

Runs = Callable[..., list[np.ndarray]]


def config(algorithm: Any, net: str, norm: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "algorithm": small(algorithm) if isinstance(algorithm, str) else algorithm,
        "model": {"name": f"{net}:net", "norm": norm}, "rounds": 3,
        "local": {"steps": 3, "batch_size": 6, "lr": 0.05}, "batching": {"mode": "lanes", "size": 5},
        "schedule": {"name": "sync", "cohort": 8}, "checkpoint": {"every": 0}, **more,
    }  # fmt: skip


@pytest.fixture
def trained(engine, source) -> Runs:
    """trained(algorithm, batching, **sections) -> the parameters after each round."""

    def run(algorithm: Any, batching: dict[str, Any] | None = None, **more: Any) -> Any:
        given = config(algorithm, source("net", NET), **more)
        return engine({**given, "batching": {**given["batching"], **(batching or {})}})[0]

    return run


def xs(run: Any) -> list[bytes]:
    return [x.tobytes() for x in run.executor.xs]


def assert_close(ours: Any, theirs: Any, rtol: float, atol: float) -> None:
    """Two runs have the same parameters after each round, up to rounding."""
    for a, b in zip(ours.executor.xs, theirs.executor.xs, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def trainer_of(run: Any) -> LaneTrainer:
    (trainer,) = run.executor.trainer.trainers
    assert isinstance(trainer, LaneTrainer)
    return trainer


def kinds(run: Any) -> int:
    """How many kinds of steps the first lane keeps captured."""
    layouts = trainer_of(run).lanes[0].layouts.values()
    return sum(step.replay is not None for memory in layouts for step in memory.steps.values())


SPECIAL = [
    name for name in algorithm_of_each_client_rule() if not is_usual(ALGORITHMS[name].client())
]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("algorithm", ["fedavg", "dpsgd", *SPECIAL])
def test_a_method_has_the_bits_of_loop_on_ragged_clients(algorithm, trained):
    """The battery has the other methods."""
    norm = algorithm != "dpsgd"
    looped = trained(algorithm, {"mode": "loop"}, norm=norm)
    lanes = trained(algorithm, norm=norm)
    assert captured_trainer(lanes) and xs(lanes) == xs(looped)


def test_an_lstm_whose_other_passes_have_no_gradient(trained, source):
    """It has one output fewer there, and has it again in a replay, which computes them: by another
    kernel, so the last digits differ."""
    model = {"name": f"{source('net', NET)}:Recurrent"}
    lanes = trained("moon", model=model)
    assert captured_trainer(lanes)
    looped = trained("moon", {"mode": "loop"}, model=model)
    assert_close(looped, lanes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "gradma", "fedreg", "scaffold", "moon"])
def test_neither_lanes_nor_other_clients_change_a_bit(algorithm, trained):
    """Blocks do change the last bits of a sum, so they are the same here."""
    several = xs(trained(algorithm))
    assert several == xs(trained(algorithm, {"lanes": 1})) == xs(trained(algorithm, {"lanes": 4}))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedreg", "scaffold", "moon", "feddyn"])
@pytest.mark.parametrize(
    "lr", [[[0, 0.1], [2, 0.01]], {"name": "cosine", "base_lr": 0.05, "T_max": 9}]
)
def test_captured_steps_have_the_bits_of_others(algorithm, lr, trained):
    local = {"steps": 3, "batch_size": 6, "lr": lr}
    captured = trained(algorithm, local=local)
    assert xs(captured) == xs(trained(algorithm, {"capture": False}, local=local))
    looped = trained(algorithm, {"mode": "loop"}, local=local)
    # Loop mode multiplies by a number, where some CPUs round once less than by a tensor. FedReg's
    # pseudo data make more of it: 1.1e-6 on one CPU. A wrong step size would differ by 1e-2.
    assert_close(looped, captured, rtol=1e-5, atol=1e-5)


def test_step_sizes_of_rounds_are_no_kinds_of_their_own(trained):
    equal = {"name": "iid", "clients": 20}
    local = {"steps": 3, "batch_size": 6, "lr": {"name": "cosine", "base_lr": 0.1, "T_max": 9}}
    assert kinds(trained("fedprox", partition=equal, local=local)) == 1


@pytest.mark.parametrize("qp_scope", ["whole", "per_tensor"])
def test_gradma_where_its_last_gradient_binds(qp_scope, trained):
    more = {"local": {"steps": 5, "batch_size": 6, "lr": 0.5}, "rounds": 6, "dtype": "float64"}
    client = {"name": "gradma", "qp_scope": qp_scope}
    runs = [
        trained("gradma_w", {"mode": mode}, client=client, **more) for mode in ("loop", "lanes")
    ]
    assert_close(*runs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["fedreg", "scaffold"])
def test_clients_that_began_at_different_times(algorithm, trained):
    schedule = {
        "name": "kasync", "k": 3, "concurrency": 8, "client_speeds": {"name": "lognormal", "sigma": 1.0},
    }  # fmt: skip
    more = {"schedule": schedule, "rounds": 8}
    assert xs(trained(algorithm, **more)) == xs(trained(algorithm, {"mode": "loop"}, **more))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "adam", "state": "keep"}, "accumulate": 2},
        {"optimizer": {"name": "sgd", "momentum": 0.9}, "max_grad_norm": 0.5, "weight_decay": 0.01},
        {"accumulate": 3, "epochs": 2, "steps": None},
        {"personal": ["2.*"]},
        {"upload": [{"name": "topk", "share": 0.2}]},
        {"batch_size": "full", "steps": 2},
        {"buffers": "frozen"},
        {"lr": {"name": "cosine", "base_lr": 0.05, "T_max": 3, "over": "steps"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_of_local_training(changes, trained):
    local = {"steps": 3, "batch_size": 6, "lr": 0.05, **changes}
    runs = [trained("fedprox", {"mode": mode}, local=local) for mode in ("loop", "lanes")]
    assert trainer_of(runs[1]).has_captured
    if "lr" in changes:  # a number in mode loop, and a tensor on lanes
        assert_close(*runs, rtol=1e-5, atol=1e-6)
    else:
        assert xs(runs[0]) == xs(runs[1])


def test_layouts_that_are_not_kept_are_captured_anew(trained, monkeypatch):
    expected = xs(trained("scaffold"))
    monkeypatch.setattr(lane, "MAX_LAYOUTS", 1)
    assert xs(trained("scaffold")) == expected


def test_kinds_beyond_the_limit_run_uncaptured_and_none_goes(trained, monkeypatch):
    """Lanes share cuBLAS's workspace of their stream with all their graphs."""
    expected = trained("scaffold")
    monkeypatch.setattr(lane, "MAX_KINDS", 1)
    run = trained("scaffold")
    assert xs(run) == xs(expected) and kinds(expected) > kinds(run) == 1
    assert trainer_of(run).uncaptured_steps and "more than 1 kinds" in trainer_of(run).refusals[0]


@pytest.mark.parametrize(
    "rule", ["Branches", "Centres", "Masks", "Swaps", "TwiceAtTheEnd", "Views"]
)
def test_rules_that_branch_and_rules_whose_tensors_are_each_others(rule, trained, source):
    given = {"server": "fedavg", "client": f"{source('rules', RULES)}:{rule}"}
    runs = [trained(None, {"mode": mode}, **given) for mode in ("loop", "lanes")]
    assert xs(runs[0]) == xs(runs[1])
    refusals = trainer_of(runs[1]).refusals
    lines = {"Branches": "g.norm() > 1", "Masks": "direction[direction < 0]"}
    if rule in lines:
        assert lines[rule] in refusals[0] and trainer_of(runs[1]).uncaptured_steps > 20
    else:
        assert not refusals and trainer_of(runs[1]).has_captured


def test_steps_of_a_net_that_draws_are_not_captured_and_give_the_bits_of_mode_loop(engine, source):
    net = f"{source('drawing', DRAWING_NET)}:net"
    runs = []
    for mode in ("loop", "lanes"):
        given = {**config("gradma", source("net", NET)), "model": {"name": net}}
        run, records = engine({**given, "batching": {"mode": mode, "size": 5}})
        runs.append(run)
        assert records[-1].get("system/uncaptured_steps", 0) == (8 * 3 if mode == "lanes" else 0)
    assert xs(runs[0]) == xs(runs[1])
    assert "the net draws random numbers" in trainer_of(runs[1]).refusals[0]


def test_out_of_memory_trains_the_block_again_on_half_the_lanes(trained, monkeypatch, caplog):
    expected = xs(trained("scaffold"))
    steps_of, failures = lane.Lane.steps_of, []

    def full(self: lane.Lane, client: Any) -> Any:
        lanes = [made for made in made_trainers[-1].lanes if made is self]
        if made_trainers[-1].lanes.index(lanes[0]) == 2:
            failures.append(client.task.client)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps_of(self, client)

    made_trainers: list[LaneTrainer] = []
    init = LaneTrainer.__init__

    def noted(self: LaneTrainer, *args: Any) -> None:
        init(self, *args)
        made_trainers.append(self)

    waited: list[int] = []
    monkeypatch.setattr(
        HostGraphs, "wait", lambda self: waited.append(len(made_trainers[-1].lanes))
    )
    monkeypatch.setattr(LaneTrainer, "__init__", noted)
    monkeypatch.setattr(lane.Lane, "steps_of", full)
    assert xs(trained("scaffold", {"lanes": 4})) == expected
    assert waited == [3], "before the first lane's nets are used again"
    assert len(failures) == 1 and "out of memory: block 0 trains again, on lanes=1" in caplog.text


def test_memory_that_runs_out_before_any_lane_ends_the_run(trained, monkeypatch):
    def full(*given: Any, apart: bool) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lane_trainer.PrefetchedBatches, "__init__", full)
    with pytest.raises(torch.OutOfMemoryError):
        trained("fedavg")


def test_a_failed_attempt_leaves_no_memory_behind(trained):
    """Else the block would train again with less memory than before."""
    trainer = trainer_of(trained("fedavg"))
    trainer.lanes *= 2
    held: list[weakref.ref[Tensor]] = []

    def attempt() -> None:
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError as error:
            trainer.failed(ClientTask(0, 0, 0, 1.0, 1), error)

    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            attempt()
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_client_that_does_not_fit_on_one_lane_is_its_failure(trained, monkeypatch):
    def full(self: lane.Lane, client: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lane.Lane, "steps_of", full)
    with pytest.raises(Exception, match=r"client .* failed in round 1: .*out of memory"):
        trained("fedavg")


@pytest.mark.parametrize(("room", "lanes"), [(0, 1), (5, 1), (41, 3), (10**6, 16)])
def test_lanes_follow_from_the_memory(room, lanes, monkeypatch, trained):
    monkeypatch.setattr(HostGraphs, "watch_memory", lambda self: lambda: 10)
    monkeypatch.setattr(HostGraphs, "free_bytes", lambda self, share: room)
    run = trained("fedavg", {"size": 20}, schedule={"name": "sync", "cohort": 20},
                  partition={"name": "iid", "clients": 20})  # fmt: skip
    assert len(trainer_of(run).lanes) == lanes


def test_auto_is_lanes_on_a_gpu_and_loop_on_a_cpu(monkeypatch):
    given = {"resources": {"executor": "inline"}}
    assert prepare("quickstart", given).mode == "loop"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    given["resources"]["gpus"] = 1
    assert prepare("quickstart", given).mode == "lanes"


def test_lanes_of_a_cpu_are_a_loop(monkeypatch):
    assert lane_trainer.graphs_of(torch.device("cpu")) is not None, "tests rehearse"
    monkeypatch.setattr("raysim.training.trainers.lane_trainer.rehearses", lambda: False)
    assert lane_trainer.graphs_of(torch.device("cpu")) is None


def test_a_rehearsal_is_of_one_thread():
    """A dry run that takes too long goes on in its thread, beside the run."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(rehearses).result() and rehearses()
        with rehearsal():
            assert not pool.submit(rehearses).result()
        assert rehearses(), "it ends with what was before"


def test_how_many_lanes_and_captures_are_no_part_of_what_a_run_is():
    changes = [{}, {"batching.lanes": 3}, {"batching.capture": False}]
    assert len({prepare("quickstart", change).config.fingerprint for change in changes}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", ["fedavg", "gradma", "fedreg", "scaffold", "moon"])
def test_a_gpu_gives_the_same_bits_captured_or_not_on_any_number_of_lanes(algorithm, trained):
    more = {"resources": {"executor": "inline", "gpus": 1.0, "threads": 1}}
    more["local"] = {"steps": 5, "batch_size": 6, "lr": 0.5}
    runs = [
        trained(algorithm, batching, **more)
        for batching in ({}, {"lanes": 1}, {"capture": False}, {"lanes": 2, "capture": False})
    ]
    assert len({tuple(xs(run)) for run in runs}) == 1
    assert trainer_of(runs[0]).has_captured
