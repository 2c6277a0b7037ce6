"""A run in an MLflow store, as the process that trains and the one that calls MLflow know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_id: str | None,
        run_dir: Path | str,
        replaces: str | None = None,
    ) -> None:
        self.uri, self.experiment, self.run_id = uri, experiment, run_id
        self.run_dir, self.replaces = Path(run_dir).absolute(), replaces
        self.key: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make such an object of the run as it is now, for JSON."""
        return {
            "uri": self.uri,
            "experiment": self.experiment,
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "replaces": self.replaces,
        }
