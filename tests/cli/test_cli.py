"""What must hold of the command line: it says what it documents, leaves with the right code, and a
mistake is one message without a traceback. All but a handful run in this process, through the
console script's own `main`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import assert_one_message
from support.programs import program
from support.sweeps import written

import raysim
from raysim.prepare.resolve import prepare
from raysim.rules.contract import ALGORITHMS, CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.registry import discover

discover()


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all runs; making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.getbasetemp()}/shared-mlflow.db"


@pytest.fixture
def small(tmp_path: Path, uri: str) -> Path:
    """A configuration of a second."""
    inline = {"executor": "inline", "threads": 1}
    tracking = {"uri": uri, "experiment": "cli"}
    return written(tmp_path / "small.yaml", rounds=2, resources=inline, tracking=tracking)


# -- what is imported, and when --------------------------------------------------------------------


@pytest.mark.ray
def test_importing_is_cheap():
    code = """
import sys
import raysim
heavy = {"ray", "mlflow", "torchvision", "matplotlib"}
assert not (heavy | {"torch"}) & set(sys.modules), "raysim"
import raysim.cli
assert not heavy & set(sys.modules), "raysim.cli"
from raysim.prepare.resolve import prepare
prepare("quickstart")
assert not heavy & set(sys.modules), "prepare"
for name in raysim.__all__:
    getattr(raysim, name)
assert not {"ray", "mlflow", "torchvision"} & set(sys.modules), "run"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# -- run -------------------------------------------------------------------------------------------


def test_a_key_that_is_written_like_an_option_is_named(raysim_):
    said = raysim_("run", "quickstart", "--local.lr=0.5")
    assert said.code == 2 and "write local.lr=VALUE" in said.err.splitlines()[-1]
    assert "VALUE" not in raysim_("run", "quickstart", "--nonsense", "5").err


def test_a_key_that_is_given_twice_is_a_warning(raysim_, small, caplog):
    said = raysim_(
        "run", small, "seed=1", "local.lr=0.1", "seed=2", "local.lr=0.1", "--print-config"
    )
    assert yaml.safe_load(said.out)["seed"] == 2
    assert caplog.messages == ["seed is given twice; the last value counts: seed=2"]


def test_print_config_runs(raysim_, small, tmp_path):
    said = raysim_(
        "run", small, "algorithm=gradma", "algorithm.memory=5", "local.lr=1e-2", "--print-config"
    )
    assert said.code == 0 and said.err == ""
    resolved = yaml.safe_load(said.out)
    assert resolved["server"]["memory"] == 5 and resolved["local"]["lr"] == 0.01
    assert resolved["batching"]["mode"] in ("loop", "lanes") and isinstance(
        resolved["batching"]["size"], int
    )
    assert not list(Path().iterdir()), "nothing is written"
    (tmp_path / "resolved.yaml").write_text(said.out)
    direct = raysim_(
        "run", small, "algorithm=gradma", "algorithm.memory=5", "local.lr=1e-2", "--json"
    )
    again = raysim_("run", tmp_path / "resolved.yaml", "--json")
    assert direct.code == again.code == 0 and direct.last["digest"] == again.last["digest"]


def test_dry_run_trains_one_client_here_and_starts_nothing(raysim_, monkeypatch):
    import ray

    def no(*arguments: Any, **options: Any) -> None:
        raise AssertionError("Ray was started, or a run tracked")

    monkeypatch.setattr(ray, "init", no)
    monkeypatch.setattr("raysim.runs.run.Tracker", no)
    said = raysim_("run", "quickstart", "--dry-run")
    assert said.code == 0 and not list(Path().iterdir())
    for text in (
        'client rule  gradma (qp_scope="whole"',
        "server rule  gradma (lr=1.0",
        "beta2=0.5, memory=100",
        "mlp, 4,810 parameters",
        "100, samples",
        "10 clients in",
        "MB down",
        "captured, with the same bits",
    ):
        assert text in said.out
    assert prepare("quickstart").config.fingerprint in said.out
    assert raysim_("run", "quickstart", "--dry-run", "local.lr=1e30").code == 1


def test_dry_run_shows_the_stages_of_the_uploads(raysim_):
    chain = "local.upload=[{name: topk, share: 0.1}, {name: qsgd}]"
    said = raysim_("run", "quickstart", "algorithm=fedavg", chain, "--dry-run")
    assert said.code == 0, said.err
    row = next(line for line in said.out.splitlines() if line.startswith("upload stages"))
    assert "topk (of=null, error_feedback=false, share=0.1), then qsgd (" in row
    groups = "groups={plain: {share: 0.5, local: {upload: []}}}"
    said = raysim_("run", "quickstart", "algorithm=fedavg", chain, groups, "--dry-run")
    rows = dict(line.split("  ", 1) for line in said.out.splitlines() if "  " in line)
    assert rows["upload stages of plain"].strip() == "none"
    assert rows["group plain"].strip() == "fedavg"


