"""What installed packages offer: raysim's own methods under any other `algorithms`, and the entry
points of other distributions: methods, data sets, nets and probes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.programs import program

import raysim
from raysim import cli
from raysim.errors import ConfigError
from raysim.prepare.resolve import prepare
from raysim.rules import contract
from raysim.rules.methods import registry

HALF = program("installed_methods_half")

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(distribution, module, source, **entry_points): lays a distribution out as pip does;
    what was imported of it is forgotten after the test."""
    before = set(sys.modules)

    def lay(
        distribution: str, module: str, source: str, version: str = "1.0",
        group: str = "raysim.algorithms", **points: str,
    ) -> Path:  # fmt: skip
        site = tmp_path / distribution
        facts = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        facts.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (facts / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (facts / "top_level.txt").write_text(f"{module}\n")
        (facts / "RECORD").write_text(f"{module}.py,,\n")
        lines = [f"[{group}]\n{name} = {value}\n" for name, value in points.items()]
        (facts / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(site))
        return site

    yield lay  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith("half"):
            del sys.modules[name]


@pytest.fixture
def small(base: dict) -> dict:
    return {**base, "rounds": 2, "partition": {"name": "iid", "clients": 20}, "local": {"steps": 1}}


# -- raysim's own ----------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.parametrize(
    "mode",
    [
        ["-m", "raysim"],
        pytest.param(["-c", "from raysim.cli import console; console()"], marks=pytest.mark.long),
    ],
)
def test_a_package_of_ones_own_called_algorithms(tmp_path, mode):
    """Both forms put the working directory first, and with it the user's package."""
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "__init__.py").write_text(
        "raise RuntimeError('the package of somebody else')"
    )
    done = subprocess.run(
        [sys.executable, *mode, "list", "algorithms", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and '"scaffold"' in done.stdout, done.stderr


@pytest.mark.ray
def test_the_methods_are_found_in_a_plain_checkout(tmp_path):
    """Not installed: the repository's folder alone is on the path, after another package called
    algorithms."""
    checkout = Path(__file__).parents[2]
    (tmp_path / "algorithms.py").write_text("")
    third = [p for p in sys.path if p.endswith("site-packages")]
    script = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n"
        "import algorithms, raysim\n"
        "from raysim.rules import contract\n"
        "from raysim.rules.methods import registry\n"
        "registry.discover()\n"
        "print(raysim.__file__, contract.CLIENT_RULES['fedprox'].__module__, len(contract.ALGORITHMS))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(checkout), *third])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    registry.discover()
    file, module, count = done.stdout.split() or pytest.fail(done.stderr)
    assert Path(file) == checkout / "raysim" / "__init__.py"
    assert (module, int(count)) == ("raysim.algorithms.fedprox", len(contract.ALGORITHMS))


def test_what_is_installed_has_no_top_level_algorithms():
    """All packages of the wheel are below raysim, and the folder of methods is one of them."""
    built = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]
    assert {package.partition(".")[0] for package in built["packages"]} == {"raysim"}
    assert "raysim.algorithms" in built["packages"]
    root = Path(__file__).parents[2]
    folders = {path.parent.relative_to(root) for path in (root / "raysim").rglob("__init__.py")}
    packages = {".".join(folder.parts) for folder in folders}
    assert packages <= set(built["packages"]), "every package is in the wheel"
    assert built["package-dir"]["raysim.algorithms"] == "algorithms"


# -- other distributions' --------------------------------------------------------------------------


def test_an_entry_point_is_used_by_its_name(small, install):
    install("half-client", "halfpkg", HALF, half="halfpkg:HALF", halved="halfpkg:HalfClient")
    named = prepare(small, ["algorithm=half"])
    assert named.client.share == 0.25 and named.label == "half"  # type: ignore[attr-defined]
    assert prepare(small, ["algorithm=halved"]).client.share == 0.5  # type: ignore[attr-defined]
    alone = prepare(small, ["client=halved", "server=fedavgm", "client.share=0.1"])
    assert alone.client.share == 0.1 and alone.config.client.name == "halved"  # type: ignore[attr-defined, union-attr]
    with pytest.raises(ConfigError, match=r"unknown key of 'half'.*did you mean 'share'"):
        prepare(small, ["algorithm=half", "algorithm.shar=1"])
    with pytest.raises(ConfigError, match="did you mean 'half'"):
        prepare(small, ["algorithm=hal"])


def test_only_the_method_that_is_asked_for_is_imported(small, install):
    install(
        "half-broken", "halfbroken", "raise RuntimeError('not today')", halfbroken="halfbroken:X"
    )
    install("half-module", "halfmodule", "", halfmodule="halfmodule")
    assert prepare(small, ["algorithm=fedavg"]).label == "fedavg"
    with pytest.raises(
        ConfigError, match=r"algorithm\.name: halfbroken fails on import: RuntimeError: not today"
    ):
        prepare(small, ["algorithm=halfbroken"])
    with pytest.raises(
        ConfigError, match=r"'halfmodule' of half-module 1.0 names the module.*module:NAME"
    ):
        prepare(small, ["algorithm=halfmodule"])


def test_a_clash_of_names_is_refused_where_the_name_is_used(small, install):
    install("half-one", "halfone", HALF, half="halfone:HALF", fedprox="halfone:HALF")
    install("half-two", "halftwo", HALF, version="2.1", half="halftwo:HALF")
    assert prepare(small, ["algorithm=fedavg"]).label == "fedavg"
    with pytest.raises(
        ConfigError, match=r"'half' is a method of half-one 1\.0 and of half-two 2\.1; uninstall"
    ):
        prepare(small, ["algorithm=half"])
    ours = rf"'fedprox' is a method of raysim {raysim.__version__} and of half-one 1\.0"
    for override in ("algorithm=fedprox", "client=fedprox"):
        with pytest.raises(ConfigError, match=ours):
            prepare(small, [override, "server=fedavg"])
    assert prepare(small, ["algorithm=halfone:HALF"]).client.share == 0.25  # type: ignore[attr-defined]


@pytest.mark.ray
@pytest.mark.parametrize("rule", ["HalfClient", "HalfServer"])
def test_raysims_own_other_half_is_not_ambiguous(small, install, source, rule):
    """The user names one rule and raysim adds fedavg's other half, whatever else is called fedavg."""
    server = "\n@dataclass(frozen=True)\nclass HalfServer(FedAvgServer): ...\n"
    mine = f"{source('half', HALF + server)}:{rule}"
    install("half-clash", "halfclash", HALF + server, fedavg="halfclash:HALF")
    plan = prepare(small, [f"algorithm={mine}"])
    assert {type(plan.client).__module__, type(plan.server).__module__} >= {
        "raysim.algorithms.fedavg"
    }
    assert prepare(yaml.safe_load(plan.config.dump())).config.fingerprint == plan.config.fingerprint
    assert prepare(small, [f"algorithm=halfclash:{rule}"]).label == rule
    with pytest.raises(ConfigError, match="'fedavg' is a method of raysim"):
        prepare(small, [f"client={mine.replace(rule, 'HalfClient')}", "server=fedavg"])


def test_list_shows_where_a_method_is_from(install, monkeypatch, capsys, caplog):
    install("half-client", "halfpkg", HALF, half="halfpkg:HALF", halved="halfpkg:HalfClient")
    install(
        "half-broken", "halfbroken", "raise RuntimeError('not today')", halfbroken="halfbroken:X"
    )
    for what, name in (("algorithms", "half"), ("clients", "halved")):
        monkeypatch.setattr(sys, "argv", ["raysim", "list", what, "--json"])
        with pytest.raises(SystemExit):
            cli.main()
        origins = {row["name"]: row["from"] for row in yaml.safe_load(capsys.readouterr().out)}
        assert (origins[name], origins["fedavg"]) == ("half-client 1.0", "raysim")
        assert "halfbroken" not in origins and "halfbroken fails on import" in caplog.text


@pytest.mark.parametrize("given", ["halfpkg:HalfClient", "half"])
def test_a_run_of_an_installed_method_is_resumed(small, install, given):
    """Its config.yaml names the rule by its module, whatever the algorithm was called."""
    install("half-client", "halfpkg", HALF, half="halfpkg:HALF")
    whole = raysim.run(small, algorithm=given, run_dir=f"{small['run_dir']}-whole")
    stopped = raysim.run(small, algorithm=given, rounds=1)
    config = yaml.safe_load((stopped.run_dir / "config.yaml").read_text())
    assert config["client"]["name"] == "halfpkg:HalfClient"
    assert raysim.resume(stopped.run_dir, {"rounds": 2}).state_digest == whole.state_digest


def test_a_rule_that_no_name_finds_is_refused(small, install):
    source = (
        HALF
        + "\ndef make():\n    class Inner(HalfClient): ...\n    return dataclass(frozen=True)(Inner)\n"
    )
    install(
        "half-local",
        "halflocal",
        source + "\nLOCAL = Algorithm('x', make(), FedAvgServer, 'nobody 2024')\n",
    )
    with pytest.raises(
        ConfigError, match=r"make.<locals>.Inner .* define it at the top of its module"
    ):
        prepare(small, ["algorithm=halflocal:LOCAL"])


# -- data sets, nets and probes --------------------------------------------------------------------

OTHERS = '''
from dataclasses import dataclass

import numpy as np
from torch import nn

from raysim import Probe


def blobs(n: int = 24):
    """Two blobs."""
    y = np.arange(n) % 2
    x = np.random.default_rng(0).normal(y[:, None], 0.1, (n, 3)).astype("float32")
    return x, y, x, y


def flat(shape, classes, width: int = 4):
    """A net with one hidden layer."""
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, classes))


@dataclass
class Twice(Probe):
    """Twice the loss of each round."""

    factor: float = 2.0

    def follow(self, record):
        return {"loss": self.factor * record["train_loss"]} if "train_loss" in record else {}
'''


@pytest.fixture
def others(install: Install) -> Install:
    """A package with a data set, a net and a probe."""
    for group, name, value in (
        ("data", "blobs", "blobs"),
        ("models", "flat", "flat"),
        ("probes", "twice", "Twice"),
    ):
        source = OTHERS if group == "data" else ""
        module = "halfothers" if source else f"half{group}"
        install(
            f"half-{group}",
            module,
            source,
            group=f"raysim.{group}",
            **{name: f"halfothers:{value}"},
        )
    return install


def test_data_nets_and_probes_of_a_package_are_used_by_their_names(small, others):
    keys = {
        **small, "algorithm": "fedavg", "data": {"name": "blobs", "n": 32}, "model": {"name": "flat", "width": 5},
        "partition": {"clients": 4}, "schedule": {"cohort": 2},
        "evaluate": {"every": 1, "probes": [{"name": "twice", "factor": 3}]},
    }  # fmt: skip
    done = raysim.run(keys, tracking=False, **{"checkpoint.every": 1})
    assert len(done.parameters) == 3 * 5 + 5 + 5 * 2 + 2 and len(prepare(keys).dataset.y) == 32
    assert done.history[1]["Twice/loss"] == 3 * done.history[1]["train_loss"]
    again = yaml.safe_load((done.run_dir / "config.yaml").read_text())
    assert (again["data"]["name"], again["model"]["name"]) == ("blobs", "flat")
    assert again["files"]["data"]["half-data"] == again["files"]["model"]["half-data"] == "1.0"
    assert raysim.resume(done.run_dir, {"rounds": 3}).rounds == 3
    (Path(sys.modules["halfothers"].__file__)).write_text(OTHERS.replace("0.1", "0.2"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"halfothers\.py has changed since this run began"):
        prepare(done.run_dir / "config.yaml")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data=digits", "data.name: 'digits' is a data set of raysim .* and of half-clash 1.0"),
        ("model=mlp", "model.name: 'mlp' is a net of raysim .* and of half-clash 1.0"),
        ("data=blob", r"data.name: unknown name 'blob'; did you mean 'blobs'"),
        ("model=fla", r"model.name: unknown model 'fla'; did you mean 'flat'"),
        ("evaluate.probes=twic", r"unknown probe 'twic'; did you mean 'twice'"),
        ("data.m=3", r"data\.m: unknown key"),
    ],
)
def test_mistakes_in_names_of_packages(small, others, key, message):
    if "half-clash" in message:
        group, name = ("data", "digits") if "data" in key else ("models", "mlp")
        others("half-clash", "halfclash", "", group=f"raysim.{group}", **{name: "halfothers:blobs"})
    with pytest.raises(ConfigError, match=message):
        prepare(
            {**small, "data": "blobs", "model": "flat", "algorithm": "fedavg"},
            [key, "partition.clients=4", "schedule.cohort=2"],
        )


def test_lists_have_what_packages_offer(others, monkeypatch, capsys):
    for what, name, own in (
        ("data", "blobs", "digits"),
        ("models", "flat", "mlp"),
        ("probes", "twice", "evaluate.theory"),
    ):
        monkeypatch.setattr(sys, "argv", ["raysim", "list", what])
        with pytest.raises(SystemExit):
            cli.main()
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert lines[0][:2] == ["name", "from"]
        origins = {line[0]: line[1:3] for line in lines}
        assert origins[name] == [f"half-{what}", "1.0"], what and origins[own][0] == "raysim"
