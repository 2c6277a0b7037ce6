"""What must hold of the search for equal privacy: it halves the interval of log sigma, it finds the
noise that was put in, and what cannot be found is one message with the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import CommandResult, assert_one_message

from raysim.attacks import noise_matching
from raysim.attacks.noise_matching import MatchOptions, MethodComparison, NoiseTrial, bisect
from raysim.errors import ConfigError


def falling(sigma: float) -> float:
    """30 dB at 0.001, 20 at 0.01, 10 at 0.1."""
    return -10 * math.log10(sigma)


@pytest.mark.parametrize("wanted", [29.0, 24.3, 15.0, 3.21])
def test_the_search_ends_where_a_monotone_function_has_the_value(wanted):
    tried = bisect(falling, wanted, 1e-4, 1.0, 0.01, 20)
    assert tried[:2] == [NoiseTrial(1e-4, pytest.approx(40.0)), NoiseTrial(1.0, pytest.approx(0.0))]
    assert abs(tried[-1].psnr - wanted) <= 0.01 and tried[-1].noise_multiplier == pytest.approx(
        10 ** (-wanted / 10), rel=0.003
    )
    assert all(abs(one.psnr - wanted) > 0.01 for one in tried[:-1])
    assert len(tried) <= 2 + math.ceil(math.log2(40 / 0.01))


def test_each_try_halves_the_interval_of_log_sigma():
    tried = bisect(falling, 35.0, 1e-4, 1.0, 1e-9, 3)
    assert [one.noise_multiplier for one in tried] == pytest.approx(
        [1e-4, 1.0, 1e-2, 1e-3, 10**-3.5]
    )


def test_an_end_that_is_near_enough_ends_it_at_once():
    assert [one.noise_multiplier for one in bisect(falling, 39.9, 1e-4, 1.0, 0.2, 9)] == [1e-4]
    assert [one.noise_multiplier for one in bisect(falling, 0.1, 1e-4, 1.0, 0.2, 9)] == [1e-4, 1.0]


def test_tries_run_out_where_there_is_no_such_value():
    """30 dB, then 10 dB: 20 is nowhere."""
    tried = bisect(lambda sigma: 30.0 if sigma < 0.03 else 10.0, 20.0, 1e-4, 1.0, 0.5, 6)
    assert len(tried) == 8
    assert tried[-1].noise_multiplier == pytest.approx(0.03, rel=0.3)


@pytest.mark.parametrize(
    ("wanted", "way"), [(41.0, "lower its lower end"), (-1.0, "raise its upper end")]
)
def test_without_a_bracket_the_figures_are_told(wanted, way):
    with pytest.raises(ConfigError) as refused:
        bisect(falling, wanted, 1e-4, 1.0, 0.1, 9)
    told = str(refused.value)
    assert all(
        word in told
        for word in (
            "match.noise_multiplier",
            f"{wanted:.2f} dB",
            "40.00 dB",
            "0.0001",
            "0.00 dB",
            way,
        )
    )


def file(tmp_path: Path, **change: Any) -> Path:
    """DP-SGD of a known sigma, 0.05, is the method that DP-SGD is to match: the same noise, so that
    sigma is found."""
    whole = {
        "rounds": 2,
        "data": "digits",
        "partition": {"name": "iid", "clients": 20},
        "model": {"name": "mlp", "hidden": [16]},
        "algorithm": "fedavg",
        "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 0.05},
        "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
        "schedule": {"cohort": 5},
        "resources": {"executor": "inline", "threads": 1},
        "checkpoint": {"every": 0},
        "tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "equal"},
        "match": {
            "rival": {"algorithm": "fedavg", "privacy.max_grad_norm": 1.0},
            "noise_multiplier": [0.02, 0.3],
            "tolerance": 0.5,
            "images": 3,
            "attack": {"cost": "cosine", "iterations": 60, "lr": 0.1, "signed": True, "box": True},
            **change,
        },
    }
    path = tmp_path / "match.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


@pytest.mark.ray
def test_the_noise_that_was_put_in_is_found(raysim_, tmp_path):
    said = raysim_("privacy-match", file(tmp_path), "--json")
    assert said.code == 0, said.err
    found = said.last
    own, rival = found["sides"]
    assert found["within"] and abs(rival["attacks"]["oblivious"]["psnr"] - found["target"]) <= 0.5
    assert (
        rival["noise_multiplier"] == pytest.approx(0.05, rel=0.25)
        and own["noise_multiplier"] is None
    )
    assert list(own["attacks"]) == list(rival["attacks"]) == ["oblivious", "adaptive"]
    clipped = [
        side["attacks"]["adaptive"]["psnr"] - side["attacks"]["oblivious"]["psnr"]
        for side in found["sides"]
    ]
    assert clipped == pytest.approx(
        [0, 0], abs=0.3
    )  # a cosine does not see what clipping does to one gradient
    for line in found["tries"]:
        assert f"noise multiplier {line['noise_multiplier']:.4g}: {line['psnr']:.2f} dB" in said.err
    for side in found["sides"]:
        trained = yaml.safe_load((Path(side["run_dir"]) / "config.yaml").read_text())
        assert (
            trained["rounds"] == 2
            and trained["local"]["epochs"] == 1
            and trained["record_updates"] is None
        )
        assert trained["privacy"]["noise_multiplier"] == (side["noise_multiplier"] or 0.05)
        assert all(
            (Path(one["folder"]) / "attack.png").is_file() for one in side["attacks"].values()
        )
        assert 0 < side["accuracy"] <= 1
    assert json.loads((Path(own["run_dir"]) / "match.json").read_text()) == found


def assert_refused(said: CommandResult, *words: str) -> None:
    assert_one_message(said)
    assert all(word in said.err for word in words), said.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_multiplier": [1.0, 0.1]}, ("match", "smaller one first")),
        ({"noise_multiplier": [0.0, 0.1]}, ("match.noise_multiplier", "greater than 0")),
        ({"rival": {"algorithm": "fedavg", "privacy.noise_multiplier": 1}}, ("match", "privacy.noise_multiplier")),
        ({"rival": {"algorithm": "fedavgg"}}, ("fedavgg", "fedavg")),
        ({"rival": {"algorithm": "fedreg", "privacy.max_grad_norm": 1.0}}, ("privacy", "fedreg")),
        ({"tolerence": 1}, ("match.tolerence", "tolerance")),
        ({"attack": {"iteration": 9}}, ("match.attack.iteration", "iterations")),
        ({"images": 21}, ("schedule.cohort", "20")),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_before_anything_runs(change, words, raysim_, tmp_path):
    said = raysim_("privacy-match", file(tmp_path, **change))
    assert_refused(said, *words)
    assert not Path("runs").exists()


def test_a_run_that_stops_on_a_metric_is_attacked_without_it(tmp_path):
    """The run that is attacked does not evaluate."""
    raw = yaml.safe_load(file(tmp_path).read_text()) | {"stop": {"metric": "loss", "patience": 5}}
    asked = MatchOptions(**raw.pop("match"))
    MethodComparison(raw, asked)


def test_other_files_and_other_commands_are_told_apart(raysim_, tmp_path):
    path = file(tmp_path)
    assert_refused(raysim_("run", path), "match", f"raysim privacy-match {path}")
    assert_refused(raysim_("privacy-match", "quickstart"), "match", "no such section")


def test_no_finite_psnr_is_an_error_that_says_what_to_change(tmp_path, monkeypatch):
    monkeypatch.setattr(
        noise_matching, "attack", lambda *given: (type("Result", (), {"psnr": math.nan}), tmp_path)
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(noise_matching.RaysimError, match=r"match\.attack"):
        noise_matching.match(file(tmp_path))
