"""The table of research tasks: its files have the lines of code that it says, its keys are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.documents import blocks
from support.examples import gallery

from raysim.config import explain, loading
from raysim.prepare import resolve
from raysim.rules.methods import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "examples" / "research_tasks.md").read_text().splitlines()
    if line.startswith("|")
][2:]
FILE = re.compile(r"\[`(\w+\.py)`\]\(([^)]+)\)")
KEYS = re.compile(r"(?<!\[)`([^`]+=[^`]+)`")


def _source(name: str, target: str) -> str:
    if not target.startswith("#"):
        page = DOCS / "examples" / target
        return next(block.text for block in blocks(page) if block.file == name)
    (path,) = gallery.FOLDER.glob(f"*/{name}")
    assert target == f"#{gallery.read_example(path).label}"
    return path.read_text()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_row_has_the_lines_of_its_files(row):
    files = FILE.findall(row[2])
    counted = [str(gallery.lines_of_code(_source(*file))) for file in files]
    assert ", ".join(counted) == ("" if not files and row[3] in ("", "0") else row[3])


def test_each_file_of_the_gallery_has_a_row():
    assert {e.path.name for e in gallery.examples()} <= set(re.findall(r"\w+\.py", str(ROWS)))


@pytest.mark.parametrize(
    "keys", [keys for row in ROWS if "](" not in row[2] for keys in KEYS.findall(row[2])]
)
def test_the_keys_of_a_row_are_valid(keys):
    overrides = re.split(r" (?=[\w.]+=)", keys)
    explain.validate(
        loading.read_config("quickstart", overrides, resolve.keys, registry.algorithm_defaults)
    )
