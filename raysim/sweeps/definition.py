"""Definition of a sweep: a configuration, the keys that vary, and the settings of its trials.

The section `sweep` of a file or `key=value` on the command line defines the keys that vary (see
`search_space`). The section also holds the `SweepSettings`; on the command line these are
`sweep.samples=20` and so on. `preparation` reads a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from raysim.config.schema import Config
from raysim.config.sections.storage import Tracking
from raysim.ledger.kept import kept_config
from raysim.runs.python_inputs import SECTIONS_OF_RULES
from raysim.runs.result import read_history
from raysim.runs.run_dir import HISTORY_FILE
from raysim.sweeps.reading import SweepSettings
from raysim.sweeps.search_space import Draw, title_of
from raysim.system.json_files import parsed
from raysim.tracking.recorder import flatten_parameters


class _Result(TypedDict):
    """Keys of result.json that every ended trial has."""

    run_id: str
    rounds: int
    metrics: dict[str, dict[str, float]]
    seconds: float


@dataclass(frozen=True, repr=False)
class Trial:
    """One run of a sweep."""

    values: dict[str, Any]
    """Values of the keys that vary."""

    config: Config
    """Resolved configuration."""

    label: str
    """Label of the algorithm."""

    folder: Path
    """Absolute path of the run's folder."""

    position: int = field(default=0, compare=False)
    """Number of trials before it in the sweep."""

    def __repr__(self) -> str:
        """Return its title and its folder."""
        return f"Trial({self.title}, {self.folder})"

    @property
    def title(self) -> str:
        """Values of the keys that vary as text, or the label if none varies."""
        return title_of(self.values) or self.label

    @property
    def params(self) -> dict[str, str]:
        """Resolved configuration as text by dotted key, as in a ledger."""
        return flatten_parameters(kept_config(self.config))

    @property
    def result(self) -> dict[str, Any] | None:
        """Result of an ended trial, with a key `stopped` if it was stopped early; else None."""
        try:
            return parsed((self.folder / "result.json").read_bytes(), _Result)
        except (OSError, ValueError):
            return None

    def best(self, metric: str) -> float | None:
        """Return the best value of a metric, or None if the trial has no result with it.

        Args:
            metric: name of the metric.
        """
        return (self.result or {}).get("metrics", {}).get(metric, {}).get("best")

    @property
    def failures(self) -> int:
        """Number of failed attempts that were followed by another."""
        return len(list(self.folder.glob("error-*.txt")))

    def history(self) -> list[tuple[int, dict[str, float]]]:
        """Return (round, metrics) of a trial with a result, up to the last round of the result.

        A run that was resumed for more rounds has more in its file.
        """
        last = (self.result or {}).get("rounds", math.inf)
        rows = read_history(self.folder / HISTORY_FILE)
        return [(t, row) for row in rows if (t := int(row.pop("round"))) <= last]


WatchCallback = Callable[[Trial, str, Mapping[str, Any]], None]
"""Called with a trial, its state and facts: "running" with the latest record; "finished" or
"stopped" with the result; "failed" with the "error"; "again" with the "error" before a retry."""


@dataclass(frozen=True)
class Sweep:
    """Checked sweep that is ready to start."""

    name: str
    """Name of the sweep: that of its file."""

    trials: list[Trial]
    """Trials without duplicates."""

    axes: dict[str, list[Any]]
    """Keys that vary, with all their values."""

    drawn: dict[str, Draw]
    """Distributions of the keys that are drawn."""

    base: dict[str, Any]
    """Configuration that the trials have in common, not resolved."""

    merged: int
    """Number of points that were dropped because they compute the same as another trial."""

    folder: Path
    """Folder of the parent run."""

    settings: SweepSettings
    """Settings of the sweep."""

    @property
    def tracking(self) -> Tracking:
        """Tracking settings, which all trials share."""
        return self.trials[0].config.tracking

    @property
    def common(self) -> dict[str, str]:
        """Configuration of the sweep as flat text, without the keys and sections that vary.

        If a rule varies, so do method and rules.
        """
        varied = {key.removesuffix(".name") for key in self.axes}
        if not varied.isdisjoint(SECTIONS_OF_RULES):
            varied |= set(SECTIONS_OF_RULES)
        common = {}
        for key, value in flatten_parameters(self.base).items():
            if not any(f"{key}.".startswith(f"{section}.") for section in varied):
                common[key] = value
        return common

    def done(self, trial: Trial) -> bool:
        """Return True if a trial needs no further work in this sweep.

        A finished trial is done, unless its history could not be written. A trial that was stopped
        early is done if this sweep stops trials by the same settings.

        Args:
            trial: A trial of this sweep.
        """
        result = trial.result
        if result is None or not (trial.folder / HISTORY_FILE).exists():
            return False
        if "stopped" not in result:
            return True
        # `raysim resume` writes parameters.safetensors when it completes a stopped trial.
        was_resumed = (trial.folder / "parameters.safetensors").exists()
        stopping = self.settings.early_stopping
        settings = stopping and stopping.model_dump(mode="json")
        return bool(settings) and result.get("early_stopping") == settings and not was_resumed
