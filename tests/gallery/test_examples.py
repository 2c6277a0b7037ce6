"""The gallery of docs/examples: each file is short, and its command trains, in loop as under vmap."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.examples import DATA, gallery, small_config
from support.oracle_cases import distance

BULYANS_COHORT = 7
"""Fewest clients of a round with one attacker that Bulyan takes."""
EXAMPLES = [pytest.param(example, id=example.path.stem) for example in gallery.examples()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short(example):
    source = example.path.read_text()
    assert gallery.lines_of_code(source) <= gallery.MAX_LINES_OF_CODE
    assert ";" not in source.partition("Run: ")[2].partition('"""')[2], "one statement a line"


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_command_of_an_example_trains(example, here: Path, engine: Callable):
    """`prepare` includes the dry run, which compares loop and vmap on two ragged clients."""
    for path in example.path.parent.glob("*.*"):
        shutil.copy(path, here)
    (here / "tiny.py").write_text(DATA)
    cohort = BULYANS_COHORT if example.family == "robust" else 4
    config = small_config(example.command, "./tiny.py:load", cohort)
    done, records = engine(config)
    assert records[-1]["round"] == 2
    assert all(np.isfinite(x).all() for x in done.executor.xs)
    assert done.plan.config.evaluate.clients is None or "clients/accuracy" in records[-1]
    other = "loop" if done.plan.mode == "vmap" else "vmap"
    again, _ = engine({**config, "batching": {**config["batching"], "mode": other}})
    assert distance(again.executor.xs, done.executor.xs) < 1e-8


def test_docstrings_and_comments_are_no_lines_of_code():
    source = '"""Text\n\nof two."""\n\nimport os  # comment\n\n# alone\nx = (\n    1,\n    "text",\n)\n"""About x."""\n'
    assert gallery.lines_of_code(source) == 5


@pytest.mark.parametrize("docstring", ["", "Ditto (Li).\n\nText.\n\nRun: raysim run quickstart", "A (B, C 2020).\n\nText."])  # fmt: skip
def test_a_docstring_of_another_form_is_refused(docstring, tmp_path):
    (tmp_path / "ditto.py").write_text(f'"""{docstring}"""\n')
    with pytest.raises(ValueError, match=r"ditto\.py: begin the docstring"):
        gallery.read_example(tmp_path / "ditto.py")
