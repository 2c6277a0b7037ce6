"""Forgetting of other clients' data by local training (Xu et al. 2022, appendix B.3).

Two quantities are measured for the clients of a round:

- the mean loss of the trained local model on the data of each client of the previous round,
  compared with the loss of the model that the client started from;
- after the client's first local step, the correlation between the Fisher information of its pseudo
  data and that of the data of the last rounds' clients.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from raysim import schedule
from raysim.config.sections.schedule import Sync
from raysim.engine.plan import Probe, ProbedRun
from raysim.errors import ConfigError
from raysim.rules.batch import Batch
from raysim.rules.contract import overridden
from raysim.rules.losses import task_loss
from raysim.system import files
from raysim.system.json_files import read_json

if TYPE_CHECKING:
    from raysim.engine.plan import Plan
    from raysim.server.round_cohort import RoundCohort
    from raysim.training.client_start import PreparedClient
    from raysim.training.trainers.trainer import ClientUpdate, Trainer

GRADIENTS_AT_A_TIME = 64
"""Examples of past clients in a batch for per-example gradients."""


@dataclass
class ForgettingRequest:
    """Measurements that a client of a round makes."""

    clients: list[int]
    """Clients of the previous round, on whose data the local model is evaluated."""

    window: list[int]
    """Clients of the last rounds, whose data enters the Fisher correlation; []: no correlation."""


@dataclass
class ForgettingProbe(Probe):
    """Probe that measures how the clients of a round forget the previous round's data."""

    name: ClassVar = "forgetting"
    """Name of the section under `evaluate`."""

    every: int = 1
    """Rounds from one measurement to the next."""

    fisher: bool = False
    """Whether to correlate the Fisher information of pseudo data and past clients' data."""

    window: int = 10
    """Past rounds whose clients' data enters the correlation."""

    def check(self, plan: Plan) -> None:
        """Check that forgetting can be measured. See `Probe.check`."""
        if not isinstance(plan.config.schedule, Sync):
            raise ConfigError(
                "evaluate.forgetting: compares the clients of consecutive synchronous rounds; use "
                "schedule.name=sync"
            )
        if plan.clients.phases:
            raise ConfigError(
                "evaluate.forgetting: measures on examples that clients keep in all rounds; leave "
                "partition.phases or evaluate.forgetting out (with classes as "
                "phases, tasks/forgetting is logged)"
            )
        if overridden(plan.server, ["select"]):
            raise ConfigError(
                f"evaluate.forgetting: server rule '{plan.server.name}' selects the clients, and "
                "past rounds must be known without training; use another server rule"
            )
        if self.fisher and not plan.client.prepares:
            raise ConfigError(
                f"evaluate.forgetting.fisher: client rule '{plan.client.name}' prepares no pseudo "
                "data; use fedreg or fedreg_mg with pairing=index, or set it to false"
            )

    def begin(self, run: ProbedRun) -> None:
        """Start with a new run. See `Probe.begin`."""
        super().begin(run)
        self.past: dict[int, list[int]] = {}
        """Clients of the previous round, by the round in which their data is evaluated."""
        self.cohorts: deque[list[int]] = deque(maxlen=self.window)
        """Clients of the last rounds, oldest round first."""
        before = schedule.make_schedule(run.plan.config, run.plan.clients.sizes_by_round)
        self.cohorts.extend(before.next_round(t).ids for t in range(run.rounds_done))

    def request(self, round: RoundCohort) -> dict[int, ForgettingRequest]:
        """Return the requests of a round's clients. See `Probe.request`."""
        requests = {}
        if round.t % self.every == 0 and self.cohorts and self.cohorts[-1]:
            window = sorted(set().union(*self.cohorts)) if self.fisher else []
            past = self.past[round.t] = self.cohorts[-1]
            requests = {client: ForgettingRequest(past, window) for client in round.ids}
        self.cohorts.append(round.ids)
        return requests

    def measure(
        self,
        trainer: Trainer,
        client: PreparedClient,
        update: ClientUpdate,
        request: ForgettingRequest,
    ) -> dict[str, list[float]]:
        """Return the measurements of one client.

        Returns:
            `before` and `after`: the mean loss on the data of each client of `request.clients`,
            before and after local training. `fisher`, if requested: a list with the correlation.

        See `Probe.measure`.
        """
        assert update.local_params is not None
        trained = update.local_params, update.report["buffers"]
        measured = {
            "before": self._losses_before(trainer, client, request.clients),
            "after": _losses(trainer, *trained, request.clients),
        }
        if request.window:
            measured["fisher"] = [_fisher_correlation(trainer, client, request.window)]
        return measured

    def _losses_before(
        self, trainer: Trainer, client: PreparedClient, clients: list[int]
    ) -> list[float]:
        """Return the losses of the model that a client received; of each model only once."""
        base, received = client.task.base, client.broadcast
        w, buffers = received.global_params, received.buffers
        # The tensors are kept beside the losses, so that no later tensor is taken for them.
        before = getattr(self, "before", None)
        if before is None or before[0] != base or before[1] is not w or before[2] is not buffers:
            before = self.before = base, w, buffers, _losses(trainer, w, buffers, clients)
        return before[3]

    def metrics(
        self, round: RoundCohort, results: Mapping[int, dict[str, list[float]]]
    ) -> dict[str, float]:
        """Return the metrics of a round. See `Probe.metrics`."""
        measured = gather_losses(self.past.pop(round.t, []), results)
        if measured and self.run.folder is not None:
            write_forgetting(self.run.folder, round.t, measured)
        return forgetting_metrics(measured)


