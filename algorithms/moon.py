"""MOON: model-contrastive learning (Li, He, Song, CVPR 2021).

    z, z_g, z_p    representations of the batch under the local model, the received one (with its
                   BatchNorm statistics) and the client's model of its last participation
    loss           CE + mu * -log(e^{cos(z, z_g)/T} / (e^{cos(z, z_g)/T} + e^{cos(z, z_p)/T}))
    server         FedAvg

State: client P and BatchNorm statistics, for each client that ever participated. Traffic: P down,
P up. A step costs two more forward passes.

Only z has a gradient; the two frozen models are in eval mode. With mu = 0 the method is FedAvg, bit
for bit. MOONM (Luo 2023) has FedAvgM's server.

The representation is the input of the model's linear classifier, so that P is the same for all
methods; the paper adds a projection head (`model.projection: 256`). At the first participation
there is no previous model: x is used, and the term vanishes (`first_previous: global`). The code
of Li Q. 2021 uses an independent random initialisation for each client (`first_previous: random`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from raysim.algorithms.fedavg import AUTHORS_CODE, FedAvgServer
from raysim.algorithms.fedavgm import FedAvgMServer
from raysim.rules import (
    Algorithm,
    Batch,
    ClientRule,
    LocalData,
    Net,
    Report,
    State,
    Task,
    task_loss,
)


@dataclass(frozen=True)
class MOONClient(ClientRule):
    """Local SGD with a contrastive term: towards global, away from previous features."""

    needs_features = True
    mu: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive term."""
    temperature: Annotated[float, Field(gt=0)] = 0.5
    """T of the contrastive term."""
    first_previous: Literal["global", "random"] = "global"
    """Previous model at the first participation: x, or a random one."""

    def state(self, task: Task) -> State:
        return {"y_prev": task.zeros(), "buffers_prev": task.zero_buffers()}

    def init(self, shared: State, client_state: State, data: LocalData, task: Task) -> State:
        if client_state["seen"]:
            previous, statistics = client_state["y_prev"], client_state["buffers_prev"]
        elif self.first_previous == "random":
            previous, statistics = task.fresh_model()
        else:
            previous, statistics = shared["x"], task.global_buffers
        return {"y_prev": previous, "buffers_prev": statistics}

    def direction(self, shared: State, state: State, batch: Batch, task: Task) -> Tensor:
        with torch.no_grad():
            z_g = task.net(shared["x"], batch, "eval", task.global_buffers).features
            z_p = task.net(state["y_prev"], batch, "eval", state["buffers_prev"]).features

        def loss(net: Net, batch: Batch) -> Tensor:
            return task_loss(net, batch) + self.mu * contrast(
                net.features, z_g, z_p, self.temperature
            )

        return task.grad(state["w"], batch, loss)

    def finish(
        self, shared: State, state: State, client_state: State, data: LocalData, task: Task
    ) -> tuple[Report, State]:
        return {"delta": shared["x"] - state["w"]}, {
            "y_prev": state["w"],
            "buffers_prev": task.buffers,
        }


def contrast(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
    """Return the contrastive loss of each example, [B], of representations [B, F].

    Args:
        z: representations [B, F] by the net that trains.
        z_g: those by the global net; they attract.
        z_p: those by the client's previous net; they repel.
        temperature: divides the cosines.
    """
    logits = torch.stack([cosine(z, z_g), cosine(z, z_p)], 1) / temperature
    return -F.log_softmax(logits, 1)[:, 0]


def cosine(a: Tensor, b: Tensor, smallest: float = 1e-8) -> Tensor:
    """Return the cosine of two representations [B, F] for each example, [B].

    It is 0 with gradient 0 where one of them is (nearly) zero, as dead ReLUs cause.

    Args:
        a: representations [B, F].
        b: representations [B, F].
        smallest: norm up to which a representation counts as zero.
    """
    squared = torch.stack([(a * a).sum(1), (b * b).sum(1)])
    alive = (squared > smallest**2).all(0)
    norms = torch.where(alive, squared, 1.0).sqrt()
    return torch.where(alive, (a * b).sum(1) / (norms[0] * norms[1]), 0.0)


Algorithm(
    "moon", MOONClient, FedAvgServer, "Li Q. 2021", state="server 0, client P", presets=AUTHORS_CODE
)
Algorithm(
    "moonm", MOONClient, FedAvgMServer, "Luo 2023", state="server P, client P", presets=AUTHORS_CODE
)
