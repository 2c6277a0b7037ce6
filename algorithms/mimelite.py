"""MimeLite with momentum (Karimireddy et al. 2020, arXiv 2008.03606).

    client   y <- y - lr ((1 - beta) grad f_i(y; batch) + beta m), m fixed;    d_i = x - y
             q_i = grad f_i(x), all data
    server   x <- x - server.lr sum w_i d_i;    m <- (1 - beta) sum w_i q_i + beta m

State: server P. Traffic: 2P down, 2P up.

q_i costs one pass over the client's data, not augmented, in train mode without dropout and without
an update of BatchNorm statistics. The well-known JAX code is undamped (`damped: false`, grad f +
beta m and q + beta m): for constant beta, without weight decay and clipping, it is the same method
with lr scaled by 1 - beta. If you configure the halves separately (client=..., server=...), give
both the same beta.
"""

from dataclasses import dataclass

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
    UnitScheduled,
    Uploads,
)


@dataclass(frozen=True)
class MimeLiteClient(ClientRule):
    """Local SGD with the server's momentum, held fixed."""

    beta: UnitScheduled = 0.9
    """Momentum."""
    damped: bool = True
    """Multiply new gradients by 1 - beta."""

    needs = ("x", "m")
    sends = ("delta", "q")

    @property
    def needs_plain_sgd(self) -> str:
        return "its steps apply the server's momentum, which no step of a client changes"

    @property
    def unprotected_uploads(self) -> tuple[str, ...]:
        return ("q",)

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        return mix(task.grad(state["w"], batch), shared["m"], self)

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        return {"delta": shared["x"] - state["w"], "q": task.full_grad(shared["x"], data)}, {}


@dataclass(frozen=True)
class MimeLiteServer(ServerRule):
    """Weighted average of updates, and a momentum of full gradients at x."""

    beta: UnitScheduled = 0.9
    """Momentum."""
    damped: bool = True
    """Multiply new gradients by 1 - beta."""

    provides = ("x", "m")

    @property
    def uploads(self) -> Uploads:
        return {"delta": "mean", "q": "mean"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        return {"x": x0, "m": torch.zeros_like(x0)}

    def broadcast(self, state: State) -> State:
        return {"x": state["x"], "m": state["m"]}

    def update(self, state: State, reports: Reports) -> State:
        m = mix(reports.mean("q"), state["m"], self)
        return {"x": state["x"] - self.lr * reports.mean("delta"), "m": m}


def mix(gradient: Tensor, m: Tensor, rule: MimeLiteClient | MimeLiteServer) -> Tensor:
    """Return (1 - beta) gradient + beta m, or gradient + beta m if undamped; [P] each.

    Args:
        gradient: [P], that of a mini-batch on a client, the mean of all `q` on the server.
        m: [P], the server's momentum.
        rule: the rule with `beta` and `damped`.
    """
    return (1 - rule.beta if rule.damped else 1.0) * gradient + rule.beta * m


Algorithm(
    "mimelite",
    MimeLiteClient,
    MimeLiteServer,
    "Karimireddy 2020b",
    state="server P, client 0",
    traffic="down 2P, up 2P",
    presets=AUTHORS_CODE,
)
