"""`local.precision`: which passes compute in it, and which do not."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import raysim
from raysim.models.precision import allow_tf32, tf32

ON, OFF = (True, True), (False, False)
OUTSIDE = (False, True)
"""PyTorch's defaults of matrix products and of cuDNN, which hold where a run is prepared."""

PATH = Path(__file__).parents[1] / "support/programs/tf32_seen.py"


@pytest.fixture
def seen(base):
    """seen(precision, **sections): whether TF32 was allowed in the passes of a run of one round."""

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = OUTSIDE

    def run(precision: str, **sections: Any) -> dict[str, set[tuple[bool, bool]]]:
        config = {
            **base, "rounds": 1, "algorithm": "fedavg", "model": f"{PATH}:Net",
            "schedule": {"cohort": 2}, "evaluate": {"every": 1},
            "local": {"steps": 2, "batch_size": 6, "precision": precision},
            **sections,
        }  # fmt: skip
        raysim.run(config, tracking=False)
        (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", None) == str(PATH)]
        found = {where: values - {OUTSIDE} for where, values in module.SEEN.items()}
        for values in module.SEEN.values():
            values.clear()
        return found

    return run


WAYS: dict[str, dict[str, Any]] = {
    "loop": {"batching": {"mode": "loop"}},
    "lanes": {"batching": {"mode": "lanes"}},
    "pooled": {"batching": {"mode": "pooled"}, "algorithm": "fedsgd"},
    "single examples": {
        "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5},
        "batching": {"mode": "loop"},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_tf32_is_allowed_in_both_passes_of_training_and_in_nothing_else(way, seen):
    sections = dict(WAYS[way])
    if way == "pooled":
        sections["local"] = {"steps": 1, "batch_size": "full", "precision": "tf32"}
    found = seen("tf32", **sections)
    assert found["backward"] == found["forward"] == {ON}
    assert found["eval"] == {OFF}


@pytest.mark.parametrize("rule", ["Rule", "Inputs"])
def test_a_rule_itself_computes_in_float32(rule, seen):
    found = seen("tf32", algorithm=None, client=f"{PATH}:{rule}", server="fedavg")
    assert found["rule"] == {OFF}
    assert found["backward"] == found["forward"] == {ON}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_other_precisions_leave_tf32_off(precision, seen):
    found = seen(precision)
    assert found["backward"] == found["forward"] == found["eval"] == {OFF}


def test_the_process_gets_back_what_it_had(seen):
    seen("tf32")
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_settings_of_single_operations_are_kept_and_hold_nowhere():
    """PyTorch refuses to read `allow_tf32` after a program has set `fp32_precision`."""
    backends = torch.backends
    operations = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn  # pyright: ignore
    before = [of.fp32_precision for of in operations]
    try:
        for mine in (["tf32"] * 3, ["ieee", "tf32", "ieee"]):
            for of, precision in zip(operations, mine, strict=True):
                of.fp32_precision = precision
            restore = allow_tf32(False)
            assert [of.fp32_precision for of in operations] == ["ieee"] * 3
            assert not backends.cuda.matmul.allow_tf32 and not backends.cudnn.allow_tf32
            with tf32():
                assert [of.fp32_precision for of in operations] == ["tf32"] * 3
            assert [of.fp32_precision for of in operations] == ["ieee"] * 3
            restore()
            assert [of.fp32_precision for of in operations] == mine
    finally:
        for of, precision in zip(operations, before, strict=True):
            of.fp32_precision = precision


def test_a_cpu_says_that_it_has_no_tf32(seen, caplog):
    with caplog.at_level(logging.WARNING, "raysim"):
        seen("tf32")
    assert "local.precision: only GPUs have TF32" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_gpu_gives_the_same_bits_again_and_others_than_float32(precision, base):
    def digest(chosen: str) -> str:
        config = {
            **base, "rounds": 2, "algorithm": "fedavg", "model": "lenet", "schedule": {"cohort": 2},
            "local": {"steps": 2, "batch_size": 6, "precision": chosen},
            "resources": {"executor": "inline", "gpus": 1},
        }  # fmt: skip
        return raysim.run(config, tracking=False).digest

    assert digest(precision) == digest(precision) != digest("float32")