def _losses(trainer: Trainer, w: Tensor, buffers: Tensor, clients: list[int]) -> list[float]:
    """Return the mean loss on the data of each client."""
    return [_loss(trainer, w, buffers, client) for client in clients]


@torch.no_grad()
def _loss(trainer: Trainer, w: Tensor, buffers: Tensor, client: int) -> float:
    """Return the mean loss on a client's data without augmentation, in mode "eval"."""
    batch = Batch(*trainer.client_batches.images(trainer.clients.client(client), None))
    return float(task_loss(trainer.task.net(w, batch, "eval", buffers), batch).double().mean())


def _fisher_correlation(trainer: Trainer, client: PreparedClient, window: list[int]) -> float:
    """Return the correlation between the Fisher information of pseudo data and past clients' data.

    The pseudo data are the first that the client's rule prepares for each batch. The information is
    computed at the client's parameters after its first local step.
    """
    rule = client.rule
    task = replace(client.task, steps=1, requests={})
    again = trainer.start.prepare(trainer.task, rule, client.broadcast, task)
    batch = replace(
        next(trainer.client_batches.batches(task, client.mine)), prepared=again.prepared[0]
    )
    w = rule.step(client.broadcast.shared, again.state, batch, trainer.task)["w"].clone()
    past = np.concatenate([trainer.clients.client(i) for i in window])
    stored = (
        Batch(*trainer.client_batches.images(past[i : i + GRADIENTS_AT_A_TIME], None))
        for i in range(0, len(past), GRADIENTS_AT_A_TIME)
    )
    pseudo_data = [batches[0] for batches in trainer.start.prepared_batches(trainer.task, again)]
    pseudo = trainer.task.mean_squared_gradients(w, pseudo_data)
    return correlation(pseudo, trainer.task.mean_squared_gradients(w, stored))


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation of two vectors [P]; NaN if one of them is constant.

    Args:
        a: [P].
        b: [P].
    """
    a = a.double() - a.double().mean()
    b = b.double() - b.double().mean()
    return float((a @ b) / (a.norm() * b.norm()))


def gather_losses(
    past: Sequence[int], measured: Mapping[int, dict[str, list[float]]]
) -> dict[str, list[float]]:
    """Combine the measurements of a round's clients.

    Args:
        past: numbers of the clients of the previous round.
        measured: the result of `ForgettingProbe.measure` for each client number of the round.

    Returns:
        `clients`: the past clients. `before` and `after`: the losses on the data of each of them,
        the mean over the round's clients. `fisher`: one correlation for each client of the round
        that measured it. {} if no client has measured.
    """
    if not measured:
        return {}
    # Clients with parameters of their own start from other models. This mean is exact: where all
    # have received one model, it is that model's loss.
    of_past = zip(*(losses["before"] for losses in measured.values()), strict=True)
    before = [statistics.mean(losses) for losses in of_past]
    after = np.mean([losses["after"] for losses in measured.values()], axis=0).tolist()
    fisher = [value for losses in measured.values() for value in losses.get("fisher", [])]
    return {"clients": list(map(float, past)), "before": before, "after": after, "fisher": fisher}


def forgetting_metrics(measured: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the metrics of a round.

    `increase_q10`, `increase_q50` and `increase_q90` are quantiles over past clients.

    Args:
        measured: the result of `gather_losses`; {} gives no metrics.
    """
    if not measured:
        return {}
    increase = np.array(measured["after"]) - np.array(measured["before"])
    metrics = {
        "before": np.mean(measured["before"]),
        "after": np.mean(measured["after"]),
        "increase": increase.mean(),
    }
    metrics |= {f"increase_q{q}": np.quantile(increase, q / 100) for q in (10, 50, 90)}
    if measured["fisher"]:
        metrics["fisher_correlation"] = np.nanmean(measured["fisher"])
    return {key: float(value) for key, value in metrics.items()}


class _Measured(TypedDict):
    """Content of the file of a round: what `gather_losses` returns."""

    clients: list[float]
    before: list[float]
    after: list[float]
    fisher: list[float]


def write_forgetting(run_dir: Path, t: int, measured: Mapping[str, list[float]]) -> None:
    """Write the result of `gather_losses` for round `t` to <run_dir>/forgetting/round-<t>.json.

    Args:
        run_dir: folder of the run.
        t: number of the round, from 0.
        measured: the result of `gather_losses`.
    """
    folder = run_dir / "forgetting"
    folder.mkdir(exist_ok=True)
    (folder / f"round-{t:06d}.json").write_text(json.dumps(measured))


def read_forgetting(run_dir: Path) -> dict[int, dict[str, list[float]]]:
    """Return the values that `write_forgetting` has written, by number of the round; {} for none.

    Args:
        run_dir: the folder of the run.
    """
    remedy = "remove it, and that round is missing in the table and the picture"
    of_rounds = files.of_rounds(run_dir / "forgetting", ".json")
    return {t: read_json(file, _Measured, remedy) for t, file in of_rounds.items()}
