"""What must hold of a configuration: layers lie over one another as documented, equal experiments
have equal fingerprints, and every mistake is refused in the words of someone who edits the file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.programs import program

import raysim
from raysim.attacks.noise_matching import MatchOptions
from raysim.config import explain
from raysim.config.loading import read_config, shipped
from raysim.config.references import load_object
from raysim.config.sections.base import at_round, name_of
from raysim.engine.plan import Plan
from raysim.errors import ConfigError
from raysim.prepare.resolve import keys, prepare
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.pairs import resolve_rules
from raysim.rules.methods.registry import algorithm_defaults, discover
from raysim.spelling import did_you_mean, nearest_words
from raysim.sweeps.preparation import read_sweep

discover()

RULES = program("config_rules")

NETS = program("config_nets")


@pytest.fixture
def small(base: dict[str, Any]) -> dict[str, Any]:
    return {**base, "rounds": 2, "algorithm": "fedavg", "partition": {"name": "iid", "clients": 20}}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """files(name=text, ...): writes YAML files; the tests stand in their folder."""
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> Path:
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write


def layers(source: Any, *overrides: str) -> dict[str, Any]:
    """The merged mapping, as a run sees it."""
    return read_config(source, overrides, keys, algorithm_defaults)


# -- layers ----------------------------------------------------------------------------------------


def test_extends_one_level(files):
    files(
        base="seed: 3\nrounds: 5\ndata: digits\nlocal: {steps: 2, lr: 0.5}\nmodel: {name: mlp, hidden: [8]}",
        mine="extends: base.yaml\nrounds: 7\nlocal: {lr: 0.25}\nalgorithm: fedavg",
    )
    merged = layers("mine.yaml")
    assert (merged["seed"], merged["rounds"], merged["local"]) == (3, 7, {"steps": 2, "lr": 0.25})
    assert merged["model"] == {"name": "mlp", "hidden": [8]} and "extends" not in merged
    config = explain.validate(layers("mine.yaml", "local.lr=0.125"))
    assert (config.seed, config.rounds, config.local.lr, config.local.steps) == (3, 7, 0.125, 2)
    assert (
        config.data.name == "digits"
        and config.algorithm is not None
        and config.algorithm.name == "fedavg"
    )


def test_extends_is_seen_from_the_file_not_from_here(files, monkeypatch, tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    files(base="rounds: 5\ndata: digits\nalgorithm: fedavg")
    (tmp_path / "deep" / "er" / "mine.yaml").write_text("extends: ../../base.yaml\nseed: 4")
    monkeypatch.chdir("/")
    assert layers(tmp_path / "deep" / "er" / "mine.yaml")["rounds"] == 5


def test_extends_a_shipped_configuration(files):
    files(mine="extends: quickstart\nrounds: 3")
    merged = layers("mine.yaml")
    assert merged["rounds"] == 3 and merged["algorithm"]["name"] == "gradma"


def test_extends_two_levels_is_refused(files):
    files(a="rounds: 1", b="extends: a.yaml", c="extends: b.yaml\ndata: digits")
    with pytest.raises(
        ConfigError, match=r"c\.yaml: extends 'b\.yaml', which extends another; only one level"
    ):
        layers("c.yaml")


def test_extends_a_missing_file_names_the_file_that_says_so(files):
    files(mine="extends: bse.yaml\nrounds: 1", base="rounds: 1")
    with pytest.raises(ConfigError, match=r"bse\.yaml") as error:
        layers("mine.yaml")
    assert "extends" in str(error.value) and "mine.yaml" in str(error.value)


def test_overrides_go_deep_and_keep_what_lies_beside():
    merged = layers(
        {"local": {"steps": 5, "lr": 0.1}, "data": "digits"},
        "local.lr=1e-3",
        "seed=7",
        "data.root=/x",
    )
    assert merged["local"] == {"steps": 5, "lr": 0.001} and merged["seed"] == 7
    assert merged["data"] == {"name": "digits", "root": "/x"}


@pytest.mark.parametrize(
    ("key", "without"),
    [
        ("privacy", "null to leave it out"),
        ("record_updates", "null to leave it out"),
        ("evaluate.forgetting", "null to leave it out"),
        ("checkpoint", "leave it out"),  # null is refused
    ],
)
def test_a_section_is_no_switch(key, without):
    said = rf"{key}: true is not a section; give some of {key}\.\w+, .* or {without}$"
    with pytest.raises(ConfigError, match=said):
        prepare("quickstart", {key: True})


@pytest.mark.parametrize("value", [None, False, "none"])
def test_tracking_cannot_be_left_out_by_a_value(value):
    with pytest.raises(ConfigError, match="every run of the command line is tracked") as refused:
        prepare("quickstart", {"tracking": value})
    advised = ["tracking.uri=sqlite:///mlflow.db"]
    assert advised[0] in str(refused.value) and "tracking=null" not in str(refused.value)
    assert prepare("quickstart", advised).config.tracking.uri.startswith("sqlite:///")


@pytest.mark.parametrize(
    "section", ["data", "partition", "model", "algorithm", "client", "server", "schedule"]
)
def test_a_name_is_short_for_its_section(section):
    long = layers({section: {"name": "one", "x": 1}}, f"{section}.name=one", f"{section}.y=2")
    assert layers({section: {"name": "one", "x": 1}}, f"{section}=one", f"{section}.y=2") == long
    assert long[section] == {"name": "one", "x": 1, "y": 2}


def test_the_order_of_overrides_does_not_matter(small):
    given = [
        "algorithm=fedavgm",
        "algorithm.beta1=0.25",
        "algorithm.lr=0.5",
        "local.lr=0.125",
        "seed=3",
    ]
    first = prepare(small, given).config
    assert first.server is not None and first.server.parameters["beta1"] == 0.25
    for turned in (given[::-1], given[2:] + given[:2], given[1:] + given[:1]):
        assert prepare(small, turned).config == first


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("local={steps: 3}", "local.lr=0.5"),
        ("algorithm={name: fedavgm, beta1: 0.5}", "algorithm.lr=0.5"),
    ],
)
def test_a_whole_section_beside_one_of_its_keys_in_any_order(small, whole, part):
    assert layers(small, whole, part) == layers(small, part, whole)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("fedper", "local.personal"), ("fedsgd", "local.steps"), ("fedbuff", "schedule.name")],
)
def test_a_hyper_parameter_changes_the_method_below_and_not_what_it_brings(algorithm, key):
    """In an override, in a file over another, and where a sweep varies it."""
    section, _, last = key.partition(".")
    whole = layers({"algorithm": algorithm})
    changed = layers({"algorithm": algorithm}, "algorithm.lr=0.5")
    assert changed[section][last] == whole[section][last] is not None
    assert changed["algorithm"] == {"name": algorithm, "lr": 0.5}
    other = layers({"algorithm": algorithm}, "algorithm=fedavg")
    assert section not in other, "another method brings what it needs itself"


def test_a_hyper_parameter_leaves_the_rules_beside_the_method():
    pair = {"algorithm": "fedprox", "server": "fedadam"}
    assert layers(pair, "algorithm.mu=0.5")["server"] == {"name": "fedadam"}
    assert "server" not in layers(pair, "algorithm=fedprox")
    client = {"name": "fedprox", "mu": 0.5}
    written = {"algorithm": "fedprox", "client": client, "server": "fedavg"}
    assert layers(written, "algorithm.mu=0.7")["client"] == client
    two = {"client.mu": 0.1, "server.lr": 0.5}
    assert name_of(read_config(pair, two, keys, algorithm_defaults)["algorithm"]) == "fedprox"


@pytest.mark.parametrize("null", ["local.epochs=null", "local.steps=null"])
def test_no_epochs_do_not_take_the_steps_away(null):
    given = {"steps": 20} if "epochs" in null else {"epochs": 2}
    merged = layers({"local": given}, null)["local"]
    assert {key: value for key, value in merged.items() if value is not None} == given


def test_only_sections_are_shortened_to_their_names():
    """`task` of a user's function is a word of its own."""
    own = {"data": {"name": "mine.py:load", "task": "mnli"}}
    assert layers(own, "data.task=sst2")["data"]["task"] == "sst2"
    assert layers({"groups": {"client": {"share": 0.5}}})["groups"]["client"] == {"share": 0.5}
    groups = layers({}, "groups.a.client=fedprox", "groups.a.client.mu=0.1")["groups"]
    assert groups == {"a": {"client": {"name": "fedprox", "mu": 0.1}}}
    nested = layers({"local": {"optimizer": "adam"}}, "local.optimizer.betas=[0.5, 0.9]")
    assert nested["local"]["optimizer"] == {"name": "adam", "betas": [0.5, 0.9]}


