"""Uploads that an honest-but-curious server observes, recorded for `raysim attack`.

Each round of `record_updates.rounds` has the file <run_dir>/updates/round-<t>.safetensors. For each
observed client the file holds the upload, the model that the client started from and, for
comparison, the examples of its batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from raysim.engine.plan import Probe
from raysim.errors import ConfigError
from raysim.rules.contract import overridden
from raysim.system import files
from raysim.training.messages import Broadcast

if TYPE_CHECKING:
    from raysim.engine.plan import Plan
    from raysim.server.round_cohort import RoundCohort
    from raysim.training.client_start import PreparedClient
    from raysim.training.trainers.trainer import ClientUpdate, Trainer


@dataclass
class RecordedUpdates(Probe):
    """Probe that records uploads, received models and examples of some clients in some rounds."""

    name: ClassVar = "record_updates"
    """Name of the configuration section."""

    rounds: tuple[int, ...] = (0,)
    """Rounds to record."""

    clients: int = 8
    """Clients to record in a round: the first of the cohort."""

    def check(self, plan: Plan) -> None:
        """Check that updates can be recorded. See `Probe.check`."""
        if not plan.learning_task.class_labels:
            raise ConfigError(
                "record_updates: the attacks that read it need class labels, which task "
                f"'{plan.learning_task.name}' has not; leave it out"
            )
        starts_elsewhere = any(overridden(group.rule, ["begin"]) for group in plan.all_groups)
        if starts_elsewhere or overridden(plan.server, ["sent_to"]) or plan.personal.keys:
            raise ConfigError(
                "record_updates: the attacks that read it need clients that start from the global "
                "model, but these have models of their own (`begin`, `personal` or `sent_to` of "
                "the rules, or local.personal); leave it out"
            )
        last = plan.config.rounds - 1
        if min(self.rounds) > last:
            raise ConfigError(
                f"record_updates.rounds: the run has rounds 0 to {last}, and none is listed; "
                "list at least one of them"
            )

    def request(self, round: RoundCohort) -> dict[int, bool]:
        """Request the clients of a recorded round. See `Probe.request`."""
        return dict.fromkeys(round.ids[: self.clients], True) if round.t in self.rounds else {}

    def measure(
        self, trainer: Trainer, client: PreparedClient, update: ClientUpdate, request: bool
    ) -> dict[str, np.ndarray]:
        """Return the upload, and the augmented examples of the client's batches as `x` and `y`.

        See `Probe.measure`.
        """
        batches = list(trainer.client_batches.batches(client.task, client.mine))
        examples = {"x": torch.cat([b.x for b in batches]), "y": torch.cat([b.y for b in batches])}
        upload = {key: update.report[key] for key in trainer.sent}
        tensors = {**upload, **examples}
        return {k: v.detach().cpu().contiguous().numpy() for k, v in tensors.items()}

    def metrics(
        self, round: RoundCohort, results: Mapping[int, dict[str, np.ndarray]]
    ) -> dict[str, float]:
        """Write the recorded updates of a round, and return no metrics. See `Probe.metrics`."""
        if results and self.run.folder is not None:
            cohort = zip(round.ids, round.bases, round.steps, strict=True)
            clients = [
                {"client": i, "base": base, "steps": steps}
                for i, base, steps in cohort
                if i in results
            ]
            bases = {client["base"] for client in clients}
            broadcasts = {base: self.run.broadcast(base) for base in bases}
            write_observations(self.run.folder, round.t, clients, results, broadcasts)
        return {}


@dataclass
class Observation:
    """Upload of one client in one round, with the model and the examples behind it."""

    t: int
    """Round."""

    client: int
    """Number of the client."""

    base: int
    """Version of the model that the client started from."""

    steps: int
    """Number of local steps."""

    broadcast: Broadcast
    """Message that the client received with version `base`."""

    uploads: dict[str, Tensor]
    """Uploaded vectors by name, [P] each."""

    x: Tensor
    """Examples of the client's batches as the net receives them, [n, C, H, W]."""

    y: Tensor
    """Labels of the examples, [n]."""


def write_observations(
    run_dir: Path,
    t: int,
    clients: list[dict[str, int]],
    observed: Mapping[int, dict[str, np.ndarray]],
    broadcasts: Mapping[int, Broadcast],
) -> None:
    """Write the observations of a round to a file in `run_dir`/updates.

    Args:
        run_dir: the folder of the run.
        t: number of the round, from 0.
        clients: for each client its number `client`, the version `base` that it started from, and
            its number of local steps `steps`.
        observed: for each client number the uploaded vectors by name, and the examples as `x` and
            `y`.
        broadcasts: the messages by version of the model.
    """
    tensors: dict[str, Tensor] = {}
    for base, broadcast in broadcasts.items():
        tensors |= {
            f"down/{base}/{k}": v.detach().cpu().clone() for k, v in broadcast.shared.items()
        }
        tensors[f"buffers/{base}"] = broadcast.buffers.detach().cpu().clone()
    for entry in clients:
        client = entry["client"]
        for key, value in observed[client].items():
            tensors[f"client/{client}/{key}"] = torch.from_numpy(value)
    folder = run_dir / "updates"
    folder.mkdir(exist_ok=True)
    with files.whole(folder / f"round-{t:06d}.safetensors") as part:
        save_file(tensors, part, {"clients": json.dumps(clients)})


def read_observations(run_dir: Path, t: int | None = None) -> list[Observation]:
    """Return the observations of a round.

    Args:
        run_dir: the folder of the run.
        t: number of the round, from 0; None: the first recorded round.

    Returns:
        One observation for each recorded client.

    Raises:
        ConfigError: the run has no recorded updates, or none of round `t`, or the file is damaged.
    """
    of_rounds = files.of_rounds(run_dir / "updates", ".safetensors")
    if not of_rounds:
        raise ConfigError(
            f"{run_dir} holds no updates; run it again with 'record_updates.rounds=[0]', which "
            "records those of the first round"
        )
    if t is not None and t not in of_rounds:
        raise ConfigError(
            f"{run_dir} holds no updates of round {t}, only of {', '.join(map(str, of_rounds))}"
        )
    t = min(of_rounds) if t is None else t
    try:
        return _read_round(of_rounds[t], t)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{of_rounds[t]} is damaged ({error}); run it again, or attack another round"
        ) from None


def _read_round(path: Path, t: int) -> list[Observation]:
    """Return the observations in a file of round `t`."""
    observations = []
    with safe_open(path, "pt") as file:
        keys = list(file.keys())

        def tensors_under(prefix: str) -> dict[str, Tensor]:
            """Return the tensors whose keys start with `prefix`, by the rest of their keys."""
            matching = [key for key in keys if key.startswith(prefix)]
            return {key.removeprefix(prefix): file.get_tensor(key) for key in matching}

        for entry in json.loads(file.metadata()["clients"]):
            client = entry["client"]
            base = entry["base"]
            shared = tensors_under(f"down/{base}/")
            uploads = tensors_under(f"client/{client}/")
            x = uploads.pop("x")
            y = uploads.pop("y")
            broadcast = Broadcast(shared, file.get_tensor(f"buffers/{base}"))
            observations.append(
                Observation(t, client, base, entry["steps"], broadcast, uploads, x, y)
            )
    return observations
