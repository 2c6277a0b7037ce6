"""Plots of one run: its learning curve and the staleness of its updates."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raysim.schedule import Arrival, ScheduledRound

MAX_DRAWN_CLIENTS = 40
"""Largest number of clients whose tasks are drawn on the virtual clock."""


def plot_learning_curve(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot accuracy and loss over rounds, as one PNG of 1000 × 400 pixels.

    Args:
        history: one mapping of metrics for each round, in order. `round` is the abscissa; if it is
            missing, the position is. Every metric whose name ends in "accuracy" or "loss" is drawn
            over the rounds that have it.
        path: the file to write; its folder must exist.
    """
    # Every run draws it, and a layout that matplotlib finds takes as long as the rest of it.
    figure = Figure(figsize=(10, 4), dpi=100)
    figure.subplots_adjust(left=0.08, right=0.985, bottom=0.13, top=0.92, wspace=0.19)
    names = list(dict.fromkeys(itertools.chain.from_iterable(history)))
    for axes, kind in zip(figure.subplots(1, 2), ("accuracy", "loss"), strict=True):
        for name in names:
            if not name.endswith(kind):
                continue
            points = [
                (row.get("round", t), row[name]) for t, row in enumerate(history) if name in row
            ]
            rounds, values = zip(*points, strict=True)
            axes.plot(rounds, values, marker="." if len(points) <= 50 else None, label=name)
        axes.set(title=f"{kind} by round", xlabel="round", ylabel=kind)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend()
    figure.savefig(path, format="png")


def plot_virtual_clock(turns: Sequence[ScheduledRound], path: Path) -> None:
    """Plot the tasks on the virtual clock and a histogram of the updates' staleness.

    The file is a PNG of 1200 × 500 pixels. Colours show the staleness of each task.

    Args:
        turns: the first rounds of a run, at least one. MAX_DRAWN_CLIENTS clients with the lowest
            numbers among those that arrive in these rounds have a lane. The histogram counts all.
        path: the file to write; its folder must exist.
    """
    arrived = [(arrival, turn.t - arrival.base) for turn in turns for arrival in turn.arrivals]
    stalest = max((staleness for _, staleness in arrived), default=0)
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    clock, histogram = figure.subplots(1, 2, width_ratios=(3, 1))
    _plot_tasks(clock, arrived, max(stalest, 1))
    for turn in turns:
        clock.axvline(turn.time, color="0.8", linewidth=0.5, zorder=0)
    n_lanes = len(clock.get_yticks())
    clock.set_title(f"tasks that arrived in rounds 0 to {turns[-1].t}, {n_lanes} of the clients")
    counts = Counter(staleness for _, staleness in arrived)
    histogram.bar(list(counts), list(counts.values()), color="tab:gray")
    histogram.set(title="staleness", xlabel="rounds behind", ylabel="arrived updates")
    histogram.set_xlim(-1, stalest + 1)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png")


def _plot_tasks(clock: Axes, arrived: Sequence[tuple[Arrival, int]], stalest: int) -> None:
    """Plot a bar for each task of the drawn clients; its colour is the staleness on arrival."""
    drawn_clients = sorted({arrival.client for arrival, _ in arrived})[:MAX_DRAWN_CLIENTS]
    lanes = {client: lane for lane, client in enumerate(drawn_clients)}
    colours = clock.figure.colorbar(ScalarMappable(Normalize(0, stalest), "viridis_r"), ax=clock)
    colours.set_label("staleness on arrival")
    for arrival, staleness in arrived:
        if arrival.client in lanes:
            clock.barh(
                lanes[arrival.client],
                arrival.finish - arrival.start,
                left=arrival.start,
                height=0.8,
                color=colours.cmap(staleness / stalest),
            )
    clock.set_yticks(list(lanes.values()), list(map(str, lanes)), fontsize=6)
    clock.set(xlabel="virtual time (lines: the server's rounds)", ylabel="client")