@pytest.mark.parametrize(
    "two",
    [
        ("client={mu: 0.1}", "client.name=fedprox"),
        ("client={name: fedprox, mu: 0.5}", "client.mu=0.1"),
    ],
)
def test_of_two_overrides_the_longer_key_counts_in_any_order(two):
    for overrides in (two, two[::-1]):
        assert layers({}, *overrides)["client"] == {"name": "fedprox", "mu": 0.1}


def test_a_value_that_is_laid_under_several_configurations_stays_as_it_is():
    shared: dict[str, Any] = {"optimizer": {"name": "adam"}}
    for point in ({"local": shared, "local.optimizer.betas": [0.5, 0.9]}, {"local": shared}):
        read = read_config({"data": "digits"}, point, keys, algorithm_defaults)
        assert ("betas" in read["local"]["optimizer"]) == (len(point) == 2)
    assert shared == {"optimizer": {"name": "adam"}}


def test_the_name_of_a_group_is_a_word(small):
    with pytest.raises(ConfigError, match=r"groups\.1: .* write \"1\""):
        prepare({**small, "groups": {1: {"share": 0.5, "client": "fedprox"}}})


def test_what_was_given_is_left_alone(small):
    before, mine = json.dumps(small), {"local": {"steps": 3}, "local.lr": 0.5}
    layers(small, "local.lr=0.5", "resources.threads=2", "partition.clients=30")
    prepare(small, mine)
    assert json.dumps(small) == before and mine == {"local": {"steps": 3}, "local.lr": 0.5}


def test_yaml_numbers():
    merged = layers(
        {}, "a=1e-3", "b=2E5", "c=.5e1", "d=-1e+2", "e=1_000", "f='1e-3'", "g=null", "h=[1e-1, 2]"
    )
    assert merged == {
        "a": 1e-3,
        "b": 2e5,
        "c": 5.0,
        "d": -100.0,
        "e": 1000,
        "f": "1e-3",
        "g": None,
        "h": [0.1, 2],
    }


def test_a_new_name_keeps_the_keys_that_mean_the_same_and_no_others():
    below = {
        "algorithm": {"name": "gradma", "beta1": 0.7, "beta2": 0.3, "memory": 50, "lr": 0.5},
        "model": {"name": "mlp", "hidden": [8]},
        "partition": {"name": "dirichlet", "clients": 30, "alpha": 0.5, "min_samples": 1},
    }
    over = layers(below, "algorithm=gradma_s", "model=lenet", "partition=iid")
    assert over["algorithm"] == {**below["algorithm"], "name": "gradma_s"}
    assert over["model"] == {"name": "lenet"} and over["partition"] == {
        "name": "iid",
        "clients": 30,
    }
    for name in ("fedavgm", "fedprox"):  # every server's lr; but its beta1 is not GradMA's
        assert layers(below, f"algorithm={name}")["algorithm"] == {"name": name, "lr": 0.5}
    assert layers(below, "algorithm=fedadam")["algorithm"] == {"name": "fedadam"}  # nor is its lr
    moon = layers(
        {"algorithm": {"name": "fedprox", "mu": 0.3, "weights": "samples"}}, "algorithm=moonm"
    )
    assert moon["algorithm"] == {"name": "moonm", "weights": "samples"}
    same = layers(below, "algorithm=gradma", "model=mlp", "algorithm.beta1=0.1")
    assert (
        same["algorithm"] == {**below["algorithm"], "beta1": 0.1}
        and same["model"] == below["model"]
    )


def test_a_new_name_of_ones_own_keeps_the_keys_that_mean_the_same(source):
    rules, nets = source("own_rules", RULES), source("own_nets", NETS)
    below = {
        "model": {"name": "mlp", "hidden": [8]},
        "client": {"name": "fedprox", "mu": 1.0},
        "server": "fedavg",
    }
    over = layers(
        {**below, "server": {"name": "fedavgm", "lr": 0.5, "beta1": 0.1}}, f"server={rules}:Taking"
    )
    assert over["server"] == {"name": f"{rules}:Taking", "lr": 0.5}
    assert layers(below, f"model={nets}:Net")["model"] == {"name": f"{nets}:Net"}


@pytest.mark.parametrize("wins", ["steps", "epochs"])
def test_steps_and_epochs_are_rivals(small, wins):
    loses = {"steps": "epochs", "epochs": "steps"}[wins]
    config = prepare({**small, "local": {loses: 3, "lr": 0.5}}, [f"local.{wins}=2"]).config
    assert (
        getattr(config.local, wins) == 2
        and getattr(config.local, loses) is None
        and config.local.lr == 0.5
    )


def test_neither_steps_nor_epochs_is_five_steps(small):
    assert (
        prepare({**small, "local": {"lr": 0.5}}).config.local.steps
        == 5
        == prepare(small).config.local.steps
    )


