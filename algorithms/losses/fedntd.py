"""FedNTD, not-true distillation (Lee et al., NeurIPS 2022).

Cross-entropy + beta KL(q_g || q), where q_g and q are the softmax of the global and of the local
logits, divided by tau, over all classes but the true one. The authors' code multiplies the KL by
tau² (the same for tau = 1), and weighs clients by samples (algorithm.weights=samples).

Run: raysim run quickstart algorithm=fedntd
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, Positive, cross_entropy


@dataclass(frozen=True)
class FedNTDClient(ClientRule):
    """Local SGD that keeps what the global model says of the classes that are not true."""

    needs_class_labels = True
    beta: NonNegative = 1.0
    """Weight of the distillation."""
    tau: Positive = 1.0
    """Temperature."""

    def loss(self, shared, state, net, batch, task):
        others = torch.arange(1, task.classes, device=batch.y.device)
        not_true = (batch.y[:, None] + others) % task.classes
        teacher = task.net(shared["x"], batch, "eval", task.global_buffers).logits
        q_global = F.log_softmax(teacher.gather(1, not_true) / self.tau, 1)
        q = F.log_softmax(net.logits.gather(1, not_true) / self.tau, 1)
        ntd = F.kl_div(q, q_global, reduction="none", log_target=True).sum(1)
        return cross_entropy(net, batch) + self.beta * ntd


Algorithm("fedntd", FedNTDClient, FedAvgServer, "Lee 2022")
