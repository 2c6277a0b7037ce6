"""FedACG, accelerated client gradient (Kim et al., CVPR 2024).

Clients receive a point ahead of the global model, s = x + lam m, and stay near it: they minimise
f(w) + beta/2 |w - s|². The server keeps the momentum: m <- lam m - lr mean_i (s - w_i), and moves x
<- x + m. x is evaluated. The authors' code has no server learning rate, and no 1/2 in the pull: its
weight is half of beta.

Run: raysim run quickstart algorithm=fedacg
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from raysim.rules import Algorithm, ClientRule, NonNegative, ServerRule


@dataclass(frozen=True)
class FedACGClient(ClientRule):
    """Local SGD that is pulled to its start, a point ahead of the global model."""

    beta: NonNegative = 0.01
    """Strength of the pull."""

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"], batch) + self.beta * (state["w"] - shared["x"])


@dataclass(frozen=True)
class FedACGServer(ServerRule):
    """Momentum of the updates, which clients receive before they train."""

    lam: Annotated[float, Field(ge=0, lt=1)] = 0.85
    """Momentum."""

    def init(self, x0, problem):
        return {"x": x0, "m": x0.new_zeros(len(x0))}

    def broadcast(self, state):
        return {"x": state["x"] + self.lam * state["m"]}

    def for_evaluation(self, state):
        return {"x": state["x"]}

    def update(self, state, reports):
        m = self.lam * state["m"] - self.lr * reports.mean("delta")
        return {"x": state["x"] + m, "m": m}


Algorithm("fedacg", FedACGClient, FedACGServer, "Kim 2024", state="server P, client 0")
