"""APFL (Deng et al., arXiv:2003.13461, 2020).

Each client uses the mixture u = alpha v + (1 - alpha) w of an own model v and its local model w.
w is trained by local SGD. On the same batch, v <- v - lr alpha ∇f(u) and, clipped to [0, 1],
alpha <- alpha - lr <v - w, ∇f(u)>. A client is evaluated with alpha v + (1 - alpha) x. The
authors' code moves alpha in the first step of a round only, and adds 0.02 alpha to its gradient.

Run: raysim run quickstart client=apfl.py:APFLClient server=fedavg partition.test.fraction=0.2
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim import ClientRule


@dataclass(frozen=True)
class APFLClient(ClientRule):
    alpha: float = 0.5

    def state(self, task):
        return {"v": task.x0, "alpha": task.x0.new_tensor(self.alpha)}

    def init(self, shared, client_state, data, task):
        return {"v": client_state["v"], "alpha": client_state["alpha"]}

    def step(self, shared, state, batch, task):
        w, v, alpha = state["w"], state["v"], state["alpha"]
        gradient = task.grad(alpha * v + (1 - alpha) * w, batch, mode="frozen")
        moved = alpha - task.lr * ((v - w) * gradient).sum()
        v = v - task.lr * alpha * gradient
        return {"w": task.descend(w, task.grad(w, batch)), "v": v, "alpha": moved.clamp(0, 1)}

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"v": state["v"], "alpha": state["alpha"]}

    def evaluated(self, shared, client_state, data, task):
        alpha = torch.where(client_state["seen"], client_state["alpha"], 0)
        return torch.lerp(shared["x"], client_state["v"], alpha)
