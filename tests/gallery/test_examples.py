"""The families of algorithms/: each file is short, and the command of its docstring trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.examples import DATA, gallery, small_config

import raysim
from raysim.rules.contract import ALGORITHMS, CLIENT_RULES, SERVER_RULES
from raysim.rules.methods.registry import discover
from raysim.rules.upload_stages import STAGES
from raysim.runs.resume import reopen
from raysim.runs.run import execute
from raysim.tracking.recorder import Untracked

BULYANS_COHORT = 7
"""Fewest clients of a round with one attacker that Bulyan takes."""
EXAMPLES = [pytest.param(example, id=example.path.stem) for example in gallery.examples()]


def test_every_method_of_a_family_has_a_command():
    discover()
    parts = [*CLIENT_RULES.values(), *SERVER_RULES.values(), *STAGES.values(), *ALGORITHMS.values()]
    modules = {getattr(part, "module", part.__module__) for part in parts}
    in_families = {m for m in modules if m.count(".") == 3 and m.startswith("raysim.algorithms.")}
    found = {f"raysim.algorithms.{e.family}.{e.path.stem}" for e in gallery.examples()}
    assert found == in_families


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short(example):
    source = example.path.read_text()
    assert gallery.lines_of_code(source) <= gallery.MAX_LINES_OF_CODE


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_command_of_an_example_trains(example, here: Path, engine: Callable):
    """`prepare` includes the dry run, which compares loop and lanes on two ragged clients."""
    (here / "tiny.py").write_text(DATA)
    cohort = BULYANS_COHORT if example.family == "robust" else 4
    config = small_config(example.command, "./tiny.py:load", cohort)
    done, records = engine(config)
    assert records[-1]["round"] == 2
    assert all(np.isfinite(x).all() for x in done.executor.xs)
    assert done.plan.config.evaluate.clients is None or "clients/accuracy" in records[-1]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_resumes_with_the_same_bits_in_asynchronous_rounds(example, here: Path):
    """Compared are the parameters, and the metrics of clients, who may have models of their own."""
    if example.family == "selection":
        pytest.skip("selecting rules are for synchronous rounds")
    (here / "tiny.py").write_text(DATA)
    k = BULYANS_COHORT if example.family == "robust" else 2
    config = small_config(example.command, "./tiny.py:load", k + 2)
    speeds = {"name": "lognormal"}
    config["schedule"] = {"name": "kasync", "k": k, "concurrency": k + 1, "client_speeds": speeds}
    config |= {"rounds": 3, "checkpoint": {"every": 50}}
    whole = raysim.run(config, tracking=False)
    part = {**config, "run_dir": str(here / "part")}
    raysim.run(part, progress=lambda record: record["round"] == 1, tracking=False)
    resumed = execute(*reopen(here / "part"), tracker=Untracked())
    assert resumed.state_digest == whole.state_digest
    for one, other in zip(whole.history, resumed.history, strict=True):
        names = [name for name in one if name.startswith(("clients/", "train_loss", "server/"))]
        assert all(one[name] == other[name] for name in names), one["round"]


def test_docstrings_and_comments_are_no_lines_of_code():
    source = '"""Text\n\nof two."""\n\nimport os  # comment\n\n# alone\nx = (\n    1,\n    "text",\n)\n"""About x."""\n'
    assert gallery.lines_of_code(source) == 5


@pytest.mark.parametrize("docstring", ["", "Ditto (Li).\n\nText.\n\nRun: raysim run quickstart", "A (B, C 2020).\n\nText."])  # fmt: skip
def test_a_docstring_of_another_form_is_refused(docstring, tmp_path):
    (tmp_path / "ditto.py").write_text(f'"""{docstring}"""\n')
    with pytest.raises(ValueError, match=r"ditto\.py: begin the docstring"):
        gallery.read_example(tmp_path / "ditto.py")
