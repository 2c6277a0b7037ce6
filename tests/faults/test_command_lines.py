"""Any command line does what it says, or is refused soon, in a short message, and leaves nothing
behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import SUPPORT

pytestmark = pytest.mark.ray


def explored(cases: int, seed: int, folder: Path) -> dict:
    script = SUPPORT / "command_lines.py"
    done = subprocess.run(
        [sys.executable, str(script), str(cases), str(seed), str(folder)], stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


def test_twenty_command_lines_do_what_they_say_or_are_refused(tmp_path):
    """The short version. How long a command takes counts in the long version only, on a quiet
    machine."""
    found = explored(20, 1, tmp_path)
    wrong = [case for case in found["wrong"] if case["problem"] != "too much time"]
    assert found["cases"] == 20 and not wrong, json.dumps(wrong, indent=1)


@pytest.mark.long
def test_two_thousand_command_lines_do_what_they_say_or_are_refused(tmp_path):
    found = explored(2000, 0, tmp_path)
    assert found["cases"] == 2000 and not found["wrong"], json.dumps(found["wrong"], indent=1)
