"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1).

    client   y <- y - lr (g(y) - c_i + c),  K times                                (line 10)
             c_i+ = c_i - c + (x - y) / (K lr)            option II                (line 12)
                  = full gradient of f_i at x             option I
             upload  delta = x - y  and  delta_c = c_i+ - c_i;  keep c_i+          (lines 13, 14)
    server   x <- x - server.lr * mean(delta);   c <- c + (1 / N) sum(delta_c)     (lines 16, 17)

State: server P, client P for each client that ever participated. Traffic: 2P down, 2P up.

K is the number of local steps of this client, lr the step size of this round. c_i starts at 0. The
sum over delta_c is divided by N, ALL clients with examples, so with full participation c is the
mean of all c_i. Weight decay and gradient clipping, where configured, enter x - y and therefore
c_i under option II. Under option I, c_i is the plain gradient of f_i, and another optimizer of the
local steps receives g(y) - c_i + c as its gradient. c is a plain mean even under `weights:
samples`, so the method then converges to the optimum of the unweighted objective.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raysim.algorithms.fedavg import AUTHORS_CODE
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    LocalData,
    Problem,
    Report,
    Reports,
    ServerRule,
    State,
    Task,
    Uploads,
)


@dataclass(frozen=True)
class SCAFFOLDClient(ClientRule):
    """Local SGD with each gradient corrected by the control variates."""

    option: Literal["I", "II"] = "II"
    """How a client updates its control variate: from a full gradient (I) or its steps (II)."""

    needs = ("x", "c")
    sends = ("delta", "delta_c")

    @property
    def unprotected_uploads(self) -> tuple[str, ...]:
        return ("delta_c",) if self.option == "I" else ()

    @property
    def needs_plain_sgd(self) -> str:
        if self.option == "I":
            return ""
        return (
            "option II takes (x - y) / (K lr) for the mean gradient of the steps; option I does not"
        )

    def state(self, task: Task) -> State:
        return {"c_i": task.zeros()}

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        return {"c_i": client_state["c_i"]}

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        return task.grad(state["w"], batch).sub_(state["c_i"]).add_(shared["c"])

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        delta = shared["x"] - state["w"]
        if self.option == "I":
            c_i = task.full_grad(shared["x"], data)
        else:
            c_i = client_state["c_i"] - shared["c"] + delta / (task.steps * task.lr)
        return {"delta": delta, "delta_c": c_i - client_state["c_i"]}, {"c_i": c_i}


@dataclass(frozen=True)
class SCAFFOLDServer(ServerRule):
    """Weighted average of updates, and the mean of all control variates."""

    provides = ("x", "c")

    @property
    def uploads(self) -> Uploads:
        return {"delta": "mean", "delta_c": "sum"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "c": torch.zeros_like(x0)}

    def broadcast(self, state: State) -> State:
        return {"x": state["x"], "c": state["c"]}

    def update(self, state: State, reports: Reports) -> State:
        c = state["c"] + reports.sum("delta_c") / reports.n_clients
        return {"x": state["x"] - self.lr * reports.mean("delta"), "c": c}


Algorithm(
    "scaffold",
    SCAFFOLDClient,
    SCAFFOLDServer,
    "Karimireddy 2020a",
    state="server P, client P",
    traffic="down 2P, up 2P",
    presets=AUTHORS_CODE,
)
