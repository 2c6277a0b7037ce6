"""FedDistill, federated distillation (Jeong et al., arXiv:1811.11479, 2018).

The nets stay with the clients. Clients send the sum of the logits of each class and its number of
examples; the server makes of them the mean logits of each class over all examples of the round. The
local loss adds lam times the mean squared difference between an example's logits and those of its
class. Unknown logits are NaN. The logits are those of the client's last model, in evaluation; the
paper takes means over the local steps.

In the paper the teacher of a client is the mean over the other clients; here, as in PFLlib, its own
logits count too, so a class that it alone has is pulled to its earlier logits. The paper has a
cross-entropy in place of the squared difference. So has PFLlib, at d832e76 with the mean logits
themselves as targets; earlier versions had their softmax, or this squared difference. It takes them
over the local steps, and averages the clients' means without counts.

Run: raysim run quickstart algorithm=feddistill partition.test.fraction=0.2 evaluate.every=0
evaluate.clients.every=20
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.personalised.fedproto import pulled_loss
from raysim.rules import Algorithm, ClientRule, NonNegative, ServerRule, Upload


@dataclass(frozen=True)
class FedDistillClient(ClientRule):
    """Trains an own net near the mean logits of each class, and sends its own."""

    needs_class_labels = True
    supports_dp = False  # sums and counts have no noise
    needs = ("x", "logits")
    sends = {"sums": Upload(("C", "C"), mode="sum"), "counts": Upload(("C", 1), mode="sum")}
    lam: NonNegative = 1.0
    """Weight of the distance to the mean logits."""

    def loss(self, shared, state, net, batch, task):
        return pulled_loss(self.lam, net.logits, shared["logits"], net, batch)

    def finish(self, shared, state, client_state, data, task):
        logits = task.net(state["w"], data.examples, "eval", task.buffers).logits
        sums, counts = data.examples.class_sums(logits, task.classes)
        return {"sums": sums, "counts": counts}, {}


@dataclass(frozen=True)
class FedDistillServer(ServerRule):
    """Mean logits of each class over the round's examples."""

    steps_by_lr = False
    counts_equally = True
    provides = ("x", "logits")
    uploads = {"sums": "sum", "counts": "sum"}

    def init(self, x0, problem):
        return {"x": x0, "logits": x0.new_full((problem.classes, problem.classes), torch.nan)}

    def update(self, state, reports):
        means = reports.sum("sums") / reports.sum("counts")
        return {**state, "logits": means.where(~means.isnan(), state["logits"])}


Algorithm(
    "feddistill",
    FedDistillClient,
    FedDistillServer,
    "Jeong 2018",
    state="server C C, client P + Q",
    traffic="down C C, up C (C + 1)",
    defaults={"local": {"personal": ["*"]}},
)
