"""pFedMe (Dinh et al., NeurIPS 2020).

The personal model theta is nearly the minimum of f(theta) + lam/2 |theta - w|^2 on a batch: K
steps of size personal_lr, from w (in the authors' code from the theta of the step before, with a
weight decay of 0.001). Then w <- w - lr lam (w - theta). The server moves the global model by beta
towards the mean of the clients' w; beta is its learning rate. theta has BatchNorm statistics of its
own. In the authors' code all clients train in each round, also those whose w the server does not
use, and the mean is weighted by samples (algorithm.weights=samples).

Run: raysim run quickstart algorithm=pfedme algorithm.lr=1.0 local.lr=0.05
partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, PositiveInt


@dataclass(frozen=True)
class PFedMeClient(ClientRule):
    """Moves w towards personal models that are near it."""

    lam: NonNegative = 15.0
    """Strength of the pull of theta towards w."""
    personal_lr: NonNegative = 0.05
    """Step size of theta."""
    K: PositiveInt = 5
    """Steps of theta for one step of w."""

    def state(self, task):
        return {"theta": task.x0, "buffers": task.initial_buffers}

    def init(self, shared, client_state, data, task):
        return {k: client_state[k] for k in ("theta", "buffers")}

    def step(self, shared, state, batch, task):
        theta, w, buffers = state["w"], state["w"], state["buffers"]
        task.grad(w, batch)  # w has BatchNorm statistics too
        for _ in range(self.K):
            gradient, buffers = task.grad_and_buffers(theta, batch, buffers)
            theta = theta - self.personal_lr * (gradient + self.lam * (theta - w))
        w = task.descend(w, self.lam * (w - theta))
        return {"w": w, "theta": theta, "buffers": buffers}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {k: state[k] for k in ("theta", "buffers")}

    def evaluated(self, shared, client_state, data, task):
        if not client_state["seen"]:
            return shared["x"], task.buffers
        return client_state["theta"], client_state["buffers"]


Algorithm("pfedme", PFedMeClient, FedAvgServer, "Dinh 2020", state="server 0, client P + Q")
