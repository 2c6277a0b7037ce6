"""A user's own probe: what it measures, that it changes nothing, and what happens where it is
wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support.processes import timeless
from support.programs import program

import raysim
from raysim.diagnostics import recorded_updates
from raysim.engine.state.checkpoint import available_checkpoints
from raysim.errors import ConfigError, ProbeError
from raysim.prepare.resolve import prepare
from raysim.runs.resume import resume

DRIFT = """
from dataclasses import dataclass

from raysim import Probe


@dataclass
class Drift(Probe):
    "The distance that local training moves each client, and the norm of the global model."

    every: int = 1
    largest: bool = False

    def begin(self, run):
        super().begin(run)
        self.rounds = run.rounds_done

    def request(self, round):
        return dict.fromkeys(round.ids, 2.0) if round.t % self.every == 0 else {}

    def measure(self, trainer, client, update, request):
        return {"distance": request * (update.local_params - client.broadcast.global_params).norm()}

    def metrics(self, round, results):
        self.rounds += 1
        distances = [float(result["distance"]) for result in results.values()]
        if not distances:
            return {"rounds": self.rounds}
        found = max(distances) if self.largest else sum(distances) / len(distances)
        return {"rounds": self.rounds, "distance": found}

    def evaluates(self, rounds_done):
        return rounds_done % 2 == 1

    def evaluate(self, trainer, model):
        assert model.rounds_done % 2 == 1
        named = model.state_dict()
        assert sum(tensor.numel() for tensor in named.values()) == model.global_params.numel()
        squares = sum(float((tensor**2).sum()) for tensor in named.values())
        assert abs(squares - float(model.global_params.norm()) ** 2) < 1e-3 * squares
        return {"norm": float(model.global_params.norm()), "round": model.rounds_done}

    def follow(self, record):
        return {"half norm": record["Drift/norm"] / 2} if "Drift/norm" in record else {}
"""
BROKEN = """
from raysim import Probe


class Broken(Probe):
    def at(self, method):
        if method == "{method}":
            raise KeyError("what I look for")

    def check(self, plan):
        self.at("check")

    def begin(self, run):
        self.at("begin")

    def request(self, round):
        if round.t == 2:
            self.at("request")
        return {{round.ids[0]: round.t}}

    def measure(self, trainer, client, update, request):
        if request == 2:
            self.at("measure")
        return {{}}

    def metrics(self, round, results):
        if round.t == 2:
            self.at("metrics")
        return {{}}

    def evaluates(self, rounds_done):
        if rounds_done == 2:
            self.at("evaluates")
        return rounds_done == 2

    def evaluate(self, trainer, broadcast):
        self.at("evaluate")
        return {{}}

    def follow(self, record):
        if record["round"] == 2:
            self.at("follow")
        return {{}}
