"""FedALA (Zhang et al., AAAI 2023).

A client starts from own + W (x - own), with own its last model, x the global one, and a weight W
in [0, 1] for each parameter of the classifier; elsewhere W is 1. W descends the client's loss:
W <- W - eta (x - own) ∇f(start). The paper repeats this until W converges in the first round, and
passes over a part of the data once in the others; here `passes` is the same in all rounds. A client
keeps its BatchNorm statistics. The authors' code weighs clients by samples
(server.weights=samples), and all clients, not only those of the round, move their models to such a
start in each round.

Run: raysim run quickstart algorithm=fedala partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class FedALAClient(ClientRule):
    """Local SGD from a mixture of the own and the global model, weighted element by element."""

    eta: float = 1.0
    """Step size of W."""
    passes: int = 1
    """Passes over the client's data that train W in a round."""

    def check(self, problem):
        if not problem.has_features:
            raise ValueError(
                f"name: 'fedala' weighs the classifier; model '{problem.model}' has none"
            )

    def state(self, task):
        own = {"own": task.x0, "buffers": task.initial_buffers}
        return {**own, "W": torch.ones_like(task.x0)}

    def begin(self, shared, client_state, data, task):
        own, buffers = shared["x"], task.buffers
        if client_state["seen"]:
            own, buffers = client_state["own"], client_state["buffers"]
        apart, W = shared["x"] - own, client_state["W"]
        for batch in [*data.batches()] * self.passes:
            gradient = task.grad(own + W * apart, batch, mode="frozen")
            W = (W - self.eta * task.part("classifier") * apart * gradient).clamp(0, 1)
        return own + W * apart, buffers, {"W": W}

    def finish(self, shared, state, client_state, data, task):
        kept = {"own": state["w"], "buffers": task.buffers, "W": state["W"]}
        return {"delta": shared["x"] - state["w"]}, kept


Algorithm("fedala", FedALAClient, FedAvgServer, "Zhang 2023", state="server 0, client 2P + Q")
