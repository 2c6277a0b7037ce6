"""Tables and pictures that a run writes to its folder and uploads to MLflow as artifacts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raysim import schedule
from raysim.data import plot_partition
from raysim.data.plots import MAX_CLASSES_SHOWN
from raysim.diagnostics import forgetting
from raysim.engine.evaluation import client_evaluation
from raysim.engine.loop import Record
from raysim.engine.plan import Plan
from raysim.rules.contract import overridden
from raysim.runs.result import write_history
from raysim.runs.run_dir import ARTIFACT_FILES, CLIENTS_FILE, HISTORY_FILE
from raysim.system import files

MAX_CLOCK_ROUNDS_SHOWN = 60
"""Largest number of rounds of the virtual clock that are drawn."""

AttemptCallback = Callable[[str, Callable[[], object]], None]
"""Function that calls a function and, if it fails, reports the failure under a title."""

WriteCallback = Callable[[str, Callable[[Path], object]], None]
"""Function that lets a function write the file of a name in the run's folder."""


def write_artifacts(
    plan: Plan,
    run_dir: Path,
    history: list[Record],
    attempt: AttemptCallback,
    measurements: bool = True,
    overview: bool = True,
) -> list[Path]:
    """Write the tables and pictures of a run.

    Args:
        plan: the run's plan.
        run_dir: the run's folder.
        history: the run's records; if empty, no table and no learning curve are written.
        attempt: calls the writer of each file under a title, so that a failure does not prevent the
            others.
        measurements: whether pictures of forgetting and of evaluated clients are drawn.
        overview: whether the learning curve, the partition and the virtual clock are drawn.

    Returns:
        The existing files among ARTIFACT_FILES.
    """

    def write(name: str, writer: Callable[[Path], object]) -> None:
        def write_atomically() -> None:
            try:
                with files.whole(run_dir / name) as partial:
                    writer(partial)
            except Exception:
                # One of an earlier stop has fewer rounds.
                (run_dir / name).unlink(missing_ok=True)
                raise

        attempt(f"{run_dir / name} is not written", write_atomically)

    if history:
        write(HISTORY_FILE, lambda path: write_history(history, path))
    if client_evaluation.tables(run_dir):
        write(
            CLIENTS_FILE,
            lambda path: client_evaluation.read_clients(run_dir).to_parquet(path, index=False),
        )
    if overview:
        _draw_overview(plan, history, write)
    if measurements:
        _draw_measurements(run_dir, write, attempt)
    return [path for name in ARTIFACT_FILES if (path := run_dir / name).exists()]


def _draw_overview(plan: Plan, history: list[Record], write: WriteCallback) -> None:
    """Draw the learning curve, the partition and the virtual clock."""
    # This module imports matplotlib, which is slow.
    from raysim.runs.artifacts.plots import plot_learning_curve, plot_virtual_clock

    if history:
        write("learning_curve.png", lambda path: plot_learning_curve(history, path))
    data = plan.dataset
    if data.are_labelled and data.n_classes <= MAX_CLASSES_SHOWN:
        write(
            "partition.png", lambda path: plot_partition(plan.clients, data.y, data.n_classes, path)
        )
    rounds_shown = min(plan.config.rounds, MAX_CLOCK_ROUNDS_SHOWN)
    selects = overridden(plan.server, ["select"])  # then no round is known without its training
    if not selects and (
        scheduled := schedule.preview(plan.config, plan.clients.sizes_by_round, rounds_shown)
    ):
        write("arrivals.png", lambda path: plot_virtual_clock(scheduled, path))


def _draw_measurements(run_dir: Path, write: WriteCallback, attempt: AttemptCallback) -> None:
    """Draw forgetting and the evaluated clients, if they were measured."""
    forgotten: dict[int, dict[str, list[float]]] = {}
    attempt(
        "the measurements of forgetting cannot be read",
        lambda: forgotten.update(forgetting.read_forgetting(run_dir)),
    )
    if forgotten:
        from raysim.diagnostics.plots import plot_forgetting

        write("forgetting.png", lambda path: plot_forgetting(forgotten, path))
    if client_evaluation.tables(run_dir):
        from raysim.runs.artifacts.client_plots import plot_clients

        write(
            "clients.png", lambda path: plot_clients(client_evaluation.read_clients(run_dir), path)
        )
