"""Summary of a sweep in its folder and its MLflow run: tables of results, and plots.

table.md, table.csv    mean ± std over seeds, a row for each combination of the other keys
trials.csv             a line for each trial: state, rounds, results
curves.png             the metric over rounds, with a band of one std over seeds
heatmap.png            if two keys vary: the best value for each pair of values
draws.png              if keys are drawn: the best value over each of them
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from raysim.metrics import lower_is_better
from raysim.reports.analysis import aggregate, plots
from raysim.reports.analysis.curves import curves, grid
from raysim.reports.table_row import TableRow, short, sort_key
from raysim.reports.tables.results_table import ResultsTable
from raysim.reports.tracked import TrackedRun, default_metric, numbers
from raysim.runs.artifacts.description import commands, table
from raysim.runs.provenance import command_line
from raysim.sweeps.definition import Sweep, Trial
from raysim.sweeps.search_space import as_text, shown
from raysim.tracking.recorder import flatten_parameters
from raysim.tracking.spool import Tail

MAX_CURVES = 12
"""Maximum number of curves in a plot; the best ones are drawn."""

SUMMARY_FILES = ("table.md", "table.csv", "trials.csv", "curves.png", "heatmap.png", "draws.png")
"""Names of the summary files."""


@dataclass(repr=False)
class SweepResult:
    """Result of a sweep."""

    sweep: Sweep
    """The sweep."""

    run_id: str
    """Id of the parent run in MLflow."""

    reused: int
    """Number of trials that were already done before."""

    from_ledger: int | None = None
    """How many of these were rows of the ledger; None without a ledger."""

    seconds: float = 0.0
    """Wall-clock time in seconds."""

    failed: list[tuple[Trial, str]] = field(default_factory=list)
    """Failed trials with their errors: one line, possibly followed by a traceback."""

    table: str = ""
    """Table of the results as Markdown."""

    def __repr__(self) -> str:
        """Return one line: how the trials ended, the best of them, and the sweep's folder."""
        parts = [self.ends, f"{len(self.failed)} failed"]
        best_by = self.sweep.trials[0].config.evaluate.best_by
        best = {trial.title: trial.best(best_by.metric) for trial in self.sweep.trials}
        reached = {title: value for title, value in best.items() if value is not None}
        if reached:
            title = best_by.select(reached, key=reached.__getitem__)
            parts.append(f"best {best_by.metric} {reached[title]:.4f} ({title})")
        return f"SweepResult({', '.join(parts)}, {self.sweep.folder})"

    @property
    def ends(self) -> str:
        """How the trials ended, and where those were done that this sweep did not train."""
        counts = self.counts
        ends = f"{counts['finished']} of {len(self.sweep.trials)} trials finished"
        before = self.reused - (self.from_ledger or 0)
        others = {
            "stopped early": counts["stopped_early"],
            "in an earlier sweep": before,
            "from the ledger": self.from_ledger,
        }
        return ends + "".join(f", {n} {where}" for where, n in others.items() if n)

    @property
    def stopped(self) -> list[tuple[Trial, str]]:
        """Trials that were stopped early, with the reason."""
        stopped = []
        for trial in self.sweep.trials:
            result = trial.result or {}
            if "stopped" in result:
                stopped.append((trial, result["stopped"]))
        return stopped

    @property
    def unfinished(self) -> dict[Path, tuple[str, str]]:
        """State and reason of each trial that did not finish, by its folder."""
        stopped = {trial.folder: ("stopped early", reason) for trial, reason in self.stopped}
        failed = {trial.folder: ("failed", error) for trial, error in self.failed}
        return stopped | failed

    @property
    def counts(self) -> dict[str, int]:
        """Number of trials by their final state."""
        failed = len(self.failed)
        stopped = len(self.stopped)
        finished = len(self.sweep.trials) - failed - stopped
        return {"finished": finished, "stopped_early": stopped, "failed": failed}

    def as_object(self) -> dict[str, Any]:
        """Return the result as an object that JSON can represent."""
        unfinished = self.unfinished
        trials = []
        for trial in self.sweep.trials:
            known = trial.result
            if known is None:
                _, error = unfinished[trial.folder]
                known = {"run_dir": str(trial.folder), "error": error}
            facts = {"values": trial.values, **known}
            # The id in the trial's own result is provisional; the spool has the id in MLflow.
            if run_id := Tail(trial.folder).run_id:
                facts["run_id"] = run_id
            trials.append(facts)
        facts = {"run_id": self.run_id, "dir": str(self.sweep.folder), **self.counts}
        facts["reused"] = self.reused
        if self.from_ledger is not None:
            facts["from_ledger"] = self.from_ledger
        return {**facts, "seconds": round(self.seconds, 3), "trials": trials}


MAX_TABLE_CHARACTERS = 5000
"""Maximum size of a table in a description; MLflow keeps 8000 characters of the whole."""


def description(sweep: Sweep, results: str = "") -> str:
    """Return the description of a sweep as Markdown.

    Args:
        sweep: sweep to describe.
        results: table of the results as Markdown, once the sweep has ended.
    """
    axes = {f"`{key}`": " ".join(map(shown, values)) for key, values in sweep.axes.items()}
    axes |= {f"`{key}`": str(draw) for key, draw in sweep.drawn.items()}
    if len(results) > MAX_TABLE_CHARACTERS:
        results = "The table of the results is the artifact table.md."
    parts = [
        f"**{sweep.name}**: a sweep of {len(sweep.trials)} trials, which are the runs below this "
        "one",
        table({**axes, "folder": f"`{sweep.folder}`"}),
        results,
        *commands({"started by, and resumed by the same command": command_line()}),
    ]
    return "\n\n".join(filter(None, parts))