@pytest.mark.ray
def test_a_dry_run_imports_no_compiler(tmp_path):
    """Which takes longer than all the rest."""
    code = """
import sys, raysim.cli
sys.argv = ["raysim", "run", "quickstart", "--dry-run"]
try: raysim.cli.main()
finally: assert not {"torch._dynamo", "sympy", "mlflow", "ray"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0 and "captured" in done.stdout, done.stderr


RAISING = program("cli_raising")


def test_dry_run_reports_a_rule_that_always_raises(raysim_, source):
    given = f"algorithm={source('raising', RAISING)}"
    for more in ((), ("faults.on_client_error=drop",)):
        said = raysim_("run", "quickstart", "--dry-run", f"{given}:Client", *more)
        assert said.code == 1 and "ValueError: not today" in said.err
        assert "fingerprint" not in said.out
    assert raysim_("run", "quickstart", "data=digts").out == ""
    said = raysim_("run", "quickstart", "--dry-run", f"{given}:Server")
    assert said.code == 1 and "update of server rule 'server' failed: ValueError" in said.err


def test_json_is_the_last_line(raysim_, small, tmp_path):
    said = raysim_("run", small, "--json", f"run_dir={tmp_path}/run", "rounds=3")
    assert said.code == 0 and len(said.out.splitlines()) == 1
    found = said.last
    assert set(found) == {
        "run_id",
        "run_dir",
        "rounds",
        "metrics",
        "seconds",
        "clients_per_second",
        "digest",
        "state_digest",
    }
    assert found["rounds"] == 3 and found["run_dir"] == str(tmp_path / "run")
    assert set(found["metrics"]) == {"accuracy", "loss", "train_loss"}
    assert all(set(values) == {"last", "best"} for values in found["metrics"].values())
    assert len(found["digest"]) == 64 and found["seconds"] > 0 and found["clients_per_second"] > 0
    assert "round 3/3" in said.err and "accuracy" in said.err and "raysim ui cli" in said.err


def test_run_and_resume_say_where_to_look(raysim_, small, tmp_path):
    folder = tmp_path / "run"
    first = raysim_("run", small, "checkpoint.every=2", f"run_dir={folder}")
    assert first.code == 0 and "fedavg on digits, inline: 2 rounds" in first.out
    for text in ("round 2/2", "best accuracy", str(folder), "raysim ui cli --uri sqlite:"):
        assert text in first.out
    assert re.search(r"^digest +[0-9a-f]{64}$", first.out, re.M)
    on = raysim_("resume", folder, "rounds=4", "--json")
    whole = raysim_("run", small, "rounds=4", "--json")
    assert on.code == 0 and on.last["digest"] == whole.last["digest"] and on.last["rounds"] == 4
    finished = raysim_("resume", folder)
    assert finished.code == 2 and "rounds: 4 rounds are done" in finished.err
    assert raysim_("resume", tmp_path).code == 2


def test_a_run_that_began_untracked_is_resumed_untracked(raysim_, small, tmp_path):
    folder = tmp_path / "run"
    keys = {"rounds": 4, "checkpoint.every": 1, "run_dir": folder}
    raysim.run(small, keys, tracking=False, progress=_stop_after_one_round)
    on = raysim_("resume", folder, "--json")
    assert on.code == 0 and on.last["run_id"] == "" and "open in MLflow" not in on.err
    assert on.last["rounds"] == 4 and not (folder / "spool.jsonl").exists()
    assert on.last["digest"] == raysim_("run", small, "rounds=4", "--json").last["digest"]


def _stop_after_one_round(record: dict[str, float]) -> bool:
    return record["round"] == 1


# -- one's own methods and nets --------------------------------------------------------------------

OWN = program("cli_own")


def test_ones_own_method_by_path(raysim_, small, source):
    path = source("own", OWN)

    def digest(*overrides: str) -> str:
        said = raysim_("run", small, *overrides, "--json")
        assert said.code == 0, said.err
        return said.last["digest"]

    plain = digest()
    assert (
        digest(f"algorithm={path}:Half", "algorithm.share=1") == plain
    )  # a client rule, with averaging
    assert (
        digest(f"algorithm={path}:Still", "algorithm.move=1") == plain
    )  # a server rule, with local SGD
    assert (
        digest(f"algorithm={path}:both", "algorithm.share=1", "algorithm.move=1") == plain
    )  # an Algorithm
    assert (
        digest(f"client={path}:Half", f"server={path}:Still", "client.share=1", "server.move=1")
        == plain
    )
    assert len({plain, digest(f"algorithm={path}:Half"), digest(f"algorithm={path}:Still")}) == 3
    assert digest(f"model={path}:Net", "model.width=3") not in {plain, digest(f"model={path}:Net")}


# -- what there is ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "columns", "some"),
    [
        (
            "algorithms",
            {"name", "from", "family", "paper", "client", "server", "state", "traffic", "presets"},
            set(ALGORITHMS),
        ),
        ("clients", {"name", "from", "family", "what", "keys"}, set(CLIENT_RULES)),
        ("servers", {"name", "from", "family", "what", "keys"}, set(SERVER_RULES)),
        ("models", {"name", "from", "what"}, {"logistic", "mlp", "tinynn", "lenet5", "vgg11", "resnet20", "lenet"}),
        ("data", {"name", "from", "here", "what"}, {"digits", "mnist", "cifar10"}),
        ("probes", {"name", "from", "what", "keys"}, {"evaluate.theory", "record_updates"}),
        ("partitions", {"name", "what", "keys"}, {"iid", "dirichlet", "shards", "natural", "file", "virtual"}),
        ("stages", {"name", "what", "keys"}, {"clip", "topk", "qsgd"}),
        ("sampling", {"name", "what", "keys"}, {"uniform", "samples", "poisson"}),
        ("optimizers", {"name", "what", "keys"}, {"sgd", "adam", "adamw"}),
        ("lr", {"name", "what", "keys"}, {"cosine", "step", "warmup"}),
        ("privacy", {"name", "what", "keys"}, {"example", "client"}),
        (
            "metrics",
            {"name", "unit", "what", "logged"},
            {"accuracy", "clients/used", "system/round_seconds", "system/worker_utilization"},
        ),
    ],
)  # fmt: skip
def test_list(raysim_, what, columns, some):
    said = raysim_("list", what, "--json")
    assert said.code == 0 and len(said.out.splitlines()) == 1
    rows = said.last
    for row in rows:
        assert set(row) == columns and all(isinstance(v, str) for v in row.values())
        assert row.get("what", "x")
    found = {row["name"] for row in rows}
    assert some <= found and len(found) == len(rows)
    table = raysim_("list", what)
    assert table.code == 0 and all(name in table.out for name in found)


def test_methods_of_a_family(raysim_):
    def names(*options: str) -> set[str]:
        return {row["name"] for row in raysim_("list", "algorithms", "--json", *options).last}

    general, robust = names("--family", "general"), names("--family", "robust")
    assert {"gradma", "fedreg", "fedhist"} <= general and "ditto" not in general
    assert {"krum", "median"} <= robust and not robust & general
    assert general | robust < names() == set(ALGORITHMS)
    attackers = raysim_("list", "clients", "--family", "attackers", "--json").last
    assert {row["name"] for row in attackers} >= {"alie", "sign_flip"}
    for listing, family in (
        ("algorithms", "robst"),
        ("algorithms", "attackers"),
        ("models", "robust"),
    ):
        assert raysim_("list", listing, "--family", family).code == 2


def test_list_prints_the_families_with_their_numbers_of_methods(raysim_):
    rows = {row["name"]: row for row in raysim_("list", "families", "--json").last}
    algorithms = Path(raysim.__file__).parent / "algorithms"
    folders = {file.parent.name for file in algorithms.glob("*/__init__.py")}
    assert set(rows) == folders
    for name in ("robust", "attackers"):
        methods = raysim_("list", "clients", "--family", name, "--json").last
        assert rows[name]["clients"] == str(len(methods))


def test_a_rule_of_no_algorithm_is_set_in_groups(raysim_):
    assert "client={name: fedprox}" in raysim_("list", "clients", "fedprox").out
    attacker = raysim_("list", "clients", "label_flip").out
    assert "groups.label_flip={share: 0.2, client: {name: label_flip}}" in attacker


def test_list_alone_says_what_can_be_listed(raysim_):
    said = raysim_("list")
    assert said.code == 0 and said.err == ""
    words = said.out.split()
    assert {"algorithms", "metrics", "configs"} <= set(words)
    assert raysim_("list", words[-1]).code == 0


def test_list_of_something_else(raysim_):
    said = raysim_("list", "modells")
    assert said.code == 2 and said.out == "" and "did you mean 'models'" in said.err


@pytest.mark.usefixtures("pictures")
def test_data_show(raysim_, tmp_path):
    said = raysim_("data", "show", "digits", "--json")
    assert said.code == 0 and Path("digits.png").read_bytes().startswith(b"\x89PNG")
    facts = said.last
    assert (facts["train"], facts["test"], facts["shape"], facts["samples"]) == (
        1438,
        359,
        [1, 8, 8],
        "digits.png",
    )
    table = raysim_("data", "show", "digits", "--out", tmp_path / "grid.png")
    assert table.code == 0 and (tmp_path / "grid.png").stat().st_size > 2000 and "1438" in table.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["data", "show", "digts"], "'digits'"),
        (["data", "show", "digits", "--out", "0.5"], "--out: '0.5'"),
        (["data", "fetch", "mnits"], "'mnist'"),
        (["data", "fetch", "folder"], "cannot be downloaded"),
        (["data", "show", "folder", "--path", "/nowhere"], "/nowhere"),
    ],
)
def test_data_mistakes(raysim_, arguments, said):
    result = raysim_(*arguments)
    assert_one_message(result)
    assert said in result.err


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        "algoritm=gradma", "algorithm=gradm", "rounds=-1", "rounds=abc", "schedule.cohort=1000",
        "local.lr=nan", "data=mnits", "algorithm.memory=3", "model=nope", "resources.gpus=3",
        "partition.alpha=0", "seed=x", "client=scaffold server=fedavg", "algorithm=./missing.py:X",
        "local.batch_size=0", "rounds", "tracking.uri=x", "tracking.uri=bogus://h",
        "tracking.uri=http://h:port",
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(raysim_, overrides):
    assert_one_message(raysim_("run", "quickstart", *overrides.split()))
    assert not list(Path().iterdir()), "nothing has started"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/run", "/proc/run"])
def test_a_run_dir_that_cannot_be(raysim_, small, path):
    said = raysim_("run", small, f"run_dir={path}")
    assert said.code == 2 and said.err.startswith(f"error: run_dir: {path} cannot be written: ")
    assert len(said.err.splitlines()) == 1


def test_mistakes_of_other_commands(raysim_):
    for arguments in (
        ["tracking", "sync", "nosuch"],
        ["bench", "quickstart", "rounds=-1"],
        ["resume", "nosuch"],
    ):
        assert_one_message(raysim_(*arguments))


def test_a_dead_server_is_one_message(raysim_, small, caplog):
    said = raysim_("run", small, "tracking.uri=http://127.0.0.1:9", "run_dir=first")
    assert said.code == 1 and said.err.startswith("error: tracking.uri: ") and not caplog.records
    # The run has a folder, from which it can be tried again.
    again = raysim_("resume", "first")
    assert again.code == 1 and again.err.startswith("error: tracking.uri: ")
    assert raysim_("resume", "first", "tracking.uri=sqlite:///mlflow.db").code == 0


def test_an_unknown_configuration(raysim_):
    said = raysim_("run", "quickstrat")
    assert_one_message(said)
    assert "did you mean 'quickstart'" in said.err


def test_a_taken_run_dir(raysim_, small, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    said = raysim_("run", small, f"run_dir={tmp_path}", "--json")
    assert said.code == 2 and said.out == "" and "Traceback" not in said.err
    assert f"`raysim resume {tmp_path}`" in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("runn quickstart", r"no such command 'runn'; did you mean 'run'\? \(`\S+ --help`\)"),
        (
            "report tabel",
            r"no such command 'tabel'; did you mean 'table'\? \(`\S+ report --help`\)",
        ),
        ("resume --jsn x", r"no such option: --jsn; did you mean --json\? \(`\S+ resume --help`\)"),
        ("run quickstart --verbos", r"no such option: --verbos \(`\S+ run --help`\)"),
        ("data show", r"missing argument 'name' .*"),
        ("data shwo", r"no such command 'shwo'; did you mean 'show'\? .*"),
        ("run", r"missing argument 'config' \(`\S+ run --help`\)"),
        ("ui --port x", r"invalid value for '--port': .* valid integer.*"),
        ("run quickstart --seed=3", r"--seed is a key of the configuration; write seed=VALUE"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(raysim_, command, error):
    said = raysim_(*command.split())
    assert (said.code, said.out) == (2, "")
    assert re.fullmatch(f"error: {error}\n", said.err), said.err


def test_commands_without_arguments_print_their_help(raysim_):
    for command in ([], ["report"]):
        said = raysim_(*command)
        assert said.code == 2 and "--help" in said.out and not said.err


def test_a_run_that_fails_is_code_1(raysim_, small):
    said = raysim_("run", small, "local.lr=1e30", "--json")
    assert said.code == 1 and said.out == "" and "Traceback" not in said.err
    assert (
        "client" in said.err
        and "failed in round 1: non-finite" in said.err
        and "on_client_error=drop" in said.err
        and "`raysim resume " in said.err
    )


def test_a_command_whose_folder_is_removed_says_so(raysim_, small, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = raysim_("run", str(small))
    assert said.code and "Traceback" not in said.err and said.err.startswith("error: ")
    assert "no longer exists" in said.err and "--temp-dir" in said.err


def test_help(raysim_):
    for arguments in (
        ["--help"],
        ["run", "--help"],
        ["resume", "--help"],
        ["list", "--help"],
        ["data", "--help"],
    ):
        said = raysim_(*arguments)
        assert said.code == 0 and "Usage" in said.out
