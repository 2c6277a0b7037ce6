"""A sweep that Python starts: its keys are written as those of `raysim.run`, and what it returns is
read at a prompt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.sweeps import SMALL, trained_in_this_process, values, written

import raysim
from raysim.sweeps import runner
from raysim.sweeps.definition import Sweep
from raysim.sweeps.summary import SweepResult

PROX = {"name": "fedprox", "mu": 0.1}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """planned(*arguments, **keys): the sweep that such a call would train."""

    def plan(*arguments: Any, **keys: Any) -> Sweep:
        monkeypatch.setattr(runner, "run_sweep", lambda sweep, *others: SweepResult(sweep, "", 0))
        return raysim.sweep(SMALL, *arguments, **keys).sweep

    return plan


EXPECTED = [
    {"algorithm": "fedavg", "seed": 0},
    {"algorithm": "fedavg", "seed": 1},
    {"algorithm": PROX, "seed": 0},
    {"algorithm": PROX, "seed": 1},
]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ({"algorithm": ["fedavg", PROX], "seed": [0, 1]}, {}),
        ((), {"algorithm": ["fedavg", PROX], "seed": "0..1"}),
        ({"algorithm": ["fedavg", PROX]}, {"seed": "0..1"}),
        (["algorithm=fedavg,{name: fedprox, mu: 0.1}", "seed=0..1"], {}),
        (["algorithm=fedavg,{name: fedprox, mu: 0.1}"], {"seed": [0, 1]}),
    ],
)
def test_values_are_given_as_mapping_as_texts_or_as_keywords(overrides, keys, planned):
    assert values(planned(overrides, **keys)) == EXPECTED


def test_one_value_that_is_a_list_stays_one(planned):
    """In a text it is a value, as on the command line; in a mapping a list holds several."""
    sweep = planned(["model.hidden=[8,9]", "sweep.samples=2", "local.lr=uniform(0.1,0.2)"])
    assert [trial.config.model.parameters["hidden"] for trial in sweep.trials] == [[8, 9]] * 2
    assert values(planned(**{"model.hidden": [[8], [9]]}))[1] == {"model.hidden": [9]}
    for overrides in (["tracking.models=[final]"], {"tracking.models": ["final"]}):
        assert [*planned(overrides, seed=[0]).tracking.models] == ["final"]


def test_texts_are_those_of_the_command_line(planned):
    sweep = planned(["algorithm=choice(fedavg,fedavgm)", "sweep.samples=4", "seed=0,1", "seed=2"])
    assert {(trial.label, trial.config.seed) for trial in sweep.trials} == {
        ("fedavg", 2),
        ("fedavgm", 2),
    }, "of values that are given twice the last ones count"


def test_an_unknown_keyword_is_a_mistake_with_its_key():
    with pytest.raises(raysim.ConfigError, match="algoritm: unknown key; did you mean 'algorithm'"):
        raysim.sweep(SMALL, algoritm=["fedavg", "fedavgm"])


def test_a_result_is_one_line_that_says_how_the_trials_ended(here, monkeypatch):
    trained_in_this_process(monkeypatch.setattr)
    done = raysim.sweep(SMALL, rounds=1, algorithm=["fedavg", PROX], **{"local.lr": [0.1, 1e30]})
    best = max(trial.result["metrics"]["accuracy"]["best"] for trial in done.sweep.trials[::2])
    line = repr(done)
    assert line.startswith("SweepResult(2 of 4 trials finished, 2 failed, best accuracy ")
    assert f"{best:.4f} (algorithm=fed" in line and line.endswith(f"{done.sweep.folder})")
    assert len(line) < 150 + len(str(done.sweep.folder))
    (trial, error), second = done.failed
    assert repr(trial) == f"Trial(algorithm=fedavg local.lr=1e+30, {trial.folder})"
    assert "algorithm=fedprox(mu=0.1) local.lr=1e+30" in repr(second) and "non-finite" in error


def test_a_result_without_a_finished_trial_has_no_best(here, monkeypatch):
    trained_in_this_process(monkeypatch.setattr)
    done = raysim.sweep(SMALL, rounds=1, seed=[0], **{"local.lr": 1e30})
    assert repr(done) == f"SweepResult(0 of 1 trials finished, 1 failed, {done.sweep.folder})"


def test_the_command_writes_a_section_as_a_name_with_its_settings(raysim_, monkeypatch):
    """In its list of trials and its lines of progress, not as JSON."""
    trained_in_this_process(monkeypatch.setattr)
    path = str(written(Path("prox.yaml"), rounds=1, sweep={"algorithm": ["fedavg", PROX]}))
    listed = raysim_("sweep", path, "--dry-run").out
    progress = raysim_("sweep", path).out
    assert re.search(r"^ *fedprox\(mu=0\.1\) +fedprox-", listed, re.MULTILINE)
    assert "[2/2] algorithm=fedprox(mu=0.1)  best accuracy " in progress
    assert '"name"' not in listed + progress


def test_a_function_of_the_data_gets_numbers_as_keys(here, monkeypatch):
    trained_in_this_process(monkeypatch.setattr)
    (here / "own.py").write_text(
        "import numpy as np\n\ndef load(shift):\n    y = np.arange(40) % 2\n"
        "    x = np.eye(2)[y] + shift[0]\n    return x, y, x, y\n"
    )
    data = {"name": "own.py:load", "shift": {0: 1.0}}
    done = raysim.sweep(SMALL, rounds=1, data=[data], partition={"clients": 4})
    assert not done.failed
    assert done.sweep.trials[0].config.data.parameters["shift"] == {0: 1.0}  # pyright: ignore[reportAttributeAccessIssue]
