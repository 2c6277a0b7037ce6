"""My method: one sentence that says what is new (Author, venue and year).

    client   y <- x;  K times: y <- y - lr (∇f_i(y; batch) + alpha (c - c_i));  d_i = x - y
             c_i' = c_i - c + d_i / (K lr);  sends d_i and c_i' - c_i;  keeps c_i <- c_i'
    server   x <- x - server.lr Σ_i w_i d_i;  c <- c + 1/N Σ_i (c_i' - c_i)

`lr` is the key local.lr. Tables show the server's step size as server.lr; its key is algorithm.lr.
P is the number of parameters, N that of all clients.

State: c_i, P floats for each client that took part. Traffic: 2P floats down, 2P floats up. With
alpha = 0 it is FedAvg, with alpha = 1 SCAFFOLD (Karimireddy 2020a).

    raysim run quickstart algorithm=./my_method.py:my_method algorithm.alpha=0.5
    pytest test_my_method.py
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

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
)


@dataclass(frozen=True)
class MyMethodClient(ClientRule):
    """Local SGD, each gradient corrected by c - c_i."""

    needs = ("x", "c")
    sends = ("delta", "delta_c")

    alpha: Annotated[float, Field(ge=0)] = 1.0
    """Strength of the correction."""

    # Every field is a hyper-parameter: algorithm.alpha=0.5. Its annotation is checked before a run
    # starts.

    @property
    def needs_plain_sgd(self) -> str:
        """Why local steps of another optimizer than plain SGD, such as Adam, are refused.

        See `ClientRule.needs_plain_sgd`.
        """
        return "c_i takes (x - y) / (K lr) for the mean gradient of the steps"

    def state(self, task: Task) -> State:
        """Return what a client keeps between rounds, as it is before its first round: c_i = 0.

        See `ClientRule.state`.
        """
        return {"c_i": task.zeros()}

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        """Return what the local steps of this round read beside the parameters: c_i.

        See `ClientRule.init`.
        """
        return {"c_i": client_state["c_i"]}

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        """Return the direction [P] of one local step; then w <- w - lr * direction.

        `shared` is what the server broadcast, `state["w"]` the client's parameters [P], and the
        rest of `state` what `init` returned. Do not change them in place, and keep nothing in
        Python from one step to the next: on a GPU a step is captured once and then replayed.

        See `ClientRule.direction`.
        """
        gradient = task.grad(state["w"], batch)
        return gradient + self.alpha * (shared["c"] - state["c_i"])

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        """Return the uploads, and what the client keeps for its next round.

        `task.steps` is K and `task.lr` the step size of this round.

        See `ClientRule.finish`.
        """
        delta = shared["x"] - state["w"]
        c_i = client_state["c_i"] - shared["c"] + delta / (task.steps * task.lr)
        return {"delta": delta, "delta_c": c_i - client_state["c_i"]}, {"c_i": c_i}


@dataclass(frozen=True)
class MyMethodServer(ServerRule):
    """Weighted average of the clients' updates, and the mean c of all c_i.

    `lr` and `weights` are fields of every server rule.
    """

    provides = ("x", "c")
    uploads = {"delta": "mean", "delta_c": "sum"}

    def init(self, x0: Tensor, problem: Problem) -> State:
        """Return the server's state before training, with the same keys in every round.

        See `ServerRule.init`.
        """
        return {"x": x0, "c": torch.zeros_like(x0)}

    def update(self, state: State, reports: Reports) -> State:
        """Return the next state of the server.

        `reports.mean` and `reports.sum` are over the clients of the round; `reports.n_clients` is
        N, the number of all clients.

        See `ServerRule.update`.
        """
        x = state["x"] - self.lr * reports.mean("delta")
        c = state["c"] + reports.sum("delta_c") / reports.n_clients
        return {"x": x, "c": c}


my_method = Algorithm(
    "my_method",
    MyMethodClient,
    MyMethodServer,
    "Author year",
    state="server P, client P",
    traffic="down 2P, up 2P",
)