"""


@pytest.fixture
def config(base: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        "algorithm": "fedprox",
        "rounds": 3,
        "partition": {"name": "iid", "clients": 12},
        "model": {"name": "mlp", "hidden": [6]},
        "schedule": {"cohort": 4},
        "local": {"steps": 2, "batch_size": 8, "lr": 0.2},
        "batching": {"mode": "loop", "size": 2},
        "evaluate": {"every": 0},
    }


def with_probes(config: dict[str, Any], *probes: Any) -> dict[str, Any]:
    return {**config, "evaluate": {**config["evaluate"], "probes": list(probes)}}


ON_RAY = {"executor": "ray", "actors": 2, "threads": 1}


@pytest.mark.parametrize(
    "where", ["loop", "lanes", pytest.param("ray", marks=pytest.mark.ray), "buffered"]
)
def test_it_sees_what_clients_do_and_changes_nothing(where, config, source, tmp_path, request):
    if where == "ray":
        request.getfixturevalue("recycled_actors")
        config |= {"resources": ON_RAY}
    elif where == "lanes":
        config |= {"batching": {"mode": "lanes", "size": 2}}
    elif where == "buffered":
        config |= {
            "schedule": {
                "name": "buffered",
                "buffer_size": 3,
                "concurrency": 6,
                "client_speeds": "two_speed",
            }
        }
    drift = {"name": f"{source('mine', DRIFT)}:Drift", "every": 2}
    observed = {
        **config,
        "run_dir": str(tmp_path / "with"),
        "record_updates": {"rounds": [0, 2], "clients": 4},
    }
    done = raysim.run(with_probes(observed, drift))
    without = raysim.run({**config, "run_dir": str(tmp_path / "without")})
    assert done.state_digest == without.state_digest
    for t in (0, 2):
        deltas = [
            one.uploads["delta"] for one in recorded_updates.read_observations(done.run_dir, t)
        ]
        expected = sum(2 * float(delta.norm()) for delta in deltas) / len(deltas)
        assert done.history[t + 1]["Drift/distance"] == pytest.approx(expected, rel=1e-5)
    assert "Drift/distance" not in done.history[2] and done.history[3]["Drift/rounds"] == 3
    assert done.history[3]["Drift/norm"] == pytest.approx(float(done.parameters.norm()), rel=1e-6)
    assert done.history[3]["Drift/half norm"] == done.history[3]["Drift/norm"] / 2
    assert "Drift/norm" not in done.history[0] and "Drift/norm" not in done.history[2]


def test_its_metrics_are_tracked_and_its_file_is_kept_and_no_part_of_the_identity(
    config, source, tracked
):
    path = source("mine", DRIFT)
    done = raysim.run(with_probes(config, f"{path}:Drift"))
    history = MlflowClient(config["tracking"]["uri"]).get_metric_history(
        done.run_id, "Drift/distance"
    )
    assert [m.value for m in history] == [r["Drift/distance"] for r in done.history[1:]]
    assert (done.run_dir / "source/evaluate.probes.0/mine.py").read_text() == DRIFT
    plan, plain = prepare(done.run_dir / "config.yaml"), prepare(config)
    assert plan.config.fingerprint == plain.config.fingerprint
    assert list(plan.config.files or {}) == ["evaluate.probes.0"]
    assert plan.config.evaluate.probes[0].parameters == {"every": 1, "largest": False}


def test_a_run_is_resumed_with_another_text_of_its_probe(config, source):
    path = source("mine", DRIFT)
    first = raysim.run(
        with_probes({**config, "checkpoint": {"every": 1}, "rounds": 2}, f"{path}:Drift")
    )
    Path(path).write_text(DRIFT.replace("request * (", "10 * request * ("))
    done = resume(first.run_dir, {"rounds": 3})
    assert [record["Drift/rounds"] for record in done.history[1:]] == [1, 2, 3]
    assert done.history[3]["Drift/distance"] > 3 * done.history[2]["Drift/distance"]


METHODS = "request", "measure", "metrics", "evaluates", "evaluate", "follow"


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        *((method, "loop") for method in METHODS),
        ("measure", "lanes"),
    ],
)
def test_one_that_raises_ends_the_run_in_one_message_and_nothing_is_lost(
    method, mode, config, source, tmp_path
):
    config |= {
        "batching": {"mode": mode, "size": 2},
        "faults": {"on_client_error": "drop"},
        "evaluate": {"every": 1},
        "rounds": 4,
    }
    plain = raysim.run({**config, "run_dir": str(tmp_path / "plain")})
    folder, path = tmp_path / "broken", source("broken", BROKEN.format(method=method))
    broken = with_probes(
        {**config, "run_dir": str(folder), "checkpoint": {"every": 50}}, f"{path}:Broken"
    )
    with pytest.raises(
        ProbeError, match=f"{method} of probe 'Broken' failed: KeyError: .*broken.py, line"
    ) as error:
        raysim.run(broken)
    assert "\n" not in str(error.value)
    if method in ("request", "measure", "metrics"):
        assert available_checkpoints(folder), "the rounds that were done are not saved"
    done = resume(folder, {"evaluate.probes": []})
    assert done.state_digest == plain.state_digest and timeless(done.history) == timeless(
        plain.history
    )


SELECTING = program("probes_selecting")


def test_no_checkpoint_holds_a_server_that_is_a_round_ahead(config, source, tmp_path):
    """A rule that selects its clients has updated the model when the next round is scheduled."""
    selecting = {"client": "fedprox", "server": source("selecting", SELECTING) + ":Selecting"}
    config = {**config, **selecting, "rounds": 4}
    del config["algorithm"]
    plain = raysim.run({**config, "run_dir": str(tmp_path / "plain")})
    path, folder = source("broken", BROKEN.format(method="request")), tmp_path / "broken"
    broken = with_probes(
        {**config, "run_dir": str(folder), "checkpoint": {"every": 50}}, f"{path}:Broken"
    )
    with pytest.raises(ProbeError, match="request of probe 'Broken' failed"):
        raysim.run(broken)
    assert resume(folder, {"evaluate.probes": []}).state_digest == plain.state_digest


@pytest.mark.ray
def test_one_that_raises_on_an_actor_is_named(config, source, recycled_actors):
    path = source("broken", BROKEN.format(method="measure"))
    with pytest.raises(
        ProbeError, match=r"^client \d+: measure of probe 'Broken' failed: KeyError"
    ):
        raysim.run(with_probes({**config, "resources": ON_RAY}, f"{path}:Broken"))


RETURNS = """
from raysim import Probe