def halves(raw: dict[str, Any]) -> tuple[str, str]:
    client, server = resolve_rules(explain.validate(raw))
    return client.name, server.name


def test_client_and_server_replace_the_algorithm_and_back(small):
    over = layers(
        {**small, "algorithm": {"name": "gradma", "memory": 50}}, "client=fedprox", "server=fedavgm"
    )
    assert "algorithm" not in over and halves(over) == ("fedprox", "fedavgm")
    back = layers(over, "algorithm=gradma_w")
    assert "client" not in back and "server" not in back and halves(back) == ("gradma", "fedavg")


def test_one_half_replaces_that_half(small):
    over = layers(
        {**small, "algorithm": {"name": "gradma", "memory": 50}}, "client=fedprox", "client.mu=0.5"
    )
    assert halves(over) == ("fedprox", "gradma")
    plan = prepare(over)
    assert plan.client.mu == 0.5 and plan.server.memory == 50  # type: ignore[attr-defined]


# -- what an algorithm brings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "over", "expected"),
    [
        ({"algorithm": "fedsgd"}, [], (1, None, "full")),
        ({"local": {"steps": 9, "batch_size": 7}}, ["algorithm=fedsgd"], (1, None, "full")),
        ({"algorithm": "fedsgd", "local": {"batch_size": 7}}, [], (1, None, 7)),
        ({"algorithm": "fedsgd"}, ["local.steps=3"], (3, None, "full")),
        ({"algorithm": "fedsgd", "local": {"epochs": 2}}, [], (None, 2, "full")),
        ({"local": {"steps": 9}}, ["algorithm=fedsgd", "local.epochs=4"], (None, 4, "full")),
        ({"local": {"steps": 9}}, ["local.batch_size=3", "algorithm=fedsgd"], (1, None, 3)),
    ],
)
def test_defaults_enter_with_the_layer_that_names_the_algorithm(small, below, over, expected):
    small.pop("algorithm")
    local = prepare({**small, **below}, over).config.local
    assert (local.steps, local.epochs, local.batch_size) == expected


def test_defaults_of_a_section_with_a_name_go_with_any_name(small):
    """FedFomo needs validation examples; the file that names it also names a partition."""
    partition = {"name": "dirichlet", "clients": 12, "alpha": 1.0}
    fomo = {**small, "partition": partition, "algorithm": "fedfomo"}
    val = prepare(fomo).config.partition.val
    assert val is not None and val.fraction == 0.2
    assert prepare(fomo, ["algorithm=fedavg"]).config.partition.val is None


def test_the_defaults_of_ones_own_algorithm(small, source):
    path = source("own_rules", RULES)
    assert prepare(small, [f"algorithm={path}:both"]).config.local.steps == 3
    assert prepare(small, [f"algorithm={path}:both", "local.steps=4"]).config.local.steps == 4


def test_ones_own_algorithm_does_not_take_a_shipped_name_away(small, source):
    path = source("own_rules", RULES + 'Algorithm("fedavg", Other, Other, "nobody 2024")')
    before = ALGORITHMS["fedavg"]
    prepare(small, [f"algorithm={path}:both"])
    assert ALGORITHMS["fedavg"] is before


@pytest.mark.parametrize("over", [["algorithm=fedavg"], ["client=fedavg", "server=fedavg"]])
def test_the_defaults_of_a_replaced_algorithm_go_with_it(small, over):
    local = prepare({**small, "algorithm": "fedsgd"}, over).config.local
    assert (local.steps, local.batch_size) == (5, 64), (
        "fedsgd's single full step under another name"
    )


def test_a_preset_lies_under_what_the_user_writes(small):
    small["schedule"] = {"cohort": 4}
    plain = prepare(small, ["algorithm=gradma"])
    preset = prepare(small, ["algorithm=gradma", "algorithm.preset=authors_code"])
    mine = prepare(
        small, ["algorithm=gradma", "algorithm.preset=authors_code", "algorithm.weights=uniform"]
    )
    assert (plain.server.weights, preset.server.weights, mine.server.weights) == (
        "uniform",
        "samples",
        "uniform",
    )
    assert plain.client.qp_scope == "whole"  # type: ignore[attr-defined]
    for half in (
        preset.client,
        preset.server,
        mine.client,
        mine.server,
    ):  # a key of both halves sets both
        assert half.qp_scope == "per_tensor"  # type: ignore[attr-defined]
    wanted = {
        "gradma": {"previous": "reset", "dropout": "independent"},
        "gradma_w": {"previous": "memory", "first_previous": "global", "dropout": "independent"},
    }
    for name, fields in wanted.items():
        client = prepare(small, [f"algorithm={name}", "algorithm.preset=authors_code"]).client
        assert {k: getattr(client, k) for k in fields} == fields


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_preset_of_every_algorithm_resolves(name):
    for preset in ALGORITHMS[name].presets:
        resolve_rules(
            explain.validate(
                layers(
                    {"data": "digits", "rounds": 1, "algorithm": {"name": name, "preset": preset}}
                )
            )
        )


# -- schedules -------------------------------------------------------------------------------------


def test_at_round():
    assert [at_round([(0, 0.5), (5, 0.25), (6, 0.125)], t) for t in (0, 4, 5, 6, 99)] == [
        0.5,
        0.5,
        0.25,
        0.125,
        0.125,
    ]
    assert at_round(0.5, 99) == 0.5


def test_schedules_reach_the_rules(small):
    plan = prepare(
        small,
        [
            "algorithm=fedavgm",
            "algorithm.beta1=[[0, 0.5], [5, 0.25]]",
            "algorithm.lr=[[0, 1], [2, 3]]",
        ],
    )
    assert plan.config.local.lr == 0.01
    due = [(plan.server.at(t).beta1, plan.server.at(t).lr) for t in (0, 2, 5)]  # type: ignore[attr-defined]
    assert due == [(0.5, 1.0), (0.5, 3.0), (0.25, 3.0)]
    assert prepare(small, ["local.lr=[[0, 0.5], [5, 1]]"]).config.local.lr == [(0, 0.5), (5, 1.0)]


def test_a_hyperparameter_without_its_section_is_told_where_it_belongs(small):
    for override, key in (("mu=0.1", "algorithm.mu"), ("lr=0.1", "local.lr")):
        with pytest.raises(ConfigError, match=rf"unknown key; did you mean {re.escape(key)}\?$"):
            prepare(small, ["algorithm=fedprox", override])


# -- the fingerprint -------------------------------------------------------------------------------


def fingerprint(source: Any, *overrides: str) -> str:
    return prepare(source, overrides).config.fingerprint


