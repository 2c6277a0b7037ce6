"""pFedMe (Dinh et al., NeurIPS 2020).

The personal model theta is nearly the minimum of f(theta) + lam/2 |theta - w|^2 on a batch: K
steps of size personal_lr, from w (in the authors' code from the theta of the step before). Then
w <- w - lr lam (w - theta). The server moves the global model by beta towards the mean of the
clients' w; beta is its learning rate.

Run: raysim run quickstart client=pfedme.py:PFedMeClient server=fedavg server.lr=1.0 local.lr=0.05
partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim import ClientRule


@dataclass(frozen=True)
class PFedMeClient(ClientRule):
    lam: float = 15.0
    personal_lr: float = 0.05
    K: int = 5

    def state(self, task):
        return {"theta": task.x0}

    def init(self, shared, client_state, data, task):
        return {"theta": client_state["theta"]}

    def step(self, shared, state, batch, task):
        theta = w = state["w"]
        for k in range(self.K):
            gradient = task.grad(theta, batch, mode="frozen" if k else "train")
            theta = theta - self.personal_lr * (gradient + self.lam * (theta - w))
        return {"w": task.descend(w, self.lam * (w - theta)), "theta": theta}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"theta": state["theta"]}

    def evaluated(self, shared, client_state, data, task):
        return client_state["theta"] if client_state["seen"] else shared["x"]
