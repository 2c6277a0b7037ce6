"""Commands that are sent to a cluster as jobs: mistakes are named before or after the upload."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from raysim.cli import UsageError
from raysim.cli.jobs import _follow_job, checked_command
from raysim.distributed.cluster.jobs import JobClient, _job
from raysim.errors import ConfigError

SHARED = {"rounds": 1, "data": "digits", "algorithm": "fedavg"}
SHARED |= {"tracking": {"uri": "http://tracking:5000"}}


RULE = "from raysim.rules import ClientRule\n\n\nclass f(ClientRule):\n    pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(SHARED))
    return tmp_path


@pytest.mark.parametrize("name", [".gitignore", ".rayignore"])
def test_a_configuration_that_is_not_uploaded_is_refused(folder: Path, name: str) -> None:
    assert checked_command(["run", "mine.yaml"], folder) == ["run", "mine.yaml"]
    (folder / name).write_text("*.yaml\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is not uploaded.*\.gitignore"):
        checked_command(["run", "mine.yaml"], folder)
    (folder / name).write_text("*.yaml\n!mine.yaml\n")
    assert checked_command(["run", "mine.yaml"], folder) == ["run", "mine.yaml"]


def test_a_configuration_of_an_earlier_run_is_not_uploaded(folder: Path) -> None:
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "runs" / "first" / "config.yaml").write_text(yaml.safe_dump(SHARED))
    with pytest.raises(ConfigError, match=r"config\.yaml is not uploaded.*one of .*runs"):
        checked_command(["run", "runs/first/config.yaml"], folder)


def test_a_run_that_is_not_uploaded_is_not_resumed(folder: Path) -> None:
    (folder / "runs" / "first").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"runs/first is not uploaded.*absolute path"):
        checked_command(["resume", "runs/first"], folder)
    there = str((folder / "runs" / "first").absolute())
    assert checked_command(["resume", there], folder) == ["resume", there]
    assert checked_command(["resume", "0" * 32], folder)  # MLflow's id


def test_a_file_of_the_users_code_has_to_be_uploaded(folder: Path) -> None:
    command = ["run", "mine.yaml", "model=net.py:make"]
    with pytest.raises(ConfigError, match=r"model: there is no file net\.py in --working-dir"):
        checked_command(command, folder)
    (folder / "net.py").touch()
    assert checked_command(command, folder) == command
    (folder / ".gitignore").write_text("net.py\n")
    with pytest.raises(ConfigError, match=r"net\.py is not uploaded.*\.gitignore"):
        checked_command(command, folder)


CODE = {
    "data": "data={}:f",
    "task": "task={}:f",
    "partition": "partition={}:f",
    "evaluate.metrics.0": "evaluate.metrics=[{}:f]",
    "evaluate.probes.0": "evaluate.probes=[{}:f]",
    "schedule.sampling": "schedule.sampling={}:f",
    "local.lr": "local.lr={}:f",
    "groups.a.client": "groups.a={{share: 0.5, client: {}:f}}",
}


@pytest.mark.parametrize("key", CODE)
def test_all_code_that_a_configuration_names_is_uploaded(folder: Path, key: str) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "code.py").write_text(RULE)
    command = ["run", "mine.yaml", CODE[key].format("mine/code.py")]
    assert checked_command(command, folder) == command
    (folder / ".gitignore").write_text("mine/\n")
    with pytest.raises(ConfigError, match=r"mine/code\.py is not uploaded.*\.gitignore"):
        checked_command(command, folder)
    with pytest.raises(ConfigError, match=rf"{key}: {folder}/mine/code\.py is not uploaded"):
        checked_command([*command[:2], CODE[key].format(folder / "mine" / "code.py")], folder)


@pytest.mark.parametrize(
    "key, value",
    [
        ("groups.a.file", "groups.a={{file: {}, client: fedprox}}"),
        ("partition.path", "partition={{name: file, path: {}}}"),
        ("data.path", "data={{name: arrays, path: {}}}"),
        ("data.path", "data={{name: folder, path: {}}}"),
        ("model.init_from", "model={{name: mlp, init_from: {}}}"),
    ],
)
def test_files_of_clients_and_examples_are_uploaded_or_absolute(
    folder: Path, key: str, value: str
) -> None:
    for path, why in (("there.npz", "no file there.npz"), ("../x.npz", "not uploaded")):
        with pytest.raises(ConfigError, match=f"{key}: .*{why}"):
            checked_command(["run", "mine.yaml", value.format(path)], folder)
    (folder / "there.npz").touch()
    for path in ("there.npz", "/shared/there.npz"):
        assert checked_command(["run", "mine.yaml", value.format(path)], folder)


def test_options_and_their_values_are_read_as_the_command_reads_them(folder: Path) -> None:
    options = ["--parallel", "2", "--ledger", "/f", "--dir", "/d", "--where", "method=fedavg"]
    for command in (
        ["sweep", *options, "mine.yaml", "seed=0..2"],
        ["sweep", "mine.yaml", "seed=0..2", *options],
    ):
        assert checked_command(command, folder) == command
    for command in (
        ["sweep", "mine.yaml", "--jobs", "2"],
        ["resume", "--quiet", "/runs/x"],
        ["run"],
    ):
        with pytest.raises(UsageError):
            checked_command(command, folder)


def test_variables_of_this_machine_do_not_count_for_a_job(folder: Path, monkeypatch) -> None:
    (folder / "mine.yaml").write_text(yaml.safe_dump({**SHARED, "tracking": {}}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    with pytest.raises(ConfigError, match="would be deleted with the job's folder"):
        checked_command(["run", "mine.yaml"], folder)


@pytest.mark.parametrize(
    "message",
    [
        "Request failed with status code 413: Maximum request body size exceeded",
        "Package size (600.00MiB) exceeds the maximum size of 500.00MiB.",
    ],
)
def test_a_folder_that_is_too_large_is_named(message: str) -> None:
    client = JobClient.__new__(JobClient)
    client.address = "http://head:8265"
    refused = pytest.raises(ConfigError, match=r"--working-dir.*too large.*\.rayignore")
    with refused, client._asking():
        raise RuntimeError(message)


def details(message: str) -> Any:
    return SimpleNamespace(
        submission_id="1", status="FAILED", entrypoint="", driver_exit_code=None, message=message
    )


def test_the_reason_of_pip_comes_first() -> None:
    reason = "ERROR: No matching distribution found for nosuchpackage==1.2"
    assert _job(details(f"Failed to install: {'progress ' * 300} {reason}")).message == reason
    assert _job(details("exit code 1")).message == "exit code 1"


def test_ctrl_c_says_that_the_job_goes_on(capsys) -> None:
    def follow(number: str) -> Any:
        yield "round 1/2\n"
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as left:
        _follow_job(SimpleNamespace(follow=follow), "raysubmit_1")  # pyright: ignore[reportArgumentType]
    assert left.value.exit_code == 130
    output = capsys.readouterr()
    assert output.out == "round 1/2\n"
    assert "the job goes on" in output.err and "raysim job stop raysubmit_1" in output.err