def test_the_fingerprint_is_the_same_in_another_process_and_order(small):
    raw = layers(
        small, "algorithm=fedavgm", "algorithm.beta1=0.5", "algorithm.lr=0.5", "local.lr=0.1"
    )
    turned = {
        k: dict(reversed(v.items())) if isinstance(v, dict) else v for k, v in reversed(raw.items())
    }
    here = explain.validate(raw).fingerprint
    assert explain.validate(turned).fingerprint == here and re.fullmatch("[0-9a-f]{64}", here)
    code = (
        "import json, sys\nfrom raysim.config.explain import validate\n"
        "print(validate(json.loads(sys.argv[1])).fingerprint)"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, json.dumps(turned)],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": "12345"},
        timeout=60,
    )
    assert there.stdout.strip() == here, there.stderr


@pytest.mark.parametrize(
    "explicit",
    [
        [
            "seed=0",
            "dtype=float32",
            "local.steps=5",
            "local.batch_size=64",
            "local.lr=0.01",
            "local.weight_decay=0",
        ],
        ["algorithm.lr=1", "algorithm.weights=uniform"],
        ["algorithm.lr=1.0", "algorithm.name=fedavg"],
        [
            "schedule.name=sync",
            "schedule.cohort=10",
            "faults.on_client_error=stop",
            "resources.threads=1",
        ],
        ["model=mlp"],
        ["model={name: mlp, hidden: [200, 200]}"],
        ["batching.mode=auto", "batching.size=auto"],
        ["batching.mode=loop", "batching.size=1"],
        ["data.augment=null", "data.download=false"],
    ],
    ids=lambda given: given[0],
)
def test_a_default_written_out_is_the_default(small, explicit):
    assert fingerprint(small, *explicit) == fingerprint(small)


def test_numbers_are_numbers_in_the_fingerprint(small):
    small["schedule"] = {"cohort": 4}
    for one, other in (
        ("local.lr=1", "local.lr=1.0"),
        ("algorithm.beta1=0", "algorithm.beta1=0.0"),
    ):
        assert fingerprint(small, "algorithm=fedavgm", one) == fingerprint(
            small, "algorithm=fedavgm", other
        )


def test_free_arguments_may_have_numbers_as_keys(small):
    small["data"] = {"name": "torchvision", "dataset": "SVHN", "arguments": {"a": {1: 2}}}
    other = {**small, "data": {**small["data"], "arguments": {"a": {1: 3}}}}
    assert explain.validate(small).fingerprint != explain.validate(other).fingerprint


def test_what_does_not_touch_the_result_does_not_touch_the_fingerprint(small, tmp_path):
    same = [
        "rounds=50",
        "resources.actors=3",
        "resources.executor=ray",
        "resources.cpus=0.5",
        "resources.timeout=5",
        "resources.server_threads=3",
        "tracking.experiment=other",
        "tracking.uri=http://nowhere:1",
        f"run_dir={tmp_path}/elsewhere",
        "evaluate.every=3",
        "checkpoint.every=1",
        "name=mine",
        "faults.on_client_error=drop",
        "data.root=/elsewhere",
    ]
    first = fingerprint(small)
    assert {fingerprint(small, one) for one in same} == {first} == {fingerprint(small, *same)}


@pytest.mark.parametrize(
    ("metric", "section", "others"),
    [
        ("theory/f", "theory", ["every=3", "sample=2", "f_star=1"]),
        ("forgetting/after", "forgetting", ["every=3"]),
        ("clients/accuracy", "clients", ["every=3", "sample=2"]),
        ("fine_tuned/accuracy", "clients", ["every=3", "fine_tune.steps=2"]),
    ],
)
def test_how_that_is_measured_by_which_a_run_stops_touches_the_fingerprint(
    small, metric, section, others
):
    small["evaluate"] = {section: {"fine_tune": {}} if "fine" in metric else {}}
    small["partition"] |= {"test": {"fraction": 0.5}}
    changes = [f"evaluate.{section}.{other}" for other in others]
    assert len({fingerprint(small, *change.split()) for change in ["", *changes]}) == 1
    small["stop"] = {"metric": metric, "patience": 2}
    every = {fingerprint(small, *change.split()) for change in ["", *changes]}
    assert len(every) == len(changes) + 1


def test_the_kinds_of_devices_are_part_of_the_fingerprint(small):
    def devices(**resources: Any) -> str:
        return explain.validate({**small, "resources": resources}).fingerprint

    cpu = devices(executor="inline")
    gpu = devices(executor="inline", gpus=1)
    assert cpu == devices(deterministic=False) == devices(server_gpus=0)
    # The server computes where clients do, inline as on actors that fill the card.
    assert gpu == devices(gpus=0.5, actors=2) == devices(gpus=0.25, server_gpus=0.5)
    on_cpu = devices(gpus=1, server_gpus=0)
    assert on_cpu == devices(executor="inline", gpus=1, server_gpus=0)
    other_kernels = devices(gpus=1, deterministic=False)
    assert len({cpu, gpu, on_cpu, other_kernels}) == 4


