"""What a configuration names by path is part of the run: edited, it is another run."""

from __future__ import annotations

import hashlib
import importlib
import json
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support.programs import program

import raysim
from raysim.config import references
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.runs import run as experiment
from raysim.runs.artifacts.export import export
from raysim.runs.resume import forked
from raysim.sweeps.preparation import prepare_sweep
from raysim.system import startup_stages

REPOSITORY = Path(__file__).parents[2]
RULE = """
from dataclasses import dataclass

from helper import SHARE
from raysim.rules import ClientRule


@dataclass(frozen=True)
class Mine(ClientRule):
    table: str = ""

    def direction(self, shared, state, batch, task):
        from parts.late import more

        return SHARE * more() * task.grad(state["w"], batch)
"""
NET = """
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, shape, classes, weights: str):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
        self.body[1].bias.data.fill_(float(Path(weights).read_text()))

    def forward(self, x):
        return self.body(x)
"""
FILES = {
    "m.py": RULE,
    "helper.py": "SHARE = 0.5",
    "parts/__init__.py": "",
    "parts/late.py": "from . import deep\n\ndef more():\n    return deep.MORE",
    "parts/deep.py": "MORE = 1.0",
    "parts/unused.py": "",
    "net.py": NET,
    "bias.txt": "0.25",
    "parts.json": json.dumps([list(range(k, 1400, 20)) for k in range(20)]),
    "times.csv": "client,seconds_per_sample,down,up\n"
    + "\n".join(f"{i},0.1,0.1,0.1" for i in range(20)),
}


@pytest.fixture
def files(here: Path) -> Path:
    """A folder of a user's files, which is the current one."""
    for name, text in FILES.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    return here


@pytest.fixture
def small(base: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        "rounds": 2,
        "algorithm": "./m.py:Mine",
        "local": {"steps": 1},
        "schedule": {"cohort": 2},
    }


EVERYTHING = {
    "model": {"name": "./net.py:Net", "weights": "bias.txt"},
    "partition": {"name": "file", "path": "parts.json"},
    "schedule.client_speeds": {"name": "trace", "path": "times.csv"},
}
EDITS = [
    ("m.py", RULE + "\n# a comment", "algorithm: m.py"),
    ("helper.py", "SHARE = 0.25", "algorithm: helper.py"),
    ("parts/deep.py", "MORE = 2.0", "algorithm: parts/deep.py"),
    ("parts/late.py", "def more():\n    return 1.0", "algorithm: parts/late.py"),
    ("net.py", NET + "\n# a comment", "model: net.py"),
    ("bias.txt", "0.5", "model.weights: bias.txt"),
    (
        "parts.json",
        json.dumps([list(range(k, 1401, 20)) for k in range(20)]),
        "partition.path: /",
    ),
    ("times.csv", FILES["times.csv"].replace("5,0.1", "5,0.2"), "schedule.client_speeds.path: "),
]


@pytest.fixture
def stopped(files: Path, small: dict[str, Any]) -> tuple[Path, str]:
    """A run of everything after one of its two rounds, and its fingerprint."""
    done = raysim.run(small, {**EVERYTHING, "rounds": 1})
    return done.run_dir, prepare(small, EVERYTHING).config.fingerprint


def test_each_file_is_part_of_the_identity_and_resume_names_it(stopped, files, small):
    run_dir, before = stopped
    assert prepare(small, EVERYTHING).config.fingerprint == before
    for name, edited, said in EDITS:
        (files / name).write_text(edited)
        assert prepare(small, EVERYTHING).config.fingerprint != before, name
        with pytest.raises(
            ConfigError,
            match=rf"^{said}\S* has changed since this run began \(.* put the old one back",
        ):
            raysim.resume(run_dir, {"rounds": 2})
        (files / name).write_text(FILES[name])
    (files / "parts" / "unused.py").write_text("# nobody imports it")
    stages: list[str] = []
    with startup_stages.shown_by(stages.append):
        assert raysim.resume(run_dir, {"rounds": 2}).rounds == 2
    assert stages.count("loading digits") == 1
    assert prepare(small, EVERYTHING).config.fingerprint == before


