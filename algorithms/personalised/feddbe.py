"""FedAvg with DBE, the domain bias eliminator (Zhang et al., NeurIPS 2023).

Each client keeps a vector z^p, which is added to the features z = f(x): its outputs are g(z + z^p).
The local loss adds kappa/2 times the mean squared difference between the client's mean features m
and the consensus m^g. Each batch moves m, which starts a round at 0, to (1 - mu) m + mu mean z; the
gradient flows into the batch's features. The net and z^p make steps of SGD along the same gradient.
m^g is the mean over the clients of the first round of their m after their last steps. That round
has neither z^p nor kappa. In the authors' code it trains all clients, whose models are then
forgotten; here it is a round as any other, and its models count.

Run: raysim run quickstart algorithm=feddbe partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch.nn.functional import cross_entropy

from raysim.rules import Algorithm, ClientRule, NonNegative, ServerRule, Upload


@dataclass(frozen=True)
class FedDBEClient(ClientRule):
    """Adds a vector of its own to the features, whose mean is pulled to the consensus."""

    needs_class_labels = True
    supports_dp = False  # the mean features have no noise
    needs = ("x", "consensus")
    sends = {"delta": Upload("P"), "mean": Upload("F")}
    kappa: NonNegative = 50.0
    """Weight of the distance between mean features and consensus."""
    mu: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a batch in the mean features."""

    def state(self, task):
        return {"z_p": task.x0.new_zeros(task.features)}

    def init(self, shared, client_state, data, task):
        return {"z_p": client_state["z_p"], "mean": torch.zeros_like(shared["consensus"])}

    def step(self, shared, state, batch, task):
        means = []

        def loss(net, batch, others):
            means.append(torch.lerp(state["mean"], net.features.mean(0), self.mu))
            apart = (means[0] - shared["consensus"]).nan_to_num()
            logits = net.classify(net.features + others["z_p"])
            term = self.kappa / 2 * apart.square().mean()
            return cross_entropy(logits, batch.y, reduction="none") + term

        others = {"z_p": state["z_p"]}
        gradient, of_others = task.joint_grad(state["w"], batch, others, loss)
        known = ~shared["consensus"].isnan()
        z_p = state["z_p"] - task.lr * (known * of_others["z_p"])
        return {"w": task.descend(state["w"], gradient), "z_p": z_p, "mean": means[0].detach()}

    def finish(self, shared, state, client_state, data, task):
        report = {"delta": shared["x"] - state["w"], "mean": state["mean"]}
        return report, {"z_p": state["z_p"]}

    def predict(self, shared, client_state, net, task):
        return net.classify(net.features + client_state["z_p"])


@dataclass(frozen=True)
class FedDBEServer(ServerRule):
    """FedAvg's server, which keeps the mean features of the first round as the consensus."""

    provides = ("x", "consensus")
    uploads = {"delta": "mean", "mean": "mean"}

    def init(self, x0, problem):
        return {"x": x0, "consensus": x0.new_full((problem.features,), torch.nan)}

    def update(self, state, reports):
        x, old = state["x"] - self.lr * reports.mean("delta"), state["consensus"]
        return {"x": x, "consensus": reports.mean("mean").where(old.isnan(), old)}


Algorithm(
    "feddbe",
    FedDBEClient,
    FedDBEServer,
    "Zhang 2023",
    state="server F, client F",
    traffic="down P + F, up P + F",
)
