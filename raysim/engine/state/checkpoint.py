"""Write and read the checkpoints of a run.

    <run_dir>/checkpoints/round-000050/
        server.safetensors    state of the server rule, BatchNorm statistics
        clients.safetensors   batch cursors, clients seen, rows in memory, slots of rows on disk;
                              last losses of clients if the server rule selects them
        clock.safetensors     the virtual clock, with the clients in flight and their model versions
        run.json              format, rounds done, traffic, history, MLflow run id, fingerprint
        sums.json             sha256 of each of the other files

A checkpoint is written to a temporary folder, synced to disk and renamed, so it is either complete
or absent. The rows on disk (see client_store.py) stay in `<run_dir>/rows`, where no slot that a
checkpoint refers to is overwritten. Randomness is keyed, so no generator state is stored. A run
that resumes from a checkpoint gives the same result as a run that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from raysim.config.sections.evaluation import DEFAULT_BEST, BestBy
from raysim.data import partition_digest
from raysim.engine.plan import Plan
from raysim.engine.state import client_store
from raysim.errors import ConfigError, RaysimError
from raysim.system.files import free_space, of_rounds, sync_to_disk
from raysim.system.json_files import parsed
from raysim.training.messages import Broadcast

logger = logging.getLogger("raysim")

CHECKPOINT_FORMAT = 4
"""Version of the checkpoint format. Checkpoints in other formats are not read."""

CHECKPOINT_FILES = ("server.safetensors", "clients.safetensors", "clock.safetensors", "run.json")
"""Names of the files of a checkpoint that have a checksum in sums.json."""


class Facts(TypedDict):
    """Content of run.json, beside the format."""

    round: Annotated[int, Field(ge=0)]
    bytes_down: int
    bytes_up: int
    version_bytes: dict[str, int]
    history: list[dict[str, float]]
    recoveries: dict[str, float]
    run_id: str
    fingerprint: str
    data: str
    partition: str
    torch: str
    raysim: str
    methods: str


@dataclass
class Checkpoint:
    """The complete state of a run after `facts["round"]` rounds."""

    server: dict[str, Tensor]
    """State of the server rule and the BatchNorm statistics."""

    clients: dict[str, Tensor]
    """Content of the client-side state store and of the client history, as they pack it."""

    clock: dict[str, Tensor]
    """State of the virtual clock."""

    versions: dict[int, Broadcast]
    """Model versions, by number, from which the clients in flight started."""

    facts: dict[str, Any]
    """Content of run.json: round, traffic, history, MLflow run id, fingerprint."""


def checkpoints_folder(run_dir: Path) -> Path:
    """Return the folder that holds the checkpoints of a run.

    Args:
        run_dir: the folder of the run.
    """
    return run_dir / "checkpoints"


class Unwritable(RaysimError):
    """A checkpoint cannot be written. The earlier checkpoints stay complete."""


def write_checkpoint(
    run_dir: Path, checkpoint: Checkpoint, keep: int, best: BestBy | None = DEFAULT_BEST
) -> Path:
    """Write a checkpoint, then remove the older ones that are no longer needed.

    A crash at any point leaves the older checkpoints complete.

    Args:
        run_dir: the folder of the run.
        checkpoint: the state to write.
        keep: the number of newest checkpoints to keep.
        best: the metric by which the best checkpoint is kept too; None: it is not.

    Returns:
        The folder of the new checkpoint.

    Raises:
        Unwritable: the files cannot be written; the message gives the free space on the disk.
    """
    home = checkpoints_folder(run_dir)
    final = home / checkpoint_name(checkpoint.facts["round"])
    partial = home / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_files(partial, checkpoint)
        # Before the rename: after a crash, a complete name must not stand for files cut short.
        for path in (*partial.iterdir(), partial):
            sync_to_disk(path)
        # A rename replaces no folder that has files in it.
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_to_disk(home)
    except (OSError, SafetensorError) as error:
        space = free_space(run_dir)
        shutil.rmtree(partial, ignore_errors=True)
        raise Unwritable(f"checkpoint {final} cannot be written: {error} ({space})") from None
    available = of_rounds(home)
    kept = set([*available.values()][-keep:])
    if best is not None:
        # Its history has all of them; in a long run, reading that of each takes long.
        records = {record["round"]: record for record in checkpoint.facts["history"]}
        values = {path: records.get(t, {}).get(best.metric) for t, path in available.items()}
        kept |= {*_best_first(values, best)[:1]}
    for path in available.values():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a checkpoint, and their checksums."""
    server, clients, clock, facts = (folder / name for name in CHECKPOINT_FILES)
    save_file({k: v.contiguous() for k, v in checkpoint.server.items()}, server)
    save_file({k: v.contiguous() for k, v in checkpoint.clients.items()}, clients)
    save_file(_clock(checkpoint), clock)
    facts.write_text(json.dumps({"format": CHECKPOINT_FORMAT, **checkpoint.facts}))
    sums = {name: _sha256_of_file(folder / name) for name in CHECKPOINT_FILES}
    (folder / "sums.json").write_text(json.dumps(sums))


