"""Notes before a run: clients of different sizes count equally, clients have models of their own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml
from support.programs import program

import raysim
from raysim.prepare.resolve import prepare
from raysim.sweeps import runner
from raysim.sweeps.summary import SweepResult

PER_CLIENT = program("uniform_weights_per_client")


@pytest.fixture
def notes(base, ragged, caplog):
    """notes(**sections): what is logged for a configuration about weights."""
    caplog.set_level(logging.INFO, "raysim.notes")

    def logged(sizes=(4, 9, 0, 12), **sections):
        caplog.clear()
        config = {
            **base,
            "rounds": 1,
            "partition": ragged(sizes),
            "schedule": {"cohort": 2},
            "model": "logistic",
        }
        prepare({**config, "local": {"steps": 1, "batch_size": 4, "lr": 0.1}, **sections})
        return [record.message for record in caplog.records if record.name == "raysim.notes"]

    return logged


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "scaffold", "gradma", {"name": "fedprox", "mu": 0.1}]
)
def test_it_is_logged_where_nobody_chose(algorithm, notes):
    (message,) = notes(algorithm=algorithm)
    assert message.startswith("clients of different sizes count equally in means; ")
    assert message.endswith(": algorithm.weights=samples")


def test_the_key_is_that_of_the_server_rule_where_the_run_names_one(notes):
    (message,) = notes(client="fedprox", server="fedavg")
    assert message.endswith(": server.weights=samples")


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "fedavg", "weights": "uniform"}},
        {"algorithm": {"name": "fedavg", "weights": "samples"}},
        {"client": "fedavg", "server": {"name": "fedavg", "weights": "uniform"}},
        {"algorithm": "fednova"},
        {"algorithm": "fedasync", "schedule": {"name": "kasync", "k": 1}},
        {"algorithm": "fedavg", "sizes": (20, 20, 0, 21)},
    ],
)
def test_else_it_is_not(sections, notes):
    assert not notes(**sections)


def test_a_users_rule_that_gets_single_uploads_may_count_them_equally(notes, source):
    assert not notes(client="fedavg", server=f"{source('middle', PER_CLIENT)}:Middle")


@pytest.fixture
def unequal(base, ragged):
    """A configuration whose clients have 4, 9 and 12 examples, with another order for each seed."""
    config = {key: value for key, value in base.items() if key != "run_dir"}
    return {
        **config,
        "rounds": 1,
        "partition": ragged((4, 9, 12)),
        "schedule": {"cohort": 2},
        "model": "logistic",
        "algorithm": "fedavg",
        "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
    }


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("algorithm", ["ditto", "ifca", "fedamp", "local_only", "apfl"])
def test_methods_with_models_of_clients_say_that_these_are_not_evaluated(algorithm, notes):
    sections = {"algorithm": algorithm, "sizes": (4, 4, 4)}
    (message,) = notes(**sections, evaluate={"every": 1})
    assert message.startswith("clients have models of their own, and only the global model is")
    assert not notes(**sections)
    clients = {"partition": {"name": "iid", "clients": 3, "test": {"fraction": 0.2}}}
    assert not notes(**sections, **clients, evaluate={"clients": {"every": 1}})
    assert not notes(sizes=(4, 4, 4), algorithm="fedprox", evaluate={"every": 1})


def test_a_call_from_python_shows_it_without_logging_that_is_set_up(unequal, here, caplog):
    raysim.run(unequal, tracking=False)
    (message,) = warnings(caplog)
    assert message.startswith("note: clients of different sizes count equally in means; ")


def test_a_sweep_from_python_shows_it_once(unequal, here, caplog, monkeypatch):
    monkeypatch.setattr(runner, "run_sweep", lambda sweep, *others: SweepResult(sweep, "", 0))
    planned = raysim.sweep(unequal, algorithm=["fednova", "fedavg", "fedprox"], seed=[0, 1]).sweep
    assert len(planned.trials) == 6
    (message,) = warnings(caplog)
    assert message.endswith("by their examples: algorithm.weights=samples")
    caplog.clear()
    raysim.sweep(unequal, algorithm=[{"name": "fedavg", "weights": "samples"}, "fednova"])
    assert not warnings(caplog)


def test_a_sweep_of_the_command_line_shows_it_once(unequal, raysim_):
    Path("unequal.yaml").write_text(yaml.safe_dump(unequal))
    said = raysim_("sweep", "unequal.yaml", "seed=0..2", "--dry-run")
    assert said.out.count("note: clients of different sizes count equally") == 1


def test_the_command_line_shows_it(raysim_, base, ragged, tmp_path):
    partition = ragged((4, 9, 12))
    said = raysim_(
        "run", "quickstart", "rounds=1", "algorithm=fedavg", "resources.executor=inline", "schedule.cohort=2",
        f"partition={{name: file, path: {partition['path']}}}", f"run_dir={tmp_path}/shown", f"tracking.uri={base['tracking']['uri']}",
    )  # fmt: skip
    assert said.out.count("note: clients of different sizes count equally") == 1
