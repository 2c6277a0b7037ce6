"""Plots of attacks: images and their reconstructions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

MAX_SHOWN_IMAGES = 40
"""Largest number of images in a plot."""

IMAGES_PER_ROW = 8
"""Number of images in a row of a plot."""


def plot_reconstructions(
    pairs: Sequence[tuple[str, np.ndarray, np.ndarray, float]], title: str, path: Path
) -> None:
    """Plot each image above its reconstruction, with the PSNR.

    Args:
        pairs: for each image its name, the image and its reconstruction, both [C, H, W] in [0, 1],
            and the PSNR in dB (NaN: no reconstruction). The first MAX_SHOWN_IMAGES are drawn; the
            title says so if there are more.
        title: title of the figure.
        path: the file to write, a PNG; its folder must exist.
    """
    shown = pairs[:MAX_SHOWN_IMAGES]
    across = min(len(shown), IMAGES_PER_ROW)
    bands = -(-len(shown) // IMAGES_PER_ROW)
    figure = Figure(
        figsize=(max(1.4 * across, 6), 3.2 * bands + 0.5), dpi=120, layout="constrained"
    )
    cells = figure.subplots(2 * bands, across, squeeze=False)
    for axes in cells.flat:
        axes.set_axis_off()
    for k, (name, before, after, quality) in enumerate(shown):
        band, column = divmod(k, IMAGES_PER_ROW)
        psnr = f"{quality:.1f} dB"
        if not np.isfinite(quality):
            psnr = "none" if np.isnan(quality) else "exact"
        for row, image, text in (
            (2 * band, before, f"sent: {name}"),
            (2 * band + 1, after, f"recovered: {psnr}"),
        ):
            flat = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
            cells[row, column].imshow(np.nan_to_num(flat).clip(0, 1), cmap="gray", vmin=0, vmax=1)
            cells[row, column].set_title(text, fontsize=7)
    some = f" (the first {len(shown)} of {len(pairs)} images)" if len(shown) < len(pairs) else ""
    figure.suptitle(title + some, fontsize=9)
    figure.savefig(path, format="png")
