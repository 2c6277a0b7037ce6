"""Pictures of a run, drawn without pyplot, so that no global state is touched and any thread may draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raysim.engine.schedule import Turn

if TYPE_CHECKING:
    from raysim.diagnostics.convergence import Lines, Slope
    from raysim.planning.simulated_executor import Summary
    from raysim.reports.aggregate import Curve

WIDEST = 48
"""Letters in a line above a panel."""
LANES = 40
"""Clients whose tasks are drawn on the clock, and actors of a simulated cluster."""
PAIRS, ACROSS = 40, 8
"""Images shown beside what was recovered of them, and how many of them in a row."""


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


def curves(
    found: Sequence[Curve], metric: str, spent: str, path: Path, title: str = "", logarithmic: bool = False
) -> None:
    """Courses over what was spent (or over a parameter), one line each with a band of one standard deviation over the
    seeds, as one picture: a PNG of 1000 × 600 pixels, or what the path's ending says. Panels share their ordinate.

    Args:
        found: from `raysim.report.curves` or `along`.
        metric: the ordinate's name; `spent` the abscissa's, which may be `logarithmic`.
        path: the file to write; its folder must exist.
        title: above it, if there is anything to say.
    """
    panels = list(dict.fromkeys(curve.panel for curve in found))
    figure, cells = _panels(len(panels), (10, 6) if len(panels) == 1 else (6, 4.5))
    for axes, panel in zip(cells, panels, strict=True):
        shown = [curve for curve in found if curve.panel == panel]
        for i, curve in enumerate(shown):
            means = np.array([f.mean for f in curve.figures])
            style = ("-", "--", ":", "-.")[i // 10 % 4]  # colours repeat after ten
            marker = "." if len(means) <= 12 else None
            (line,) = axes.plot(curve.spent, means, style, marker=marker, label=curve.label)
            if any(f.std is not None for f in curve.figures):
                std = np.array([f.std or 0.0 for f in curve.figures])
                low, high = means - std, means + std
                axes.fill_between(curve.spent, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set(xlabel=spent, ylabel=metric, xscale="log" if logarithmic else "linear")
        axes.set_title(fill(panel, WIDEST), fontsize="small")
        if spent == "rounds":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(shown) > 1:
            axes.legend(fontsize="small", ncols=1 + len(shown) // 12)
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def _panels(count: int, size: tuple[float, float], shared: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with so many axes of this size (inches), three in a row, perhaps with one ordinate for all."""
    rows, across = -(-count // 3), min(count, 3)
    figure = Figure(figsize=(across * size[0], rows * size[1]), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    cells = list(figure.subplots(rows, across, squeeze=False, sharey=shared).flat)
    for empty in cells[count:]:
        empty.set_axis_off()
    return figure, cells[:count]


Panel = tuple[str, Sequence[str], Sequence[str], Mapping[tuple[str, str], float]]
"""A title, the values of x and of y, in order, and the metric by (x's value, y's value); what is missing is white."""


def heatmap(panels: Sequence[Panel], x: str, y: str, metric: str, path: Path) -> None:
    """A value for each pair of two parameters' values, as one picture: a PNG, or what the path's ending says.

    Args:
        panels: three in a row, each with colours of its own. One or more.
        x, y: the parameters' names.
        metric: what the cells hold; shares of one are shown in percent.
        path: the file to write; its folder must exist.
    """
    scale = 100 if metric.endswith("accuracy") else 1
    width, height = (max(len(panel[i]) for panel in panels) for i in (1, 2))
    figure, places = _panels(len(panels), (2 + 0.8 * width, 1.5 + 0.6 * height), shared=False)
    for axes, (title, columns, lines, cells) in zip(places, panels, strict=True):
        values = np.array([[scale * cells.get((c, r), np.nan) for c in columns] for r in lines])
        image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color="black" if value > middle else "white")
        axes.set(xlabel=x, ylabel=y, xticks=range(len(columns)), yticks=range(len(lines)))
        axes.set_title(fill(title, WIDEST), fontsize="small")
        axes.set(xticklabels=columns, yticklabels=lines)
        figure.colorbar(image, ax=axes, label=f"best {metric}" + (" %" if scale > 1 else ""))
    figure.savefig(path)


def speedup(lines: Lines, found: Slope, target: str, over: str, path: Path) -> None:
    """Rounds to a target against what is on log axes, a point for each seed, beside a line of slope -1, as one PNG of
    700 × 500 pixels.

    Args:
        lines: from `raysim.diagnostics.convergence.speedup`.
        found: their slope.
        target: in words; `over` what is on the abscissa.
        path: the file to write; its folder must exist.
    """
    figure = Figure(figsize=(7, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for seed, line in lines.items():
        axes.loglog(list(line), list(line.values()), "o", alpha=0.6, label=f"seed {seed}")
    xs = np.array(sorted({x for line in lines.values() for x in line}))
    mean = np.array([np.exp(np.mean([np.log(line[x]) for line in lines.values() if x in line])) for x in xs])
    axes.plot(xs, mean, color="tab:red", label=f"slope {found.mean:.3f}, 95 % [{found.low:.3f}, {found.high:.3f}]")
    axes.plot(xs, mean[0] * xs[0] / xs, "--", color="0.5", label="slope -1")
    axes.set(xlabel=over, ylabel=f"rounds to {target}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, format="png")


class Cloud(NamedTuple):
    """(a parameter's value, what was reached, whether in all rounds) for each of some runs."""

    points: Sequence[tuple[Any, float, bool]]
    logarithmic: bool


def scatter(found: Mapping[str, Cloud], label: str, path: Path) -> None:
    """What was reached over each of some parameters, as one picture; hollow: runs that were stopped early.

    Args:
        found: by parameter, one or more.
        label: the ordinate's name.
        path: the file to write; its folder must exist.
    """
    figure, places = _panels(len(found), (5, 4))
    for axes, (name, cloud) in zip(places, found.items(), strict=True):
        x, y, whole = zip(*cloud.points, strict=True)
        if cloud.logarithmic:
            axes.set_xscale("log")
        axes.scatter(x, y, facecolors=["tab:blue" if each else "none" for each in whole], edgecolors="tab:blue")
        axes.set(xlabel=name, ylabel=label)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def forgetting(rounds: Mapping[int, Mapping[str, Sequence[float]]], path: Path) -> None:
    """What local training forgets, as in Xu et al. 2022, figures 1 and C.1, as one PNG of 1400 × 400 pixels.

    Args:
        rounds: for each round what `raysim.diagnostics.forgetting.gather` gives: losses on past clients' data before
            and after, and perhaps correlations of Fisher information. One round or more.
        path: the file to write; its folder must exist.
    """
    figure = Figure(figsize=(14, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    losses, course, fisher = figure.subplots(1, 3)
    for when, colour in (("before", "tab:blue"), ("after", "tab:red")):
        values = np.concatenate([one[when] for one in rounds.values()])
        losses.hist(values[np.isfinite(values)], bins=40, alpha=0.5, color=colour, label=f"{when} local training")
    losses.set(xlabel="mean loss on a past client's data", ylabel="past clients, in all rounds")
    losses.legend()
    more = [np.array(one["after"]) - np.array(one["before"]) for one in rounds.values()]
    low, middle, high = np.array([np.nanquantile(values, (0.1, 0.5, 0.9)) for values in more]).T
    at = [t + 1 for t in rounds]  # as the learning curve counts them
    course.plot(at, middle, color="tab:red", marker="." if len(at) <= 50 else None, label="median")
    course.fill_between(at, low, high, color="tab:red", alpha=0.2, label="a tenth to nine tenths")
    course.axhline(0, color="0.5", linewidth=0.5)
    course.set(xlabel="round", ylabel="increase of the loss")
    course.xaxis.set_major_locator(MaxNLocator(integer=True))
    course.legend()
    found = np.array([value for one in rounds.values() for value in one["fisher"]])
    fisher.hist(found[np.isfinite(found)], bins=40, range=(-1, 1), color="tab:gray")
    fisher.set(xlabel="correlation of Fisher information: pseudo and past data", ylabel="clients, in all rounds")
    figure.suptitle("what local training forgets of the data of the round before's clients", fontsize=10)
    figure.savefig(path, format="png")


def arrivals(turns: Sequence[Turn], path: Path) -> None:
    """Tasks on the virtual clock, coloured by staleness, and how stale arrivals are, as one PNG of 1200 × 500 pixels.

    Args:
        turns: the first rounds of a run, one or more. Of the clients that arrive in them the first 40, by their
            numbers, have a lane; the histogram is of all.
        path: the file to write; its folder must exist.
    """
    came = [(one, turn.t - one.base) for turn in turns for one in turn.arrivals]
    lanes = {client: lane for lane, client in enumerate(sorted({one.client for one, _ in came})[:LANES])}
    shown = [(one, s) for one, s in came if one.client in lanes]
    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    clock, histogram = figure.subplots(1, 2, width_ratios=(3, 1))
    bars = clock.barh(
        [lanes[one.client] for one, _ in shown],
        [one.finish - one.start for one, _ in shown],
        left=[one.start for one, _ in shown],
        height=0.8,
    )
    stalest = max((s for _, s in came), default=0)
    colours = figure.colorbar(ScalarMappable(Normalize(0, max(stalest, 1)), "viridis_r"), ax=clock)
    colours.set_label("staleness on arrival")
    for bar, (_, s) in zip(bars, shown, strict=True):
        bar.set_color(colours.cmap(s / max(stalest, 1)))
    for turn in turns:
        clock.axvline(turn.time, color="0.8", linewidth=0.5, zorder=0)
    clock.set_yticks(list(lanes.values()), list(map(str, lanes)), fontsize=6)
    clock.set(xlabel="virtual time (lines: the server's rounds)", ylabel="client")
    clock.set_title(f"tasks that arrived in rounds 0 to {turns[-1].t}, {len(lanes)} of the clients")
    counts = Counter(s for _, s in came)
    histogram.bar(list(counts), list(counts.values()), color="tab:gray")
    histogram.set(xlabel="staleness", ylabel="arrivals")
    histogram.set_xlim(-1, stalest + 1)
    histogram.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, format="png")


def simulation(added: Sequence[Summary], alone: Sequence[Summary], path: Path) -> None:
    """A simulated cluster, as one PNG of 1500 × 500 pixels: when the actors of some nodes train in the last round, what
    the rounds' critical path is made of, and the bytes that come to the server.

    Args:
        added, alone: the rounds with sums that are added up on their nodes, and without; one or more.
        path: the file to write; its folder must exist.
    """
    figure = Figure(figsize=(15, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    lanes, critical, traffic = figure.subplots(1, 3, width_ratios=(3, 2, 1))
    last = added[-1]
    actors = sorted({(node, actor) for node, actor, _, _ in last.trained})
    lane = {actor: i for i, (_, actor) in enumerate(actors[:: -(-len(actors) // LANES)])}
    for node, actor, begin, end in last.trained:
        if actor in lane:
            lanes.barh(lane[actor], end - begin, left=begin - last.begin, color=f"C{node % 10}", edgecolor="white")
    lanes.set(xlabel="seconds since the end of the last round's training", ylabel="actor, coloured by its node")
    lanes.set(yticks=[], xlim=(0, last.seconds))
    which = f"{len(lane)} of {len(actors)} actors, helping by helping"
    lanes.set_title(f"round {len(added)}: {which}; busy {last.busy:.1%}")
    names = ("added up on nodes", "alone")
    courses = [rounds[1:] or rounds for rounds in (added, alone)]
    floor = np.zeros(2)
    for kind in dict.fromkeys(kind for rounds in courses for one in rounds for kind in one.path):
        mean = np.array([np.mean([one.path.get(kind, 0.0) for one in rounds]) for rounds in courses])
        critical.bar(names, mean, bottom=floor, label=kind)
        floor += mean
    critical.set(ylabel="seconds of a round's critical path")
    critical.set_ylim(0, 1.5 * floor.max() or None)
    critical.legend(fontsize=8)
    traffic.bar(names, [np.mean([one.bytes_up for one in rounds]) / 1e6 for rounds in courses], color="tab:gray")
    traffic.set(ylabel="MB a round to the server's node")
    figure.savefig(path, format="png")


def recovered_images(pairs: Sequence[tuple[str, np.ndarray, np.ndarray, float]], title: str, path: Path) -> None:
    """Images above what an attacker made of them, with the PSNR of each.

    Args:
        pairs: a name, the image and the recovered one, [C, H, W] in [0, 1], and the PSNR in dB (NaN: none). The first
            40 are drawn, and the title says so.
        path: the file to write, a PNG; its folder must exist.
    """
    shown = pairs[:PAIRS]
    across, bands = min(len(shown), ACROSS), -(-len(shown) // ACROSS)
    figure = Figure(figsize=(max(1.4 * across, 6), 3.2 * bands + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.subplots(2 * bands, across, squeeze=False)
    for axes in cells.flat:
        axes.set_axis_off()
    for k, (name, before, after, quality) in enumerate(shown):
        band, column = divmod(k, ACROSS)
        said = "none" if np.isnan(quality) else "exact" if np.isinf(quality) else f"{quality:.1f} dB"
        for row, image, text in ((2 * band, before, f"sent: {name}"), (2 * band + 1, after, f"recovered: {said}")):
            flat = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
            cells[row, column].imshow(np.nan_to_num(flat).clip(0, 1), cmap="gray", vmin=0, vmax=1)
            cells[row, column].set_title(text, fontsize=7)
    some = f" (the first {len(shown)} of {len(pairs)} images)" if len(shown) < len(pairs) else ""
    figure.suptitle(title + some, fontsize=9)
    figure.savefig(path, format="png")
