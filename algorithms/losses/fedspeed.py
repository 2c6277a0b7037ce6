"""FedSpeed (Sun et al., ICLR 2023).

Steps w <- w - lr ((1 - alpha) g1 + alpha g2 - c + (w - x) / lam) with g1 = ∇f(w) and
g2 = ∇f(w + rho g1). Then the client keeps c <- c - (w - x) / lam and sends the model w - lam c.
The authors' code divides rho by |g1|, so its rho is the distance of the perturbed point, and it
averages -lam c over all clients, not over those of the round.

Run: raysim run quickstart algorithm=fedspeed algorithm.lam=10
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, Positive, Share


@dataclass(frozen=True)
class FedSpeedClient(ClientRule):
    """Local SGD with prox-correction and a perturbed gradient."""

    lam: Positive = 10.0
    """Inverse strength of the pull towards x."""
    alpha: Share = 0.9
    """Weight of the perturbed gradient."""
    rho: NonNegative = 0.1
    """Step of the perturbation."""

    def state(self, task):
        return {"c": task.zeros()}

    def init(self, shared, client_state, data, task):
        return {"c": client_state["c"]}

    def direction(self, shared, state, batch, task):
        w = state["w"]
        g1 = task.grad(w, batch)
        g2 = task.grad(w + self.rho * g1, batch, mode="frozen")
        pull = (w - shared["x"]) / self.lam
        return (1 - self.alpha) * g1 + self.alpha * g2 - state["c"] + pull

    def finish(self, shared, state, client_state, data, task):
        c = state["c"] - (state["w"] - shared["x"]) / self.lam
        return {"delta": shared["x"] - (state["w"] - self.lam * c)}, {"c": c}


Algorithm("fedspeed", FedSpeedClient, FedAvgServer, "Sun 2023", state="server 0, client P")
