"""Plots of many runs: curves, heatmaps and scatter plots.

Plots do not use pyplot and therefore no global state, so any thread may draw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from raysim.by_key import by_key
from raysim.metrics import is_share
from raysim.reports.table_row import Figure
from raysim.reports.tables.cell_texts import MISSING_TEXT
from raysim.reports.value_names import NO_NAMES, Names, named

if TYPE_CHECKING:
    from raysim.reports.analysis.curves import Curve
    from raysim.reports.analysis.speedup import Slope, SpeedupLines

MAX_TITLE_LETTERS = 48
"""Maximum number of characters in a line of a panel's title, and in a legend inside of its axes."""
MAX_UPRIGHT_LETTERS = 8
"""Longest label of a heatmap's column that stands upright; longer ones are turned."""
MIN_HEATMAP_INCHES = 3.0
"""Least height of a panel of a heatmap, so that the labels beside it have room."""
LETTERS_PER_INCH = 9
"""Number of characters of the label of an axis for each inch of a panel with its tick labels."""

_LINE_STYLES = ("-", "--", ":", "-.")
"""Line styles of curves, each used for ten colours."""


def plot_curves(
    curves: Sequence[Curve],
    metric: str,
    x_label: str,
    path: Path,
    title: str = "",
    logarithmic: bool = False,
) -> None:
    """Plot curves, each with a band of one standard deviation over the seeds.

    A single panel is 1000 × 600 pixels. Panels share their y-axis, and a label looks alike in all.

    Args:
        curves: Curves, as from `curves.curves` or `curves.along`.
        metric: Label of the y-axis.
        x_label: Label of the x-axis.
        path: File to write; its suffix sets the format. The folder must exist.
        title: Title of the figure; "" for none.
        logarithmic: True for a logarithmic x-axis.
    """
    panels = by_key(curves, attrgetter("panel"))
    labels = list(dict.fromkeys(curve.label for curve in curves))
    figure, cells = _panels(len(panels), (10, 6) if len(panels) == 1 else (6, 4.5))
    for axes, (panel, shown) in zip(cells, panels.items(), strict=True):
        for curve in shown:
            _draw_curve(axes, curve, labels.index(curve.label), is_share(metric))
        axes.set(xlabel=x_label, ylabel=metric, xscale="log" if logarithmic else "linear")
        axes.set_title(fill(panel, MAX_TITLE_LETTERS), fontsize="small")
        if x_label == "rounds":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(shown) > 1:
            _add_legend(axes, [curve.label for curve in shown])
    if title:
        figure.suptitle(title)
    figure.savefig(path)


