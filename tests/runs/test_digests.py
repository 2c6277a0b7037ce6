"""Record of what short runs compute, so that a change of the code's structure cannot change a
result unseen.

Some methods have no global model: x stays at its initial value. Of their runs, what server and
clients keep is recorded too.

`digests.json` holds two things for each run. `digests` maps a platform (torch build, CPU
capability, CPU vendor) to the sha256 of the final parameters: on a platform that is recorded the
bits must be the same. `projections` holds four numbers, the final parameters times fixed random
vectors: they must agree on every platform, to a tolerance.

A change that is meant to change results records them anew, and says so in its message:

    python tests/runs/test_digests.py [CASE ...]
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raysim
from raysim.engine.inline_executor import Inline
from raysim.engine.loop import Engine
from raysim.prepare.resolve import prepare
from raysim.rules.contract import ALGORITHMS
from raysim.rules.methods.registry import discover
from raysim.runs.result import parameters_digest
from raysim.runs.resume import resume
from raysim.server.central_server import evaluated_params
from raysim.spelling import did_you_mean
from raysim.system.cpu_kind import cpu_kind

discover()

FILE = Path(__file__).with_name("digests.json")
TOLERANCE = 1e-6
"""Difference of projections between platforms, as a share of the parameters' norm. Between vector
instruction sets 1e-7 was seen at most, in float32 without BatchNorm. The gradient through BatchNorm
over two examples amplifies rounding without bound, so nets with BatchNorm run in float64."""
TOLERANCE_OF_TIES = 1e-3
"""The same where max-pooling follows BatchNorm: rounding decides which of two equal values passes
the gradient."""

RULES = """
from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, ServerRule


@dataclass(frozen=True)
class Sluggish(ClientRule):
    decay: float = 0.5

    def state(self, task):
        return {"v": torch.zeros(task.x0.numel())}

    def init(self, shared, client_state, data, task):
        return {"v": client_state["v"]}

    def step(self, shared, state, batch, task):
        v = self.decay * state["v"] + task.grad(state["w"], batch)
        return {**state, "v": v, "w": state["w"] - task.lr * v}

    def finish(self, shared, state, client_state, data, task):
        report, client_state = super().finish(shared, state, client_state, data, task)
        return report, {"v": state["v"]}


@dataclass(frozen=True)
class Halfway(ServerRule):
    def update(self, state, reports):
        return {"x": state["x"] - 0.5 * self.lr * reports.mean("delta")}
"""
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, classes):
        layers = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, classes)
        super().__init__(nn.Flatten(), *layers)
"""
FLOAT64 = {"dtype": "float64"}
BASE: dict[str, Any] = {
    "data": "digits",
    "partition": {"name": "dirichlet", "clients": 20, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [12]},
    "local": {"batch_size": 8, "lr": 0.2},
    "resources": {"executor": "inline", "threads": 1},
    "evaluate": {"every": 0},
    "rounds": 5,
    "seed": 3,
}
KASYNC = {"name": "kasync", "k": 4, "concurrency": 12, "client_speeds": {"name": "lognormal"}}
BUFFERED = {"name": "buffered", "buffer_size": 4, "concurrency": 8, "client_speeds": "two_speed"}