def test_the_contents_are_sums_of_the_files(files, small):
    found = prepare(small, EVERYTHING).config.files or {}
    names = {
        "algorithm": ["m.py", "helper.py", "parts/__init__.py", "parts/deep.py", "parts/late.py"],
        "model": ["net.py"],
        "model.weights": ["bias.txt"],
        "partition.path": [str(files / "parts.json")],
        "schedule.client_speeds.path": [str(files / "times.csv")],
    }
    names["client"] = names["algorithm"]
    sums = {
        key: {n: hashlib.sha256((files / n).read_bytes()).hexdigest() for n in ns}
        for key, ns in names.items()
    }
    assert found == sums


def test_files_that_are_named_relative_to_a_folder_are_found_from_another_one(
    here: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    y = np.arange(40) % 2
    x = np.stack([y, 1 - y], 1).astype("float32")
    given = base | {
        "data": {"name": "arrays", "path": "points.npz"},
        "partition": {"name": "file", "path": "parts.json"},
        "model": {"name": "logistic", "init_from": "start.safetensors"},
        "algorithm": "fedavg",
        "local": {"steps": 1},
        "schedule": {"cohort": 2},
        "rounds": 1,
    }
    fingerprints = []
    for folder in (here / "one", here / "two"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        np.savez("points.npz", x=x, y=y, x_test=x, y_test=y)
        Path("parts.json").write_text(json.dumps([list(range(20)), list(range(20, 40))]))
        save_file({"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}, "start.safetensors")
        fingerprints.append(prepare(given).config.fingerprint)
    assert fingerprints[0] == fingerprints[1], "the folder is no part of the identity"
    whole = raysim.run(given, rounds=2, run_dir=str(here / "whole"))
    done = raysim.run(given)
    monkeypatch.chdir("/")
    assert raysim.resume(done.run_dir, {"rounds": 2}).state_digest == whole.state_digest
    assert raysim.load(done.run_dir).net() is not None
    assert Path(export(done.run_dir, "torch", out=here / "net.pt")).is_file()
    assert prepare(done.run_dir / "config.yaml").config.fingerprint == fingerprints[0]
    # Files that were moved are named anew; those of folder "one" have the same content.
    monkeypatch.chdir(here / "one")
    for name in ("points.npz", "parts.json"):
        (here / "two" / name).unlink()
    moved = {"rounds": 3, "data.path": "points.npz", "partition.path": "parts.json"}
    other = json.dumps([list(range(19)), list(range(19, 40))])
    Path("other.json").write_text(other)
    with pytest.raises(ConfigError, match=r"^partition\.path: \S*other\.json has another content"):
        raysim.resume(done.run_dir, moved | {"partition.path": "other.json"})
    assert raysim.resume(done.run_dir, moved).rounds == 3


IDENTITIES = {
    "fedavg": "749cd4aaf1d946d232d5db0864f43f2a4902f47866c7da50a9115e6db5f56f45",
    "gradma": "d6c5c4a59c5f19443dad26aa5e22fc02aa69da14e7dab59fe01af1e5a2b42e36",
}
"""Identities of two runs of quickstart. They change with the keys of the configuration, and with
nothing else."""


def test_what_names_no_file_has_the_identity_it_had():
    given = {"resources.executor": "inline"}
    found = {
        "fedavg": prepare("quickstart", given).config,
        "gradma": prepare(
            "quickstart", {**given, "algorithm": "gradma", "algorithm.memory": 10}
        ).config,
    }
    assert {name: config.fingerprint for name, config in found.items()} == IDENTITIES
    assert all(config.files is None for config in found.values())


def test_a_rule_from_a_module_beside_the_file_is_found_again(files, small):
    """An Algorithm in one file, of a rule in another."""
    rule = RULE.replace("from helper import SHARE", "SHARE = 1")
    (files / "own_rules.py").write_text(rule)
    pair = "from own_rules import Mine\nfrom raysim.algorithms.fedavg import FedAvgServer\n"
    pair += "from raysim.rules import Algorithm\npair = Algorithm('pair', Mine, FedAvgServer, 'nobody 2024')\n"
    (files / "pair.py").write_text(pair)
    first = prepare(small, {"algorithm": "./pair.py:pair"})
    assert first.config.client and first.config.client.name == "./own_rules.py:Mine"
    again = prepare(first.config.model_dump(mode="json"))
    assert again.config == first.config and type(again.client).__name__ == "Mine"


def test_a_sweep_trains_again_when_its_rule_was_edited(files, small):
    small |= {"tracking": {**small["tracking"], "experiment": "edited"}}
    small.pop("run_dir")
    folders = []
    for text in (RULE, RULE.replace("SHARE *", "2 * SHARE *"), RULE):
        (files / "m.py").write_text(text)
        trials = prepare_sweep(small, ["seed=0..1"]).trials
        folders.append([trial.folder for trial in trials])
    assert folders[0] == folders[2] and not set(folders[0]) & set(folders[1])


def test_a_trial_of_a_rule_that_is_edited_meanwhile_fails(files, small):
    from raysim.prepare.resolve import resolve_plan

    prepared = prepare(small).config.model_dump(mode="json")
    resolve_plan(prepared)
    (files / "helper.py").write_text("SHARE = 1")
    with pytest.raises(ConfigError, match=r"helper\.py has changed"):
        resolve_plan(prepared)


def test_what_is_recorded_is_what_was_loaded(files, small):
    """The rule is edited while the data are read."""
    from raysim import data
    from raysim.prepare.resolve import read_run_config, resolve_plan

    def load(wanted):
        (files / "helper.py").write_text("SHARE = 1")
        return data.load_dataset(wanted)

    plan = resolve_plan(read_run_config(small), load)
    assert (
        plan.code[0].modules["helper"].text == plan.sources["client"]["helper.py"] == b"SHARE = 0.5"
    )
    assert (plan.config.files or {})["client"]["helper.py"] == hashlib.sha256(
        b"SHARE = 0.5"
    ).hexdigest()


def test_the_source_is_kept(tracked, stopped, files):
    kept = stopped[0] / "source"
    found = {str(p.relative_to(kept)): p.read_text() for p in kept.rglob("*") if p.is_file()}
    rule = ("m.py", "helper.py", "parts/__init__.py", "parts/late.py", "parts/deep.py")
    assert found == {**{f"algorithm/{name}": FILES[name] for name in rule}, "model/net.py": NET}
    assert '"folder": "source"' in (stopped[0] / "spool.jsonl").read_text()


def test_a_fork_may_have_the_edited_rule(stopped, files):
    (files / "helper.py").write_text("SHARE = 0.25")
    plan, _, _, origin = forked(stopped[0], {"rounds": 2})
    assert plan.config.rounds == 2 and "files.algorithm" in origin.changes
    (files / "net.py").write_text(NET + "\n# a comment")
    with pytest.raises(
        ConfigError, match=r"^model: a fork keeps its run's data, partition and model"
    ):
        forked(stopped[0], {"rounds": 2})


def test_a_configuration_with_contents_may_be_given_another_method(stopped):
    """The contents that a config.yaml holds speak of the files that it names, and of no others."""
    assert (
        prepare(stopped[0] / "config.yaml", {"algorithm": "fedavg", "run_dir": None}).client.name
        == "fedavg"
    )


def test_images_are_known_by_what_was_decoded(here, base):
    rng = np.random.default_rng(0)
    for half, count in (("train", 6), ("test", 2)):
        for label in "ab":
            (here / "images" / half / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(here / "images" / half / label / f"{i}.png")
    config = {
        **base,
        "data": {"name": "folder", "path": "images"},
        "rounds": 1,
        "algorithm": "fedavg",
    }
    config |= {"partition": {"clients": 2}, "schedule": {"cohort": 2}}
    plan = prepare(config)
    assert plan.config.files == {"data.path": {str(here / "images"): plan.dataset.digest}}
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(here / "images" / "train" / "a" / "0.png")
    assert prepare(config).config.fingerprint != plan.config.fingerprint
    with pytest.raises(
        ConfigError, match=r"data\.path: \S*images has changed since this run began"
    ):
        prepare(plan.config.model_dump(mode="json"))


def test_weights_that_are_a_folder(files, small):
    (files / "w" / "deep").mkdir(parents=True)
    (files / "w" / "deep" / "a.bin").write_bytes(b"1")
    first = prepare(small, {"algorithm.table": "w"}).config
    assert set(first.files or {}) == {"algorithm", "client", "client.table"}
    (files / "w" / "deep" / "a.bin").write_bytes(b"2")
    assert prepare(small, {"algorithm.table": "w"}).config.fingerprint != first.fingerprint


READERS = """
from dataclasses import dataclass
from pathlib import Path

from raysim.rules import ClientSampling, UploadStage
from raysim.rules.tasks.shipped_tasks import TASKS


@dataclass(frozen=True)
class Task(TASKS["classification"]):
    path: str = "bias.txt"


@dataclass(frozen=True)
class Sampling(ClientSampling):
    path: str

    def sample(self, pool, size, t, rng):
        return list(range(t, t + size))


@dataclass(frozen=True)
class Stage(UploadStage):
    path: str = ""

    def encode(self, update, rng):
        return update


def lr(t, path):
    return float(Path(path).read_text())
"""
READER = {"path": "bias.txt"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task", {"name": "readers.py:Task"}),
        ("schedule.sampling", {"name": "readers.py:Sampling", **READER}),
        ("local.upload", [{"name": "readers.py:Stage", **READER}]),
        ("local.lr", {"name": "readers.py:lr", **READER}),
        ("groups.a", {"share": 0.5, "local": {"lr": {"name": "readers.py:lr", **READER}}}),
    ],
)
def test_files_that_own_parts_name_are_part_of_the_identity(key, value, files, small, tmp_path):
    (files / "readers.py").write_text(READERS)
    config = prepare(small, {key: value}).config
    place = next(place for place in config.files or {} if place.endswith(".path"))
    assert place.startswith(key)
    (tmp_path / "config.yaml").write_text(config.dump())
    (files / "bias.txt").write_text("0.5")
    assert prepare(small, {key: value}).config.fingerprint != config.fingerprint
    with pytest.raises(ConfigError, match=rf"^{place}: bias\.txt has changed since this run"):
        prepare(tmp_path / "config.yaml")


def test_folders_that_arguments_of_the_data_name_do_not_count(files, small):
    """A run writes into the current folder, and other data sets lie beside the one it reads."""
    code = "def load(root):\n    return x, y, x, y\n"
    code = "import numpy as np\ny = np.arange(40) % 2\nx = np.eye(2)[y]\n\n" + code
    (files / "data.py").write_text(code)
    small |= {"data": {"name": "data.py:load", "root": "."}, "run_dir": "runs/one"}
    small |= {"partition": {"clients": 4}, "algorithm": "fedavg", "rounds": 1}
    done = raysim.run(small, tracking=False)
    assert set(done.config.files or {}) == {"data", "data.examples"}
    assert raysim.resume(done.run_dir, rounds=2).rounds == 2


WRITER = program("file_digests_writer")


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_was_empty_may_be_written_to(gone, files, small):
    """It goes on, whatever the file holds by now, and is the run that it was."""
    (files / "writer.py").write_text(WRITER)
    log = files / "log.txt"
    log.touch()
    rule = {
        "algorithm": None,
        "client": {"name": "./writer.py:Writer", "log": "log.txt"},
        "server": "fedavg",
    }
    done = raysim.run(small, {**rule, "rounds": 1})
    assert log.read_text()
    if gone:
        log.unlink()
    assert raysim.resume(done.run_dir, {"rounds": 2}).rounds == 2


def test_a_file_that_is_gone_is_named(stopped, files):
    (files / "bias.txt").unlink()
    with pytest.raises(ConfigError, match=r"bias\.txt"):
        raysim.resume(stopped[0], {"rounds": 2})


def test_paths_inside_lists_and_mappings_count(files, small):
    (files / "v.bin").write_bytes(b"1")
    (files / "parts_net.py").write_text(NET.replace("weights: str", "weights: str, extra=None"))
    given = {
        "model": {
            "name": "./parts_net.py:Net",
            "weights": "bias.txt",
            "extra": {"parts": ["v.bin"], "k": 3},
        }
    }
    first = prepare(small, given).config
    assert "model.extra.parts.0" in (first.files or {})
    (files / "v.bin").write_bytes(b"2")
    assert prepare(small, given).config.fingerprint != first.fingerprint


# -- modules that Python finds ---------------------------------------------------------------------


def test_a_package_counts_by_its_files_and_its_version(here, small, monkeypatch):
    package, facts = here / "site" / "counted", here / "site" / "counted_dist-1.5.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("SHARE = 0.5")
    (package / "rules.py").write_text(
        RULE.replace("from helper", "from counted.base")
        .replace("parts.late import more", "counted import base")
        .replace("* more()", "* base.SHARE")
    )
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: counted-dist\nVersion: 1.5\n")
    (facts / "RECORD").write_text("counted/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    config = prepare(small, {"algorithm": "counted.rules:Mine"}).config
    found = (config.files or {})["client"]
    assert list(found) == [
        "counted/rules.py",
        "counted/__init__.py",
        "counted/base.py",
        "counted-dist",
    ]
    assert found["counted-dist"] == "1.5"
    (package / "base.py").write_text("SHARE = 0.75")
    with pytest.raises(ConfigError, match=r"algorithm: counted/base\.py has changed"):
        prepare(config.model_dump(mode="json"))
    (package / "base.py").write_text("SHARE = 0.5")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: counted-dist\nVersion: 1.6\n")
    with pytest.raises(ConfigError, match=r"algorithm: counted-dist has changed .* \(1\.5 then, "):
        prepare(config.model_dump(mode="json"))
    for name in [n for n in sys.modules if n.partition(".")[0] == "counted"]:
        del sys.modules[name]


def test_a_module_that_was_edited_after_its_import_is_refused(files, small, monkeypatch):
    (files / "edited_rules.py").write_text(RULE.replace("from helper import SHARE", "SHARE = 0.5"))
    monkeypatch.syspath_prepend(str(files))
    small["algorithm"] = "edited_rules:Mine"
    before = prepare(small).config.fingerprint
    text = RULE.replace("from helper import SHARE", "SHARE = 0.25  # another one")
    (files / "edited_rules.py").write_text(text)
    with pytest.raises(ConfigError, match=r"^algorithm\.name: 'edited_rules' was edited after"):
        prepare(small)
    importlib.reload(sys.modules["edited_rules"])
    assert prepare(small).config.fingerprint != before
    for name in [n for n in sys.modules if n == "edited_rules" or n.partition(".")[0] == "parts"]:
        del sys.modules[name]


# -- imports from a rule's own folder --------------------------------------------------------------


def modules(folder: Path, **texts: str) -> set[str]:
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return set(references.read_code(str(folder / "m.py"), "key").files)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a", {"a.py"}),
        ("import os, json, torch.nn\nimport raysim", set()),
        ("import a.b", {"a.py"}),
        ("from p import b", {"p/b.py"}),
        ("from p.b import f", {"p/b.py"}),
        ("from . import a", {"a.py"}),
        ("def f():\n    if 0:\n        import a as z", {"a.py"}),
        ("try:\n    import nowhere\nexcept ImportError:\n    import a", {"a.py"}),
        ("import importlib\nimportlib.import_module('a')", {"a.py"}),
        (
            "import importlib\nn = 'a'\nimportlib.import_module('.' + n, __package__)",
            {"a.py", "c.py"},
        ),
        ("import random", set()),
    ],
)
def test_which_imports_count(tmp_path, text, found):
    there = modules(tmp_path, m=text, a="import c", c="", p__b="", random="raise RuntimeError")
    first = {"c.py"} if "a.py" in found else set()
    assert there == {"m.py"} | found | first


def test_each_folder_has_its_own_helper(tmp_path):
    """Two rules, two modules of one name; and nothing else sees either."""
    rule = (
        "import helper\nfrom helper import X\ndef late():\n    import helper as h\n    return h.X"
    )
    for folder, value in (("one", 1), ("two", 2)):
        modules(tmp_path / folder, m=rule, helper=f"X = {value}")
        loaded = references.load_object(f"{tmp_path / folder}/m.py:late", "key")
        assert (
            loaded() == value and loaded.__globals__["helper"].X == loaded.__globals__["X"] == value
        )
    assert "helper" not in sys.modules and str(tmp_path / "one") not in sys.path


def test_a_file_in_a_package_may_name_the_package(tmp_path):
    texts = {
        "pack____init__": "",
        "pack__m": "from pack.base import X\nfrom .base import X as Y",
        "pack__base": "X = 3",
    }
    for name, text in texts.items():
        path = tmp_path / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert references.load_object(f"{tmp_path}/pack/m.py:X", "key") == 3
    assert set(references.read_code(f"{tmp_path}/pack/m.py", "key").files) == {
        "m.py",
        "base.py",
        "__init__.py",
    }


def test_a_shipped_rule_is_found_from_any_folder(base, tmp_path, monkeypatch):
    """It is the same run there, and a file of this path in the working folder comes first."""
    rule = "configs/gradma/scaffold_by_cohort.py"
    server = f"{rule}:ScaffoldByCohortServer"
    config = base | {"rounds": 1, "client": "scaffold", "server": server}

    def fingerprint() -> str:
        return prepare(config).config.fingerprint

    monkeypatch.chdir(REPOSITORY)
    here = fingerprint()
    monkeypatch.chdir(tmp_path)
    assert fingerprint() == here
    mine = tmp_path / rule
    mine.parent.mkdir(parents=True)
    mine.write_text((REPOSITORY / rule).read_text() + "# mine\n")
    assert fingerprint() != here


def test_an_edited_file_is_loaded_anew_and_a_mistake_has_its_line(tmp_path):
    for value in (1, 2):
        modules(tmp_path, m="from helper import X", helper=f"X = {value}")
        assert references.load_object(f"{tmp_path}/m.py:X", "key") == value
    modules(tmp_path, m="import helper", helper="\n\nnone.such = 1")
    with pytest.raises(
        ConfigError, match=r"^key: \S*m\.py fails on import: NameError: name 'none'"
    ):
        references.load_object(f"{tmp_path}/m.py:X", "key")


def test_a_modules_own_refusal_stays_as_it_is(tmp_path, monkeypatch):
    code = "from raysim import ConfigError\nraise ConfigError('local.lr: too large')"
    (tmp_path / "refusing.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"^local\.lr: too large$"):
        references.load_object("refusing:X", "key")


def test_a_failed_import_names_the_error_that_it_began_with(tmp_path):
    code = """
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ImportError("cannot import Net") from error
    """
    modules(tmp_path, m=textwrap.dedent(code))
    with pytest.raises(
        ConfigError, match=r"ImportError: cannot import Net; caused by RuntimeErr"
    ) as e:
        references.load_object(f"{tmp_path}/m.py:X", "key")
    assert "torchvision's build does not fit torch's" in str(e.value)
    assert "\n" not in str(e.value)


# -- on actors -------------------------------------------------------------------------------------

CACHING = program("file_digests_caching")


@pytest.mark.ray
def test_a_rule_with_caches_runs_on_actors_without_its_folder(here, base, small, recycled_actors):
    """lru_cache, a class's cache, a tensor and a lambda; modules beside it, imported at the top and
    late. The files are gone once the run is prepared, as they are on another node."""
    texts = {
        "m": CACHING,
        "scale": "import functools\n\ndouble = functools.lru_cache(lambda n: 2 * n)",
        "late": "ONE = 1",
    }
    for name, text in texts.items():
        (here / f"{name}.py").write_text(text)
    config = {**small, "algorithm": f"{here}/m.py:Caching", "partition": {"clients": 10}}
    inline = raysim.run(config)
    ray = prepare(
        config,
        {"resources.executor": "ray", "resources.actors": 2, "run_dir": f"{small['run_dir']}-ray"},
    )
    for name in texts:
        (here / f"{name}.py").unlink()
    assert experiment.execute(ray).digest == inline.digest


def test_a_plan_is_unpickled_by_a_process_that_has_no_file(files, small):
    plan = prepare(small, EVERYTHING)
    (files / "plan.pickle").write_bytes(pickle.dumps(plan))
    for name in FILES:
        (files / name).unlink()
    script = "import pickle; plan = pickle.load(open('plan.pickle', 'rb')); print(type(plan.client), type(plan.net))"
    done = subprocess.run([sys.executable, "-c", script], cwd=files, capture_output=True, text=True)
    assert "m.Mine" in done.stdout and "net.Net" in done.stdout, done.stderr