def test_what_touches_the_result_touches_the_fingerprint(small):
    small["partition"] = {"name": "dirichlet", "clients": 20, "alpha": 0.5}
    changes = [
        "seed=1",
        "local.lr=0.02",
        "partition.alpha=0.25",
        "resources.threads=2",
        "dtype=float64",
        "local.steps=4",
        "local.batch_size=full",
        "schedule.cohort=9",
        "model={name: mlp, hidden: [8]}",
        "algorithm=fedprox",
        "algorithm.lr=0.5",
        "algorithm.weights=samples",
        "batching={mode: lanes, size: 2}",
        "local.weight_decay=0.1",
        "local.max_grad_norm=1",
        "partition.val_fraction=0.1",
        "data.scaling=unit",
    ]
    every = [fingerprint(small), *(fingerprint(small, change) for change in changes)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["algorithm=fedsgd"],
        [
            "algorithm={name: gradma, preset: authors_code, memory: 30}",
            "local.lr=[[0, 0.5], [3, 0.25]]",
        ],
        [
            "algorithm={name: gradma, memory: 30, beta1: [[0, 0.5], [2, 0.25]], max_age: 3}",
            "client=fedprox",
        ],
        ["client={name: fedprox, mu: 0.5}", "server={name: fedavgm, weights: samples}"],
        ["local.epochs=2", "local.batch_size=full", "dtype=float64"],
        [
            "partition={name: dirichlet, clients: 12, alpha: 1e-2}",
            "model=logistic",
            "batching.mode=lanes",
        ],
        [
            "partition={name: virtual, clients: 1000}",
            "evaluate.every=0",
            "name=mine",
            "local.max_grad_norm=1",
        ],
        ["algorithm={rules}:Mine", "algorithm.strength=2"],
        ["algorithm={rules}:both", "algorithm.strength=2"],
        ["client={rules}:Mine", "server=fedavgm", "client.strength=3"],
        ["model={nets}:Net", "model.hidden=[5]"],
        ["algorithm=own_rules:Mine", "algorithm.strength=2"],
        ["algorithm=own_rules:both"],
        pytest.param(
            ["client={rules}:Mine", "server=fedavg", "client.floor=null"], id="null in a rule"
        ),
        pytest.param(["model={nets}:Net", "model.scale=null"], id="null in a model"),
    ],
)
def test_a_resolved_configuration_reads_back_to_itself(small, given, source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # "own_rules" is a module that Python finds
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    paths = {"{rules}": source("own_rules", RULES), "{nets}": source("own_nets", NETS)}
    for mark, path in paths.items():
        given = [text.replace(mark, path) for text in given]
    first = prepare(small, given)
    (tmp_path / "config.yaml").write_text(first.config.dump())
    again = prepare(tmp_path / "config.yaml")
    assert again.config == first.config and again.config.fingerprint == first.config.fingerprint
    assert (repr(again.client), repr(again.server)) == (repr(first.client), repr(first.server))
    assert (again.mode, again.block_size, again.label) == (
        first.mode,
        first.block_size,
        first.label,
    )


# -- mistakes --------------------------------------------------------------------------------------

JARGON = re.compile(
    r"pydantic|validation error|value error|instance of|dictionary|tuple|object to extract|discriminator|union|"
    r"\btag\b|extra inputs|constrained|NoneType|function-|literal|model_|Traceback|: :|^:",
    re.IGNORECASE | re.MULTILINE,
)
"""Words of libraries and of Python, which someone who edits a YAML file need not know."""

MISTAKES = """
algoritm=gradma                                     | algoritm            | 'algorithm'
sed=3                                               | sed                 | 'seed'
data.nam=digits                                     | data.nam            | 'name'
partition.client=4                                  | partition.client    | 'clients'
schedule.cohrot=3                                   | schedule.cohrot     | 'cohort'
local.step=3                                        | local.step          | 'steps'
local.momentum=0.9                                  | local.momentum      | local.optimizer.momentum?
faults.on_error=stop                                | faults.on_error     | 'on_client_error'
resources.actor=2                                   | resources.actor     | 'actors'
batching.siz=3                                      | batching.siz        | 'size'
evaluate.evry=1                                     | evaluate.evry       | 'every'
checkpoint.kep=3                                    | checkpoint.kep      | 'keep'
tracking.experimnt=x                                | tracking.experimnt  | 'experiment'
model=mlp model.hiden=[3]                           | model.hiden         | 'hidden'
model=mlp model.dropout=0.5                         | model.dropout       | 'mlp'
algorithm=fedavg algorithm.memory=3                 | algorithm.memory    | fedavg
algorithm=gradma algorithm.bta1=0.5                 | algorithm.bta1      | 'beta1'
client=fedprox client.nu=1 server=fedavg            | client.nu           | 'mu'
client=fedavg server=fedavgm server.beta=1          | server.beta         | 'beta1'
client=RULES:Mine server=fedavg client.stength=1    | client.stength      | 'strength'
algorithm=RULES:Mine algorithm.stength=1            | algorithm.stength   | 'strength'
model=NETS:Net model.hiden=[3]                      | model.hiden         | 'hidden'
rounds=-1                                           | rounds              | 1 | -1
rounds=0                                            | rounds              | 1
rounds=abc                                          | rounds              | integer | 'abc'
rounds=1.5                                          | rounds              | integer
rounds=null                                         | rounds              | integer
rounds=true                                         | rounds              | integer
rounds=1000000001                                   | rounds              | 1000000000
seed=9223372036854775808                            | seed                | less than 9223372036854775808
run_dir=""                                          | run_dir             | must not be empty
client_state.dir=""                                 | client_state.dir    | must not be empty
partition=                                          | partition           | expected a section, a mapping of keys
schedule.sampling=3                                 | schedule.sampling   | expected a section, a mapping of keys
tracking.experiment=null                            | tracking.experiment | must not be empty
tracking.experiment=""                              | tracking.experiment | must not be empty
tracking.experiment=/                               | tracking.experiment | must not be empty
tracking.experiment=a/../b                          | tracking.experiment | '..' can be
tracking.experiment="a\\nb"                         | tracking.experiment | in one line
rounds=[1]                                          | rounds              | integer
rounds.x=3                                          | rounds              | integer
seed=x                                              | seed                | 'x'
seed=-1                                             | seed                | -1
name=3                                              | name                | string
run_dir=3                                           | run_dir             | string
dtype=float16                                       | dtype               | 'float64' | 'float16'
data=3                                              | data
data=null                                           | data
data.root=3                                         | data.root           | string
data.download=maybe                                 | data.download       | 'maybe'
data.augment=2                                      | data.augment        | 2
partition=dirichlet                                 | partition.alpha     | missing
algorithm=krum algorithm.attackers=9                | algorithm.attackers | with 9 attackers | attackers + 3 = 21, and it is | lower attackers
algorithm=bulyan algorithm.attackers=9              | algorithm.attackers | with 9 attackers | attackers + 3 = 39, and it is | lower attackers
client=fedavg server=dnc server.attackers=20        | server.attackers    | attackers = 20 must be below schedule.cohort = | lower attackers
algorithm=fedasync algorithm.alpha=2                | algorithm.alpha     | at most 1 | (given: 2.0)
algorithm=fednova algorithm.mu=500                  | algorithm.mu        | 1 / local.lr = | it is 500: lower it
tracking.uri=http://                                | tracking.uri        | names no server | http://HOST:5000
partition={name: slow_class, alpha: 1, label: 12}   | partition.label     | classes 0 to 9 (given: 12)
partition=natural                                   | partition.name      | digits has none: take another partition, or give `users`
partition.clients=5000                              | partition           | too many for the | lower them
partition=dirichlet partition.alpha=0               | partition.alpha     | greater than 0
partition=dirichlet partition.alpha=nan             | partition.alpha     | finite
partition=dirichlet partition.alpha=.nan            | partition.alpha     | finite
partition=dirichlet partition.alpha=.inf            | partition.alpha     | finite
partition={name: dirichlet, alpha: 1, kind: class}  | partition.kind      | 'client_over_classes'
partition.clients=0                                 | partition.clients   | 1
partition.clients=many                              | partition.clients   | 'many'
partition.clients=100000                            | partition.clients   | 1438
partition=shards partition.classes=0                | partition.classes   | 1
partition={name: dirichlet}                         | partition.alpha     | missing | partition.alpha=
partition=null                                      | partition
partition=3                                         | partition
schedule.cohort=21                                  | schedule.cohort     | 21 | 20 | partition.clients
schedule.cohort=0                                   | schedule.cohort     | 1
schedule.cohort=2.5                                 | schedule.cohort     | integer
model=3                                             | model
model=mlp model.hidden=abc                          | model.hidden        | 'abc'
model=mlp model.hidden=[a]                          | model.hidden        | 'a'
model=mlp model.hidden=[-3]                         | model.hidden        | -3
model=NETS:Net model.hidden=x                       | model.hidden        | 'x'
model=lenet5                                        | model.name          | lenet5 | 8×8
algorithm=3                                         | algorithm
algorithm.lr=0                                      | algorithm.lr        | greater than 0
algorithm.lr=.nan                                   | algorithm.lr        | finite
algorithm.weights=sample                            | algorithm.weights   | 'samples'
algorithm=fedprox algorithm.mu=-1                   | algorithm.mu        | 0
algorithm=fedprox algorithm.mu=.inf                 | algorithm.mu        | finite
algorithm=gradma algorithm.beta1=.nan               | algorithm.beta1     | finite
algorithm=gradma algorithm.beta1=x                  | algorithm.beta1     | 'x'
algorithm=gradma algorithm.memory=-1                | algorithm.memory    | 0
algorithm=gradma algorithm.memory=1.5               | algorithm.memory    | integer
algorithm=gradma algorithm.memory=3                 | algorithm.memory    | 3 | 10
client=fedavg server=gradma server.memory=9         | server.memory       | 9 | 10
algorithm=gradma algorithm.solver=exat              | algorithm.solver    | 'exact'
algorithm=gradma algorithm.norm_floor=2             | algorithm.norm_floor| 1
algorithm=gradma algorithm.small_tensor_rule=sum    | algorithm.small_tensor_rule | qp_scope=per_tensor
client=fedprox client.mu=x server=fedavg            | client.mu           | 'x'
client=RULES:Mine server=fedavg client.strength=x   | client.strength     | 'x'
local.lr=nan                                        | local.lr            | finite
local.lr=.nan                                       | local.lr            | finite
local.lr=.inf                                       | local.lr            | finite
local.lr=0                                          | local.lr            | greater than 0
local.lr=-0.1                                       | local.lr            | greater than 0
local.lr=fast                                       | local.lr            | 'fast'
local.lr=true                                       | local.lr            | number
local.lr=[[0,true]]                                 | local.lr            | true is not
local.optimizer=adam local.optimizer.betas=[false,0.9] | local.optimizer.betas | false is not
groups.a.share=yes groups.a.client=null             | groups.a.share      | true is not
groups.a.ids=[true,2] groups.a.local.steps=3        | groups.a.ids        | true is not
groups.a.ids=[1] groups.a.local.steps=on            | groups.a.local.steps | true is not
record_updates.rounds=[true]                        | record_updates.rounds | true is not
model.hidden=[true]                                 | model.hidden        | true is neither
algorithm.lr=[[0,true]]                             | algorithm.lr        | true is neither
local.lr=[]                                         | local.lr            | [first round, value]
local.lr=[[1,0.1]]                                  | local.lr            | [first round, value]
local.lr=[[0,0.1],[5,0.2],[5,0.3]]                  | local.lr            | [first round, value]
local.lr=[[0,0.1],[5,0.2],[3,0.3]]                  | local.lr            | [first round, value]
local.lr=[0.1,0.2]                                  | local.lr            | [first round, value]
local.lr=[[0,0.1],[5]]                              | local.lr            | [first round, value]
local.lr=[[0,0.1],[5.5,1]]                          | local.lr            | [first round, value]
local.lr=[[0,0.1],[5,-1]]                           | local.lr            | greater than 0
local.batch_size=0                                  | local.batch_size    | 1 | 'full'
local.batch_size=ful                                | local.batch_size    | 'full'
local.batch_size=2.5                                | local.batch_size    | integer
local.steps=0                                       | local.steps         | 1
local.steps=5 local.epochs=2                        | local               | steps | epochs | not both
local.max_grad_norm=0                               | local.max_grad_norm | greater than 0
local.weight_decay=-1                               | local.weight_decay  | 0
local=5                                             | local
local=[1]                                           | local
evaluate=false                                      | evaluate
faults.on_client_error=ignore                       | faults.on_client_error | 'drop'
resources.executor=dask                             | resources.executor  | 'inline'
resources.actors=0                                  | resources.actors    | 1
resources.threads=0                                 | resources.threads   | 1
resources.timeout=0                                 | resources.timeout   | 0
resources.gpus=-1                                   | resources.gpus      | 0
resources.gpus=2                                    | resources.gpus      | 1
resources.executor=ray resources.actors=5000        | resources.actors    | 5000 | this machine has
resources.executor=ray resources.cpus=5000          | resources           | 5000 | this machine has
batching.mode=vmap                                     | batching.mode          | 'lanes'
batching.size=0                                        | batching.size          | 1 | 'auto'
batching.size=atuo                                     | batching.size          | 'auto'
evaluate.every=-1                                   | evaluate.every      | 0
checkpoint.keep=0                                   | checkpoint.keep     | 1
tracking.required=perhaps                           | tracking.required   | 'perhaps'
tracking.uri=3                                      | tracking.uri        | string
tracking.uri=./mlruns                               | tracking.uri        | sqlite:///mlflow.db
data=mnits                                          | data.name           | 'mnist'
data=cifar100 data.root=/nowhere                    | data.name           | cifar100 | data fetch cifar100 | /nowhere
data=folder                                         | data.path           | folder
data.path=/tmp                                      | data.path           | digits
partition=dirichlt                                  | partition.name      | 'dirichlet'
partition=natural                                   | partition.name      | digits
partition=file                                      | partition.path      | missing
partition=file partition.path=/nowhere.json         | partition.path      | /nowhere.json
partition={name: virtual, clients: 20, samples: 100000} | partition.samples | 1438
schedule=snyc                                       | schedule.name       | 'sync'
model=lenett                                        | model.name          | 'lenet'
model=nope                                          | model.name          | 'nope' | path.py:Class
algorithm=gradm                                     | algorithm.name      | 'gradma'
algorithm=gradma algorithm.preset=authors_cod       | algorithm.preset    | 'authors_code'
algorithm=gradma algorithm.preset=[[0,1]]           | algorithm.preset    | name of a preset
algorithm=fedsgd algorithm.preset=authors_code      | algorithm.preset    | fedsgd | no presets
client=fedprx server=fedavg                         | client.name         | 'fedprox'
client=fedavg server=fedavgmm                       | server.name         | 'fedavgm'
algorithm=./missing.py:X                            | algorithm.name      | ./missing.py
client=RULES server=fedavg                          | client.name         | RULES:NAME
seed=0..2                                           | seed                | integer
local.lr=0.1,0.2                                    | local.lr            | finite number
sweep.samples=2                                     | sweep.samples       | raysim sweep
algorithm=RULES:Mein                                | algorithm.name      | 'Mine'
algorithm=RULES:Other                               | algorithm.name      | Algorithm | ClientRule | ServerRule
client=RULES:Taking server=fedavg                   | client.name         | not a ClientRule
client=fedavg server=RULES:Mine                     | server.name         | not a ServerRule
client=RULES:Nine server=fedavg                     | client.name         | 'Mine'
algorithm=BROKEN:X                                  | algorithm.name      | fails on import | nothing_there
algorithm=SYNTAX:X                                  | algorithm.name      | fails on import | line 1
algorithm=LEAVES:X                                  | algorithm.name      | fails on import
algorithm=no.such.package:X                         | algorithm.name      | no.such.package
model=./missing.py:Net                              | model.name          | ./missing.py
model=NETS:Ney                                      | model.name          | 'Net'
model=NETS:NotANet                                  | model.name          | torch.nn.Module
model=NETS:number                                   | model.name          | NETS:number
model=BROKEN:Net                                    | model.name          | fails on import | nothing_there
client=RULES:Asking server=fedavg                   | client rule 'asking' | 'c' | server rule 'fedavg'
client=fedavg server=RULES:Taking                   | client rule 'fedavg' | 'h' | server rule 'taking'
client=gradma                                       | server              | missing
algorithm=null                                      | client              | algorithm=fedavg
rounds                                              | override 'rounds'   | key=value
=3                                                  | override '=3'       | key=value
rounds=[1                                           | rounds | '[1'
local=3 local.steps=5                               | override 'local.steps' | 'local'
"""


def mistakes() -> list[Any]:
    rows = [[part.strip() for part in line.split("|")] for line in MISTAKES.strip().splitlines()]
    return [pytest.param(*row[:2], row[2:], id=row[0]) for row in rows]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("own"), {}
    texts = {
        "rules": RULES,
        "nets": NETS,
        "broken": "import nothing_there",
        "syntax": "def (",
        "leaves": "exit(3)",
    }
    for name, text in texts.items():
        (folder / f"its_{name}.py").write_text(text)
        found[name.upper()] = str(folder / f"its_{name}.py")
    return found


def with_paths(text: str, own: dict[str, str]) -> str:
    for mark, path in own.items():
        text = text.replace(mark, path)
    return text


@pytest.mark.parametrize(("length", "fits"), [(255, True), (256, False)])
def test_a_part_of_an_experiments_name_is_a_folders(small, length, fits):
    name = "ü" * (length // 2) + "x" * (length % 2)
    given = [f"tracking.experiment=a/{name}"]
    if fits:
        assert prepare(small, given).config.tracking.folder == f"a/{name}"
    else:
        with pytest.raises(ConfigError, match=r"tracking\.experiment: .* at most 255 bytes"):
            prepare(small, given)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def containing_itself() -> list:
    value: list = []
    value += [value, value]
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (10**5000, "a number of more than 500 digits"),
        (-(10**5000), "a number of more than 500 digits"),
        ([{"x": 10**5000}], "a number of more than 500 digits"),
        (nested(3000), "more than 32 lists and mappings inside one another"),
        (containing_itself(), "more than (32 lists and mappings|500,000 values)"),
    ],
    ids=["long", "negative", "inside", "deep", "cyclic"],
)
@pytest.mark.parametrize("key", ["rounds", "name", "algorithm"])
def test_values_from_python_have_the_limits_of_a_file(small, key, value, said):
    with pytest.raises(ConfigError, match=f"^{key}: {said}"):
        prepare(small, {key: value})
    with pytest.raises(ConfigError, match=f"^{key}: {said}"):
        prepare({**small, key: value})


