"""Nets, rules, losses and metrics compute the same in all processes, or are refused there."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
from ray.exceptions import RayError
from support.plain_fedavg import blobs, cut, run
from support.programs import program

from raysim.distributed.waiting import translated
from raysim.engine import driver_environment
from raysim.engine.failure_policy import ActorDied
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare


@pytest.fixture
def scaled(tmp_path) -> Callable[[str], str]:
    """scaled(name): the name in a file whose classes and functions read SCALE_OF_THIS_TEST."""
    (tmp_path / "scaled.py").write_text(program("same_outputs_nets"))
    return lambda name: f"{tmp_path}/scaled.py:{name}"


def test_a_plan_brings_the_variables_that_this_process_has_set(scaled, monkeypatch):
    raw = {"data": {"name": "digits"}, "rounds": 1, "algorithm": None}
    raw |= {"client": scaled("Client"), "server": scaled("Server")}
    monkeypatch.setenv("SCALE_OF_THIS_TEST", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "x")
    monkeypatch.setenv("SOME_API_KEY", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("PATH", "/bin")
    known, stay = driver_environment.own_variables(), driver_environment.NOT_FOR_WORKERS
    # One of those that the process was started with.
    gone = next(name for name in os.environ if name not in known and not stay.match(name))
    value = os.environ[gone]
    monkeypatch.delenv(gone)
    set_here = driver_environment.own_variables()
    assert set_here["SCALE_OF_THIS_TEST"] == "2" and set_here[gone] is None
    own = {"MLFLOW_TRACKING_PASSWORD", "SOME_API_KEY", "CUDA_VISIBLE_DEVICES", "PATH"}
    assert not own & set(set_here)
    of_worker = pickle.dumps(prepare(raw))
    monkeypatch.delenv("SCALE_OF_THIS_TEST")
    monkeypatch.setenv(gone, value)
    assert isinstance(pickle.loads(of_worker), Plan)
    assert os.environ["SCALE_OF_THIS_TEST"] == "2" and gone not in os.environ


@pytest.mark.ray
def test_workers_have_a_variable_that_was_set_after_ray_started(
    local_ray, scaled, tmp_path, monkeypatch
):
    results = []
    for scale in ("1", "2"):
        monkeypatch.setenv("SCALE_OF_THIS_TEST", scale)
        for resources in ({"executor": "inline"}, {"executor": "ray", "actors": 1}):
            result = run(
                scaled("Net"),
                blobs(),
                cut([60, 60]),
                2,
                algorithm=None,
                client=scaled("Client"),
                server=scaled("Server"),
                task=scaled("loss"),
                evaluate={"every": 1, "metrics": [scaled("metric")]},
                resources=resources,
                run_dir=str(tmp_path / f"{scale}-{resources['executor']}"),
            )
            results.append((result.digest, result.history[-1]["metric"]))
    assert results[0] == results[1] != results[2] == results[3]


def test_a_module_that_is_missing_where_an_actor_starts_is_a_mistake_of_the_configuration():
    text = (
        "The actor died because of an error raised in its creation task, x\n{}: No module named y"
    )
    missing = translated(RayError(text.format("ModuleNotFoundError")), "the start of it")
    assert isinstance(missing, ConfigError)
    assert str(missing).startswith("the start of it failed: No module named y; ")
    assert type(translated(RayError(text.format("OSError")), "the start")) is ActorDied


@pytest.mark.ray
def test_a_module_that_only_this_process_finds_is_named(local_ray, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "found_here_only.py").write_text("FACTOR = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    (tmp_path / "rule.py").write_text(f"import found_here_only\n{program('same_outputs_nets')}")
    rule = {"algorithm": None, "client": f"{tmp_path}/rule.py:Client", "server": "fedavg"}
    keys = {"resources": {"executor": "ray", "actors": 1}, "run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"No module named 'found_here_only'.*PYTHONPATH"):
        run("logistic", blobs(), cut([60, 60]), 1, **rule, **keys)


@pytest.mark.ray
def test_outputs_of_several_forms(local_ray, tmp_path):
    (tmp_path / "two_heads.py").write_text(program("two_heads"))
    net, task = f"{tmp_path}/two_heads.py:TwoHeads", f"{tmp_path}/two_heads.py:loss"
    digests = [
        run(
            net,
            blobs(),
            cut([60, 60]),
            2,
            task={"name": task, "like": "any"},
            resources=resources,
            run_dir=str(tmp_path / resources["executor"]),
        ).digest
        for resources in ({"executor": "inline"}, {"executor": "ray", "actors": 2})
    ]
    assert digests[0] == digests[1]
