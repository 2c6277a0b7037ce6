"""FedDyn: dynamic regularisation (Acar et al., ICLR 2021).

    client   y <- y - lr (grad f_i(y; batch) + alpha (y - x + lambda_i)) from y = x
             lambda_i <- lambda_i + (y - x)
    server   a = sum w_i y_i;    h <- h + 1/N sum_i (y_i - x);    x <- a + h

State: server P, client P for each client that ever participated. Traffic: P down, P up.

h is the mean of all lambda_i, that is -1/alpha times the paper's h. Clients train from x, and x is
evaluated. The mean a of the round's models, smoother early on, is x - h. The server has no step
size. h is a plain mean even under `weights: samples`, so the method then converges to the optimum
of the unweighted objective.

The code of Acar 2021 scales alpha by the mean client size over n_i (`scale_alpha`); the paper does
not. It also samples clients by independent coin flips, as `schedule.sampling: poisson` does.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    LocalData,
    PositiveScheduled,
    Problem,
    Report,
    Reports,
    ServerRule,
    State,
    Task,
    Uploads,
)


@dataclass(frozen=True)
class FedDynClient(ClientRule):
    """Local SGD on the dynamically regularised objective."""

    alpha: Annotated[float, Field(gt=0)] = 0.01
    """Strength of the regularisation."""
    scale_alpha: bool = False
    """Multiply alpha by the mean client size over the client's own size."""

    def state(self, task: Task) -> State:
        return {"lambda": task.zeros()}

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        scale = data.average / max(data.n, 1) if self.scale_alpha else 1.0
        return {
            "lambda": client_state["lambda"],
            "alpha": shared["x"].new_full((), self.alpha * scale),
        }

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        w = state["w"]
        pull = (w - shared["x"]).add_(state["lambda"]).mul_(state["alpha"])
        return task.grad(w, batch).add_(pull)

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        delta = shared["x"] - state["w"]
        return {"delta": delta}, {"lambda": client_state["lambda"] - delta}


@dataclass(frozen=True)
class FedDynServer(ServerRule):
    """Mean of the cohort's models, shifted by the mean of all lambda_i."""

    lr: PositiveScheduled = 1.0
    """Must be 1: FedDyn's server has no step size."""

    def check(self, problem: Problem) -> None:
        if self.lr != 1.0:
            raise ValueError("lr: FedDyn's server has no step size; leave lr at 1")

    @property
    def uploads(self) -> Uploads:
        return {"delta": ("mean", "sum")}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "h": torch.zeros_like(x0)}

    def update(self, state: State, reports: Reports) -> State:
        a = state["x"] - reports.mean("delta")
        h = state["h"] - reports.sum("delta") / reports.n_clients
        return {"x": a + h, "h": h}


Algorithm(
    "feddyn",
    FedDynClient,
    FedDynServer,
    "Acar 2021",
    state="server P, client P",
    presets=AUTHORS_CODE,
)
