"""Shared by the tests of sweeps: a run of a second, files of it, the values of trials, and sweeps
in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from raysim.config.tracking_uri import absolute_uri
from raysim.sweeps import runner
from raysim.sweeps.definition import Sweep, Trial, WatchCallback
from raysim.sweeps.trials import trial as one
from support.configurations import IID_MLP

SMALL = {
    **IID_MLP,
    "local": {"steps": 2, "batch_size": 8, "lr": 0.05},
    "checkpoint": {"every": 0},
    "tracking": {"experiment": "swept"},
}


def written(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **sections}))
    return path


def values(planned: Sweep) -> list[dict[str, Any]]:
    return [trial.values for trial in planned.trials]


def trained_in_this_process(patch: Callable[[Any, str, Any], None]) -> list[Trial]:
    """Let sweeps train their trials in this process, one after the other.

    Args:
        patch: `monkeypatch.setattr`.

    Returns:
        The trials that were started since, in their order.
    """
    started: list[Trial] = []

    @contextmanager
    def processes(
        sweep: Sweep, missing: list[Trial], parallel: int | None
    ) -> Iterator[runner.RunAll]:
        yield partial(in_turn, sweep, missing)

    def in_turn(
        sweep: Sweep, missing: list[Trial], parent: str, watch: WatchCallback
    ) -> list[tuple[Trial, str]]:
        failed: list[tuple[Trial, str]] = []
        uri = absolute_uri(sweep.tracking.uri)
        for trial in missing:
            started.append(trial)
            experiment = sweep.tracking.experiment
            error = one.train_trial(trial, uri, experiment, parent, None, lambda figures: "")
            watch(trial, "failed" if error else "finished", trial.result or {"error": error})
            if error:
                failed.append((trial, error))
        return failed

    patch(runner, "_processes", processes)
    return started
