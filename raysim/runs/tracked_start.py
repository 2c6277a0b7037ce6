"""Records of a run at its start: parameters, tags, data set, partition and code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.data import dataset_summary, partition_digest
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint
from raysim.runs import git
from raysim.runs.artifacts.description import describe
from raysim.runs.provenance import REQUIREMENTS_FILE, command_tag, versions
from raysim.runs.run_dir import SOURCES_FOLDER, without_secrets
from raysim.system.cpu_kind import cpu_kind
from raysim.tracking.followers import NOTE_TAG
from raysim.tracking.recorder import FORK_CHANGES, FORK_ROUND, RESUMED_ROUNDS, Recorder

TAGS_OF_THE_END = ("digest", "early_stop", "error", "error_at_end", "stopped_early")
"""Tags that a run gets when it ends, of which some say why."""


@dataclass
class ForkOrigin:
    """Origin of a fork."""

    run_id: str
    """MLflow id of the forked run."""
    changes: str
    """Changed keys with old and new values, as text."""
    tracks: bool
    """True if MLflow tracks the fork."""


def start_tracking(
    tracker: Recorder,
    plan: Plan,
    run_dir: Path,
    saved: checkpoint.Checkpoint | None,
    origin: ForkOrigin | None,
) -> str:
    """Start or reopen the tracked run with its tags, data sets and code.

    Args:
        tracker: receives them.
        plan: the plan of the run.
        run_dir: the folder of the run.
        saved: the checkpoint from which the run resumes; None: it starts at the beginning.
        origin: the origin of a fork; None if the run is not a fork.

    Returns:
        The id of the run.
    """
    about = {**run_tags(plan), **_tags_of(origin, saved), "run_dir": str(run_dir.absolute())}
    before = (saved.facts["run_id"] if saved else "") or tracker.earlier
    if before:
        # The tags of the former end no longer apply.
        about |= dict.fromkeys(TAGS_OF_THE_END, "")
        about |= {RESUMED_ROUNDS: str(plan.config.rounds), **command_tag("resumed.command")}
    else:
        about |= {NOTE_TAG: describe(plan, run_dir), **command_tag()}
    params = without_secrets(plan.config).model_dump(mode="json")
    run_id = tracker.start(plan.label, params, about, run_id=before)
    _track_inputs(tracker, plan)
    tracker.artifact(run_dir / REQUIREMENTS_FILE)
    if (run_dir / SOURCES_FOLDER).is_dir():
        tracker.artifact(run_dir / SOURCES_FOLDER, SOURCES_FOLDER)
    return run_id


def run_tags(plan: Plan) -> dict[str, str]:
    """Return the tags by which users filter runs in MLflow.

    Args:
        plan: the plan of the run.
    """
    c = plan.config
    return {
        "algorithm": plan.label,
        "client_rule": plan.client.name,
        "server_rule": plan.server.name,
        "data": c.data.name,
        "partition": c.partition.name,
        "model": c.model.name,
        "seed": str(c.seed),
        "fingerprint": c.fingerprint,
        "parameters": str(plan.problem.size),
        **git.git_tags(),
        **versions(),
        "cpu_capability": cpu_kind(),
        **(
            {"privacy.unprotected": ", ".join(plan.client.unprotected_uploads)}
            if c.example_privacy and plan.client.unprotected_uploads
            else {}
        ),
    }


def _tags_of(origin: ForkOrigin | None, saved: checkpoint.Checkpoint | None) -> dict[str, str]:
    """Return the tags of a fork: its origin and its changes; {} for other runs."""
    if origin is None or saved is None:
        return {}
    return {
        "fork.of": origin.run_id,
        FORK_ROUND: str(saved.facts["round"]),
        FORK_CHANGES: origin.changes,
    }


def _track_inputs(tracker: Recorder, plan: Plan) -> None:
    """Log the data set and the partition."""
    data = plan.dataset
    sizes = plan.clients.sizes
    tracker.inputs(
        data.name,
        data.digest,
        getattr(plan.config.data, "root", None) or data.name,
        "training",
        dataset_summary(data),
    )
    low, middle, high = (int(q) for q in np.quantile(sizes, (0, 0.5, 1)))
    tracker.inputs(
        f"partition-{plan.config.partition.name}",
        partition_digest(plan.clients),
        data.name,
        "partition",
        {
            "clients": len(plan.clients),
            "samples_min": low,
            "samples_median": middle,
            "samples_max": high,
        },
    )
