"""Nets, optimizers and other options on a pretended GPU: they train with the bits of mode loop on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.batteries import small
from support.pretend_gpu import pretended_gpu
from support.programs import program

import raysim
from raysim.errors import ConfigError
from raysim.planning.execution_modes import compare_modes

NETS, RULES = program("gpu_nets"), program("chance_rules")
SGD = {"name": "sgd", "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
OPTIMIZERS = {
    "momentum": {**SGD, "state": "keep"},
    "momentum anew": {**SGD, "dampening": 0.0, "nesterov": True},
    "adam": {"name": "adam", "amsgrad": True, "state": "keep"},
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "rmsprop": {"name": "rmsprop", "centered": True, "momentum": 0.5},
    "adagrad": {"name": "adagrad", "state": "keep"},
}
COSINE = {"name": "cosine", "base_lr": 0.1, "T_max": 3}
TESTS = {"name": "dirichlet", "clients": 8, "alpha": 0.5, "test": {"fraction": 0.25}}

Sections = dict[str, Any]
VARIANTS: dict[str, Sections] = {
    **{f"optimizer {name}": {"local": {"optimizer": keys}} for name, keys in OPTIMIZERS.items()},
    **{
        f"net {net}": {"model": f"NETS:{net}"}
        for net in ("conv", "groups", "lstm", "gru", "attention", "embedding")
    },
    "embedding sgd": {"model": "NETS:embedding", "local": {"optimizer": OPTIMIZERS["momentum"]}},
    "gradients in evaluation mode": {
        "model": "NETS:lstm", "algorithm": None, "client": "NETS:Evaluates", "server": "fedavg"
    },
    "tf32": {"model": "NETS:conv", "local": {"precision": "tf32"}},
    "bf16": {"model": "NETS:conv", "local": {"precision": "bf16"}},
    "bf16 without convolutions": {"local": {"precision": "bf16"}},
    "rounds": {"local": {"lr": COSINE}},
    "steps": {"local": {"lr": {**COSINE, "over": "steps"}}},
    "steps and momentum": {"local": {"lr": {**COSINE, "over": "steps"}, "optimizer": SGD}},
    "accumulation": {"local": {"steps": 5, "accumulate": 2, "max_grad_norm": 1.0}},
    "epochs": {"local": {"steps": None, "epochs": 2, "weight_decay": 0.01}},
    "groups": {
        "groups": {
            "fast": {"share": 0.4, "local": {"steps": 4, "lr": 0.02, "optimizer": OPTIMIZERS["adam"]}},
            "prox": {"share": 0.3, "client": {"name": "fedprox", "mu": 0.1}},
        }
    },
    "attackers": {
        "algorithm": "median",
        "groups": {"attackers": {"share": 0.3, "client": {"name": "sign_flip", "factor": 2.0}}},
    },
    "collusion": {
        "algorithm": "trimmed_mean",
        "groups": {"attackers": {"share": 0.3, "client": "alie"}},
    },
    "label flip": {"groups": {"attackers": {"share": 0.3, "client": "label_flip"}}},
    "personal": {"local": {"personal": "classifier"}},
    "personal norm": {"model": "NETS:conv", "local": {"personal": "norm", "buffers": "personal"}},
    "dp of examples": {
        "model": "mlp", "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 0.5, "delta": 1e-5}
    },
    "dp of clients": {
        "privacy": {
            "unit": "client", "clip_norm": 0.5, "noise_multiplier": 0.5, "delta": 1e-5,
            "adaptive": {"lr": 0.2},
        }
    },
    "topk and qsgd": {
        "local": {"upload": [{"name": "topk", "share": 0.1, "error_feedback": True}, {"name": "qsgd", "bits": 4}]}
    },
    "randk": {"local": {"upload": [{"name": "clip", "norm": 1.0}, {"name": "randk", "share": 0.2}]}},
    "signsgd": {"local": {"upload": "signsgd"}},
    "upload dtype": {"local": {"upload_dtype": "bfloat16"}},
    "forgetting and theory": {"evaluate": {"every": 1, "forgetting": {}}},
    "declared noise": {"algorithm": None, "client": "RULES:Noisy", "server": "fedavg"},
    "augmentation": {"data": {"name": "digits", "augment": True}, "model": "NETS:conv"},
    "kasync": {"schedule": {"name": "kasync", "k": 3, "concurrency": 5}, "algorithm": "fedasync"},
    "buffered": {"schedule": {"name": "buffered", "buffer_size": 3}, "algorithm": "fedbuff"},
    "evaluated clients": {"partition": TESTS, "evaluate": {"every": 2, "clients": {"every": 2, "fine_tune": {"steps": 2}}}},
    "personal models": {"algorithm": "ditto", "partition": TESTS, "evaluate": {"every": 2, "clients": {"every": 2}}},
    "float64": {"dtype": "float64", "model": "NETS:conv"},
}  # fmt: skip
FIRST = ("optimizer adam", "dp of clients")
"""Those of the first tier; test_pretended_gpu.py has methods, personal parts and augmentation."""

OTHER_KERNELS = (
    "net lstm", "net gru", "net attention", "net embedding", "embedding sgd",
    "gradients in evaluation mode", "rounds", "steps", "steps and momentum", "declared noise",
    "bf16", "bf16 without convolutions",
)  # fmt: skip
"""A CPU has other kernels for these layers. In a lane's steps the step size, or the client's number,
is a tensor and no number of Python, so that products with it are rounded otherwise."""


@pytest.fixture(autouse=True)
def rehearsed() -> None:
    """Rehearse nothing: the pretended GPU is one."""


@pytest.fixture
def configured(base, source, monkeypatch) -> Any:
    """configured(resources, **sections) -> a configuration of three rounds."""
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS"):
        # A first setting, which is undone, so that those that a run makes are undone too.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    files = {"NETS": source("nets", NETS), "RULES": source("rules", RULES)}

    def make(gpus: float, **sections: Any) -> Sections:
        local = {"steps": 3, "batch_size": 6, "lr": 0.05, **sections.pop("local", {})}
        resources = {"executor": "inline", "threads": 1, "gpus": gpus}
        algorithm = sections.pop("algorithm", "fedavg")
        config = {
            **base, "algorithm": algorithm and small(algorithm), "rounds": 3, "local": local,
            "resources": resources, "batching": {"mode": "lanes" if gpus else "loop", "size": 3},
            "model": {"name": "mlp", "hidden": [12]}, "checkpoint": {"every": 0},
            "schedule": {"name": "sync", "cohort": 6},
            "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5},
            "evaluate": {"every": 3}, "run_dir": f"{base['run_dir']}{gpus:g}", **sections,
        }  # fmt: skip
        config["local"] = {key: value for key, value in local.items() if value is not None}
        text = repr(config)
        for name, path in files.items():
            text = text.replace(f"{name}:", f"{path}:")
        return eval(text)

    return make


def computed(result: raysim.RunResult) -> list[dict[str, float]]:
    """Return the metrics of all rounds that do not depend on the machine."""
    return [
        {name: value for name, value in record.items() if not name.startswith("system/")}
        for record in result.history
    ]


def assert_same_bits(a: raysim.RunResult, b: raysim.RunResult) -> None:
    assert a.digest == b.digest
    np.testing.assert_equal(computed(a), computed(b))


@pytest.mark.parametrize(
    "variant",
    [*FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in VARIANTS if name not in FIRST)],
)  # fmt: skip
def test_a_variant_on_a_gpu(variant, configured):
    on_cpu = raysim.run(configured(0.0, **VARIANTS[variant]), tracking=False)
    with pretended_gpu() as gpu:
        on_gpu = raysim.run(configured(1.0, **VARIANTS[variant]), tracking=False)
        assert gpu.replays and not gpu.faults
        if variant not in OTHER_KERNELS:
            assert_same_bits(on_cpu, on_gpu)
            return
        uncaptured = configured(1.0, **VARIANTS[variant])
        uncaptured["batching"]["capture"] = False
        uncaptured["run_dir"] += "-uncaptured"
        assert_same_bits(raysim.run(uncaptured, tracking=False), on_gpu)
    # PyTorch computes other operations in bfloat16, which has 8 bits, on a GPU than on a CPU.
    tolerances = {"rtol": 1e-2, "atol": 5e-3} if "bf16" in variant else {"rtol": 1e-4, "atol": 1e-5}
    for name, expected in on_cpu.state_dict.items():
        np.testing.assert_allclose(on_gpu.state_dict[name], expected, **tolerances)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_parts_that_a_step_leaves_alone_keep_their_count(optimizer, configured):
    """The net asks for a value, so that its steps are not captured but use the lane's memory."""
    sections = {"model": "NETS:two_heads", "local": {"optimizer": OPTIMIZERS[optimizer]}}
    on_cpu = raysim.run(configured(0.0, **sections), tracking=False)
    with pretended_gpu() as gpu:
        on_gpu = raysim.run(configured(1.0, **sections), tracking=False)
    assert not gpu.faults
    assert_same_bits(on_cpu, on_gpu)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["scaffold", "fedhist"])
