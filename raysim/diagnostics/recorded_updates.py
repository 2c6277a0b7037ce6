"""What an honest but curious server has seen of some clients, kept for `raysim attack`.

One file for each round that `observe.rounds` names: <run_dir>/updates/round-<t>.safetensors. Of each observed client it
holds what was sent up, the model that the client began with, and, for comparison, the examples it trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raysim.errors import ConfigError
from raysim.training.messages import Broadcast, Job


@dataclass
class Observation:
    """One client's upload in round `t`: `uploads` [P] each, `down` what it was sent with version `base`, `steps` its
    local steps, and the examples of its batches, x [n, C, H, W] as the net sees them and y [n]."""

    t: int
    client: int
    base: int
    steps: int
    down: Broadcast
    uploads: dict[str, Tensor]
    x: Tensor
    y: Tensor


def write(
    run_dir: Path, t: int, jobs: list[Job], seen: Mapping[int, dict[str, np.ndarray]], downs: Mapping[int, Broadcast]
) -> None:
    """Keeps what was seen of these jobs' clients, who began with the versions `downs`."""
    tensors: dict[str, Tensor] = {}
    clients = [{"client": job.client, "base": job.base, "steps": job.steps} for job in jobs if job.client in seen]
    for base in {one["base"] for one in clients}:
        down = downs[base]
        tensors |= {f"down/{base}/{k}": v.detach().cpu().clone() for k, v in down.shared.items()}
        tensors[f"buffers/{base}"] = down.buffers.detach().cpu().clone()
    for one in clients:
        for key, value in seen[one["client"]].items():
            tensors[f"client/{one['client']}/{key}"] = torch.from_numpy(value)
    folder = run_dir / "updates"
    folder.mkdir(exist_ok=True)
    part = folder / f"round-{t:06d}.part"
    save_file(tensors, part, {"clients": json.dumps(clients)})
    part.replace(part.with_suffix(".safetensors"))


def read(run_dir: Path, t: int | None = None) -> list[Observation]:
    """The observations of a round (null: of the first that has any). Raises ConfigError where there are none."""
    files = sorted((run_dir / "updates").glob(f"round-{'[0-9]' * 6}.safetensors"))
    rounds = [int(file.stem.removeprefix("round-")) for file in files]
    if not files:
        raise ConfigError(
            f"{run_dir} holds no updates; run it again with 'observe.rounds=[0]', which keeps those of round 0"
        )
    if t is not None and t not in rounds:
        raise ConfigError(f"{run_dir} holds no updates of round {t}, only of {', '.join(map(str, rounds))}")
    t = rounds[0] if t is None else t
    try:
        return _read(files[rounds.index(t)], t)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{files[rounds.index(t)]} is damaged ({error}); run it again, or attack another round"
        ) from None


def _read(path: Path, t: int) -> list[Observation]:
    found = []
    with safe_open(path, "pt") as file:
        keys = list(file.keys())
        for one in json.loads(file.metadata()["clients"]):
            down = f"down/{one['base']}/"
            shared = {k.removeprefix(down): file.get_tensor(k) for k in keys if k.startswith(down)}
            own = f"client/{one['client']}/"
            parts = {k.removeprefix(own): file.get_tensor(k) for k in keys if k.startswith(own)}
            x, y = parts.pop("x"), parts.pop("y")
            down = Broadcast(shared, file.get_tensor(f"buffers/{one['base']}"))
            found.append(Observation(t, one["client"], one["base"], one["steps"], down, parts, x, y))
    return found
