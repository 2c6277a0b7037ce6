"""FedCurv: a penalty on leaving other clients' optima (Shoham et al., NeurIPS workshop 2019).

    client   y <- y - lr (grad f_i(y; batch) + 2 lam (A*y - b)), I times;    d_i = x - y
             F_i = 1/n_i sum_s (d log p(y_s | x_s; y) / dy)^2    diagonal of the Fisher at the end
    server   x <- x - server.lr sum w_i d_i
             A <- sum_i F_i,    b <- sum_i F_i*y_i    over this round's clients

State: server 2P; clients 2P with `own: false`. Traffic: 3P down, 2P up.

The penalty lam sum_j (y - y_j)' diag(F_j) (y - y_j) pulls towards the parameters at which the last
round's clients ended; the first round has none. The server could compute F_i*y_i itself; it is sent
because it can then be summed, and does not count as traffic. Where 2 lr lam A exceeds 2 in a
coordinate, steps overshoot: the metric `stiffness` is 2 lr lam max(A).

The original leaves out the client's own term: `own: false`, meant for synchronous rounds. The code
of Xu 2022 keeps it, sums over clients (for a mean over S clients use lam / S) and computes F_i in
eval mode on augmented images: `fisher: augmented`. `privacy` does not protect F_i.
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
    Uploads,
)


@dataclass(frozen=True)
class FedCurvClient(ClientRule):
    """Local SGD with a pull towards the last clients' optima, weighted by their curvature."""

    lam: Annotated[float, Field(ge=0)] = 1e-4
    """Strength of the penalty."""
    own: bool = True
    """Keep the client's own last term in A and b."""
    fisher: Literal["stored", "augmented"] = "stored"
    """Images on which F_i is computed: as stored, or augmented."""

    needs = ("x", "A", "b")
    sends = ("delta", "fisher", "fisher_y")
    not_counted_as_traffic = ("fisher_y",)

    logs = (Logged("stiffness", "mean of 2 lr λ max(A), the stiffness of the penalty"),)

    @property
    def unprotected_uploads(self) -> tuple[str, ...]:
        return ("fisher",)

    def state(self, task: Task) -> State:
        if self.own:
            return {}
        return {
            "fisher": task.zeros(),
            "fisher_y": task.zeros(),
            "round": torch.zeros(1, dtype=torch.float64),
        }

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        if self.own:
            return {}
        just_now = client_state["seen"] & (client_state["round"] == task.t - 1)
        A, b = (
            shared[k] - torch.where(just_now, client_state[v], 0)
            for k, v in (("A", "fisher"), ("b", "fisher_y"))
        )
        return {"A": A, "b": b}

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        A, b = (shared if self.own else state)["A"], (shared if self.own else state)["b"]
        return task.grad(state["w"], batch) + 2 * self.lam * (A * state["w"] - b)

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        y = state["w"]
        fisher = task.fisher(y, data, augment=self.fisher == "augmented")
        stiffness = 2 * self.lam * task.lr * shared["A"].max()
        report = {
            "delta": shared["x"] - y,
            "fisher": fisher,
            "fisher_y": fisher * y,
            "metric/stiffness": stiffness,
        }
        if self.own:
            return report, {}
        return report, {
            "fisher": fisher,
            "fisher_y": fisher * y,
            "round": torch.full_like(client_state["round"], float(task.t)),
        }


@dataclass(frozen=True)
class FedCurvServer(ServerRule):
    """Weighted average of the updates, and sums of the clients' curvature terms."""

    provides = ("x", "A", "b")

    @property
    def uploads(self) -> Uploads:
        return {"delta": "mean", "fisher": "sum", "fisher_y": "sum"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "A": torch.zeros_like(x0), "b": torch.zeros_like(x0)}

    def broadcast(self, state: State) -> State:
        return dict(state)

    def update(self, state: State, reports: Reports) -> State:
        x = state["x"] - self.lr * reports.mean("delta")
        return {"x": x, "A": reports.sum("fisher"), "b": reports.sum("fisher_y")}


Algorithm(
    "fedcurv",
    FedCurvClient,
    FedCurvServer,
    "Shoham 2019",
    state="server 2P, client 0",
    traffic="down 3P, up 2P",
)
