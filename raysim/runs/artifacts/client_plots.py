"""Plot of the evaluation of clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim import metrics as registry
from raysim.engine.evaluation.client_evaluation import FINE_TUNED

N_BINS = 20
"""Bins of a histogram."""


def plot_clients(evaluated: pd.DataFrame, path: Path) -> None:
    """Plot histograms of the metrics over the clients in each evaluation.

    The file is a PNG, 500 pixels wide for each metric and 800 high. Above are the histograms of the
    last evaluation: the clients that train and those held out, before (solid) and after fine-tuning
    (dashed). Below, each column is the histogram of one evaluation of the clients that train, with
    the number of clients as colour, and the line is their mean.

    Args:
        evaluated: the table of a run's evaluated clients.
        path: the file to write; its folder must exist.
    """
    last = evaluated.loc[evaluated["round"] == evaluated["round"].max()]
    facts = {"round", "client", "examples", "val_examples", "held_out", "group"}
    metrics = [name for name in last if name not in facts and not name.startswith(FINE_TUNED)]
    figure = Figure(figsize=(5 * len(metrics), 8), dpi=100, layout="constrained")
    figure.suptitle(f"Clients on their own test examples, after round {last['round'].max()}")
    above, below = figure.subplots(2, len(metrics), squeeze=False)
    for axes, metric in zip(above, metrics, strict=True):
        _plot_last_evaluation(axes, last, metric)
    training = evaluated.query("not held_out")
    for axes, metric in zip(below, metrics, strict=True):
        _plot_each_evaluation(axes, training, metric)
    figure.savefig(path, format="png")


def _plot_last_evaluation(axes: Axes, last: pd.DataFrame, metric: str) -> None:
    """Plot histograms of a metric over the clients, for each kind of clients that has values."""
    samples = []
    for held_out, who, color in ((False, "training", "blue"), (True, "held out", "orange")):
        of_kind = last["held_out"] == held_out
        for column, when, linestyle in (
            (metric, "", "solid"),
            (f"{FINE_TUNED}{metric}", ", fine-tuned", "dashed"),
        ):
            if column not in last:
                continue
            values = _finite(last.loc[of_kind, column])
            if len(values):
                style = {"color": f"tab:{color}", "linestyle": linestyle}
                samples.append((f"{who}{when}, n = {len(values)}", values, style))
    # Common edges, so that the heights of the histograms can be compared.
    together = np.concatenate([[], *(values for _, values, _ in samples)])
    edges = np.histogram_bin_edges(together, N_BINS).tolist()
    for label, values, style in samples:
        axes.hist(values, bins=edges, histtype="step", label=label, **style)
    entry = registry.find_metric(metric)
    unit = f" [{entry.unit}]" if entry and entry.unit else ""
    axes.set(xlabel=f"{metric} of a client{unit}", ylabel="clients")
    if samples:
        axes.legend(fontsize="small")


def _plot_each_evaluation(axes: Axes, training: pd.DataFrame, metric: str) -> None:
    """Plot a column for each evaluation: the histogram of a metric over clients."""
    rounds = training["round"].to_numpy(dtype=int)
    by_round = {
        number: values
        for number in np.unique(rounds).tolist()
        if len(values := _finite(training.loc[rounds == number, metric]))
    }
    axes.set(xlabel="round", ylabel=f"{metric} of a client")
    if not by_round:
        return
    edges = np.histogram_bin_edges(np.concatenate(list(by_round.values())), N_BINS)
    counts = np.stack([np.histogram(values, edges)[0] for values in by_round.values()], axis=1)
    columns = np.arange(len(by_round) + 1) - 0.5
    mesh = axes.pcolormesh(columns, edges, counts, cmap="Blues")
    axes.figure.colorbar(mesh, ax=axes, label="clients")
    means = [values.mean() for values in by_round.values()]
    axes.plot(range(len(means)), means, color="tab:orange", marker=".")
    shown = np.unique(np.linspace(0, len(means) - 1, 6).astype(int))
    axes.set_xticks(shown, [str(list(by_round)[k]) for k in shown])


def _finite(column: pd.Series) -> np.ndarray:
    """Return the finite values of a column."""
    values = column.to_numpy(dtype=float)
    return values[np.isfinite(values)]
