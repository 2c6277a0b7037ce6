"""FedNova: normalised averaging (Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020).

    client   local SGD, with momentum rho (v <- rho v + grad f, y <- y - lr v) or a proximal term mu
             K steps;  a_i = K                                       plain
                           = sum_{k=1..K} (1 - rho^k) / (1 - rho)    with momentum
                           = sum_{k<K} (1 - lr mu)^k                 with proximal term
             upload  d_i / a_i  and  a_i
    server   tau_eff = sum q_i a_i;    d = tau_eff sum q_i d_i / a_i;    q_i = n_i / sum n_j
             m <- beta1 m + d;    x <- x - server.lr m

State: server P with momentum, else none. Traffic: P down, P + 1 up.

With equal K and neither momentum nor proximal term the method is FedAvg with `weights: samples`.
`samples` is the default here; `weights: uniform` uses q_i = 1/S. The sums are not evaluated in
closed form, which cancels for small lr mu and for rho near 1. Weight decay and gradient clipping,
where configured, act on v; a_i ignores them.

The code of Wang J. 2020 differs in tau_eff with mu > 0. The server may choose tau_eff. Here it is
always sum q_i a_i, so with equal K FedNova with mu > 0 is FedProx with `weights: samples`. That
code uses sum q_i a_i for mu = 0, with or without momentum, but sum q_i K_i for mu > 0. Since a_i <=
K_i, its steps are longer, by K / a if all clients make K steps: 1.02 for K = 5 and lr mu = 0.01. If
all K_i are equal, server.lr times that factor gives that code's step; otherwise no constant does.

That code keeps the server's momentum per unit of step size: m <- beta1 m + d / lr, x <- x - lr m.
With a constant local.lr this is the same. Under a schedule of local.lr old updates shrink there
with lr, and keep their length here.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    LocalData,
    Logged,
    Problem,
    Report,
    Reports,
    ServerRule,
    State,
    Task,
    UnitScheduled,
    Uploads,
)


@dataclass(frozen=True)
class FedNovaClient(ClientRule):
    """Local SGD whose update is divided by the amount of local work."""

    mu: Annotated[float, Field(ge=0)] = 0.0
    """Strength of the proximal term; 0: none."""
    rho: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Local momentum; 0: none."""

    sends = ("normalised", "a")

    @property
    def needs_plain_sgd(self) -> str:
        return "a_i, by which an update is divided, counts steps of equal size along the gradient"

    def check(self, problem: Problem) -> None:
        if self.mu and self.rho:
            raise ValueError(
                "rho: momentum and proximal term together are not offered; set mu=0 or rho=0"
            )
        if problem.lr * self.mu >= 1:
            raise ValueError(
                f"mu: must stay below 1 / local.lr = {1 / problem.lr:g}, or local steps jump over "
                f"x; it is {self.mu:g}: lower it, or local.lr"
            )

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        return {"v": task.zeros()} if self.rho else {}

    def step(self, shared: State, state: State, batch: Batch, task: Task) -> State:
        y = state["w"]
        direction = task.grad(y, batch)
        if self.mu:
            direction = direction + self.mu * (y - shared["x"])
        if self.rho:
            direction = self.rho * state["v"] + direction
            state = {**state, "v": direction}
        return {**state, "w": task.descend(y, direction)}

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        a = sum((1 - task.lr * self.mu) ** k for k in range(task.steps))
        if self.rho:
            a = sum((1 - self.rho**k) / (1 - self.rho) for k in range(1, task.steps + 1))
        return {
            "normalised": (shared["x"] - state["w"]) / a,
            "a": shared["x"].new_full((1,), float(a)),
        }, {}


@dataclass(frozen=True)
class FedNovaServer(ServerRule):
    """Average of the normalised updates, scaled by the mean amount of local work."""

    weights: Literal["uniform", "samples"] = "samples"
    """Weights q_i of the clients, equal or by samples."""
    beta1: UnitScheduled = 0.0
    """Server momentum; 0: none."""

    logs = (Logged("tau_eff", "effective number of local steps", "steps"),)

    @property
    def uploads(self) -> Uploads:
        return {"normalised": "mean", "a": "mean"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "m": torch.zeros_like(x0)} if self.beta1 else {"x": x0}

    def update(self, state: State, reports: Reports) -> State:
        step = reports.mean("a") * reports.mean("normalised")
        reports.log(tau_eff=float(reports.mean("a")))
        if "m" in state:
            step = self.beta1 * state["m"] + step
            state = {**state, "m": step}
        return {**state, "x": state["x"] - self.lr * step}


Algorithm(
    "fednova",
    FedNovaClient,
    FedNovaServer,
    "Wang J. 2020",
    "server 0, client 0",
    "down P, up P + 1",
)
