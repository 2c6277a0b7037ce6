"""Plots of the diagnostics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def plot_forgetting(rounds: Mapping[int, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Plot how local training forgets past clients' data.

    The file is a PNG of 1400 × 400 pixels with three panels: the losses before and after local
    training, the increase of the loss over the rounds, and the correlations of Fisher information
    (Xu et al. 2022, figures 1 and C.1).

    Args:
        rounds: the result of `raysim.diagnostics.forgetting.gather_losses` for each round; at least
            one round.
        path: the file to write; its folder must exist.
    """
    figure = Figure(figsize=(14, 4), dpi=100, layout="constrained")
    losses, increases, fisher = figure.subplots(1, 3)
    for when, colour in (("before", "tab:blue"), ("after", "tab:red")):
        values = np.concatenate([measured[when] for measured in rounds.values()])
        losses.hist(
            values[np.isfinite(values)],
            bins=40,
            alpha=0.5,
            color=colour,
            label=f"{when} local training",
        )
    losses.set(
        title="loss on past clients' data",
        xlabel="mean loss of a client",
        ylabel="past clients, in all rounds",
    )
    losses.legend()
    loss_increases = [
        np.array(measured["after"]) - np.array(measured["before"]) for measured in rounds.values()
    ]
    quantiles = np.array([np.nanquantile(values, (0.1, 0.5, 0.9)) for values in loss_increases])
    low, median, high = quantiles.T
    # Learning curves count rounds from 1.
    counts = [t + 1 for t in rounds]
    marker = "." if len(counts) <= 50 else None
    increases.plot(counts, median, color="tab:red", marker=marker, label="median")
    increases.fill_between(
        counts, low, high, color="tab:red", alpha=0.2, label="10 % to 90 % quantile"
    )
    increases.axhline(0, color="0.5", linewidth=0.5)
    increases.set(title="change by local training", xlabel="round", ylabel="increase of the loss")
    increases.xaxis.set_major_locator(MaxNLocator(integer=True))
    increases.legend()
    correlations = np.array([r for measured in rounds.values() for r in measured["fisher"]])
    fisher.hist(correlations[np.isfinite(correlations)], bins=40, range=(-1, 1), color="tab:gray")
    fisher.set(
        title="Fisher information",
        xlabel="correlation of pseudo and past data",
        ylabel="clients, in all rounds",
    )
    figure.suptitle("forgetting of the data of the previous round's clients", fontsize=10)
    figure.savefig(path, format="png")
