"""APFL (Deng et al., arXiv:2003.13461, 2020).

Each client uses the mixture u = alpha v + (1 - alpha) w of an own model v and its local model w.
w is trained by local SGD. On the same batch, v <- v - lr alpha ∇f(u) and, clipped to [0, 1],
alpha <- alpha - lr <v - w, ∇f(u)>. A client is evaluated with alpha v + (1 - alpha) x, and with
the BatchNorm statistics of its own passes at u.

The authors' code mixes the outputs of v and w, not their parameters, with w after its step. It
moves alpha in the first step of a round only, and adds 0.02 alpha to its gradient. PFLlib trains v
along v's own gradient, moves alpha in each step with that addition, and replaces v by the mixture
at the end of the round.

Run: raysim run quickstart algorithm=apfl partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, Share


@dataclass(frozen=True)
class APFLClient(ClientRule):
    """Local SGD of w, and of a mixture with an own model."""

    alpha: Share = 0.5
    """Weight of the own model at first."""

    def state(self, task):
        alpha = task.x0.new_full((), self.alpha)
        return {"v": task.x0, "alpha": alpha, "buffers": task.initial_buffers}

    def init(self, shared, client_state, data, task):
        return {k: client_state[k] for k in ("v", "alpha", "buffers")}

    def step(self, shared, state, batch, task):
        w, v, alpha = state["w"], state["v"], state["alpha"]
        u = alpha * v + (1 - alpha) * w
        gradient, buffers = task.grad_and_buffers(u, batch, state["buffers"])
        moved = alpha - task.lr * ((v - w) * gradient).sum()
        own = {"v": v - task.lr * alpha * gradient, "alpha": moved.clamp(0, 1), "buffers": buffers}
        return {"w": task.descend(w, task.grad(w, batch)), **own}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {k: state[k] for k in ("v", "alpha", "buffers")}

    def evaluated(self, shared, client_state, data, task):
        if not client_state["seen"]:
            return shared["x"], task.buffers
        u = torch.lerp(shared["x"], client_state["v"], client_state["alpha"])
        return u, client_state["buffers"]


Algorithm("apfl", APFLClient, FedAvgServer, "Deng 2020", state="server 0, client P + Q + 1")
