"""FedLC (Zhang et al., ICML 2022).

Cross-entropy of calibrated logits z_c - tau n_c^(-1/4), where n_c is the number of the client's
examples of class c. Rare classes get larger margins; for a missing class n_c counts as 1e-8.

The paper's loss prints the sum in the denominator over the classes c != y only. The loss is here
the softmax cross-entropy, whose denominator has all classes: the paper says that it calibrates the
logits before the softmax cross-entropy, and public implementations do so (FL-bench, fluke).
Without the term of y the loss would have no lower bound.

Run: raysim run quickstart algorithm=fedlc
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class FedLCClient(ClientRule):
    """Local SGD on logits that are calibrated by the client's classes."""

    needs_class_labels = True
    supports_dp = False  # the numbers n_c have no noise
    tau: NonNegative = 1.0
    """Strength of the calibration."""

    def init(self, shared, client_state, data, task):
        n = torch.bincount(data.examples.y, minlength=task.classes).to(shared["x"])
        return {"margins": self.tau * n.clamp(min=1e-8) ** -0.25}

    def loss(self, shared, state, net, batch, task):
        return F.cross_entropy(net.logits - state["margins"], batch.y, reduction="none")


Algorithm("fedlc", FedLCClient, FedAvgServer, "Zhang 2022")
