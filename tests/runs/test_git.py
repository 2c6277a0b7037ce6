"""The commits that a run is tagged with: raysim's own only where it is raysim's, and the user's."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import raysim
from raysim.runs import git

USERS = "mlflow.source.git.commit"

raysim_commit = git._raysim_commit


@pytest.fixture(autouse=True)
def asked_each_time(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests ask once."""
    monkeypatch.setattr(git, "_raysim_commit", raysim_commit)


def commit(folder: Path) -> str:
    """A repository with one commit of everything in the folder; the commit."""
    run = [
        "git",
        "-c",
        "user.name=n",
        "-c",
        "user.email=e@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*run, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True
    ).stdout.decode()[:-1]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """fake(script): a git of these lines of shell is the only program on the PATH; fake(""): there
    is none."""

    def put(script: str) -> None:
        (tmp_path / "bin").mkdir()
        if script:
            (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "bin" / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    return put


def test_the_users_repository_and_whether_it_is_dirty(here):
    (here / "m.py").write_text("one")
    first = commit(here)
    (here / "inside").mkdir()
    os.chdir(here / "inside")
    assert git.git_tags()[USERS] == first and git.git_tags()["mlflow.source.git.dirty"] == "false"
    (here / "m.py").write_text("two")
    assert git.git_tags()[USERS] == first and git.git_tags()["mlflow.source.git.dirty"] == "true"


def test_in_a_folder_that_was_deleted_nothing_of_the_user_is_tagged(here, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert not any("git" in key for key in git.git_tags())


def test_outside_of_a_repository_and_in_one_without_commits_nothing_is_tagged(here, caplog):
    assert not any("git" in key for key in git.git_tags())
    subprocess.run(["git", "init", "-q"], check=True)
    assert not any("git" in key for key in git.git_tags())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("variable", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"])
def test_a_hooks_variables_do_not_change_the_repository(here, tmp_path, monkeypatch, variable):
    """Git sets them for hooks and for `git rebase --exec`; they name the repository that it works
    on."""
    (here / "m.py").write_text("one")
    own = commit(here)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "n.py").write_text("two")
    commit(tmp_path / "other")
    named = {"GIT_DIR": ".git", "GIT_WORK_TREE": ".", "GIT_INDEX_FILE": ".git/index"}[variable]
    monkeypatch.setenv(variable, str(tmp_path / "other" / named))
    assert git.git_tags()[USERS] == own and git.git_tags()["mlflow.source.git.dirty"] == "false"


def installed(place: Path) -> Path:
    """raysim copied as an installation has it, so that a process can import it from there."""
    source = Path(raysim.__file__).parent
    shutil.copytree(source, place / "raysim", ignore=shutil.ignore_patterns("__pycache__"))
    return place


@pytest.mark.parametrize("project", [None, "mine", "raysim"])
def test_the_commit_is_raysims_or_nobodys(tmp_path, project):
    """An installation in a virtual environment inside of the user's repository; raysim copied into
    the user's own project; and a checkout of raysim."""
    place = installed(tmp_path if project else tmp_path / ".venv" / "site-packages")
    if project:
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    made = commit(tmp_path)
    script = "import sys; sys.path.insert(0, sys.argv[1]); from raysim.runs import git; print(git.__file__, git.git_tags())"
    command = [sys.executable, "-c", script, str(place)]
    said = subprocess.run(
        command, cwd=tmp_path.parent, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(str(place))
    assert re.findall("'commit': '(.*?)'", said) == ([made] if project == "raysim" else [])


def test_without_git_a_run_runs(here, fake, base):

    fake("")
    done = raysim.run({**base, "rounds": 1, "algorithm": "fedavg", "partition": {"clients": 10}})
    assert done.rounds == 1


def test_a_repository_that_git_refuses_is_named(here, fake, caplog):
    fake("echo \"fatal: detected dubious ownership in repository at '$PWD'\" >&2; exit 128")
    assert not any("git" in key for key in git.git_tags())
    assert f"git refuses in {here}: fatal: detected dubious ownership" in caplog.text


def test_a_git_that_does_not_answer_is_ended(here, fake, caplog, monkeypatch):
    """Also where a child of it, which inherits what it writes to, lives on."""
    fake("/bin/sleep 600 & wait")
    monkeypatch.setattr(git, "GIT_TIMEOUT_S", 1.0)
    assert not any("git" in key for key in git.git_tags())
    assert f"git has not answered within 1 s in {here}" in caplog.text