@pytest.mark.parametrize(("given", "key", "said"), mistakes())
def test_a_mistake_is_refused_in_plain_words(small, own, given, key, said):
    if given.startswith(("client=", "server=")) and "server=" in given:
        small.pop("algorithm")
    if given.startswith("client=gradma"):
        small.pop("algorithm")
    overrides = [
        with_paths(text, own) for text in re.split(r" (?=[a-z_.0-9]+=)", given)
    ]  # spaces inside of {} belong to the value
    with pytest.raises(ConfigError) as caught:
        prepare(small, overrides)
    message = str(caught.value)
    assert (
        re.match(rf"{re.escape(key)}\b", message) if key[-1].isalpha() else message.startswith(key)
    ), message
    assert not [word for word in said if with_paths(word, own) not in message], message
    assert not JARGON.search(message), message


def test_all_mistakes_are_said_at_once(small):
    with pytest.raises(ConfigError) as caught:
        prepare(small, ["seed=x", "local.lr=-1", "evaluate.evry=2", "partition.clients=0"])
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == [
        "evaluate.evry",
        "local.lr",
        "partition.clients",
        "seed",
    ]


def test_both_halves_and_rounds_and_data_are_asked_for():
    for given, wanted in [
        ({}, {"rounds", "data"}),
        ({"data": "digits"}, {"rounds"}),
        ({"data": "digits", "rounds": 1}, {"client"}),
        ({"data": "digits", "rounds": 1, "client": "fedavg"}, {"server"}),
        ({"data": "digits", "rounds": 1, "algorithm": {"beta1": 1}}, {"algorithm.name"}),
    ]:
        with pytest.raises(ConfigError, match="missing") as caught:
            prepare(given)
        assert {line.split(":")[0] for line in str(caught.value).splitlines()} == wanted


