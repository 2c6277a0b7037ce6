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

from raysim.models import build
from raysim.models.checks.against_pytorch import check_reading
from raysim.models.flat import Model
from raysim.prepare import workload
from raysim.runs import run
from raysim.runs.artifacts import client_plots, plots, written_files
from raysim.tracking.recorder import Untracked

PLOTS_OF_A_RUN = (
    (written_files, "plot_partition"),
    (plots, "plot_learning_curve"),
    (plots, "plot_virtual_clock"),
    (client_plots, "plot_clients"),
)

_CHECKED: set[tuple[Any, ...]] = set()
"""What `check_shipped_nets_once` knows of the nets that are checked."""


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


def check_shipped_nets_once(replace: Callable[[Any, str, Any], None]) -> None:
    """Compare each net of raysim with PyTorch's passes of it once, not in every run's preparation.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(workload, "check_reading", _check_reading)


def _check_reading(net: nn.Module, model: Model, settings: str) -> None:
    facts = (repr(net), model.shape, model.dtype, type(model.learning_task), model.size)
    if facts not in _CHECKED or torch.get_default_dtype() != torch.float32:
        check_reading(net, model, settings)
        if model.name in build.NETS:
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
