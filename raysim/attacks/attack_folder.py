"""Files of an attack: options, table and plot, in the run's folder and in MLflow."""

from __future__ import annotations

import csv
import json
import logging
import math
from pathlib import Path

from raysim.attacks.plots import plot_reconstructions
from raysim.attacks.reconstructions import AttackResult
from raysim.engine.plan import Plan
from raysim.errors import RaysimError, round_name
from raysim.system import files
from raysim.tracking.late_sending import add_to

logger = logging.getLogger("raysim")


def write_attack(result: AttackResult, plan: Plan, run_dir: Path) -> Path:
    """Write plot, table and options of an attack, and add them to the run in MLflow.

    Args:
        result: the result of the attack.
        plan: the run that was attacked.
        run_dir: the folder of that run.

    Returns:
        The folder that holds them.

    Raises:
        OSError: a file cannot be written.
    """
    o = result.options
    folder, number = files.make_numbered(run_dir / "attack" / f"{o.cost}-{o.attacker}")
    options_used = {**o.model_dump(), "tv": o.weight, "round": result.round}
    (folder / "options.json").write_text(json.dumps(options_used, indent=1) + "\n")
    _write_table(result, plan, folder / "table.csv")
    _plot(result, plan, folder / "attack.png")
    metrics = {} if math.isnan(result.psnr) else {f"attack/psnr_{o.cost}_{o.attacker}": result.psnr}
    try:
        add_to(run_dir, metrics, number, folder, f"attack/{folder.name}")
    except RaysimError as error:
        logger.warning("the run in MLflow does not show this attack: %s", error)
    return folder


def _write_table(result: AttackResult, plan: Plan, path: Path) -> None:
    """Write a row for each image, with its label, cost and PSNR."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "image", "label", "class", "cost", "psnr", "restart"])
        for client in result.clients:
            for k, (label, quality) in enumerate(zip(client.labels, client.psnr, strict=True)):
                name = plan.dataset.classes[label]
                writer.writerow(
                    [client.client, k, label, name, client.cost, quality, client.restart]
                )


def _plot(result: AttackResult, plan: Plan, path: Path) -> None:
    """Plot each image above its reconstruction."""
    pairs = []
    for client in result.clients:
        images = zip(client.original.numpy(), client.reconstructed.numpy(), strict=True)
        for label, quality, (before, after) in zip(client.labels, client.psnr, images, strict=True):
            name = f"client {client.client}: {plan.dataset.classes[label]}"
            pairs.append((name, before, after, quality))
    mean = f"mean PSNR {result.psnr:.2f} dB, median {result.median:.2f}"
    if math.isnan(result.psnr):
        mean = "no image with a finite PSNR"
    options = result.options
    run = f"{plan.label} on {plan.config.data.name}, {round_name(result.round)}"
    title = f"{run}: {options.cost}, {options.attacker}; {mean}"
    plot_reconstructions(pairs, title, path)
