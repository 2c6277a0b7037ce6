"""Pictures of a run, drawn without pyplot, so that no global state is touched and any thread may draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def learning_curve(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Accuracy and loss over rounds, as one PNG of 1000 × 400 pixels.

    Args:
        history: one mapping of metrics for each round, in order. `round` is the abscissa (the position, where it is
            missing). Every metric whose name ends in "accuracy" or "loss" is drawn over the rounds that have it.
        path: the file to write; its folder must exist.
    """
    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(name for row in history for name in row))
    for axes, kind in zip(figure.subplots(1, 2), ("accuracy", "loss"), strict=True):
        for name in (name for name in names if name.endswith(kind)):
            points = [(row.get("round", t), row[name]) for t, row in enumerate(history) if name in row]
            rounds, values = zip(*points, strict=True)
            axes.plot(rounds, values, marker="." if len(points) <= 50 else None, label=name)
        axes.set(xlabel="round", ylabel=kind)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend()
    figure.savefig(path, format="png")
