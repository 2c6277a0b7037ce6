"""Ditto (Li et al., ICML 2021).

Each client trains two models: the global one by local SGD, and beside it an own model v that is
pulled towards it, v <- v - lr (∇f(v) + lam (v - x)), on the same batches. v has BatchNorm
statistics of its own, and is what a client is evaluated with. Its steps are plain ones, without
the optimizer, the clipping and the weight decay of `local`. The paper's algorithm trains v in steps
of its own, s of them with a step size of their own; here both models make as many steps, of the
same size.

Run: raysim run quickstart algorithm=ditto partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class DittoClient(ClientRule):
    """Local SGD, and an own model that is pulled towards the global one."""

    lam: NonNegative = 0.1
    """Strength of the pull towards the global model."""

    def state(self, task):
        return {"v": task.x0, "buffers": task.initial_buffers}

    def init(self, shared, client_state, data, task):
        return {"v": client_state["v"], "buffers": client_state["buffers"]}

    def step(self, shared, state, batch, task):
        w, v = state["w"], state["v"]
        gradient, buffers = task.grad_and_buffers(v, batch, state["buffers"])
        return {
            "w": task.descend(w, task.grad(w, batch)),
            "v": v - task.lr * (gradient + self.lam * (v - shared["x"])),
            "buffers": buffers,
        }

    def finish(self, shared, state, client_state, data, task):
        kept = {"v": state["v"], "buffers": state["buffers"]}
        return {"delta": shared["x"] - state["w"]}, kept

    def evaluated(self, shared, client_state, data, task):
        if not client_state["seen"]:
            return shared["x"], task.buffers
        return client_state["v"], client_state["buffers"]


Algorithm("ditto", DittoClient, FedAvgServer, "Li T. 2021", state="server 0, client P + Q")
