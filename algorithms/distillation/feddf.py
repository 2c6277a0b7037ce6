"""FedDF (Lin et al., NeurIPS 2020).

Ensemble distillation: the server averages the clients' models, and then trains the average to give
the mean of their logits on unlabelled public examples. On nets with BatchNorm all of them run with
the server's statistics of before the round.

Run: raysim run quickstart algorithm=feddf partition.public_fraction=0.1
"""

from dataclasses import dataclass, replace

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, PositiveInt, ServerRule, soft_cross_entropy


@dataclass(frozen=True)
class FedDFServer(ServerRule):
    """Average of the models, trained on the mean of their outputs."""

    needs_public_data = "inputs"
    batch_size: PositiveInt = 16
    """Public examples in a step."""
    distill_lr: NonNegative = 0.1
    """Step size of the distillation, which makes one pass in a round."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        task, buffers = reports.task, reports.task.global_buffers
        models = [state["x"] - delta for delta in reports.per_client("delta")]
        x = state["x"] - self.lr * reports.mean("delta")
        for batch in reports.public.batches(self.batch_size, reports.rng("distill")):
            logits = [task.net(w, batch, "eval", buffers).logits for w in models]
            batch = replace(batch, y=torch.stack(logits).mean(0).softmax(1))
            x = x - self.distill_lr * task.grad(x, batch, soft_cross_entropy, "eval", buffers)
        return {"x": x}


Algorithm("feddf", FedAvgClient, FedDFServer, "Lin 2020")