def summary_files(folder: Path) -> list[Path]:
    """Return the existing summary files of a sweep's folder.

    Args:
        folder: folder of the sweep.
    """
    return [folder / name for name in SUMMARY_FILES if (folder / name).exists()]


def write_summary(outcome: SweepResult) -> str:
    """Write all summary files into the folder of the sweep.

    Args:
        outcome: the result of the sweep; its `table` is not set yet.

    Returns:
        The table of the results as Markdown, or a sentence if no trial has finished.
    """
    folder = outcome.sweep.folder
    # Remove files of an earlier attempt: this attempt may not write all of them again.
    for path in summary_files(folder):
        path.unlink()
    metric, runs = _trials_as_runs(outcome)
    _write_trials(outcome, metric, runs)
    rows = aggregate.rows(runs)
    if not any(row.result for row in rows):
        return "no trial has finished"
    results = ResultsTable(rows)
    text = results.markdown()
    (folder / "table.md").write_text(text + "\n")
    (folder / "table.csv").write_text(results.csv() + "\n")
    _plot(outcome.sweep, metric, runs, rows)
    return text


def _plot(sweep: Sweep, metric: str, runs: list[TrackedRun], rows: list[TableRow]) -> None:
    """Plot the curves of the best rows, and the results over the keys that vary."""
    folder = sweep.folder
    best = sorted(rows, key=sort_key)[:MAX_CURVES]
    shown = set().union(*(row.run_ids for row in best))
    title = f"the best {MAX_CURVES} of {len(rows)}" if len(rows) > MAX_CURVES else ""
    averaged = curves([run for run in runs if run.run_id in shown])
    plots.plot_curves(averaged, metric, "rounds", folder / "curves.png", title)
    keys = list(dict.fromkeys(itertools.chain.from_iterable(row.parameters for row in rows)))
    if sweep.drawn:
        plots.plot_scatter(_drawn(sweep, metric, runs), f"best {metric}", folder / "draws.png")
    elif len(keys) == 2:
        x, y = keys
        panel = plots.Panel("", *grid(runs, x, y))
        plots.plot_heatmap([panel], short(x), short(y), rows[0].figure, folder / "heatmap.png")


def _trials_as_runs(outcome: SweepResult) -> tuple[str, list[TrackedRun]]:
    """Return the metric of the comparison, and all trials as runs; failed ones have no history."""
    unfinished = outcome.unfinished
    failed = {trial.folder for trial, _ in outcome.failed}
    trained = [trial for trial in outcome.sweep.trials if trial.folder not in failed]
    histories = {trial.folder: trial.history() for trial in trained}
    records = itertools.chain.from_iterable(histories.values())
    logged = set().union(*(record for _, record in records))
    metric = _metric_of_comparison(outcome.sweep, logged)
    runs = []
    for trial in outcome.sweep.trials:
        history = histories.get(trial.folder, [])
        values = numbers([(t, record[metric]) for t, record in history if metric in record])
        params = flatten_parameters(trial.config.model_dump(mode="json"))
        state, _ = unfinished.get(trial.folder, ("", ""))
        runs.append(TrackedRun(trial.folder.name, params, values, unfinished=state, metric=metric))
    return metric, runs


def _metric_of_comparison(sweep: Sweep, logged: set[str]) -> str:
    """Return the metric that stops trials, or else that of a report."""
    stopping = sweep.settings.early_stopping
    # Tables sort in the usual direction of a metric, so early stopping must have the same one.
    if (
        stopping
        and stopping.metric in logged
        and stopping.lower == lower_is_better(stopping.metric)
    ):
        return stopping.metric
    return default_metric(sweep.trials[0].config.evaluate.best_by.metric, logged)


def _best(run: TrackedRun) -> float | None:
    """Return the best value of a run, or None without a history."""
    return aggregate.result_of_run(run, "best") if run.history else None


def _write_trials(outcome: SweepResult, metric: str, runs: list[TrackedRun]) -> None:
    """Write the lines of trials.csv."""
    unfinished = outcome.unfinished
    records = []
    for trial, run in zip(outcome.sweep.trials, runs, strict=True):
        result = trial.result or {}
        state, why = unfinished.get(trial.folder, ("finished", ""))
        record: dict[str, Any] = {}
        for key in outcome.sweep.axes:
            record[key] = as_text(trial.values[key]) if key in trial.values else ""
        record["seed"] = trial.config.seed
        record["state"] = state
        record["why"] = why.partition("\n")[0]  # without the traceback
        record["rounds"] = result.get("rounds")
        record["failed attempts"] = trial.failures
        record[f"best {metric}"] = _best(run)
        record[f"last {metric}"] = run.history[-1][1] if run.history else None
        record["seconds"] = result.get("seconds")
        record["run"] = Tail(trial.folder).run_id
        record["folder"] = trial.folder
        records.append(record)
    table = pd.DataFrame(records, dtype=object)
    table.to_csv(outcome.sweep.folder / "trials.csv", index=False, lineterminator="\n")


def _drawn(sweep: Sweep, metric: str, runs: list[TrackedRun]) -> dict[str, plots.Cloud]:
    """Return the results over each key that was drawn."""
    clouds = {}
    for key, draw in sweep.drawn.items():
        points = []
        for trial, run in zip(sweep.trials, runs, strict=True):
            best = _best(run)
            if best is None or key not in trial.values:
                continue
            value = trial.values[key]
            if draw.kind == "choice":
                value = as_text(value)
            points.append((value, best, not run.unfinished))
        if points:
            clouds[key] = plots.Cloud(points, draw.kind == "loguniform")
    return clouds
