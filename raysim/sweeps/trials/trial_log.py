"""Events of the trials that run: who has started, who goes on, who has ended and how."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raysim.errors import RaysimError
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.early_stopping import Halving, RungTracker
from raysim.sweeps.trials.trial import set_aside_error
from raysim.system import files
from raysim.tracking.recorder import Recorder


class TrialLog:
    """Bookkeeping of the trials that run, by their positions among the missing ones.

    Args:
        sweep: the sweep.
        missing: the trials of the sweep that run, in the order of their positions.
        watch: called with each trial, its state, and its facts.
    """

    def __init__(self, sweep: Sweep, missing: list[Trial], watch: WatchCallback):
        self.trials, self.watch = missing, watch
        self.running: dict[int, Trial] = {}
        self.failed: dict[int, str] = {}
        stopping = sweep.settings.early_stopping
        self.halving = None if stopping is None else Halving(stopping)
        if self.halving:
            _replay_finished(self.halving, sweep, missing)

    def started(self, place: int) -> None:
        """Log that a trial has started.

        Args:
            place: position of the trial among those that run.
        """
        self.running[place] = self.trials[place]
        self.watch(self.trials[place], "running", {})

    def reported(self, place: int, figures: Mapping[str, Any]) -> str:
        """Log what a trial reports, and return the reason to stop it, or "".

        Args:
            place: position of the trial among those that run.
            figures: metrics of a round, with its `rung` and `value` at a rung.
        """
        trial = self.trials[place]
        reason = ""
        if self.halving and "rung" in figures:
            reason = self.halving.judge(trial.folder, figures)
        self.watch(trial, "running", figures)
        return reason

    def died(self, place: int, ending: str) -> None:
        """Write error.txt of a trial whose process died and could not.

        Args:
            place: position of the trial.
            ending: how the process has ended.
        """
        set_aside_error(self.trials[place])  # of an earlier sweep, if the process died at its start
        _write_error(self.trials[place], ending)

    def again(self, place: int) -> None:
        """Log that a trial is tried again.

        Args:
            place: position of the trial, whose attempt has ended without a result.
        """
        trial = self._gone(place)
        self.watch(trial, "again", {"error": self._error(trial, died=True)})

    def ended(self, place: int, died: bool = False) -> None:
        """Log that a trial has ended: finished, stopped early or failed.

        Args:
            place: position of the trial among those that run.
            died: whether its last attempt has ended without a result.
        """
        trial = self._gone(place)
        if not died and (result := trial.result):
            self.watch(trial, "stopped" if "stopped" in result else "finished", result)
            return
        if died:
            _close(trial, "FAILED")
        self.failed[place] = text = self._error(trial, died)
        self.watch(trial, "failed", {"error": text})

    def killed(self) -> None:
        """Record that the trials which ran have been killed."""
        for trial in self.running.values():
            _close(trial, "KILLED")

    @property
    def failures(self) -> list[tuple[Trial, str]]:
        """The failed trials with their errors, in the order of the sweep."""
        return [(self.trials[place], error) for place, error in sorted(self.failed.items())]

    def _gone(self, place: int) -> Trial:
        return self.running.pop(place, self.trials[place])

    def _error(self, trial: Trial, died: bool) -> str:
        mistake = trial.folder / "error.txt"
        if died and not mistake.exists():  # Tune does not say how a process has ended
            _write_error(trial, "its process died, or its node (out of memory?)")
        if mistake.exists():
            return mistake.read_text().strip()
        return (
            f"there is no record of it in {trial.folder}; every node of the cluster must see that "
            "folder"
        )


def _write_error(trial: Trial, text: str) -> None:
    """Write error.txt of a trial, whose folder may be missing."""
    files.make_private(trial.folder)
    files.write_file(trial.folder / "error.txt", text)


def _replay_finished(halving: Halving, sweep: Sweep, missing: list[Trial]) -> None:
    """Report the rungs of the trials that were finished before."""
    for trial in sweep.trials:
        if trial in missing:
            continue
        ladder = RungTracker(halving.stopping, trial.config.rounds)
        for t, record in trial.history():
            if rung := ladder.climb({"round": t, **record}):
                halving.judge(trial.folder, {"round": t, **rung})


def _close(trial: Trial, status: Any) -> None:
    """End the record of a trial whose process has ended."""
    for _ in range(50):  # the process may need a while to end
        try:
            recorder = Recorder("", "", trial.folder)
        except RaysimError:
            time.sleep(0.1)
            continue
        recorder.end(status)
        return
