"""`raysim.testing`: its checks pass for sound rules and name what is wrong with others."""

from __future__ import annotations

import pytest
from support.programs import program

from raysim import testing
from raysim.errors import ConfigError

RULES = program("checks_rules")


@pytest.fixture
def plain(source) -> str:
    return source("rules", RULES) + ":plain"


def test_a_sound_method_passes_all_checks(plain):
    result = testing.check_method(plain)
    assert result.rounds == 3 and result.run_id == ""
    testing.check_reduction({"algorithm": plain}, {"algorithm": "fedavg"}, rtol=1e-12)


def test_what_differs_is_said_with_its_size(plain):
    double = {"algorithm": {"name": plain, "factor": 2.0}}
    with pytest.raises(AssertionError, match=r"the first run and the second differ by 0\.\d+, rel"):
        testing.check_reduction(double, {"algorithm": "fedavg"})
    with pytest.raises(AssertionError, match=r"differ by 0\.\d+, .*; allowed are 1e-12"):
        testing.check_reduction(double, {"algorithm": "fedavg"}, rtol=1e-12)


def test_a_method_that_keeps_something_in_python_is_refused(plain):
    with pytest.raises(ConfigError, match=r"'remembers' .* that differs if a GPU captures"):
        testing.check_captures(algorithm=plain.replace(":plain", ":remembers"))


def test_a_method_that_keeps_clients_in_python_is_found_by_resuming(plain):
    """After the rounds of a dry run, and in a variable of its file."""
    testing.check_captures(algorithm=plain.replace(":plain", ":late"))
    with pytest.raises(
        AssertionError, match="an uninterrupted run and one that was resumed differ"
    ):
        testing.check_resume(algorithm=plain.replace(":plain", ":late"))


def test_a_model_that_is_lost_on_resuming_is_found(plain):
    """The parameters are the same, and the metrics of clients are not."""
    models = plain.replace(":plain", ":models")
    with pytest.raises(AssertionError, match=r"resumed have the same parameters, but clients/"):
        testing.check_resume(algorithm=models)


def test_one_round_cannot_be_resumed():
    with pytest.raises(ConfigError, match="rounds: a run of one round cannot be resumed"):
        testing.check_resume(algorithm="fedavg", rounds=1)


def test_runs_of_checks_are_not_tracked():
    with pytest.raises(ConfigError, match="tracking: the runs of checks are not tracked"):
        testing.check_captures(algorithm="fedavg", tracking=True)


@pytest.mark.ray
def test_actors_are_checked(plain, recycled_actors):
    testing.check_actors(2, algorithm=plain)


def test_a_warning_of_all_runs_of_a_check_is_logged_once(caplog):
    for _ in range(2):
        caplog.clear()
        testing.check_method("fedavg")
        messages = [record.getMessage() for record in caplog.records]
        assert len([text for text in messages if "1 of 8 clients have no training" in text]) == 1
