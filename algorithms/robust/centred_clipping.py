"""Centred clipping with client momentum (Karimireddy et al., ICML 2021).

Clients send momenta m_i <- (1 - beta) delta_i + beta m_i. The server moves its last aggregate v
towards each of them, by tau at most: v <- v + mean_i (m_i - v) min(1, tau / |m_i - v|). In the
authors' code the momenta are not damped, m_i <- delta_i + beta m_i, so that v and tau have
1 / (1 - beta) times the size; m_i is delta_i in the first round in both.

Run: raysim run quickstart algorithm=centred_clipping algorithm.tau=1.0
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from raysim.rules import Algorithm, ClientRule, Positive, ServerRule


@dataclass(frozen=True)
class CentredClippingClient(ClientRule):
    """Local SGD that sends a momentum of its updates. The first one is the update itself."""

    name = "centred_clipping"
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the last momentum."""

    def state(self, task):
        return {"m": task.zeros()}

    def finish(self, shared, state, client_state, data, task):
        beta = self.beta * client_state["seen"].to(shared["x"])
        m = (1 - beta) * (shared["x"] - state["w"]) + beta * client_state["m"]
        return {"delta": m}, {"m": m}


@dataclass(frozen=True)
class CentredClippingServer(ServerRule):
    """x <- x - lr * v."""

    name = "centred_clipping"
    counts_equally = True
    tau: Positive = 10.0
    """Largest distance from v that counts."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "v": x0.new_zeros(len(x0))}

    def update(self, state, reports):
        gaps = reports.per_client("delta") - state["v"]
        factors = (self.tau / gaps.norm(dim=1, keepdim=True)).clamp(max=1)
        v = state["v"] + (factors * gaps).mean(0)
        return {"x": state["x"] - self.lr * v, "v": v}


Algorithm(
    "centred_clipping",
    CentredClippingClient,
    CentredClippingServer,
    "Karimireddy 2021",
    state="server P, client P",
)