def cases() -> dict[str, dict[str, Any]]:
    """The runs by name: changes to BASE."""
    sync = {"schedule": {"cohort": 5}}
    own_schedule = {name for name, one in ALGORITHMS.items() if "schedule" in one.defaults}
    found = {}
    for name, one in sorted(ALGORITHMS.items()):
        if one.client.needs_public_data or one.server.needs_public_data:
            continue  # the digits have none
        case = {"algorithm": name} | ({} if name in own_schedule else sync)
        if name == "bulyan":
            case["schedule"] = {"cohort": 7}
        if one.defaults.get("local", {}).get("buffers") == "personal":
            case |= {"model": "{net}:Net", **FLOAT64}
        found[f"method {name}"] = case
    found |= {
        "kasync gradma": {"algorithm": "gradma", "schedule": KASYNC},
        "kasync scaffold": {
            "algorithm": "scaffold",
            "schedule": KASYNC | {"client_dropout": {"rate": 0.2}},
        },
        "buffered fedreg": {"algorithm": "fedreg", "schedule": BUFFERED},
        "buffered fedbuff": {"algorithm": "fedbuff", "schedule": BUFFERED | {"max_staleness": 2}},
        "sync deadline": {
            "algorithm": "mifa",
            "schedule": {"cohort": 8, "deadline": 1.2, "client_speeds": {"name": "lognormal"}},
        },
        "loop tinynn gradma": {
            "algorithm": "gradma",
            "model": "tinynn",
            "dtype": "float64",
            "batching": {"mode": "loop"},
        }
        | sync,
        "loop lenet": {"algorithm": "fedavgm", "model": "lenet", "batching": {"mode": "loop"}}
        | sync,
        "pooled fedsgd": {"algorithm": "fedsgd", "batching": {"mode": "pooled"}} | sync,
        "own rules": {"client": "{rules}:Sluggish", "server": "{rules}:Halfway"} | sync,
        "own net": {"algorithm": "scaffold", "model": "{net}:Net", "dtype": "float64"} | sync,
        "private": {
            "algorithm": "fedavg",
            "privacy": {"max_grad_norm": 1.0, "noise_multiplier": 0.5},
        }
        | sync,
        "rounded uploads": {
            "algorithm": "fedavg",
            "local": {"batch_size": 8, "lr": 0.05, "upload_dtype": "bfloat16"},
        }
        | sync,
        "epochs and schedule": {
            "algorithm": "fedprox",
            "local": {
                "epochs": 2,
                "batch_size": "full",
                "lr": [[0, 0.1], [2, 0.01]],
                "weight_decay": 0.01,
                "max_grad_norm": 1.0,
            },
        }
        | sync,
        "float64": {"algorithm": "gradma", "dtype": "float64"} | sync,
        "virtual": {
            "algorithm": "fedavg",
            "partition": {"name": "virtual", "clients": 1000, "samples": 11},
        }
        | sync,
    }
    return found


CASES = cases()
UNMOVED = (
    "apple", "cfl", "fedamp", "feddistill", "fedfomo", "fedproto", "ifca", "local_only", "pfedhn",
)  # fmt: skip
"""Methods that leave x at its initial value."""


def kept(engine: Engine) -> torch.Tensor:
    """Return what server and clients keep at the end of a run, in one vector.

    It has the floating-point tensors of the server's state except x, and those of each client.
    """
    tensors = {k: v for k, v in engine.final.items() if k.startswith("state/") and k != "state/x"}
    for client in range(len(engine.plan.clients)):
        for name, values in (engine.state.store.get(client) or {}).items():
            tensors[f"client {client:06} {name}"] = torch.from_numpy(values)
    floating = [tensors[k].flatten() for k in sorted(tensors) if tensors[k].is_floating_point()]
    return torch.cat(floating)


def results(name: str, run: Engine) -> dict[str, torch.Tensor]:
    """Return what is recorded of the finished run of a case, by the name in the record."""
    method = name.removeprefix("method ")
    found = {name: evaluated_params(run.final)}
    if method in UNMOVED:
        found[f"kept {method}"] = kept(run)
    return found


def configuration(case: dict[str, Any], folder: Path, run_dir: Path) -> dict[str, Any]:
    """Return a case's whole configuration; its files and the MLflow database that all cases share
    are in `folder`."""
    files = {"rules": folder / "digest_rules.py", "net": folder / "digest_net.py"}
    files["rules"].write_text(RULES)
    files["net"].write_text(NET)
    named = {k: v.format(**files) if isinstance(v, str) else v for k, v in case.items()}
    tracking = {"uri": f"sqlite:///{folder}/mlflow.db"}
    return {
        **BASE,
        "checkpoint": {"every": 0},
        "run_dir": str(run_dir),
        "tracking": tracking,
        **named,
    }


def this_platform() -> str:
    """The kind of machine on which bits are promised to be the same."""
    file = Path("/proc/cpuinfo")
    pairs = re.findall(
        r"^([^\t:]+)\s*: (.*)$", file.read_text() if file.exists() else "", re.MULTILINE
    )
    cpu = dict(reversed(pairs))  # the first core's
    kind = (
        " ".join(cpu[key] for key in ("vendor_id", "cpu family") if key in cpu)
        or platform.machine()
    )
    return f"torch {torch.__version__}, {cpu_kind()}, {kind}"


def projection(x: torch.Tensor) -> list[float]:
    """Four inner products with fixed random vectors of length one."""
    z = np.random.default_rng(0).standard_normal((4, len(x)))
    return [float(v) for v in (z / np.linalg.norm(z, axis=1, keepdims=True)) @ x.double().numpy()]


RECORD = "python tests/runs/test_digests.py"
"""Command that records all runs."""


