"""IFCA (Ghosh et al., NeurIPS 2020).

The server keeps k models. A client trains the one with the smallest loss on its data, and the
server averages each model over the clients that chose it. The models start at the initial one with
noise; the paper draws each anew. There is no global model, so evaluate the clients.

Run: raysim run quickstart algorithm=ifca algorithm.k=3 partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.rules import Algorithm, ClientRule, PositiveInt, ServerRule, Upload


@dataclass(frozen=True)
class IFCAClient(ClientRule):
    """Trains the received model with the smallest loss on the client's data."""

    needs = ("x", "models")
    sends = {"delta": Upload("P"), "cluster": Upload((), torch.int64)}

    def begin(self, shared, client_state, data, task):
        j = torch.stack([task.full_loss(w, data) for w in shared["models"]]).argmin()
        return shared["models"][j], None, {"cluster": j}

    def finish(self, shared, state, client_state, data, task):
        j = state["cluster"]
        return {"delta": shared["models"][j] - state["w"], "cluster": j}, {}


@dataclass(frozen=True)
class IFCAServer(ServerRule):
    """k models; each moves by the mean update of the clients that chose it."""

    counts_equally = True
    k: PositiveInt = 2
    """Number of models."""
    provides = ("x", "models")
    uploads = {"delta": "per_client", "cluster": "per_client"}

    def init(self, x0, problem):
        noise = problem.rng("models").normal(0, 0.1, (self.k, len(x0)))
        return {"x": x0, "models": x0 + x0.new_tensor(noise)}

    def update(self, state, reports):
        chosen = torch.eye(self.k).to(state["x"])[reports.per_client("cluster")]
        mean = (chosen / chosen.sum(0).clamp(min=1)).T @ reports.per_client("delta")
        return {**state, "models": state["models"] - self.lr * mean}


Algorithm(
    "ifca",
    IFCAClient,
    IFCAServer,
    "Ghosh 2020",
    state="server k P, client 0",
    traffic="down k P, up P + 1",
)
