"""All processes of a run must have the same source code of raysim; otherwise the run ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import basic, written

import raysim
from raysim.distributed.cluster.versions import SourceCode, check_source_code, source_code
from raysim.errors import ConfigError

PACKAGE = Path(raysim.__file__).parent


def copied(folder: Path) -> Path:
    """A copy of the package, as in a checkout where a command is started."""
    kept_out = shutil.ignore_patterns("__pycache__", "*.jsonl", "*.png", "*.svg")
    return Path(shutil.copytree(PACKAGE, folder / "raysim", ignore=kept_out))


@pytest.mark.ray
def test_an_actor_with_other_source_code_of_raysim_is_refused(tmp_path, uri):
    """Ray's workers find a package in the folder of the command before the installed one."""
    copy = copied(tmp_path)
    resources = {"executor": "ray", "actors": 1, "cpus": 1}
    config = written(tmp_path, basic(tmp_path, uri) | {"resources": resources, "rounds": 1})
    command = [sys.executable, "-P", "-m", "raysim", "run", config.name]
    with (copy / "version.py").open("a") as file:
        file.write("# another text\n")
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    line = ran.stderr.splitlines()[-1]
    assert "the ServerActor has another raysim" in line
    assert str(copy) in line and str(PACKAGE) in line and "pip install -e ." in line


def test_the_source_code_is_that_of_all_modules_in_any_folder(tmp_path, monkeypatch):
    here = source_code()
    assert here.folder == str(PACKAGE)
    monkeypatch.setattr(
        "raysim.distributed.cluster.versions.__file__",
        str(copied(tmp_path) / "distributed/cluster/versions.py"),
    )
    there = source_code.__wrapped__()
    assert there.digest == here.digest and there.folder == str(tmp_path / "raysim")
    (tmp_path / "raysim/algorithms/fedreg.py").write_text("")
    assert source_code.__wrapped__().digest != here.digest


def test_files_that_were_changed_meanwhile_are_told_from_another_folder():
    here = SourceCode("/here/raysim", "1")
    check_source_code("the ServerActor", here, here)
    with pytest.raises(
        ConfigError, match="files were changed since this process started, so start"
    ):
        check_source_code("the ServerActor", SourceCode("/here/raysim", "2"), here)
    with pytest.raises(ConfigError, match="in /there/raysim, than the command, in /here/raysim"):
        check_source_code("the ServerActor", SourceCode("/there/raysim", "2"), here)
