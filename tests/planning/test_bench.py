"""`raysim bench` tries candidates, leaves given settings alone, and names the fastest."""

from __future__ import annotations

from typing import Any

import pytest
from support.configurations import IID_MLP

from raysim.engine.inline_executor import Inline
from raysim.errors import ConfigError
from raysim.planning.bench import bench, candidates
from raysim.prepare.resolve import prepare


def settings(
    given: set[str] = frozenset(), blocks: bool = False, **more: Any
) -> list[dict[str, Any]]:
    return list(candidates(prepare({**IID_MLP, **more}), given, blocks))


def test_only_the_place_is_varied_unless_blocks_are_asked_for(monkeypatch):
    monkeypatch.setattr("raysim.system.machine.cores", lambda: 8)
    places = settings()
    assert [p.get("resources.actors") for p in places] == [None, 1, 2, 4, 8]
    assert not any(key.startswith("batching.") for p in places for key in p)
    ways = settings(blocks=True)
    assert {w["batching.mode"] for w in ways} == {"loop", "pooled"}
    assert len(ways) == 5 * 2


def test_what_is_given_is_not_varied(monkeypatch):
    monkeypatch.setattr("raysim.system.machine.cores", lambda: 8)
    given = {"resources.executor", "resources.actors"}
    assert settings(given, resources={"executor": "inline", "actors": 1}) == [{}]
    looped = {"resources": {"executor": "inline"}, "batching": {"mode": "loop"}, "model": "lenet"}
    ways = settings({*given, "batching.mode"}, blocks=True, **looped)
    assert not any("batching.mode" in way for way in ways)


def test_gpus_are_shared_between_more_and_more_actors(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("raysim.system.machine.cores", lambda: 4)
    shares = [
        (p["resources.actors"], p["resources.gpus"]) for p in settings() if "resources.actors" in p
    ]
    assert shares == [(2, 1), (4, 0.5), (8, 0.25), (16, 0.125)]


def test_lanes_are_tried_on_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ways = settings(blocks=True)
    assert {w["batching.mode"] for w in ways} == {"loop", "pooled", "lanes"}
    sizes = [w["batching.size"] for w in ways if w["batching.mode"] == "lanes"]
    assert sizes == [1, 4] * 5  # in each of five places


def test_the_fastest_is_named(monkeypatch):
    """Rates in clients per second. The pooled mode has the largest single rate, lanes of one the
    most rounds."""
    rates = {
        "loop": [5.0, 5.0, 5.0],
        "pooled": [3.0, 90.0, 4.0],
        ("lanes", 1): [6.0, 6.0, 6.0, 6.0],
        ("lanes", 4): [8.0, 2.0, 7.0],
    }

    begun = []

    class Rounds:
        def __init__(self, plan, executor):
            batching = plan.config.batching
            mode = batching.mode
            self.rates = rates[(mode, batching.size) if mode == "lanes" else mode]
            self.begins_anew = executor in begun
            begun.append(executor)

        def rounds(self):
            if self.begins_anew:
                return
            yield from ({"round": t, "system/clients_per_second": 1e9} for t in range(3))
            yield from (
                {"round": t, "system/clients_per_second": rate}
                for t, rate in enumerate(self.rates, 3)
            )

    monkeypatch.setattr("raysim.planning.bench.Engine", Rounds)
    places = [{"resources.executor": "inline", "resources.gpus": 0.0}]
    monkeypatch.setattr("raysim.planning.bench._places", lambda plan: places)
    told = []
    found = bench(IID_MLP, {"resources.executor": "inline"}, blocks=True, tell=told.append)
    assert told == found.candidates
    assert [(one.clients_per_second, one.rounds) for one in told] == [
        (5, 3),
        (4, 3),
        (6, 4),
        (7, 3),
    ]
    lanes = {"batching.mode": "lanes", "batching.size": 4}
    assert found.best.settings == {"resources.gpus": 0.0, **lanes}
    with pytest.raises(ConfigError, match="rnn_of_nobody"):
        bench({**IID_MLP, "model": {"name": "rnn_of_nobody"}}, {"resources.executor": "inline"})


def test_every_candidate_is_measured():
    found = bench(IID_MLP, {"resources.executor": "inline"}, seconds=0.01, blocks=True)
    assert len(found.candidates) == 2
    assert all(one.rounds > 0 and one.clients_per_second > 0 for one in found.candidates)


COSINE = {"name": "cosine", "base_lr": 0.1, "T_max": 4}


@pytest.mark.parametrize(
    "keys",
    [
        {"rounds": 1},
        {"rounds": 4, "local.lr": COSINE},
        {"rounds": 3, "algorithm": "dp_ftrl", "tracking.models": ["best"]},
    ],
)
def test_a_run_of_few_rounds_begins_anew(keys):
    found = bench(IID_MLP, {"resources.executor": "inline", **keys}, seconds=0.2)
    assert found.best is not None and found.best.rounds > keys["rounds"]


def test_any_error_of_a_candidate_is_its_own(monkeypatch):
    opened = Inline.open

    def open_or_fail(self, plan):
        if plan.config.batching.mode == "pooled":
            raise MemoryError("no room")
        opened(self, plan)

    monkeypatch.setattr(Inline, "open", open_or_fail)
    found = bench(IID_MLP, {"resources.executor": "inline"}, seconds=0.01, blocks=True)
    assert [one.problem for one in found.candidates] == ["", "MemoryError: no room"]


def test_a_run_with_its_own_sweep_evaluation_and_checkpoints_is_measured_without_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = {
        **IID_MLP,
        "resources": {"executor": "inline"},
        "sweep": {"seed": [0, 1]},
        "checkpoint": {"every": 1},
    }
    assert bench({**config, "run_dir": str(tmp_path / "run")}, seconds=0.01).best is not None
    assert not list(tmp_path.iterdir())
