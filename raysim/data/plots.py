"""Plots and summaries of data sets and partitions.

matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.dataset import Dataset, label_counts
from raysim.data.partition.clients import Clients, VirtualClients
from raysim.data.several_inputs import shapes_of
from raysim.errors import ConfigError

MAX_CLIENTS_SHOWN = 100
"""Clients of a partition plot."""

MAX_CLASSES_SHOWN = 1000
"""Classes of a partition plot, and of the counts in a summary."""

MAX_CIRCLE_AREA_PT2 = 250
"""Area of the largest circle of a partition plot, in square points."""

MARGINS_IN = (0.65, 0.15, 0.55, 0.35)
"""Margins of a partition plot in inches: left, right, bottom, top."""


def class_counts(
    clients: Clients | VirtualClients, labels: np.ndarray, n_classes: int, first: int
) -> np.ndarray:
    """Return the number of examples of each class that the first clients hold.

    Args:
        clients: the partition, of N clients.
        labels: int64 [n], the labels of the training half.
        n_classes: number of classes.
        first: number of clients to count.

    Returns:
        int64 [min(N, first), n_classes].
    """
    shown = range(min(len(clients), first))
    return np.stack([label_counts(labels[clients.client(i)], n_classes) for i in shown])


def plot_partition(
    clients: Clients | VirtualClients, labels: np.ndarray, n_classes: int, path: str | Path
) -> None:
    """Plot clients against classes, with circles whose areas are the numbers of examples.

    At most `MAX_CLIENTS_SHOWN` clients are drawn. The title states how many are left out.

    Args:
        clients: the partition.
        labels: int64 [n], the labels of the training half.
        n_classes: number of classes.
        path: the file to write; its suffix (.png, .pdf, .svg) selects the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = class_counts(clients, labels, n_classes, MAX_CLIENTS_SHOWN)
    client, label = np.nonzero(counts)
    width, height = np.clip([1.5 + 0.12 * len(counts), 1.2 + 0.25 * n_classes], [5, 2.5], [14, 12])
    # Every run draws it, and a layout that matplotlib finds takes as long as the rest of it.
    figure = Figure(figsize=(width, height))
    left, right, bottom, top = MARGINS_IN
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    axes = figure.subplots()
    area = MAX_CIRCLE_AREA_PT2 * counts[client, label] / max(counts.max(), 1)
    axes.scatter(client, label, s=area, color="tab:red", alpha=0.75, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-1, len(counts)), ylim=(-0.8, n_classes - 0.2))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    shown = f"first {len(counts)} of " if len(counts) < len(clients) else ""
    axes.set_title(f"{shown}{len(clients)} clients; largest circle: {counts.max()} examples")
    figure.savefig(path, dpi=120)


def plot_samples(dataset: Dataset, path: str | Path, columns: int = 10, rows: int = 20) -> None:
    """Plot the first training images of the first classes, with one class in a row.

    Args:
        dataset: the data set.
        path: the file to write; its suffix (.png, .pdf, .svg) selects the format.
        columns: largest number of images of a class.
        rows: largest number of classes.

    Raises:
        ConfigError: the examples are not images, or have no labels.
    """
    from matplotlib.figure import Figure

    if not dataset.are_images or not dataset.are_labelled:
        raise ConfigError(f"data.name: {dataset.name} has no labelled images to draw")
    channels, height, width = dataset.shape
    shown = min(dataset.n_classes, rows)
    canvas = np.full(
        (channels, shown * height, columns * width), dataset.x.max(), dtype=dataset.x.dtype
    )
    for row in range(shown):
        for column, k in enumerate(np.flatnonzero(dataset.y == row)[:columns]):
            canvas[:, row * height : (row + 1) * height, column * width : (column + 1) * width] = (
                dataset.x[k]
            )
    figure = Figure(
        figsize=(2 + 0.6 * columns, 0.8 + 0.6 * shown * height / width), layout="constrained"
    )
    axes = figure.subplots()
    image = canvas[0] if channels == 1 else canvas.transpose(1, 2, 0)
    # matplotlib ignores the colour map and its limits for RGB images.
    axes.imshow(image, cmap="gray", vmin=min(0, dataset.x.min()), vmax=dataset.x.max())
    axes.set_xticks([])
    axes.set_yticks((np.arange(shown) + 0.5) * height, dataset.classes[:shown])
    axes.set_title(f"{dataset.name}: {shown} of {dataset.n_classes} classes")
    figure.savefig(path, dpi=120)


def dataset_summary(dataset: Dataset) -> dict[str, Any]:
    """Return the figures that `raysim data show` prints, as plain types for JSON.

    `counts` maps each class to [training examples, test examples]; it is empty if there are more
    than `MAX_CLASSES_SHOWN` classes.

    Args:
        dataset: the data set.
    """
    counts: dict[str, list[int]] = {}
    if dataset.are_labelled and dataset.n_classes <= MAX_CLASSES_SHOWN:
        train_and_test = [label_counts(y, dataset.n_classes) for y in (dataset.y, dataset.y_test)]
        counts = dict(zip(dataset.classes, np.transpose(train_and_test).tolist(), strict=True))
    augmentation = []
    if dataset.pad:
        height, width = dataset.shape[1:]
        augmentation.append(f"crop {height}x{width} after padding by {dataset.pad}")
    if dataset.flip:
        augmentation.append("mirror")
    return {
        "name": dataset.name,
        "train": len(dataset.y),
        "test": len(dataset.y_test),
        "shape": shapes_of(dataset.inputs) if dataset.inputs else list(dataset.shape),
        "classes": dataset.n_classes,
        "counts": counts,
        "augmentation": ", ".join(augmentation) or "none",
        "groups": len(dataset.group_names) or None,
        "digest": dataset.digest,
    }
