"""Output that nobody takes: a run is trained to its end, and what was not written is in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.forked import Forked
from support.processes import basic, run_in, written

pytestmark = pytest.mark.ray

DISTURBED = """
import os, sys
{disturb}
import raysim.cli
raysim.cli.console()
"""

CASES = {
    "the reader is gone": """
read, write = os.pipe()
os.dup2(write, 1)
os.close(read)
os.close(write)
""",
    "the disk is full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "both disks are full": """
full = os.open('/dev/full', os.O_WRONLY)
os.dup2(full, 1)
os.dup2(full, 2)
""",
    "standard error is closed": "os.close(2); sys.stderr = None",
    "all is closed": "os.close(0); os.close(1); os.close(2); sys.stdout = sys.stderr = None",
}


def disturbed(disturb: str, *arguments: object, cwd: Path) -> tuple[int, str]:
    """Run `raysim ARGUMENTS` with disturbed output; return the exit code and what is readable."""
    code = DISTURBED.format(disturb=disturb)
    return Forked("-c", code, *arguments, cwd=cwd).ended()


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_output_nobody_takes_is_finished(case: str, tmp_path: Path, uri: str) -> None:
    config = written(tmp_path, basic(tmp_path, uri) | {"rounds": 3})
    code, output = disturbed(CASES[case], "run", config, "--json", cwd=tmp_path)
    assert code == 0 and "Traceback" not in output, output
    run = run_in(uri, tmp_path.name)
    assert run.info.status == "FINISHED"
    rest = tmp_path / "run" / "output.txt"
    if case == "standard error is closed":  # what is written to it begins with the first warning
        assert json.loads(output.splitlines()[-1])["digest"] == run.data.tags["digest"]
        return
    text = rest.read_text()
    assert json.loads(text.splitlines()[-1])["digest"] == run.data.tags["digest"]
    if case in ("the reader is gone", "the disk is full"):
        assert f"the rest is in {rest}" in output


def test_an_encoding_without_a_character_costs_nothing(tmp_path: Path, uri: str) -> None:
    config = written(tmp_path, basic(tmp_path, uri) | {"rounds": 2, "name": "ε-greedy"})
    code, output = disturbed(
        "sys.stdout.reconfigure(encoding='ascii'); sys.stderr.reconfigure(encoding='ascii')",
        "run",
        config,
        cwd=tmp_path,
    )
    assert code == 0 and "digest" in output and "Traceback" not in output, output
    assert "\\u03b5-greedy" in output


def test_other_commands(tmp_path: Path) -> None:
    """One whose result is lost fails; the end of a pipe is none of its business."""
    code, output = disturbed(CASES["the disk is full"], "list", "algorithms", cwd=tmp_path)
    assert code == 1 and "standard output cannot be written (No space left on device)" in output
    assert disturbed(CASES["the reader is gone"], "list", "algorithms", cwd=tmp_path) == (0, "")
