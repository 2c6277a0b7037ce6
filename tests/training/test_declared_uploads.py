"""Declared uploads: any shape and type reaches the server as it was sent, and a wrong one is
refused by rule and key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.cohorts import sample_cohort
from support.programs import program

import raysim
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import Upload

RULES = program("declared_uploads_rules")


@pytest.fixture
def given(base, ragged, source) -> Any:
    """given(client, server, **sections): a run of three ragged clients."""
    path = source("rules", RULES)

    def make(client: dict[str, Any], server: Any = None, **sections: Any) -> dict[str, Any]:
        own = {**client, "name": f"{path}:{client['name']}"}
        return {
            **base, "rounds": 2, "model": {"name": "mlp", "hidden": [4]}, "partition": ragged([5, 20, 9]),
            "schedule": {"cohort": 3}, "client": own, "server": server or {"name": f"{path}:Hears"}, **sections,
        }  # fmt: skip

    return make


def assert_heard(state: dict[str, torch.Tensor], ids: list[int]) -> None:
    """The sum and the mean over clients of 5, 20 and 9 examples, and each one's integers in the
    order of arrival."""
    sizes = np.array([5, 20, 9])[ids]
    assert np.array_equal(state["table"].numpy(), np.arange(30.0).reshape(10, 3) * 34)
    assert state["sizes"].dtype == torch.int32
    assert np.array_equal(state["sizes"].numpy(), np.stack([sizes, 2**30 + sizes], 1))
    assert state["number"].shape == () and float(state["number"]) == pytest.approx(34 / 3, rel=1e-6)


@pytest.mark.parametrize("batching", [{"mode": "loop", "size": 2}, {"mode": "lanes", "size": 2}])
def test_declared_uploads_arrive_in_their_shape_and_type(batching, given, engine):
    run, records = engine(given({"name": "Tells"}, batching=batching))
    assert_heard(run.executor.server.state, list(sample_cohort(run.schedule, 1)))
    P = run.plan.problem.size
    assert records[-1]["bytes_up"] == 2 * 3 * (4 * P + 4 * 30 + 2 * 4 + 4)


@pytest.mark.ray
def test_declared_uploads_arrive_over_ray(given, recycled_actors):
    config = given({"name": "Tells"}, checkpoint={"every": 1})
    inline = raysim.run(config)
    config["run_dir"] += "-ray"
    ray = raysim.run({**config, "resources": {"executor": "ray", "actors": 2, "threads": 1}})
    assert ray.digest == inline.digest


def test_a_declared_vector_computes_the_bits_of_a_named_one(given, engine):
    runs = [engine(given({"name": name}, "fedavg"))[0] for name in ("Declares", "Names")]
    assert all(map(np.array_equal, runs[0].executor.xs, runs[1].executor.xs))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("shape", r"'table' as float32 \[3, 10\], but `sends` declares it as float32 \[10, 3\]"),
        ("type", r"'sizes' as int64 \[2\], but `sends` declares it as int32 \[2\]"),
        ("vector", r"'delta' as float32 \[309\], but `sends` declares it as float32 \[310\]"),
    ],
)
def test_an_upload_that_is_not_as_declared_is_refused_by_rule_and_key(wrong, said, given):
    said = f"client.name: finish of client rule 'tells' sends {said}"
    with pytest.raises(ConfigError, match=said):
        prepare(given({"name": "Tells", "wrong": wrong}, batching={"mode": "loop"}))


@pytest.mark.parametrize("mode", ["mean", "sum", "difference"])
def test_a_server_rule_that_asks_for_another_mode_is_refused(mode, given):
    server = {"name": given({"name": "Tells"})["server"]["name"], "sizes": mode}
    said = f"client rule 'tells' with server rule 'hears': .*'sizes' in mode \"{mode}\""
    with pytest.raises(ConfigError, match=said):
        prepare(given({"name": "Tells"}, server))


@pytest.mark.parametrize("bad", ["Q", -1, 1.5, (3, "X")])
def test_a_shape_has_integers_and_known_symbols(bad):
    with pytest.raises(ValueError, match=r'"P" .the number of parameters'):
        Upload(bad)


def test_integers_have_no_mean():
    assert Upload(3, torch.int64).mode == "per_client"
    with pytest.raises(ValueError, match="per_client"):
        Upload(3, torch.int64, "mean")
