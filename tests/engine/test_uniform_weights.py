"""A run whose clients differ in size says once that they count equally, unless that was chosen."""

from __future__ import annotations

import logging

import pytest
from support.programs import program

from raysim.prepare.resolve import prepare
from raysim.sweeps.preparation import prepare_sweep

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
    assert message.startswith("clients have 4 to 12 examples and count equally in means; ")
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


def test_a_sweep_does_not_repeat_it_for_each_trial(base, ragged, caplog):
    caplog.set_level(logging.INFO, "raysim.notes")
    config = {k: v for k, v in base.items() if k not in ("run_dir", "tracking")}
    config |= {
        "rounds": 1, "partition": ragged((4, 9, 12)), "schedule": {"cohort": 2}, "model": "logistic",
        "algorithm": "fedavg", "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
    }  # fmt: skip
    assert len(prepare_sweep({**config, "sweep": {"local.lr": [0.1, 0.2]}}).trials) == 2
    assert not [record for record in caplog.records if record.name == "raysim.notes"]


def test_the_command_line_shows_it(raysim_, base, ragged, tmp_path):
    partition = ragged((4, 9, 12))
    said = raysim_(
        "run", "quickstart", "rounds=1", "algorithm=fedavg", "resources.executor=inline", "schedule.cohort=2",
        f"partition={{name: file, path: {partition['path']}}}", f"run_dir={tmp_path}/shown", f"tracking.uri={base['tracking']['uri']}",
    )  # fmt: skip
    assert said.out.count("note: clients have 4 to 12 examples and count equally") == 1
