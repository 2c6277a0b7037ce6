"""A user's function of step sizes (`local.lr: path.py:function`), against lists of its values."""

from __future__ import annotations

import random
from typing import Any

import pytest

import raysim
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare

SCHEDULES = """
def halved(t, start=0.4):
    return start * 0.5 ** t

def vanishes(t):
    return 0.1 if t < 2 else float("nan")

def fails(t):
    return 1 / (t - 1)

def zero(t):
    return 2 - t

def of_two(t, step):
    return 0.1
"""
HALVED = [[0, 0.4], [1, 0.2], [2, 0.1]]


@pytest.fixture
def digest(base: dict[str, Any], tmp_path, monkeypatch):
    """digest(lr, **sections): digest of three rounds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schedules.py").write_text(SCHEDULES)

    def of(lr: Any, **sections: Any) -> str:
        config = base | {
            "rounds": 3,
            "algorithm": "fedavg",
            "model": "logistic",
            "partition": {"clients": 6},
            "local": {"steps": 2, "lr": lr},
            "schedule": {"cohort": 3},
            **sections,
        }
        return raysim.run(config | {"run_dir": None}, tracking=False).digest

    return of


@pytest.mark.parametrize("mode", ["loop", "lanes"])
def test_the_step_sizes_are_the_values_of_the_function(digest, mode):
    batching = {"mode": mode}
    expected = digest(HALVED, batching=batching)
    assert digest("schedules.py:halved", batching=batching) == expected
    assert digest({"name": "schedules.py:halved", "start": 0.4}, batching=batching) == expected
    assert digest(lambda t: 0.4 * 0.5**t, batching=batching) == expected
    assert digest({"name": "schedules.py:halved", "start": 0.2}, batching=batching) != expected


def test_stale_clients_have_the_step_size_of_their_version(digest):
    schedule = {"name": "kasync", "k": 2, "concurrency": 4}
    assert digest("schedules.py:halved", schedule=schedule) == digest(HALVED, schedule=schedule)


def test_a_group_may_have_a_function_of_its_own(digest):
    group = {"share": 0.5, "local": {"lr": "schedules.py:halved"}}
    assert digest(HALVED, groups={"slow": group}) == digest(HALVED)


def test_a_resume_calls_it_for_further_rounds_and_refuses_another_one(base, digest, tmp_path):
    whole = digest("schedules.py:halved")
    config = base | {
        "rounds": 2,
        "algorithm": "fedavg",
        "model": "logistic",
        "partition": {"clients": 6},
        "local": {"steps": 2, "lr": "schedules.py:halved"},
        "schedule": {"cohort": 3},
    }
    first = raysim.run(config, tracking=False)
    assert raysim.resume(first.run_dir, {"rounds": 3}).digest == whole
    (tmp_path / "schedules.py").write_text(SCHEDULES.replace("0.5", "0.6"))
    with pytest.raises(ConfigError, match=r"^local\.lr: schedules\.py has changed since"):
        raysim.resume(first.run_dir, {"rounds": 4})


@pytest.mark.parametrize(
    ("lr", "said"),
    [
        ("schedules.py:vanishes", r"^local\.lr: schedules\.py:vanishes returned nan for round 2"),
        (
            "schedules.py:fails",
            r"^local\.lr\.name: schedules\.py:fails failed: Zero.*schedules\.py, line 9: ",
        ),
        ("schedules.py:zero", r"^local\.lr: is 0 in the last round; .* or return a number > 0"),
        ("schedules.py:of_two", r"^local\.lr\.step: missing"),
        ("schedules.py:halve", r"^local\.lr\.name: schedules\.py defines no 'halve'"),
        ({"name": "schedules.py:halved", "begin": 1}, r"^local\.lr\.begin: unknown key of"),
        (lambda t: -0.1, r"^local\.lr: python:\S+ returned -0\.1 for round 0"),
        (lambda t: "0.1", r"^local\.lr: python:\S+ returned '0\.1' for round 0"),
        (lambda t: random.random(), r"^local\.lr: python:\S+ returns another number for round 0"),
        (lambda t: True, r"^local\.lr: python:\S+ returned True for round 0"),
    ],
)
def test_wrong_values_name_key_and_round(digest, lr, said):
    with pytest.raises(ConfigError, match=said):
        digest(lr)


def test_a_resumed_run_calls_the_function_with_the_same_keys(digest, base, tmp_path):
    (tmp_path / "table.py").write_text("def of(t, table):\n    return table[t]\n")
    lr = {"name": "table.py:of", "table": {0: 0.4, 1: 0.2, 2: 0.1}}
    assert digest(lr) == digest(HALVED)
    sections = {"rounds": 3, "algorithm": "fedavg", "local": {"steps": 2, "lr": lr}}
    plan = prepare({**base, **sections})
    (tmp_path / "config.yaml").write_text(plan.config.dump())
    assert prepare(tmp_path / "config.yaml").config.local.lr == plan.config.local.lr
