"""Runs without what takes longer than a test's run: the disk, MLflow and pictures."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sqlalchemy import event
from sqlalchemy.engine import Engine
from torch import nn

from raysim.config.schema import Config
from raysim.engine.plan import Plan
from raysim.models import build
from raysim.models.checks.against_pytorch import check_reading
from raysim.models.flat import Model
from raysim.prepare import resolve, workload
from raysim.prepare.resolve import try_rules
from raysim.runs import run
from raysim.runs.artifacts import client_plots, plots, written_files
from raysim.tracking.recorder import Untracked
from support.oracle_cases import BATCH_NORM
from support.programs import program

PLOTS_OF_A_RUN = (
    (written_files, "plot_partition"),
    (plots, "plot_learning_curve"),
    (plots, "plot_virtual_clock"),
    (client_plots, "plot_clients"),
)

SOUND_NETS = {program("batteries_nets"), program("lanes_net"), BATCH_NORM}
"""Texts of files with nets that many runs train, and that no test is about."""

_CHECKED: set[tuple[Any, ...]] = set()
"""Facts of the nets that are checked, and of the rules that are tried."""


def leave_out_syncs() -> None:
    """Let this process not wait for the disk: neither for files nor for SQLite.

    What a killed process has written is kept by the operating system.
    """
    os.fsync = lambda handle: None
    event.listen(Engine, "connect", _leave_out_syncs_of)


def _leave_out_syncs_of(connection: Any, record: Any) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def leave_out_tracking(replace: Callable[[Any, str, Any], None]) -> None:
    """Send no run to MLflow.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(run, "Tracker", lambda *what: Untracked())


def check_known_nets_once(replace: Callable[[Any, str, Any], None]) -> None:
    """Compare each net of raysim or of `SOUND_NETS` with PyTorch's passes of it once, not in every
    run's preparation.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(workload, "check_reading", _check_reading)


def _check_reading(net: nn.Module, model: Model, settings: str) -> None:
    sizes = (model.shape, model.size, model.dtype)
    facts = (repr(net), _source(model.name), type(model.learning_task), *sizes)
    if facts not in _CHECKED or torch.get_default_dtype() != torch.float32:
        check_reading(net, model, settings)
        if _is_known(model.name):
            _CHECKED.add(facts)


def _source(net: str) -> str:
    """Return the text of the file that a net's name has; "" if it has none."""
    file = Path(net.partition(":")[0])
    return file.read_text() if file.suffix == ".py" and file.is_file() else ""


def _is_known(net: str) -> bool:
    return net in build.NETS or _source(net) in SOUND_NETS


def try_shipped_rules_once(replace: Callable[[Any, str, Any], None]) -> None:
    """Try each pair of raysim's rules once on a known net and kind of local steps, not in every
    run's preparation.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(resolve, "try_rules", _try_rules)


def _try_rules(plan: Plan, config: Config) -> None:
    rules = [plan.client, plan.server, *(group.rule for group in plan.groups)]
    stages = [*plan.stages, *(stage for group in plan.groups for stage in group.stages)]
    parts = [*rules, *stages, *plan.metrics, plan.learning_task]
    if not all(type(part).__module__.startswith("raysim.") for part in parts):
        try_rules(plan, config)
        return
    numbers = {"lr", "steps", "epochs", "batch_size"}
    local = plan.config.local.model_dump_json(exclude=numbers)
    sections = plan.config.model_dump_json(include={"groups", "privacy", "resources", "dtype"})
    net = (repr(plan.net), _source(plan.config.model.name), plan.problem.shapes)
    facts = (*map(repr, parts), *net, plan.dataset.name, plan.mode, local, sections)
    if facts not in _CHECKED:
        try_rules(plan, config)
        if _is_known(plan.config.model.name):
            _CHECKED.add(facts)


def leave_out_pictures(replace: Callable[[Any, str, Any], None]) -> None:
    """Write files of zeros in place of pictures, as large as those.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(Figure, "savefig", lambda figure, path, **how: _write(path))
    for place, plot in PLOTS_OF_A_RUN:
        replace(place, plot, lambda *what: _write(what[-1]))


def _write(path: str | Path) -> None:
    Path(path).write_bytes(bytes(50_000))
