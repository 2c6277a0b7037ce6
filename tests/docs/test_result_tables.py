"""Tables of results are what their commands print: a README's table has the lines that the report
makes from the ledger beside it, and configs/CLAIMS.md the verdicts.

`python tests/docs/test_result_tables.py PAGE` writes the tables of a README anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
COMMAND = re.compile(r"^raysim (report (?:table|claims) .*--ledger configs/[^#\n]*)", re.M)
COMMANDS = [
    (path, found.strip())
    for path in sorted(CONFIGS.glob("*/README.md"))
    for found in COMMAND.findall(path.read_text())
]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[c for _, c in COMMANDS])
def test_a_table_is_what_its_command_prints(page: Path, command: str, raysim_: Callable):
    said = raysim_(*shlex.split(command.replace(" configs/", f" {CONFIGS}/")))
    assert said.code == 0, said.err
    printed = [line for line in said.out.splitlines() if line.startswith("| ")]
    assert len(printed) > 2
    place, kept = (
        (CONFIGS / "CLAIMS.md", _of_a_claim) if "report claims" in command else (page, str)
    )
    written = {kept(line) for line in place.read_text().splitlines()}
    missing = [line for line in printed if kept(line) not in written]
    assert not missing, f"{place}: raysim {command} prints\n" + "\n".join(missing)


def _of_a_claim(line: str) -> str:
    """Return a line of claims without the names of the sides, which may be shorter on a page, and
    without the column of figures."""
    says, *cells = line.strip("| ").split(" | ")
    figures = [re.sub(r"^.*?(?=[>\d.]+[\d. ±]* (?:%|rounds))", "", cell) for cell in cells[:6]]
    return " | ".join([says, *figures])


def test_there_are_such_tables():
    assert len(COMMANDS) > 8


def write_tables(page: Path) -> None:
    """Replace each table of a README by what the command above it prints."""
    text = page.read_text()
    lines = text.splitlines()
    end = 0
    for command in COMMAND.findall(text):
        if command.startswith("report claims"):
            continue
        raysim = [sys.executable, "-m", "raysim", *shlex.split(command)]
        printed = subprocess.run(raysim, capture_output=True, text=True, check=True).stdout
        table = [line for line in printed.splitlines() if line.startswith("|")]
        # Several commands of a block have their tables below it, in the same order.
        start = next(i for i, line in enumerate(lines) if line.startswith(f"raysim {command}"))
        begin = next(i for i in range(max(start, end), len(lines)) if lines[i].startswith("|"))
        end = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
        lines[begin:end] = table
        end = begin + len(table)
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]))
