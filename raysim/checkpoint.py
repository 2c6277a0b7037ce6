"""Complete checkpoints: written beside, fsynced, renamed into place, with a checksum for each file.

    <run_dir>/checkpoints/round-000050/
        server.safetensors    the server rule's state and the BatchNorm statistics
        clients.safetensors   batch cursors, who has been seen, the rows in memory, where the rows on disk are
        run.json              rounds done, traffic so far, history, MLflow run id, fingerprint, versions
        sums.json             sha256 of the other three

Rows on disk stay in `<run_dir>/rows`, where no slot that a checkpoint here refers to is written again (store.py).
Randomness is keyed, so no generator needs saving: a run resumed from a checkpoint equals one never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from raysim import store
from raysim.errors import RaysimError

FILES = ("server.safetensors", "clients.safetensors", "run.json")


@dataclass
class Checkpoint:
    """A run after `facts["round"]` rounds."""

    server: dict[str, Tensor]
    clients: dict[str, Tensor]
    facts: dict[str, Any]


def folder(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def write(run_dir: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint, then removes all but the last `keep`. A crash at any point leaves the older ones whole."""
    home = folder(run_dir)
    home.mkdir(parents=True, exist_ok=True)
    final = home / _name(checkpoint.facts["round"])
    partial = home / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file({k: v.contiguous() for k, v in checkpoint.server.items()}, partial / FILES[0])
        save_file({k: v.contiguous() for k, v in checkpoint.clients.items()}, partial / FILES[1])
        (partial / FILES[2]).write_text(json.dumps(checkpoint.facts))
        (partial / "sums.json").write_text(json.dumps({name: _sum(partial / name) for name in FILES}))
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(home)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(home).free / 1e6
        shutil.rmtree(partial, ignore_errors=True)
        raise RaysimError(f"checkpoint {final} cannot be written: {error} ({free:.0f} MB free there)") from None
    for old in available(run_dir)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def available(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder(run_dir).glob("round-*"))


def read_latest(run_dir: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if a run has none. Damaged ones are named and passed over.

    Raises RaysimError if there are checkpoints and none is whole.
    """
    paths = available(run_dir)
    for path in reversed(paths):
        try:
            sums = json.loads((path / "sums.json").read_text())
            if bad := [name for name in FILES if _sum(path / name) != sums[name]]:
                raise ValueError(f"wrong checksum of {', '.join(bad)}")
            clients = load_file(path / FILES[1])
            store.check(clients, run_dir / store.FOLDER)
            return Checkpoint(load_file(path / FILES[0]), clients, json.loads((path / FILES[2]).read_text()))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log(f"checkpoint {path} is damaged ({error}); trying the one before")
    if paths:
        raise RaysimError(f"none of the {len(paths)} checkpoints in {folder(run_dir)} is whole")
    return None


def slots(run_dir: Path) -> list[np.ndarray]:
    """The slots on disk that each checkpoint needs (int64); a damaged one needs none."""
    found = []
    for path in available(run_dir):
        with suppress(OSError, SafetensorError), safe_open(path / FILES[1], "numpy") as file:
            found.append(file.get_tensor("disk/slots"))
    return found


def remove_after(run_dir: Path, round: int) -> None:
    """Removes the checkpoints of later rounds, which were passed over: their rows on disk will be written over."""
    for path in available(run_dir):
        if path.name > _name(round):
            shutil.rmtree(path, ignore_errors=True)


def _name(round: int) -> str:
    return f"round-{round:06d}"


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