def _best_first(values: Mapping[Path, float | None], best: BestBy) -> list[Path]:
    """Return the checkpoints that have a value of a metric, the best one first."""
    measured = {p: v for p, v in values.items() if v is not None and not math.isnan(v)}
    return sorted(measured, key=measured.__getitem__, reverse=best.mode == "max")


def _measured(path: Path, metric: str) -> float | None:
    """Return a metric after the last round of a checkpoint; None if it was not measured."""
    # A checkpoint without this metric, or one that is damaged, is not the best.
    with suppress(OSError, ValueError, KeyError, IndexError):
        return parsed((path / CHECKPOINT_FILES[3]).read_bytes(), Facts)["history"][-1][metric]
    return None


def available_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first.

    Args:
        run_dir: the folder of the run.
    """
    return [*of_rounds(checkpoints_folder(run_dir)).values()]


def read_latest(run_dir: Path) -> Checkpoint | None:
    """Read the newest checkpoint that is complete, and log why others are skipped.

    Args:
        run_dir: the folder of the run.

    Returns:
        The checkpoint; None if the run has no checkpoints.

    Raises:
        RaysimError: the run has checkpoints, but none is complete.
    """
    return _first_complete(run_dir, available_checkpoints(run_dir)[::-1])


def read_best(run_dir: Path, best: BestBy = DEFAULT_BEST) -> Checkpoint | None:
    """Read the checkpoint with the best value of a metric; see `read_latest`.

    Args:
        run_dir: the folder of the run.
        best: the metric, and whether its largest or smallest value is the best.

    Returns:
        The checkpoint; None if no checkpoint of an evaluated round is kept.

    Raises:
        RaysimError: there are such checkpoints, but none is complete.
    """
    values = {path: _measured(path, best.metric) for path in available_checkpoints(run_dir)}
    return _first_complete(run_dir, _best_first(values, best))


def check_belongs(saved: Checkpoint, plan: Plan, run_dir: Path) -> None:
    """Check that a checkpoint belongs to the configuration, data and partition of a plan.

    Args:
        saved: a checkpoint of the run.
        plan: the plan of the run, as its folder and its data now give it.
        run_dir: the folder of the run.

    Raises:
        ConfigError: one of them differs.
    """
    changed = differs_in(saved, plan)
    if changed == "fingerprint":
        raise ConfigError(
            f"{run_dir}: the checkpoint belongs to another configuration than config.yaml; "
            "put the run's config.yaml back"
        )
    if changed:
        raise ConfigError(
            f"{changed}: {run_dir} was run with another {changed} than is there now; "
            "put the old one back"
        )


def differs_in(saved: Checkpoint, plan: Plan) -> str:
    """Return in which fact a checkpoint differs from a plan: "" if it belongs to it.

    Args:
        saved: a checkpoint.
        plan: the plan of a run.
    """
    facts = {
        "fingerprint": plan.config.fingerprint,
        "data": plan.dataset.digest,
        "partition": partition_digest(plan.clients),
    }
    return next((name for name, value in facts.items() if saved.facts[name] != value), "")


def _first_complete(run_dir: Path, paths: list[Path]) -> Checkpoint | None:
    """Read the first of some checkpoints that is complete; see `read_latest`."""
    for path in paths:
        try:
            return _read_checkpoint(path, run_dir / client_store.ROWS_FOLDER)
        except OSError as error:
            why: object = f"{error.filename}: {error.strerror}"
        except (ValueError, KeyError, SafetensorError) as error:
            why = error
        logger.warning("checkpoint %s cannot be used (%s); trying the one before", path, why)
    if paths:
        raise RaysimError(
            f"none of the {len(paths)} checkpoints in {checkpoints_folder(run_dir)} can be used; "
            "restore one of them, or remove that folder and start again with `raysim resume`"
        )
    return None


def _read_checkpoint(path: Path, rows: Path) -> Checkpoint:
    """Read a checkpoint; raise OSError, ValueError, KeyError or SafetensorError if that fails."""
    sums = _read_json(path / "sums.json", dict[str, str])
    damaged = [name for name in CHECKPOINT_FILES if _sha256_of_file(path / name) != sums.get(name)]
    if damaged:
        raise ValueError(f"wrong checksum of {', '.join(damaged)}")
    facts = _read_json(path / CHECKPOINT_FILES[3], dict[str, Any])
    if facts.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(
            f"written by raysim {facts.get('raysim')} in format {facts.get('format')}; "
            f"this one reads {CHECKPOINT_FORMAT}"
        )
    # After the format, because another format may have other facts.
    _read_json(path / CHECKPOINT_FILES[3], Facts)
    server, clients, clock = (load_file(path / name) for name in CHECKPOINT_FILES[:3])
    client_store.check_rows(clients, rows)
    return Checkpoint(server, clients, *_unclock(clock), facts)


def _read_json(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file; raise ValueError if it has another type."""
    try:
        return parsed(path.read_bytes(), kind)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _clock(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return clock and model versions as one flat mapping.

    The tensors are copies, because safetensors refuses tensors that share memory.
    """
    flat = {f"clock/{k}": v for k, v in checkpoint.clock.items()}
    for number, version in checkpoint.versions.items():
        flat[f"version/{number}/buffers"] = version.buffers
        flat |= {f"version/{number}/shared/{k}": v for k, v in version.shared.items()}
    return {k: v.detach().cpu().clone() for k, v in flat.items()}


def _unclock(flat: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, Broadcast]]:
    """Return the clock and the model versions from the mapping that `_clock` returns."""
    versions: dict[int, Broadcast] = {}
    for key, value in flat.items():
        kind, number, *rest = key.split("/", 3)
        if kind == "version":
            version = versions.setdefault(int(number), Broadcast({}, value))
            if rest == ["buffers"]:
                version.buffers = value
            else:
                version.shared[rest[1]] = value
    clock = {k.removeprefix("clock/"): v for k, v in flat.items() if k.startswith("clock/")}
    return clock, versions


def disk_slots(run_dir: Path) -> list[np.ndarray]:
    """Return the slots on disk that each checkpoint needs, one int64 array per checkpoint.

    A checkpoint that cannot be read is left out.

    Args:
        run_dir: the folder of the run.
    """
    slots = []
    for path in available_checkpoints(run_dir):
        with (
            suppress(OSError, SafetensorError),
            safe_open(path / CHECKPOINT_FILES[1], "numpy") as file,
        ):
            slots.append(file.get_tensor("disk/slots"))
    return slots


def remove_after(run_dir: Path, round: int) -> None:
    """Remove the checkpoints of rounds after `round`, because their rows will be overwritten.

    Args:
        run_dir: the folder of the run.
        round: number of completed rounds of the newest checkpoint that stays.
    """
    for number, path in of_rounds(checkpoints_folder(run_dir)).items():
        if number > round:
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_name(round: int) -> str:
    """Return the folder name of the checkpoint after `round` rounds.

    Args:
        round: number of completed rounds.
    """
    return f"round-{round:06d}"


def _sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