def test_a_resumed_run_on_a_gpu(algorithm, configured):
    sections = {
        "algorithm": algorithm, "checkpoint": {"every": 1}, "model": "NETS:conv",
        "local": {"optimizer": OPTIMIZERS["momentum"]} if algorithm == "fedhist" else {},
    }  # fmt: skip
    with pretended_gpu() as gpu:
        whole = raysim.run(configured(1.0, **sections), tracking=False)
        config = {**configured(1.0, **sections), "run_dir": f"{whole.run_dir}-half"}
        half = raysim.run({**config, "rounds": 1}, tracking=False)
        resumed = raysim.resume(half.run_dir, {"rounds": 3})
    assert not gpu.faults and whole.digest == resumed.digest


def test_a_layer_without_a_deterministic_kernel_is_named_on_a_gpu(configured):
    with pretended_gpu(), pytest.raises(ConfigError, match=r"layer 1 \(AdaptiveAvgPool2d\)"):
        raysim.run(configured(1.0, model="NETS:pooled"), tracking=False)


@pytest.mark.long
def test_the_doctor_on_a_gpu(configured):
    with pretended_gpu() as gpu:
        comparison = compare_modes(rounds=1)
    assert comparison.agrees and comparison.captured and not gpu.faults
    assert comparison.difference == 0
