"""Continuation of a stopped run from its last checkpoint, and forks of it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.config import loading
from raysim.config.loading import parse_overrides
from raysim.config.schema import KEYS_WITH_DIGESTS
from raysim.config.sections.data import AnyData
from raysim.data import Dataset, loading_once
from raysim.data.partition.groups import batch_sizes_of
from raysim.engine.early_stop import StopRule
from raysim.engine.plan import Plan
from raysim.engine.state import checkpoint, client_store
from raysim.errors import ConfigError, RaysimError, counted
from raysim.prepare.checks.machine import check_address
from raysim.prepare.resolve import read_run_config, resolve_plan
from raysim.prepare.written_out import default_best
from raysim.rules.uploads import with_mode
from raysim.runs.given_again import asking_for_objects, forking, refuse_another, resuming
from raysim.runs.progress import ProgressCallback, shown
from raysim.runs.python_inputs import named_inputs
from raysim.runs.result import RunResult
from raysim.runs.run import execute
from raysim.runs.run_dir import find_run_dir, forget, is_closed, make_run_dir
from raysim.runs.tracked_start import ForkOrigin
from raysim.runs.training_calls import trains
from raysim.server.central_server import Server
from raysim.tracking.abandoned import finish_abandoned
from raysim.tracking.mlflow_client import check_database
from raysim.tracking.recorder import differing, flatten_parameters
from raysim.tracking.spool import SPOOL_FILE, Tail
from raysim.training.groups import ClientGroup
from raysim.training.tasks.local_step import LocalSettings
from raysim.training.tasks.optimizers import kept, make_optimizer
from raysim.training.tasks.pure_task import PureTask
from raysim.training.uploads.upload_chain import memory_keys
from raysim.training.uploads.upload_sum import last_upload_key
from raysim.version import __version__

logger = logging.getLogger("raysim")

MOVABLE = (*KEYS_WITH_DIGESTS, "schedule.client_speeds.path")
"""Keys that `resume` accepts if the file that they name has the same content as before."""


@trains
def resume(
    run: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    progress: ProgressCallback | None = None,
    **keys: Any,
) -> RunResult:
    """Resume a stopped run from its last whole checkpoint, in the same MLflow run.

    The result is the one that an uninterrupted run would have given. A run that was killed after
    its last round is closed: its parameters, history and artifacts are written, and its end. A run
    that began with `tracking=False` and has a checkpoint stays without MLflow.

    Args:
        run: the run's folder, or its MLflow id.
        overrides: keys that do not determine the result: rounds, resources, tracking, checkpoint,
            evaluate, client_state, faults. A model or a rule that was given as an object in Python
            is given again.
        progress: as for `raysim.run`.
        **keys: further overrides, such as rounds=10.

    Returns:
        The result, with the history of all rounds.

    Raises:
        ConfigError: there is no run, it is finished or still running, or an override would change
            its result.
        RaysimError: anything else that stopped the run.
        KeyboardInterrupt: as for `raysim.run`.
    """
    with shown(progress) as shown_for:
        plan, folder, saved = reopen(run, {**named_inputs(overrides), **named_inputs(keys)})
        return execute(plan, folder, saved, progress=shown_for(plan))


@trains
def fork(
    run: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    progress: ProgressCallback | None = None,
    tracking: bool | Mapping[str, Any] | None = None,
    **keys: Any,
) -> RunResult:
    """Start a new run from the last whole checkpoint of another one, with other keys.

    The new run has a new folder. MLflow shows it as a child of the old run. Without keys of
    `tracking`, the fork of a run that began with `tracking=False` is without MLflow, too.

    Args:
        run: the folder of the run to fork, or its MLflow id. That run is not changed.
        overrides: any keys except data, partition, model and dtype, and on a virtual clock
            schedule.
        progress: as for `raysim.run`.
        tracking: False for no MLflow; a mapping with the keys of the section `tracking`; None: as
            the run to fork.
        **keys: further overrides, such as rounds=10.

    Returns:
        The new run's result; its history begins with the rounds of the old run.

    Raises:
        ConfigError: there is no run, it has no checkpoint or is still running, or the new method
            cannot use the states of clients and server.
        RaysimError: anything else that stopped the run.
        KeyboardInterrupt: as for `raysim.run`.
    """
    with shown(progress) as shown_for:
        if isinstance(tracking, Mapping):
            keys["tracking"] = tracking
        given = {**named_inputs(overrides), **named_inputs(keys)}
        plan, folder, saved, origin = forked(run, given)
        if tracking is not None:
            origin = replace(origin, tracks=bool(tracking))
        return execute(plan, folder, saved, origin, progress=shown_for(plan))


def reopen(
    run: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> tuple[Plan, Path, checkpoint.Checkpoint | None]:
    """Return the plan, the folder and the last checkpoint of a stopped run.

    Args:
        run: folder or MLflow id of the run, which no process uses.
        overrides: "key=value" texts, or a mapping of keys with dots.

    Returns:
        Plan, folder and checkpoint; the checkpoint is None if the run was stopped before its first.

    Raises:
        ConfigError: a key would change the result, or the run is finished, still running, or not
            found.
    """
    parsed = parse_overrides(overrides)
    folder = find_run_dir(run, parsed.get("tracking.uri"))
    if "run_dir" in parsed:
        raise ConfigError(
            f"run_dir: the run stays in {folder}; leave it out, or fork the run (`--fork`)"
        )
    moved = {key: parsed[key] for key in MOVABLE if key in parsed}
    load = loading_once()
    with asking_for_objects(folder, resuming):
        before = resolve_plan(read_run_config(folder / "config.yaml", moved), load)
    _check_moved(folder, before, moved)
    plan = _plan_with(folder, before, parsed, load)
    if changed := _changes(before, plan):
        refuse_another(folder, changed)
        names = [key for key in changed if f"{key.removeprefix('files.')}.name" not in changed]
        fork = "start a new run instead"
        if not any(_is_fixed(key, before, plan) for key in names):
            fork = "raysim.fork, or `raysim resume --fork`, continues it as a new run"
        raise ConfigError(
            f"{', '.join(names)}: would change the result of the run in {folder}; {fork}"
        )
    if plan.config.tracking.required:
        check_database(plan.config.tracking.uri, folder)
    saved = _read_checkpoint(folder, before)
    _refuse_finished(folder, plan, saved)
    return plan, folder, saved


def _plan_with(
    folder: Path, before: Plan, changes: Mapping[str, Any], load: Callable[[AnyData], Dataset]
) -> Plan:
    """Return the plan of a run with changed keys."""
    raw = read_run_config(folder / "config.yaml", changes)
    given = flatten_parameters(changes)
    is_default = before.config.evaluate.best == default_best(before.metrics)
    is_chosen = any(key.startswith("evaluate.best") for key in given)
    if "evaluate.metrics" in given and is_default and not is_chosen:
        # The run's file names the first of the old metrics.
        raw["evaluate"]["best"] = None
    plan = resolve_plan(raw, load)
    if "resources.address" in changes:  # a trial of a sweep may have one that the sweep used
        check_address(plan.config)
    return plan


def _refuse_finished(folder: Path, plan: Plan, saved: checkpoint.Checkpoint | None) -> None:
    """Raise ConfigError if a run was closed and has no rounds left, or nothing to resume from."""
    closed = is_closed(folder)
    if saved is None:
        if closed:
            raise ConfigError(
                f"{folder}: the run is finished and has no checkpoint to continue from; start a "
                "new run in another folder, with checkpoints (checkpoint.every)"
            )
        return
    reason = StopRule(plan.config, saved.facts["history"]).reason
    if reason and closed:
        raise ConfigError(
            f"stop: the run in {folder} is finished, {reason}; a fork (`--fork`) with stop=null "
            "continues it as a new run"
        )
    done = saved.facts["round"]
    # A full disk, or a kill after the last round, can prevent the last steps of a run.
    if done > plan.config.rounds or (done == plan.config.rounds and closed):
        advice = "to continue, give a larger rounds=N"
        if unsent := Tail(folder).pending:
            sync = f"raysim tracking sync {shlex.quote(str(folder))}"
            advice += f"; {sync} sends {counted(unsent, 'record')} that MLflow does not have"
        raise ConfigError(f"rounds: {done} rounds are done in {folder}; {advice}")


def _check_moved(folder: Path, plan: Plan, moved: Iterable[str]) -> None:
    """Raise ConfigError if a file that lies elsewhere now has another content than before."""
    recorded = loading.read_config(folder / "config.yaml").get("files") or {}
    for key in moved:
        now = (plan.config.files or {}).get(key, {})
        if list(recorded.get(key, {}).values()) != list(now.values()):
            raise ConfigError(
                f"{key}: {', '.join(now)} has another content than the file with which the run in "
                f"{folder} began; give a copy of that file, or start a new run"
            )


def forked(
    run: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> tuple[Plan, Path, checkpoint.Checkpoint, ForkOrigin]:
    """Return the plan of a fork, its new folder, its checkpoint and its origin.

    Args:
        run: folder or MLflow id of the run.
        overrides: "key=value" texts, or a mapping of keys with dots.

    Returns:
        Plan and folder of the new run, the checkpoint of the old one, and the origin that MLflow
        shows.

    Raises:
        ConfigError: a key cannot change, the run is not found or has no checkpoint, or the new
            method cannot use the states of clients and server.
    """
    parsed = parse_overrides(overrides)
    folder = find_run_dir(run, parsed.get("tracking.uri"))
    finish_abandoned([folder])
    recorded = loading.read_config(folder / "config.yaml").get("files")
    load = loading_once()
    with asking_for_objects(folder, forking):
        before = resolve_plan(read_run_config(folder / "config.yaml", {"files": None}), load)
    before = replace(before, config=before.config.model_copy(update={"files": recorded}))
    plan = _plan_with(folder, before, {"run_dir": None, "files": None, **parsed}, load)
    changed = _changes(before, plan)
    for key in changed:
        if _is_fixed(key, before, plan):
            name = key.removeprefix("files.")
            raise ConfigError(
                f"{name}: a fork keeps its run's data, partition and model, and on a virtual clock "
                "its schedule; start a new run instead"
            )
    _check_privacy(before, plan, changed)
    saved = _read_checkpoint(folder, before)
    if saved is None:
        raise ConfigError(f"{folder}: there is no checkpoint to fork from; start a new run instead")
    if saved.facts["round"] >= plan.config.rounds:
        raise ConfigError(
            f"rounds: {saved.facts['round']} rounds are done before the fork; "
            "give rounds=N with a larger N"
        )
    if reason := StopRule(plan.config, saved.facts["history"]).reason:
        raise ConfigError(
            f"stop: the rounds before the fork end the run, {reason}; give stop=null, or other "
            "values of its keys"
        )
    _check_fork(before, plan, saved)
    changes_text = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
    is_tracked = (folder / SPOOL_FILE).exists() or any(key.startswith("tracking") for key in parsed)
    origin = ForkOrigin(saved.facts["run_id"], changes_text or "nothing", is_tracked)
    fork_dir = make_run_dir(plan)
    saved.facts |= {"fingerprint": plan.config.fingerprint, "run_id": ""}
    try:
        client_store.copy_rows(folder, fork_dir, plan.config.client_state.dir)
        # The checkpoint comes first: a fork that is killed early can still be resumed as a fork.
        checkpoint.write_checkpoint(fork_dir, saved, plan.config.checkpoint.keep)
    except BaseException:  # also Ctrl-C while many rows are copied
        forget(fork_dir)
        raise
    return plan, fork_dir, saved, origin


def _is_fixed(key: str, before: Plan, plan: Plan) -> bool:
    """Return whether a fork keeps a key of its run."""
    fixed = ["data", "partition", "model", "dtype"]
    if {before.config.schedule.name, plan.config.schedule.name} != {"sync"}:
        fixed.append("schedule")
    return key.removeprefix("files.").partition(".")[0] in fixed


def _check_fork(before: Plan, plan: Plan, saved: checkpoint.Checkpoint) -> None:
    """Raise ConfigError if the new rules cannot use the saved states of server and clients."""
    x0, buffers = plan.initial
    try:
        Server(plan.server, x0, buffers, plan.problem).restore(saved.server)
    except RaysimError as error:
        raise ConfigError(
            f"algorithm: {error}; fork to a method that keeps the same, or start a new run"
        ) from None
    stored = {k.removeprefix("rows/") for k in saved.clients if k.startswith("rows/")}
    needed = _kept_tensors(plan)
    if stored and needed and stored != needed:
        raise ConfigError(
            f"algorithm: the client states of client rule '{before.client.name}' contain "
            f"{', '.join(sorted(stored))}, but '{plan.client.name}' needs "
            f"{', '.join(sorted(needed))}; fork to another method, or start a new run"
        )


def _check_privacy(before: Plan, plan: Plan, changed: Mapping[str, Any]) -> None:
    """Raise ConfigError if ε would count rounds before the fork as more private than they were.

    ε follows from the present configuration and the number of all rounds or uses of an example.
    """
    config, sizes = plan.config, plan.clients.sizes
    if config.privacy is None or not config.privacy.noise_multiplier:
        return
    counted = ["privacy.unit", "privacy.noise_multiplier"]
    if config.client_privacy is not None:
        counted += ["schedule.cohort", "schedule.sampling"]
    different = [key for key in changed if key.startswith(tuple(counted))]
    if config.client_privacy is not None:
        if before.clients.n_training != plan.clients.n_training:
            different.append("evaluate.clients.held_out")
    elif not np.array_equal(batch_sizes_of(before.config, sizes), batch_sizes_of(config, sizes)):
        different.append("local.batch_size")
    if different:
        raise ConfigError(
            f"{different[0]}: 'privacy/epsilon' counts all rounds alike, so a fork with privacy "
            "keeps it; start a new run instead, or fork with privacy=null"
        )


def _kept_tensors(plan: Plan) -> set[str]:
    """Return the names of what a client keeps between rounds."""
    model = plan.idle_model
    names = set(plan.personal.keys)
    names |= set(map(last_upload_key, with_mode(plan.server.uploads, "difference")))
    for group in (ClientGroup("", plan.client, plan.config, plan.stages), *plan.groups):
        names |= set(group.rule.state(PureTask(model, LocalSettings())))
        names |= set(memory_keys(group.stages, plan.config.upload_key(group.name)))
        section = group.config.local.optimizer
        optimizer = make_optimizer(section)
        if optimizer is not None and section.state == "keep":
            names |= set(kept(optimizer.start(model.initial()[0]), model.segments))
    return names


def _changes(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """Return the keys that determine the result and differ, with both values."""
    old, new = (flatten_parameters(plan.config.identity()) for plan in (before, after))
    return differing(old, new, "unset")


def _read_checkpoint(folder: Path, plan: Plan) -> checkpoint.Checkpoint | None:
    """Return the run's last whole checkpoint, or None.

    Raises:
        ConfigError: the configuration, the data or the partition differ from the checkpoint's.
    """
    try:
        saved = checkpoint.read_latest(folder)
    except RaysimError as error:
        raise ConfigError(str(error)) from None
    if saved is None:
        return None
    checkpoint.check_belongs(saved, plan, folder)
    for name, version in (("torch", torch.__version__), ("raysim", __version__)):
        if (before := saved.facts[name]) != version:
            logger.warning("the run began under %s %s; its bits may change", name, before)
    if saved.facts["methods"] != plan.methods:
        logger.warning(
            "raysim's code of this method has changed since the last checkpoint; further "
            "rounds are those of the new code"
        )
    return saved
