"""Steps that are recorded and run again, as CUDA graphs are, give what they give as they stand.
There is a CPU here, so what is recorded is run again by calling it, into the tensors that it gave
first: as a graph would."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support.batteries import algorithm_of_each_client_rule, small
from support.cuda_graphs import again
from support.programs import program

from raysim.engine.process_setup import make_trainer
from raysim.prepare.resolve import prepare
from raysim.training.trainers.cuda_graphs import CudaGraphCache
from raysim.training.trainers.vmap import VmapTrainer

NET = program("cuda_graphs_net")


class Counting(CudaGraphCache):
    made: ClassVar[list[Counting]] = []

    def __init__(self) -> None:
        super().__init__(again)
        self.made.append(self)
        self.runs = 0

    def run(self, key: Any, function: Any, *given: Any) -> Any:
        self.runs += 1
        return super().run(key, function, *given)


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("raysim.training.trainers.vmap.CudaGraphCache", Counting)
    monkeypatch.setattr(VmapTrainer, "_records", lambda self: True)
    monkeypatch.setattr(Counting, "made", [])


def digests(run) -> list[bytes]:
    return [x.tobytes() for x in run.executor.xs]


def config(algorithm: str, net: str, norm: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "algorithm": small(algorithm), "model": {"name": f"{net}:net", "norm": norm}, "rounds": 4,
        "local": {"steps": 3, "batch_size": 6, "lr": 0.05}, "batching": {"mode": "vmap", "size": 3},
        "schedule": {"name": "sync", "cohort": 8}, "checkpoint": {"every": 0}, **more,
    }  # fmt: skip


EQUAL = {"name": "iid", "clients": 20}


@pytest.fixture
def both(engine, source, request):
    """both(algorithm, ...): runs it as it stands and recorded, finds the same bits, and gives the
    cache."""

    def run(algorithm: str, **more: Any) -> Counting:
        given = config(algorithm, source("net", NET), **more)
        as_it_stands, _ = engine(given)
        request.getfixturevalue("recorded")
        run, _ = engine(given)
        assert digests(run) == digests(as_it_stands)
        (cache,) = Counting.made
        return cache

    return run


@pytest.mark.parametrize("algorithm", [*algorithm_of_each_client_rule(), "dpsgd"])
def test_every_method_recorded_gives_the_same_bits(algorithm, both):
    cache = both(algorithm, norm=algorithm != "dpsgd")
    assert 0 < len(cache.recorded) < cache.runs / 3, "steps are recorded once and run again"


def test_what_is_passed_on_as_it_was_given_is_not_written_over_before_it_is_read():
    """As GradMA's y_{τ-1}: the step before's vector goes on under another name."""

    def step(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        w, last = state["w"], state["last"]
        return {"w": w + 1, "last": w, "way": state["way"] + (w - last), "view": w[:1]}

    start = {k: torch.zeros(3) for k in ("w", "last", "way")} | {"view": torch.zeros(1)}
    plain, recorded, cache = start, start, CudaGraphCache(again)
    for _ in range(5):
        plain, recorded = step(plain), cache.run("key", step, recorded)
    assert cache.recorded
    assert (
        all(torch.equal(plain[k], recorded[k]) for k in plain)
        and plain["way"].tolist() == [4.0] * 3
    )


@pytest.mark.parametrize("qp_scope", ["whole", "per_tensor"])
def test_gradma_where_its_last_gradient_binds(qp_scope, both):
    more = {"local": {"steps": 5, "batch_size": 6, "lr": 0.5}, "rounds": 6}
    both("gradma_w", client={"name": "gradma", "qp_scope": qp_scope}, **more)


@pytest.mark.parametrize("algorithm", ["gradma", "fedreg", "scaffold"])
def test_clients_that_began_at_different_times(algorithm, both):
    schedule = {
        "name": "kasync",
        "k": 3,
        "concurrency": 8,
        "client_speeds": {"name": "lognormal", "sigma": 1.0},
    }
    assert both(algorithm, schedule=schedule, rounds=8).runs > 20


def test_batches_of_different_sizes_are_kinds_of_their_own(both, ragged):
    assert len(both("fedavg", partition=ragged([20, 1, 9, 14, 2, 7, 17, 3, 30, 6])).recorded) > 2


def test_a_learning_rate_of_other_rounds_is_a_kind_of_its_own(both):
    more = {"local": {"steps": 3, "batch_size": 6, "lr": [[0, 0.1], [2, 0.01]]}}
    cache = both("fedprox", partition=EQUAL, **more)
    assert len(cache.recorded) == 4, "two rates, and blocks of three and of two clients"


def test_optimizers_and_step_sizes_of_steps_are_one_kind(both):
    local = {
        "steps": 3, "batch_size": 6, "optimizer": {"name": "adam", "state": "keep"}, "accumulate": 2,
        "lr": {"name": "cosine", "base_lr": 0.05, "T_max": 3, "over": "steps"},
    }  # fmt: skip
    cache = both("fedprox", partition=EQUAL, local=local)
    assert len(cache.recorded) == 2, "blocks of three and of two clients"


def test_more_kinds_than_are_kept_run_as_they_stand(both, monkeypatch):
    monkeypatch.setattr("raysim.training.trainers.cuda_graphs.MAX_RECORDED_STEPS", 1)
    assert len(both("fedavg").recorded) == 1


def test_kinds_of_past_rounds_make_room(both, monkeypatch):
    monkeypatch.setattr("raysim.training.trainers.cuda_graphs.MAX_RECORDED_STEPS", 2)
    more = {"local": {"steps": 3, "batch_size": 6, "lr": [[0, 0.1], [2, 0.01]]}}
    assert {kind[0][2] for kind in both("fedprox", partition=EQUAL, **more).recorded} == {0.01}


def test_what_cannot_be_recorded_runs_as_it_stands_and_says_so_once(both, monkeypatch, caplog):
    def waiting(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setitem(globals(), "again", waiting)
    assert len(both("fedavg").recorded) == 0
    assert [
        "not permitted" in message and "run without them" in message for message in caplog.messages
    ] == [True]


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"batching.cuda_graphs": False}, False), ({"local.steps": None, "local.epochs": 1}, False),
     ({"local.batch_size": "full"}, False)],
)  # fmt: skip
def test_steps_are_recorded_on_a_gpu_where_their_kinds_come_again(change, expected):
    plan = prepare(
        "quickstart",
        {
            "batching.mode": "vmap",
            "batching.cuda_graphs": True,
            "local.epochs": None,
            "local.steps": 2,
            **change,
        },
    )
    trainer = make_trainer(plan, "cpu").trainers[0]
    assert isinstance(trainer, VmapTrainer) and not trainer._records()
    trainer.model.device = torch.device("cuda:0")
    assert trainer._records() == expected


def test_graphs_are_off_by_default():
    assert not prepare("quickstart").config.batching.cuda_graphs


def test_graphs_are_no_part_of_what_a_run_is():
    one, other = (
        prepare("quickstart", {"batching.cuda_graphs": graphs}).config.fingerprint
        for graphs in (True, False)
    )
    assert one == other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", ["fedavg", "gradma", "fedreg", "scaffold"])
def test_cuda_graphs_give_the_same_bits(algorithm, engine, source):
    more = {"resources": {"executor": "inline", "gpus": 1.0, "threads": 1}}
    more["local"] = {"steps": 5, "batch_size": 6, "lr": 0.5}
    given = config(algorithm, source("net", NET), **more)
    runs = [
        engine({**given, "batching": {**given["batching"], "cuda_graphs": graphs}})[0]
        for graphs in (False, True)
    ]
    assert digests(runs[0]) == digests(runs[1])
    cache = runs[1].executor.trainer.trainers[0].cuda_graphs
    assert cache is not None and cache.recorded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_waits_for_the_gpu_runs_as_it_stands(caplog):
    cache, x, here = CudaGraphCache(), torch.ones(3, device="cuda"), torch.cuda.current_stream()
    assert cache.run("key", lambda x: x + x.sum().item(), x).tolist() == [4.0] * 3
    assert (
        not cache.recorded
        and "run without them" in caplog.text
        and torch.cuda.current_stream() == here
    )