@pytest.mark.parametrize("key", ["partition.clients=30", "model.hidden=[8]"])
def test_a_section_without_a_name_is_the_default_one(base, key):
    """Every key has a default but data, algorithm and rounds; so the name of a partition and of a
    model has one."""
    config = prepare({**base, "rounds": 1, "algorithm": "fedavg"}, [key]).config
    assert (config.partition.name, config.model.name) == ("iid", "mlp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n b", r"not valid YAML.*line 1.*line [23]"),
        ("- 1\n- 2", r"a configuration is a mapping of sections"),
        ("", r"a configuration is a mapping of sections"),
        ("rounds: 1\nrounds: 2\ndata: digits\nalgorithm: fedavg", r"rounds"),
        ("rounds: 1\ndata: digits\nalgorithm: fedavg\n1: 2", r"1"),
        ("extend: quickstart", r"mine\.yaml: extend: unknown key; did you mean 'extends'\?.*sweep"),
        ("extends: quickstart\nlr: 1", r"mine\.yaml: lr: unknown key; did you mean local\.lr\?"),
    ],
    ids=["broken", "list", "empty", "twice", "number as a key", "unknown", "without its section"],
)
def test_a_file_that_is_no_configuration(files, text, said):
    files(mine=text)
    with pytest.raises(ConfigError, match=said) as caught:
        prepare("mine.yaml")
    assert not re.search("NoneType|unicode string|keys should be", str(caught.value))


def test_a_file_that_is_no_text(files, tmp_path):
    files()
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read"):
        prepare("mine.yaml")


def test_an_unknown_configuration(files):
    files()
    for given in ("quickstar", "quickstart.yml"):
        with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
            prepare(given)


