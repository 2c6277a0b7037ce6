"""Complete checkpoints: written beside, fsynced, renamed into place, with a checksum for each file.

    <run_dir>/checkpoints/round-000050/
        server.safetensors    the server rule's state and the BatchNorm statistics
        clients.safetensors   batch cursors, who has been seen, every client's row as "<client id>/<key>"
        run.json              rounds done, traffic so far, history, MLflow run id, fingerprint, versions
        sums.json             sha256 of the other three

Randomness is keyed, so no generator needs saving: a run resumed from a checkpoint equals one never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from raysim.errors import RaysimError
from raysim.store import Store

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
    final = home / f"round-{checkpoint.facts['round']:06d}"
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
            return Checkpoint(
                load_file(path / FILES[0]), load_file(path / FILES[1]), json.loads((path / FILES[2]).read_text())
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log(f"checkpoint {path} is damaged ({error}); trying the one before")
    if paths:
        raise RaysimError(f"none of the {len(paths)} checkpoints in {folder(run_dir)} is whole")
    return None


def pack_store(store: Store) -> dict[str, Tensor]:
    """What clients keep, as named tensors."""
    packed = {"cursors": torch.from_numpy(store.cursors), "seen": torch.from_numpy(store.seen)}
    rows = {
        f"{client}/{k}": torch.from_numpy(np.atleast_1d(v))
        for client, row in store.rows.items()
        for k, v in row.items()
    }
    return {**packed, **rows}


def unpack_store(store: Store, packed: dict[str, Tensor]) -> None:
    """The reverse of `pack_store`, into an empty store."""
    for name, tensor in packed.items():
        if name in ("cursors", "seen"):
            getattr(store, name)[:] = tensor.numpy()
        else:
            client, _, key = name.partition("/")
            store.rows.setdefault(int(client), {})[key] = tensor.numpy()


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
