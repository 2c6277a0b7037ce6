"""FedAvgM: FedAvg with server momentum (Hsu, Qi, Brown 2019).

    server   m <- beta1 m + sum_i w_i d_i;    x <- x - server.lr m

State: server P. Traffic: P down, P up.

m starts at 0. It is neither damped nor a Nesterov momentum, so the effective step grows to
server.lr / (1 - beta1). Momentum applies to the parameters, never to BatchNorm statistics. With
beta1 = 0 the method is FedAvg, bit for bit. FedProxM (Luo 2023) is the same server with FedProx
clients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgClient
from raysim.algorithms.fedprox import FedProxClient
from raysim.rules import Algorithm, Problem, Reports, ServerRule, State, UnitScheduled


@dataclass(frozen=True)
class FedAvgMServer(ServerRule):
    """Weighted average with heavy-ball momentum."""

    beta1: UnitScheduled = 0.9
    """Momentum."""

    @property
    def heavy_ball(self) -> tuple[float, float]:
        return self.beta1, 0.0

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "m": torch.zeros_like(x0)}

    def update(self, state: State, reports: Reports) -> State:
        m = self.beta1 * state["m"] + reports.mean("delta")
        return {"x": state["x"] - self.lr * m, "m": m}


Algorithm(
    "fedavgm",
    FedAvgClient,
    FedAvgMServer,
    "Hsu 2019",
    state="server P, client 0",
    presets=AUTHORS_CODE,
)
Algorithm(
    "fedproxm",
    FedProxClient,
    FedAvgMServer,
    "Luo 2023",
    state="server P, client 0",
    presets=AUTHORS_CODE,
)
