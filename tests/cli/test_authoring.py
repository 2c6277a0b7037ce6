"""What must hold of help for authors: versions, completion, the JSON Schema and new methods."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jsonschema
import pytest
from support.command_line import assert_one_message

from raysim.cli.completion import (
    complete_configuration,
    complete_experiment,
    complete_listed,
    complete_override,
)
from raysim.cli.pages.json_schema import configuration_schema
from raysim.config import limited_yaml, loading
from raysim.config.shipped_files import shipped_files
from raysim.prepare.configured_probes import BUILT_IN_PROBES
from raysim.prepare.resolve import prepare
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.registry import discover

discover()

SCHEMA = shipped_files("json")["schema"]


def test_version(raysim_):
    said = raysim_("--version")
    assert said.code == 0 and said.err == ""
    versions = dict(line.split(" ") for line in said.out.splitlines())
    assert list(versions) == ["raysim", "Python", "torch", "Ray", "MLflow"]
    assert versions["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["Ray"] == metadata.version("ray")


# -- completion ------------------------------------------------------------------------------------


def completed(incomplete: str, *words: str) -> list[str]:
    """What a word is completed to, after these words of overrides."""
    context = SimpleNamespace(params={"overrides": list(words)})
    return [text for text, _ in complete_override(context, incomplete)]


@pytest.mark.parametrize(
    ("incomplete", "words", "found"),
    [
        ("rou", [], ["rounds="]),
        ("alg", [], ["algorithm.", "algorithm="]),
        ("local.weight", [], ["local.weight_decay=", "local.weight_decay=0.0"]),
        ("evaluate.per_class=", [], ["evaluate.per_class=true", "evaluate.per_class=false"]),
        ("data=cifar", [], ["data=cifar10", "data=cifar100"]),
        ("schedule=k", [], ["schedule=kasync"]),
        ("algorithm.bet", ["algorithm=gradma"], ["algorithm.beta1=", "algorithm.beta2="]),
        ("algorithm.bet", ["algorithm=fedavg"], []),
        ("cifar", ["data", "="], ["cifar10", "cifar100"]),  # as bash splits data=cifar
        ("", ["rounds=3", "schedule"], ["buffered", "kasync", "sync"]),  # as bash splits schedule=
        ("nosuch.", [], []),
        ("claims", [], []),
    ],
)
def test_completion_of_overrides(incomplete, words, found):
    assert completed(incomplete, *words) == found


def test_completion_of_algorithms_and_configurations(here):
    assert set(completed("algorithm=")) == {f"algorithm={name}" for name in ALGORITHMS}
    (here / "mine.yaml").write_text("")
    (here / "my").mkdir()
    assert [text for text, _ in complete_configuration("mi")] == ["mine.yaml"]
    assert [text for text, _ in complete_configuration("my")] == ["my/"]
    assert dict(complete_configuration("quick"))["quickstart"].startswith("GradMA on the embedded")


def test_completion_of_what_is_listed():
    def names(listing: str, incomplete: str) -> list[str]:
        context = SimpleNamespace(params={"listing": listing})
        return [text for text, _ in complete_listed(context, incomplete)]

    assert names("stages", "to") == ["topk"] and names("optimizers", "ad") == [
        "adagrad",
        "adam",
        "adamw",
    ]
    assert names("probes", "") == list(BUILT_IN_PROBES) and names("metrics", "") == []


def test_completion_of_experiments(here):
    def names(incomplete: str, uri: str | None = None) -> list[str]:
        return [
            text
            for text, _ in complete_experiment(SimpleNamespace(params={"uri": uri}), incomplete)
        ]

    assert names("") == [] and not (here / "mlflow.db").exists()
    with contextlib.closing(sqlite3.connect("mlflow.db")) as database, database:
        database.execute("CREATE TABLE experiments (name TEXT, lifecycle_stage TEXT)")
        rows = [
            ("mnist", "active"),
            ("mnist-old", "deleted"),
            ("cifar", "active"),
            ("mix", "active"),
        ]
        database.executemany("INSERT INTO experiments VALUES (?, ?)", rows)
    assert names("") == ["cifar", "mix", "mnist"] and names("mn") == ["mnist"]
    assert names("", f"sqlite:///{here}/mlflow.db") == ["cifar", "mix", "mnist"]
    (here / "broken.db").write_text("no database")
    assert names("", "sqlite:///broken.db") == names("", "http://nowhere:1") == []


def test_a_shell_completes_without_importing_torch():
    code = (
        "import sys, raysim.cli\ntry: raysim.cli.main()\nfinally: assert 'torch' not in sys.modules"
    )
    asked = {
        "_RAYSIM_COMPLETE": "complete_bash",
        "COMP_WORDS": "raysim run quickstart algorithm = gradma_",
        "COMP_CWORD": "5",
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = ['raysim']\n{code}"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sorted(done.stdout.split()) == ["gradma_s", "gradma_w"], done.stderr
    assert "AssertionError" not in done.stderr


# -- the JSON Schema -------------------------------------------------------------------------------


def test_the_shipped_schema_is_current():
    """In a process of its own, since other tests declare methods and metrics in this one."""
    command = [sys.executable, "-m", "raysim", "schema", "--shipped"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stderr == ""
    assert said.stdout == SCHEMA.read_text(), "raysim schema --shipped > configs/schema.json"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = configuration_schema("raysim")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", loading.shipped())
def test_shipped_configurations_fit_the_schema_that_they_name(name, validator):
    path = loading.find_config(name)
    validator.validate(limited_yaml.read_yaml(path))
    first = path.read_text().splitlines()[0]
    assert first.startswith(loading.SCHEMA_LINE)
    assert (path.parent / first.partition("$schema=")[2]).resolve() == SCHEMA.resolve()


def test_a_resolved_configuration_fits_the_schema(validator):
    validator.validate(prepare("quickstart").config.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("algorithm: {name: ./mine.py:Half, share: 0.5}", True),
        ("algorithm: ./mine.py:Half", True),
        ("algorithm: {beta1: 0.5}", True),  # in a file that extends one with GradMA
        ("client_state: {memory: 4GB}", True),
        ("evaluate: {probes: ./mine.py:Probe}", True),
        ("partition: {test: matched}", True),
        ("partition: {name: natural, test: natural}", True),
        ("schedule: {sampling: poisson}", True),
        ("schedule: {sampling: ./mine.py:Mine}", True),
        ("evaluate: {metrics: top5}", True),
        ("local: {personal: [0]}", True),
        ("local: {personal: norm, lr: ./mine.py:lr}", True),
        ("tracking: {also: wandb, models: best}", True),
        ("model: {name: mlp, freeze: classifier}", True),
        ("schedule: {sampling: poison}", False),
        ("tracking: {also: tensorbord}", False),
        ("algorithm: gradm", False),
        ("algorithm: {name: fedavg, beta1: 0.5}", False),
        ("algoritm: gradma", False),
        ("rounds: 0", False),
        ("schedule: {name: kasync, cohort: 3}", False),
        ("model: {name: mlp, hiden: [3]}", False),
    ],
)
def test_what_fits_the_schema(text, fits, validator):
    assert validator.is_valid(limited_yaml.load_yaml(text)) == fits


def test_keys_are_described():
    schema = json.loads(SCHEMA.read_text())
    faults = schema["$defs"]["Faults"]["properties"]
    assert faults["on_client_error"]["description"]


# -- a new method ----------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    """A file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "values", "right", "wrong"),
    [
        ((), (0.0, 0.5), "gradient + self.mu", "gradient - self.mu"),
        (("--stateful",), (0.0, 1.0), '- state["c_i"]', '+ state["c_i"]'),
    ],
    ids=["plain", "stateful"],
)
def test_a_new_method_passes_its_own_test_until_it_is_wrong(options, values, right, wrong, raysim_):
    said = raysim_("new", "method", "fed_pull", *options)
    assert said.code == 0 and "algorithm=./fed_pull.py:fed_pull" in said.out
    method = Path("fed_pull.py")
    written = load(Path("test_fed_pull.py").absolute())
    for value in values:
        written.test_rounds_follow_the_paper(value)
    written.test_the_hyper_parameter_has_an_effect()
    text = method.read_text()
    assert "class FedPullClient" in text and "my_method" not in text.lower() and right in text
    method.write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError):
        written.test_rounds_follow_the_paper(values[1])


@pytest.mark.parametrize("taken", ["mine.py", "test_mine.py"])
def test_a_new_method_overwrites_nothing(raysim_, taken):
    Path(taken).write_text("precious")
    said = raysim_("new", "method", "mine")
    assert_one_message(said)
    assert Path(taken).read_text() == "precious" and len(list(Path().iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["Fed"],
        ["a-b"],
        ["class"],
        ["../a"],
        ["3fed"],
        ["numpy"],
        ["json"],
        ["fedavg"],
        ["gradma_w"],
    ],
)
def test_a_new_method_that_cannot_be(raysim_, arguments):
    assert_one_message(raysim_("new", "method", *arguments))
    assert not list(Path().iterdir())


def test_without_pytest_its_installation_is_named(raysim_, monkeypatch):
    assert "pip install" not in raysim_("new", "method", "mine").out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install pytest" in raysim_("new", "method", "yours").out
