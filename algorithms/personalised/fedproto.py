"""FedProto (Tan et al., AAAI 2022).

The nets stay with the clients. Clients send the sum of the features of each class and its number
of examples; the server makes of them the prototypes, the mean features of each class over all
examples of the round. (The authors' code averages the clients' means without weights, and takes the
features from the passes of the last local epoch, each before its step. Here they are those of the
client's last model, in evaluation.) The local loss adds lam times the mean squared difference
between an example's features and the prototype of its class, as in the authors' code. An unknown
prototype is NaN. A client answers with the class of the nearest prototype, or with its classifier
if `nearest` is false. In the authors' code it chooses among its own classes only.

Run: raysim run quickstart algorithm=fedproto partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.rules import Algorithm, ClientRule, NonNegative, ServerRule, Upload, task_loss

SUMS = {"sums": Upload(("C", "F"), mode="sum"), "counts": Upload(("C", 1), mode="sum")}
"""Sums of the features of each class, and the numbers of examples, as uploads."""
UNKNOWN = 1e6
"""Squared distance to the prototype of a class that nobody has had."""


def pulled_loss(lam, values, means, net, batch):
    """Return the task's loss plus lam times the mean squared distance to the class's mean, [B].

    Args:
        lam: weight of the distance.
        values: features or logits of the examples, [B, F].
        means: of each class, [C, F]; NaN if unknown, which does not pull.
        net: the forward pass.
        batch: the mini-batch.
    """
    apart = (values - means[batch.y]).nan_to_num()
    return task_loss(net, batch) + lam * apart.square().mean(1)


def prototype_sums(w, data, task):
    """Return the uploads "sums" [C, F] of the features at w, and "counts" [C, 1]."""
    features = task.net(w, data.examples, "eval", task.buffers).features
    sums, counts = data.examples.class_sums(features, task.classes)
    return {"sums": sums, "counts": counts}


@dataclass(frozen=True)
class FedProtoClient(ClientRule):
    """Trains an own net near the prototypes, and sends the features of its classes."""

    needs_class_labels = True
    supports_dp = False  # sums and counts have no noise
    lam: NonNegative = 1.0
    """Weight of the distance to the prototypes."""
    nearest: bool = True
    """Answer with the class of the nearest prototype; false: with the classifier."""
    needs = ("x", "prototypes")
    sends = SUMS

    def loss(self, shared, state, net, batch, task):
        return pulled_loss(self.lam, net.features, shared["prototypes"], net, batch)

    def predict(self, shared, client_state, net, task):
        if not self.nearest:
            return net.logits
        distances = torch.cdist(net.features, shared["prototypes"]).square()
        return -distances.nan_to_num(nan=UNKNOWN)

    def finish(self, shared, state, client_state, data, task):
        return prototype_sums(state["w"], data, task), {}


@dataclass(frozen=True)
class FedProtoServer(ServerRule):
    """Mean features of each class over the round's examples."""

    steps_by_lr = False
    counts_equally = True
    provides = ("x", "prototypes")
    uploads = {"sums": "sum", "counts": "sum"}

    def init(self, x0, problem):
        return {"x": x0, "prototypes": x0.new_full((problem.classes, problem.features), torch.nan)}

    def update(self, state, reports):
        means = reports.sum("sums") / reports.sum("counts")
        return {**state, "prototypes": means.where(~means.isnan(), state["prototypes"])}


Algorithm(
    "fedproto",
    FedProtoClient,
    FedProtoServer,
    "Tan 2022",
    state="server C F, client P + Q",
    traffic="down C F, up C (F + 1)",
    defaults={"local": {"personal": ["*"]}},
)