class Returns(Probe):
    def returned(self, method):
        return {value} if method == "{method}" else {{}}

    def request(self, round):
        return self.returned("request")

    def measure(self, trainer, client, update, request):
        return {{}}

    def metrics(self, round, results):
        return self.returned("metrics")

    def evaluates(self, rounds_done):
        return rounds_done == 2

    def evaluate(self, trainer, model):
        return self.returned("evaluate")

    def follow(self, record):
        return self.returned("follow")
"""


@pytest.mark.parametrize("method", ["request", "metrics", "evaluate", "follow"])
def test_none_is_no_metrics_and_what_is_no_mapping_is_refused(method, config, source, tmp_path):
    path = source("none", RETURNS.format(method=method, value=None))
    done = raysim.run(with_probes(config, f"{path}:Returns"))
    assert not [key for record in done.history for key in record if key.startswith("Returns/")]
    path = source("number", RETURNS.format(method=method, value=0.5))
    said = f"{method} of probe 'Returns' failed: .*returned a float; return a mapping of"
    with pytest.raises(ProbeError, match=said):
        raysim.run(with_probes({**config, "run_dir": str(tmp_path)}, f"{path}:Returns"))


MANY = program("probes_many")


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ("drift", ("evaluate.probes.0.name", "path.py:Class")),
        ("{many}", ("evaluate.probes.0.name", "{many}:NAME")),
        ("{many}:Nobody", ("evaluate.probes.0.name", "Nobody")),
        ("./nowhere.py:Drift", ("evaluate.probes.0.name", "nowhere.py")),
        ("{many}:NoProbe", ("evaluate.probes.0.name", "raysim.Probe")),
        ("{many}:Bare", ("evaluate.probes.0.name", "@dataclass", "Bare")),
        ("{many}:Blind", ("evaluate.probes.0.name", "measure")),
        ("{many}:Taken", ("evaluate.probes.0.name", "'server'")),
        ("{many}:Refuses", ("evaluate.probes", "only for two classes")),
        ({"name": "{many}:Odd", "evry": 2}, ("evaluate.probes.0.evry", "every")),
        ({"name": "{many}:Odd", "every": "often"}, ("evaluate.probes.0.every",)),
        ({"every": 2}, ("evaluate.probes.0.name",)),
    ],
)
def test_what_is_no_probe_is_refused(probe, words, config, source):
    many = source("many", MANY)
    if isinstance(probe, str):
        probe = probe.format(many=many)
    elif "name" in probe:
        probe = {**probe, "name": probe["name"].format(many=many)}
    with pytest.raises(ConfigError) as refused:
        prepare(with_probes(config, probe))
    assert all(word.format(many=many) in str(refused.value) for word in words), str(refused.value)


def test_two_of_one_name_are_refused(config, source):
    path = source("many", MANY)
    with pytest.raises(ConfigError, match=r"evaluate\.probes\.1\.name.*'Odd'"):
        prepare(with_probes(config, f"{path}:Odd", {"name": f"{path}:Odd", "every": 2}))


@pytest.mark.parametrize(("cls", "words"), [("Odd", "'loss #1'"), ("Stranger", "1000000")])
def test_results_that_cannot_be_used_are_refused(cls, words, config, source):
    with pytest.raises(ProbeError, match=words):
        raysim.run(with_probes(config, f"{source('many', MANY)}:{cls}"))


def test_one_without_parameters_may_have_an_init_and_stand_for_itself(config, source):
    config["evaluate"]["probes"] = f"{source('many', MANY)}:WithInit"
    assert [r.get("WithInit/seen") for r in raysim.run(config).history] == [None, 1, 2, 3]


def test_clients_that_are_looked_at_are_not_pooled(config, source):
    path = source("mine", DRIFT + "\n\nclass Global(Drift):\n    request = Probe.request\n")
    fedsgd = {
        **config,
        "algorithm": "fedsgd",
        "local": {"steps": 1, "batch_size": "full"},
        "batching": {"mode": "auto"},
    }
    assert prepare(fedsgd).mode == prepare(with_probes(fedsgd, f"{path}:Global")).mode == "pooled"
    assert prepare(with_probes(fedsgd, f"{path}:Drift")).mode == "loop"
    with pytest.raises(ConfigError, match=r"batching\.mode.*looked at"):
        prepare(with_probes({**fedsgd, "batching": {"mode": "pooled"}}, f"{path}:Drift"))
