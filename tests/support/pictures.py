"""Runs without pictures, which take longer than a test's run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from raysim.runs.artifacts import plots, written_files

PLOTS_OF_A_RUN = (
    (written_files, "plot_partition"),
    (plots, "plot_learning_curve"),
    (plots, "plot_virtual_clock"),
)


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
