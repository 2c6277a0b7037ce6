"""Next-token characters of natural users, as docs/examples/text/characters.py reads them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.examples import gallery

import raysim
from raysim.data import import_torchvision
from raysim.prepare.resolve import prepare

CHARACTERS = Path(__file__).parents[2] / "docs/examples/text/characters.py"
NETS = {
    "lstm": {"name": "lstm", "embedding": 4, "hidden": 8, "layers": 1},
    "transformer": {"name": "transformer", "width": 8, "heads": 2, "layers": 1},
}


@pytest.fixture
def text(base: dict[str, Any]) -> dict[str, Any]:
    """Three users with eight windows of eight characters each."""
    return {
        **base,
        "data": {
            "name": f"{CHARACTERS}:load",
            "modules": "abc csv queue",
            "length": 8,
            "windows": 10,
        },
        "task": "next_token",
        "partition": "natural",
        "algorithm": "fedavg",
        "local": {"steps": 4, "batch_size": 8, "lr": 1.0},
        "schedule": {"cohort": 3},
        "evaluate": {"every": 1},
        "rounds": 3,
        "dtype": "float64",
    }


def test_a_user_has_the_characters_of_one_module(text: dict[str, Any]):
    plan = prepare(text | {"model": NETS["lstm"]})
    assert len(plan.clients) == 3 and plan.clients.sizes.tolist() == [8, 8, 8]
    assert plan.dataset.group_names == ("abc", "csv", "queue")
    x, y = plan.dataset.x[8], plan.dataset.y[8]
    csv = inspect.getsource(__import__("csv"))
    assert "".join(map(chr, x.tolist())) == csv[:8] and "".join(map(chr, y.tolist())) == csv[1:9]
    assert np.concatenate([plan.dataset.x, plan.dataset.x_test]).max() < 128
    assert gallery.lines_of_code(CHARACTERS.read_text()) <= gallery.MAX_LINES_OF_CODE
    assert "partition={name: natural" in (
        ast.get_docstring(ast.parse(CHARACTERS.read_text())) or ""
    )


@pytest.mark.parametrize("net", NETS)
def test_text_is_learned_in_both_modes_and_resumed(net: str, text: dict[str, Any], tmp_path: Path):
    text |= {"model": NETS[net]}
    done = {
        mode: raysim.run(
            text | {"batching": {"mode": mode, "size": 2}},
            run_dir=str(tmp_path / mode),
            tracking=False,
        )
        for mode in ("loop", "lanes")
    }
    for result in done.values():
        assert result.history[-1]["perplexity"] < 0.9 * result.history[0]["perplexity"]
    assert torch.allclose(done["loop"].parameters, done["lanes"].parameters, rtol=1e-9, atol=1e-12)
    text |= {"batching": {"mode": "lanes", "size": 2}, "rounds": 1}
    part = raysim.run(text, run_dir=str(tmp_path / "part"), tracking=False)
    assert raysim.resume(part.run_dir, {"rounds": 3}).digest == done["lanes"].digest


ADAPTED = """
from peft import LoraConfig, get_peft_model
from raysim.models.nets.sequence import transformer

def adapted(shape, classes):
    net = transformer(shape, classes, width=8, heads=2, layers=1)
    return get_peft_model(net, LoraConfig(r=2, target_modules=["project", "out"]))
"""


@pytest.mark.ray
@pytest.mark.parametrize("net", ["lstm", pytest.param("adapted", marks=pytest.mark.long)])
def test_actors_learn_the_same_from_text(
    net: str, text: dict[str, Any], tmp_path: Path, recycled_actors: None
):
    """`adapted` has adapters of peft on a frozen base; to import peft takes each process seconds."""
    if net == "adapted":
        import_torchvision()
        pytest.importorskip("peft")
        (tmp_path / "adapted.py").write_text(ADAPTED)
    text |= {"model": NETS.get(net, f"{tmp_path}/adapted.py:adapted")}
    digests = {
        raysim.run(
            text, run_dir=str(tmp_path / resources["executor"]), resources=resources, tracking=False
        ).digest
        for resources in (
            {"executor": "inline", "threads": 1},
            {"executor": "ray", "actors": 2, "threads": 1},
        )
    }
    assert len(digests) == 1