def _draw_curve(axes: Axes, curve: Curve, index: int, share: bool) -> None:
    """Draw a curve and its band; `index` sets the look, and the band of a share is clipped."""
    # matplotlib has ten colours; the style tells later curves from those of the same colour.
    colour = f"C{index % 10}"
    style = _LINE_STYLES[index // 10 % len(_LINE_STYLES)]
    means = np.array([figure.mean for figure in curve.figures])
    marker = "." if len(means) <= 12 else None
    axes.plot(curve.costs, means, style, color=colour, marker=marker, label=curve.label)
    if all(figure.std is None for figure in curve.figures):
        return
    std = np.array([figure.std or 0.0 for figure in curve.figures])
    low, high = means - std, means + std
    if share:
        low, high = low.clip(0, 1), high.clip(0, 1)
    axes.fill_between(curve.costs, low, high, color=colour, alpha=0.2, linewidth=0)


def _add_legend(axes: Axes, labels: Sequence[str]) -> None:
    """Add a legend; one whose labels would hide the curves stands below the axes."""
    if max(map(len, labels)) <= MAX_TITLE_LETTERS:
        axes.legend(fontsize="small", ncols=1 + len(labels) // 12)
    else:
        # The padding, in font sizes, leaves room for the labels of the axis.
        axes.legend(
            fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.5
        )


def _panels(
    count: int, size: tuple[float, float], shared: bool = True
) -> tuple[Canvas, list[Axes]]:
    """Return a figure and its axes, three in a row, of a size in inches; `shared` shares y-axes."""
    rows = -(-count // 3)
    columns = min(count, 3)
    figure = Canvas(figsize=(columns * size[0], rows * size[1]), dpi=100, layout="constrained")
    cells = list(figure.subplots(rows, columns, squeeze=False, sharey=shared).flat)
    for empty in cells[count:]:
        empty.set_axis_off()
    return figure, cells[:count]


class Panel(NamedTuple):
    """A heatmap."""

    title: str
    """Title; "" for none."""

    columns: Sequence[str]
    """Ordered values of x."""

    lines: Sequence[str]
    """Ordered values of y."""

    cells: Mapping[tuple[str, str], float]
    """Result by (x, y); a missing cell is white, with a dash."""

    published: Mapping[tuple[str, str], float] = MappingProxyType({})
    """Published result by (x, y), which stands in brackets below ours."""


def plot_heatmap(
    panels: Sequence[Panel], x: str, y: str, shown: Figure, path: Path, names: Names = NO_NAMES
) -> None:
    """Plot heatmaps of a result over two parameters; the first value of y is at the top.

    Args:
        panels: At least one panel. All have one colour scale, which is that of our results.
        x: Label of the x-axis.
        y: Label of the y-axis.
        shown: Metric and statistic of the cells; accuracies are shown in percent.
        path: File to write; its suffix sets the format. The folder must exist.
        names: Names of values, parameters and the header of the colour bar.
    """
    scale = 100 if shown.percent else 1
    tables = []
    for panel in panels:
        values = [[panel.cells.get((c, r), np.nan) for c in panel.columns] for r in panel.lines]
        tables.append(scale * np.array(values))
    low, high = _colour_range(np.concatenate(tables, axis=None), shown.percent)
    n_lines, n_columns = np.max([table.shape for table in tables], axis=0).tolist()
    size = (2 + 0.8 * n_columns, max(1.5 + 0.6 * n_lines, MIN_HEATMAP_INCHES))
    canvas, places = _panels(len(panels), size, shared=False)
    for axes, panel, values in zip(places, panels, tables, strict=True):
        axes.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high)
        _write_cells(axes, panel, values, shown.percent, (low + high) / 2)
        _name_ticks(axes, panel, names)
        axes.set_xlabel(_wrapped(_axis_label(x, names), size[0]))
        axes.set_ylabel(_wrapped(_axis_label(y, names), size[1]))
        axes.set_title(fill(panel.title, MAX_TITLE_LETTERS), fontsize="small")
    header = named(shown.header(alone=False), names)
    if any(panel.published for panel in panels):
        header += " (in brackets: paper)"
    fraction = 0.15 / min(len(panels), 3)  # of the width of a panel, which is matplotlib's default
    colours = places[0].images[0]
    canvas.colorbar(colours, ax=places, label=_wrapped(header, size[1]), fraction=fraction)
    canvas.savefig(path)


def _write_cells(
    axes: Axes, panel: Panel, values: np.ndarray, percent: bool, middle: float
) -> None:
    """Write the results into the cells of a heatmap, black from the middle of the colours on."""
    scale = 100 if percent else 1
    for i, line in enumerate(panel.lines):
        for j, column in enumerate(panel.columns):
            value = values[i, j]
            text = _cell_text(value, percent)
            published = panel.published.get((column, line))
            if published is not None:
                text += f"\n({_cell_text(scale * published, percent)})"
            colour = "white" if value <= middle else "black"  # black on white, where it is NaN
            axes.text(j, i, text, ha="center", va="center", color=colour)


def _name_ticks(axes: Axes, panel: Panel, names: Names) -> None:
    """Write the values of a heatmap's axes."""
    columns = [named(column, names) for column in panel.columns]
    is_long = max(map(len, columns)) > MAX_UPRIGHT_LETTERS
    # A turned label ends at its column; one in its middle would seem to be of the next.
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
    axes.set_xticks(range(len(columns)), columns, **turned)
    axes.set_yticks(range(len(panel.lines)), [named(line, names) for line in panel.lines])


def _cell_text(value: float, percent: bool) -> str:
    """Return the text of a cell: one decimal place of a percentage, else three digits."""
    if not np.isfinite(value):
        return MISSING_TEXT
    return f"{value:.1f}" if percent else f"{value:.3g}"


def _axis_label(axis: str, names: Names) -> str:
    """Return the label of an axis: its parameters, of which one below the first is shortened."""
    first, *others = axis.split(",")
    shown = [names.get(first, first)]
    shown += [names.get(key, key.removeprefix(f"{first}.")) for key in others]
    return ", ".join(shown)


def _colour_range(values: np.ndarray, percent: bool) -> tuple[float, float]:
    """Return the smallest and the largest finite value; equal ones are set apart, within 100 %."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    if low < high:
        return low, high
    return (max(low - 1, 0), min(high + 1, 100)) if percent else (low - 1, high + 1)


def _wrapped(label: str, inches: float) -> str:
    """Return the label of an axis with line breaks after its separators, so that none is cut off.

    Args:
        label: Names of parameters or metrics, such as "groups.attackers.client".
        inches: Length of the axis.
    """
    lines = [""]
    for part in re.split(r"(?<=[ ./,_])", label):
        if lines[-1] and len(lines[-1] + part) > inches * LETTERS_PER_INCH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


class Cloud(NamedTuple):
    """Points of a scatter plot."""

    points: Sequence[tuple[Any, float, bool]]
    """(value of the parameter, result, True if the run finished) of each run."""

    logarithmic: bool
    """True for a logarithmic x-axis."""


def plot_scatter(clouds: Mapping[str, Cloud], label: str, path: Path) -> None:
    """Plot results over parameters, one panel for each; runs that did not finish are hollow.

    Args:
        clouds: Points by parameter; at least one parameter.
        label: Label of the y-axis.
        path: File to write; its suffix sets the format. The folder must exist.
    """
    figure, places = _panels(len(clouds), (5, 4))
    for axes, (name, cloud) in zip(places, clouds.items(), strict=True):
        x, y, finished = zip(*cloud.points, strict=True)
        if cloud.logarithmic:
            axes.set_xscale("log")
        axes.scatter(
            x,
            y,
            facecolors=["tab:blue" if is_finished else "none" for is_finished in finished],
            edgecolors="tab:blue",
        )
        axes.set(xlabel=name, ylabel=label)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def plot_speedup(lines: SpeedupLines, slope: Slope, target: str, over: str, path: Path) -> None:
    """Plot rounds to a target over a parameter on log axes, beside a line of slope -1.

    The picture is a PNG of 700 × 500 pixels with a point for each seed and value.

    Args:
        lines: Rounds to the target, as from `speedup.speedup`.
        slope: Their slope, as from `speedup.slope`.
        target: Target as text, for the label of the y-axis.
        over: Label of the x-axis.
        path: File to write. The folder must exist.
    """
    figure = Canvas(figsize=(7, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for seed, line in lines.items():
        axes.loglog(list(line), list(line.values()), "o", alpha=0.6, label=f"seed {seed}")
    # The geometric mean over the seeds that have a value.
    logs = pd.DataFrame(lines).transform(np.log).mean(axis="columns").sort_index()
    xs, mean = logs.index.to_numpy(), np.exp(logs.to_numpy())
    interval = f"slope {slope.mean:.3f}, 95 % [{slope.low:.3f}, {slope.high:.3f}]"
    axes.plot(xs, mean, color="tab:red", label=interval)
    axes.plot(xs, mean[0] * xs[0] / xs, "--", color="0.5", label="slope -1")
    axes.set(xlabel=over, ylabel=f"rounds to {target}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, format="png")
