"""What must hold of the command that a run is said to come from: it can be typed again, and shows
no password."""

from __future__ import annotations

import inspect
import sys
from importlib import metadata
from pathlib import Path

import pytest
from support.configurations import DIGITS_MLP

import raysim
from raysim.rules.contract import ALGORITHMS
from raysim.runs.provenance import command_line, installed_packages


@pytest.mark.parametrize(
    ("argv", "orig_argv", "command"),
    [
        (["/usr/bin/raysim", "run", "my file.yaml"], [], "raysim run 'my file.yaml'"),
        (["/lib/raysim/__main__.py", "run", "x"], [], "raysim run x"),
        (["train.py", "3"], ["/usr/bin/python3", "train.py", "3"], "python train.py 3"),
        (["/opt/ipykernel_launcher.py", "-f", "x.json"], [], ""),
        (["/ray/default_worker.py", "--node-ip-address=1.2.3.4"], [], ""),
        (["raysim", "tracking.uri=http://me:secret@host"], [], "raysim tracking.uri=http://host"),
    ],
)
def test_command_line(monkeypatch, argv, orig_argv, command):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert command_line() == command


def test_installed_packages_are_a_requirements_file():
    lines = installed_packages().splitlines()
    assert len(lines) > 20 and all(line.count("==") == 1 for line in lines)
    assert f"pytest=={metadata.version('pytest')}" in lines


def test_a_resumed_run_whose_method_has_changed_says_so(tmp_path, caplog, monkeypatch):
    """A method is edited in `algorithms/` between two sessions."""
    changed = tmp_path / "fedprox.py"
    file = inspect.getfile
    run = raysim.run(
        DIGITS_MLP, algorithm="fedprox", rounds=1, tracking=False, run_dir=str(tmp_path / "run")
    )
    raysim.resume(run.run_dir, rounds=2)
    assert "code of this method" not in caplog.text
    changed.write_text(Path(file(ALGORITHMS["fedprox"].client)).read_text() + "# mu is doubled\n")
    monkeypatch.setattr(
        inspect,
        "getfile",
        lambda c: str(changed) if file(c).endswith("algorithms/fedprox.py") else file(c),
    )
    raysim.resume(run.run_dir, rounds=3)
    assert "raysim's code of this method has changed since the last checkpoint" in caplog.text