@pytest.mark.parametrize(
    "given", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", "gradma/mnist"]
)
def test_shipped_configurations_are_found_by_name_and_are_right(files, given):
    files()
    discover()
    raw = layers(given)
    resolve_rules(explain.validate(raw))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_configuration_is_well_formed(name):
    """Its sections, and what its grids vary; of the data nothing is read, and of the methods
    nothing is asked."""
    raw = layers(name)
    many, compared = raw.pop("sweep", None), raw.pop("match", None)
    assert explain.validate(raw).rounds
    assert compared is None or MatchOptions.model_validate(compared).rival
    if many is not None:
        described = read_sweep(name)
        assert described.points
        for point in described.points[:: len(described.points) // 40 + 1]:
            explain.validate(described.raw(point))


def test_every_shipped_configuration_is_installed():
    root = Path(__file__).parents[2]
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    for path in (root / "configs").rglob("*.yaml"):
        assert ".".join(["raysim", *path.relative_to(root).parent.parts]) in packages


def test_a_run_dir_that_is_taken(small, tmp_path):
    from raysim.runs.run_dir import make_run_dir

    plan: Plan = prepare(small)
    taken = make_run_dir(plan)
    (taken / "config.yaml").write_text("")
    said = f"run_dir: {taken} already holds a stopped run; `raysim resume {taken}`"
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_run_dir(plan)
    (taken / "config.yaml").unlink()
    # Of a fork that was killed at its start, or of the user's own project.
    for name in ("checkpoints", "source", "requirements.txt", "parameters.safetensors"):
        (taken / name).mkdir()
        with pytest.raises(ConfigError, match=rf"^run_dir: {taken / name} is there, .* move it"):
            make_run_dir(plan)
        (taken / name).rmdir()
    assert make_run_dir(plan) == taken


def test_a_folder_of_runs_that_leads_nowhere_is_refused(small, tmp_path, monkeypatch):
    from raysim.runs.run_dir import make_run_dir

    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(tmp_path / "gone")
    del small["run_dir"]
    with pytest.raises(ConfigError, match=r"^run_dir: runs/.* cannot be written"):
        make_run_dir(prepare(small))


def test_run_dirs_without_a_name_are_numbered(small, files):
    from raysim.runs.run_dir import make_run_dir

    home = files()
    small.pop("run_dir")
    plan = prepare(small, ["tracking.experiment=mine", "seed=4"])
    stem = f"fedavg-4-{plan.config.fingerprint[:8]}"
    made = [(home / make_run_dir(plan)).relative_to(home) for _ in range(3)]
    assert [str(path) for path in made] == [
        f"runs/mine/{stem}{suffix}" for suffix in ("", "-2", "-3")
    ]


def test_the_dump_is_plain_yaml(small):
    text = prepare(small).config.dump()
    assert "!!" not in text and yaml.safe_load(text)["data"]["name"] == "digits"


LOADED = program("config_loaded")


@pytest.mark.parametrize("name", ["norm.running_var", "norm.running_mean", "out.weight"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_net_that_begins_with_a_non_finite_tensor_is_refused(
    small, source, tmp_path, name, value
):
    state = {
        "norm.weight": torch.ones(64), "norm.bias": torch.zeros(64), "norm.running_mean": torch.zeros(64),
        "norm.running_var": torch.ones(64), "norm.num_batches_tracked": torch.tensor(0),
        "out.weight": torch.zeros(10, 64), "out.bias": torch.zeros(10),
    }  # fmt: skip
    weights = tmp_path / "weights.pt"
    model = {"name": source("loaded", LOADED) + ":Net", "weights": str(weights)}
    torch.save(state, weights)
    prepare({**small, "model": model})
    state[name].view(-1)[1] = float(value)
    torch.save(state, weights)
    with pytest.raises(ConfigError, match=rf"^model\.name: .* '{name}' .* file of weights"):
        prepare({**small, "model": model})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stop=accuracy", "stop: expected a section.*such as {metric: accuracy, patience: 5}"),
        ("model.hidden=64", r"model\.hidden: input should be a list; write \[64\]"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_an_example(override, said):
    with pytest.raises(ConfigError, match=said):
        prepare("quickstart", [override])


@pytest.mark.parametrize(
    ("word", "known", "nearest"),
    [
        ("acc", ["auc", "accuracy", "f1"], "accuracy"),
        ("ACC", ["auc", "accuracy", "f1"], "accuracy"),
        ("acc", ["best_accuracy", "accuracy", "accuracy_worst10", "auc"], "accuracy"),
        ("fedav", ["fedavgm", "scaffold", "fedavg"], "fedavg"),
        ("leset", ["lenet", "reset"], "lenet"),
        ("clinets", ["client", "clients", "linear"], "clients"),
        ("roundz", ["sounds", "rounds"], "rounds"),
        ("fedvag", ["fedacg", "fedavg"], "fedavg"),
    ],
)
def test_a_suggestion_begins_like_the_unknown_word(word, known, nearest):
    for order in (known, known[::-1]):
        assert nearest_words(word, order)[0] == nearest
        assert f"; did you mean '{nearest}'?" in did_you_mean(word, order)


@pytest.mark.parametrize("word", ["q", "xyzzy", ""])
def test_nothing_is_suggested_for_a_word_that_is_like_none(word):
    assert did_you_mean(word, ["accuracy", "quantile"]) == " (known: accuracy, quantile)"


def test_a_metric_is_suggested_for_its_beginning(small):
    with pytest.raises(ConfigError, match="no metric 'acc'; did you mean 'accuracy'"):
        prepare(small, {"evaluate.metrics": ["acc"]})


def test_a_cluster_beside_the_inline_executor_is_refused(small, tmp_path):
    inline = {"resources.executor": "inline", "tracking": False, "run_dir": str(tmp_path / "run")}
    keys = {**inline, "rounds": 1}
    with pytest.raises(ConfigError, match=r"^resources\.address: .*set resources\.executor=ray"):
        raysim.run(small, **keys, **{"resources.address": "10.0.0.1:6379"})
    assert not (tmp_path / "run").exists()
    assert raysim.run(small, **keys, **{"resources.address": None}).rounds == 1
    for continued in (raysim.resume, raysim.fork):
        with pytest.raises(ConfigError, match=r"^resources\.address"):
            continued(tmp_path / "run", {"rounds": 2, "resources.address": "10.0.0.1:6379"})


@pytest.mark.parametrize("reference", ["./h.csv:x", "folder/h.csv:x", ".own:load", ":load"])
def test_a_file_that_is_not_python_is_no_module(reference):
    where = reference.rpartition(":")[0]
    message = (
        f"^data: '{re.escape(where)}' is neither a Python file, as in path.py:Name, nor a module"
    )
    with pytest.raises(ConfigError, match=message):
        load_object(reference, "data")
