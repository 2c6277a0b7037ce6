"""Runs without pictures, which take longer than a test's run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from raysim.runs import artifacts, plots

PLOTS_OF_A_RUN = (
    (artifacts, "plot_partition"),
    (plots, "plot_learning_curve"),
    (plots, "plot_virtual_clock"),
)


def leave_out_pictures(replace: Callable[[Any, str, Any], None]) -> None:
    """Create empty files in place of pictures.

    Args:
        replace: sets an attribute, as `setattr` does.
    """
    replace(Figure, "savefig", lambda figure, path, **how: Path(path).touch())
    for place, plot in PLOTS_OF_A_RUN:
        replace(place, plot, lambda *what: Path(what[-1]).touch())
