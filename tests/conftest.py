"""Shared fixtures: one thread, a quiet Ray, and runs of the real engine that record every x_t."""

from __future__ import annotations

from support.isolation import opens_nothing_foreign  # noqa: F401  # a fixture; the first import

# isort: split
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # both are read when ray is imported
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import pytest
import torch
from support.command_line import raysim_  # noqa: F401  # a fixture
from support.mlflow_tables import made_once
from support.mlflow_thread import call_mlflow_here
from support.processes import client_of
from support.quick_runs import (
    check_known_nets_once,
    leave_out_pictures,
    leave_out_syncs,
    leave_out_tracking,
    try_shipped_rules_once,
)
from support.watched import Watched

from raysim.config.sections.data import Data
from raysim.data import load_dataset
from raysim.engine.loop import Engine
from raysim.engine.plan import Plan
from raysim.prepare import resolve
from raysim.prepare.resolve import prepare
from raysim.runs import git
from raysim.tracking import mlflow_client
from raysim.tracking import spool_sender as tracking
from raysim.training.trainers.host_graphs import rehearsal

torch.set_num_threads(1)
leave_out_syncs()

LONG_FOLDERS = ("distributed", "faults", "sweeps", "runs", "docs", "rules")
"""Folders with the longest files. They run first, so that no worker is alone with one at the end."""

UNTRACKED_FOLDERS = (
    "data", "diagnostics", "engine", "gallery", "models", "numerics", "oracle", "rules", "training",
)  # fmt: skip
"""Folders whose tests' runs are sent to MLflow only where a test asks for it by `tracked`."""

raysim_commit = cache(git._raysim_commit)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests that start Ray without the mark `ray`, and run long files first."""
    for item in items:
        if "local_ray" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("ray"):
            raise pytest.UsageError(f"{item.nodeid} starts Ray: mark it with `@pytest.mark.ray`")
    items.sort(key=lambda item: not {*LONG_FOLDERS} & {*item.path.parts})


@pytest.fixture(scope="session", autouse=True)
def tables_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create the tables of an MLflow database once, and copy them; import MLflow once. Both take
    seconds. MLflow runs in this process, so this one has the variables of MLflow's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mlflow_client.MLFLOW_ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        call_mlflow_here(patch.setattr)
        patch.setattr(
            mlflow_client,
            "import_mlflow",
            made_once(tmp_path_factory.mktemp("tables") / "mlflow.db"),
        )
        yield


@pytest.fixture(scope="session")
def uri(tables_made_once: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow database for many tests."""
    made = f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db"
    client_of(made).search_experiments()
    return made


@pytest.fixture
def pictures() -> None:
    """Draw the pictures of this test's runs."""


@pytest.fixture
def tracked() -> None:
    """Send this test's runs to MLflow."""


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the dry run of rules out of this test's preparations. For tests of all methods that are
    tried elsewhere: in tests/engine/test_rule_dry_run.py, in the battery, and with the gallery."""
    monkeypatch.setattr(resolve, "try_rules", lambda plan, config: None)


@pytest.fixture(autouse=True)
def rehearsed() -> Iterator[None]:
    """Let lanes capture and replay local steps on this CPU, as they do on a GPU."""
    with rehearsal():
        yield


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Draw the same numbers in a test whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of runs what takes longer than a test's run, and was done before or has other tests."""
    monkeypatch.setattr(tracking, "FLUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(git, "_raysim_commit", raysim_commit)
    check_known_nets_once(monkeypatch.setattr)
    try_shipped_rules_once(monkeypatch.setattr)
    asked = {"pictures", "tracked"} & {*request.fixturenames}
    if request.path.parent.name in UNTRACKED_FOLDERS and not asked:
        leave_out_tracking(monkeypatch.setattr)
    if "pictures" not in request.fixturenames:
        leave_out_pictures(monkeypatch.setattr)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """Sections that all runs share: inline, without evaluation, everything written below tmp_path."""
    return {
        "data": "digits",
        "resources": {"executor": "inline", "threads": 1},
        "evaluate": {"every": 0},
        "run_dir": str(tmp_path / "run"),
        "tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"},
    }


@pytest.fixture
def engine(base: dict[str, Any]) -> Iterator[Callable[..., tuple[Engine, list[dict[str, float]]]]]:
    """engine(config) -> (engine, records): a whole run. `engine.executor` is `Watched`, with .xs
    and .server.

    `change` may replace parts of the plan before the run, `before` may change the engine. With
    `states`, .states holds the server's whole state of every round.
    """
    opened: list[Watched] = []

    def run(
        config: Mapping[str, Any],
        change: Callable[[Plan], Plan] = lambda plan: plan,
        before: Callable[[Engine], None] = lambda engine: None,
        states: bool = False,
    ) -> tuple[Engine, list[dict[str, float]]]:
        plan, executor = change(prepare({**base, **config})), Watched(states)
        executor.open(plan)
        opened.append(executor)
        made = Engine(plan, executor)
        before(made)
        return made, list(made.rounds())

    yield run
    for executor in opened:
        executor.close()


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str, str], str]:
    """source(name, code): write a user's own file and return its path."""

    def write(name: str, code: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return str(path)

    return write


@pytest.fixture
def ragged(tmp_path: Path) -> Callable[[Sequence[int]], dict[str, str]]:
    """ragged(sizes): a partition of the digits into clients of these sizes.

    Two thirds (rounded up) of client k's examples are digit k, the others digit k + 3, so that
    clients disagree.
    """

    def write(sizes: Sequence[int]) -> dict[str, str]:
        y = load_dataset(Data(name="digits")).y
        pools = [list(np.flatnonzero(y == c)) for c in range(10)]
        digits = [
            [k % 10] * -(-2 * n // 3) + [(k + 3) % 10] * (n // 3) for k, n in enumerate(sizes)
        ]
        lists = [[int(pools[digit].pop()) for digit in wanted] for wanted in digits]
        path = tmp_path / f"partition-{'-'.join(map(str, sizes))}.json"
        path.write_text(json.dumps(lists))
        return {"name": "file", "path": str(path)}

    return write


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Start Ray on this machine once. `RayExecutor` uses the Ray that it finds."""
    import ray

    from raysim.distributed.cluster import loopback

    with loopback.few_processes(), loopback.patient_start():
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def recycling(local_ray: None) -> Iterator[Any]:
    from support.recycled import Recycling

    actors = Recycling()
    yield actors
    actors.shut_down()


@pytest.fixture
def recycled_actors(recycling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's runs reuse the actors of earlier runs."""
    recycling.begin(monkeypatch.setattr)
