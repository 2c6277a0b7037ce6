"""FedALA (Zhang et al., AAAI 2023).

A client starts from own + W (x - own), with own its last model, x the global one, and a weight W
in [0, 1] for each parameter of the classifier; elsewhere W is 1. W descends the client's loss:
W <- W - eta (x - own) ∇f(start), in `passes` over its data. With `steady` > 0 a client repeats this
in its first round with a model of its own until there are more than ten losses and the standard
deviation of the last ten is below that; the loss of a pass is that of its last batch, before the
step (as in the authors' code, which has 0.1). The paper takes a part of the data for it. A client
keeps its BatchNorm statistics.

The authors' code weighs clients by samples (algorithm.weights=samples), and all clients, not only
those of the round, move their models to such a start in each round.

Run: raysim run quickstart algorithm=fedala partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, PositiveInt, task_loss

MAX_PASSES = 200
"""Largest number of passes that wait for W to converge."""
N_LOSSES = 10
"""Losses whose standard deviation shows whether W has converged."""


@dataclass(frozen=True)
class FedALAClient(ClientRule):
    """Local SGD from a mixture of the own and the global model, weighted element by element."""

    needs_features = True
    eta: NonNegative = 1.0
    """Step size of W."""
    passes: PositiveInt = 1
    """Passes over the client's data that train W in a round."""
    steady: NonNegative = 0.0
    """Standard deviation of losses at which W has converged; 0: no convergence is waited for."""

    def state(self, task):
        own = {"own": task.x0, "buffers": task.initial_buffers}
        return {**own, "W": torch.ones_like(task.x0), "tuned": task.x0.new_zeros(())}

    def begin(self, shared, client_state, data, task):
        x, own, W = shared["x"], client_state["own"], client_state["W"]
        if not client_state["seen"]:  # it has no own model
            return x, task.buffers, {"W": W}
        waits = self.steady > 0 and data.n > 0 and not client_state["tuned"]
        losses, W_before = [], W
        for _ in range(MAX_PASSES if waits else self.passes):
            for batch in (batches := list(data.batches())):
                gradient = task.grad(own + W * (x - own), batch, mode="frozen")
                step = self.eta * task.part("classifier") * (x - own) * gradient
                W_before, W = W, (W - step).clamp(0, 1)
            if waits:
                net = task.net(own + W_before * (x - own), batches[-1])
                losses.append(task_loss(net, batches[-1]).mean())
                last = torch.stack(losses[-N_LOSSES:])
                if len(losses) > N_LOSSES and last.std(correction=0) < self.steady:
                    break
        return own + W * (x - own), client_state["buffers"], {"W": W}

    def finish(self, shared, state, client_state, data, task):
        kept = {"own": state["w"], "buffers": task.buffers, "W": state["W"]}
        kept["tuned"] = client_state["seen"].to(shared["x"])
        return {"delta": shared["x"] - state["w"]}, kept


Algorithm("fedala", FedALAClient, FedAvgServer, "Zhang 2023", state="server 0, client 2P + Q + 1")
