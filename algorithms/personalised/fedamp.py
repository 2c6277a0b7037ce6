"""FedAMP, attentive message passing (Huang et al., AAAI 2021).

The server keeps a cloud model u_i for each client: a mixture of the last models of the round's
clients, in which similar ones count more: u_i = (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j over
j != i, with xi_ij = alpha exp(-|w_i - w_j|² / sigma) / sigma. A client starts at u_i and minimises
f(w) + mu/2 |w - u_i|². Clients that are not in a round keep their cloud models. There is no global
model, so evaluate the clients. In PFLlib a client goes on from its own model, and the pull to u_i
has no gradient, so that its clients train alone.

Run: raysim run quickstart algorithm=fedamp partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedprox import FedProxClient
from raysim.rules import Algorithm, NonNegative, Positive, ServerRule

EXACT = "donot_use_mm_for_euclid_dist"  # a matrix product cancels if models are alike


@dataclass(frozen=True)
class FedAMPClient(FedProxClient):
    """Local SGD that is pulled towards the client's cloud model."""

    mu: NonNegative = 1.0
    """Strength of the pull."""


@dataclass(frozen=True)
class FedAMPServer(ServerRule):
    """A cloud model for each client, near the models that are like its own."""

    counts_equally = True
    provides = ("x", "models")
    uploads = {"delta": "per_client"}
    sigma: Positive = 100.0
    """Squared distance at which models count much less."""
    alpha: NonNegative = 0.01
    """Step size of the message passing. alpha / sigma is the largest weight of another model."""

    def init(self, x0, problem):
        return {"x": x0, "models": x0.repeat(problem.n_clients, 1)}

    def sent_to(self, shared, client):
        return {"x": shared["models"][client]}

    def update(self, state, reports):
        ids = torch.tensor(reports.ids, device=state["x"].device)
        w = state["models"][ids] - self.lr * reports.per_client("delta")
        distances = torch.cdist(w, w, compute_mode=EXACT).square()
        xi = self.alpha * (-distances / self.sigma).exp() / self.sigma
        xi.fill_diagonal_(0)
        models = state["models"].clone()
        models[ids] = (1 - xi.sum(1, keepdim=True)) * w + xi @ w
        return {**state, "models": models}


Algorithm(
    "fedamp",
    FedAMPClient,
    FedAMPServer,
    "Huang 2021",
    state="server N P, client 0",
    traffic="down P, up P",
)
