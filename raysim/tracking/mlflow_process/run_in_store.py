"""A run in an MLflow store, as the process that trains and the one that calls MLflow know it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class RunInStore:
    """One run in an MLflow server or database; used by one thread.

    Args:
        uri: absolute tracking URI.
        experiment: name of the experiment, which is created if it does not exist.
        run_id: MLflow's id of the run that has received earlier records; None: none has.
        run_dir: the run's folder, to which the paths of its files are relative.
        replaces: id of a deleted run, whose records a new run receives; None: no run is replaced.

    Attributes:
        key: id of the open run in its start record, possibly the provisional one; None before.
    """

    uri: str
    experiment: str
    run_id: str | None
    run_dir: Path
    replaces: str | None = None

    def __post_init__(self) -> None:
        self.run_dir = Path(self.run_dir).absolute()
        self.key: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make such an object of the run as it is now."""
        return {field.name: getattr(self, field.name) for field in fields(RunInStore)}