def check(name: str, x: torch.Tensor) -> None:
    """Compares a run's final parameters with what is recorded for the case of this name."""
    recorded = json.loads(FILE.read_text())
    assert name in recorded["projections"], f"'{name}' is not recorded: {RECORD}"
    known = recorded["digests"].get(this_platform(), {})
    if name in known:
        assert parameters_digest(x) == known[name], f"'{name}' computes other bits than recorded"
    scale = float(x.double().norm())
    differences = np.subtract(projection(x), recorded["projections"][name])
    tolerance = TOLERANCE_OF_TIES if "tinynn" in name else TOLERANCE
    assert np.abs(differences).max() <= tolerance * scale, (
        f"'{name}' computes something else than recorded"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files and the MLflow database that all cases share."""
    return tmp_path_factory.mktemp("digests")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", CASES)
def test_the_engine_computes_what_is_recorded(name, engine, folder: Path, tmp_path: Path):
    run, _ = engine(configuration(CASES[name], folder, tmp_path / "run"))
    for recorded, computed in results(name, run).items():
        check(recorded, computed)


def test_methods_that_leave_x_are_known():
    """Their digests say nothing, so that of what is kept is recorded."""
    projections = json.loads(FILE.read_text())["projections"]
    methods = {name for name in ALGORITHMS if f"method {name}" in projections}
    initial = projections["method local_only"]
    assert {name for name in methods if projections[f"method {name}"] == initial} == {*UNMOVED}


def test_a_run_computes_what_is_recorded(folder: Path, tmp_path: Path):
    done = raysim.run(configuration(CASES["method fedavg"], folder, tmp_path / "run"))
    assert done.digest == parameters_digest(done.parameters)
    check("method fedavg", done.parameters)


def test_a_resumed_run_computes_what_is_recorded(folder: Path, tmp_path: Path):
    config = configuration(CASES["method gradma"], folder, tmp_path / "run") | {
        "checkpoint": {"every": 1}
    }
    stopped = raysim.run(config | {"rounds": 2})
    check("method gradma", resume(stopped.run_dir, {"rounds": BASE["rounds"]}).parameters)


@pytest.mark.ray
def test_two_actors_compute_what_is_recorded(folder: Path, tmp_path: Path, recycled_actors: None):
    config = configuration(CASES["method gradma"], folder, tmp_path / "run")
    resources = {"executor": "ray", "actors": 2, "threads": 1}
    check("method gradma", raysim.run(config | {"resources": resources}).parameters)


@pytest.mark.ray
def test_two_actors_sum_small_updates_like_one_process(
    folder: Path, tmp_path: Path, recycled_actors: None
):
    def run(name: str, scale: float, **sections: Any) -> raysim.RunResult:
        one_step = {
            "server": {"name": "fedavg", "lr": 0.1 / scale},
            "client": "fedavg",
            "local": {"steps": 1, "batch_size": 8, "lr": scale},
            "batching": {"mode": "loop", "size": 1},
            "schedule": {"cohort": 8},
            "dtype": "float64",
        }
        return raysim.run(configuration(one_step | sections, folder, tmp_path / name))

    ordinary, small = run("ordinary", 1.0), run("small", 1e-12)
    assert torch.allclose(small.parameters, ordinary.parameters, rtol=1e-3, atol=1e-4)
    resources = {"executor": "ray", "actors": 2, "threads": 1}
    assert run("two", 1e-12, resources=resources).digest == small.digest


def test_every_case_is_recorded():
    recorded = json.loads(FILE.read_text())
    names = {*CASES, *(f"kept {name}" for name in UNMOVED)}
    assert set(recorded["projections"]) == names, RECORD
    for platform_name, digests in recorded["digests"].items():
        assert set(digests) <= names, platform_name


def record(names: Collection[str] = ()) -> None:
    """Run cases and write what they compute.

    A case stays as it is, with the digests of other platforms, if `check` accepts what it computes.

    Args:
        names: the names of the cases; () for all.
    """
    if unknown := set(names) - CASES.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: no such case{did_you_mean(min(unknown), CASES)}")
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"digests": {}, "projections": {}}
    here = recorded["digests"].setdefault(this_platform(), {})
    for known in [recorded["projections"], *recorded["digests"].values()]:
        for name in known.keys() - CASES.keys() - {f"kept {name}" for name in UNMOVED}:
            del known[name]

    def keep(name: str, x: torch.Tensor) -> None:
        try:
            check(name, x)
        except AssertionError:
            recorded["projections"][name] = projection(x)
            for known in recorded["digests"].values():
                known.pop(name, None)
        here[name] = parameters_digest(x)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, sections in CASES.items():
            if names and case not in names:
                continue
            print(case, flush=True)
            plan, executor = prepare(configuration(sections, folder, folder / case)), Inline()
            executor.open(plan)
            engine = Engine(plan, executor)
            for _ in engine.rounds():
                pass
            for recorded_name, computed in results(case, engine).items():
                keep(recorded_name, computed)
            executor.close()
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
