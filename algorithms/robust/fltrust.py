"""FLTrust (Cao et al., NDSS 2021).

The server trains on root data that it trusts, the public data of the data set. An update counts by
its cosine with the server's own update, if that is positive, and is scaled to that update's norm.

Run: raysim run quickstart algorithm=fltrust partition.public_fraction=0.1
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, PositiveInt, ServerRule


@dataclass(frozen=True)
class FLTrustServer(ServerRule):
    """Mean of updates, weighted by their cosines with an update on trusted data."""

    counts_equally = True
    weights_after_training = True
    needs_public_data = "labels"
    epochs: PositiveInt = 1
    """Passes over the root data in a round."""
    batch_size: PositiveInt = 16
    """Root examples in a step."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        w, rng = state["x"], reports.rng("root")
        for _ in range(self.epochs):
            for batch in reports.public.batches(self.batch_size, rng):
                w = reports.task.descend(w, reports.task.grad(w, batch))
        root, deltas = state["x"] - w, reports.per_client("delta")
        norms = deltas.norm(dim=1).clamp(min=1e-12)
        trust = torch.relu(deltas @ root / (norms * root.norm()))
        total = trust.sum().clamp(min=1e-12)
        reports.set_weights((trust.double() / total).tolist())
        mean = (trust * root.norm() / norms) @ deltas / total
        return {"x": state["x"] - self.lr * mean}


Algorithm("fltrust", FedAvgClient, FLTrustServer, "Cao 2021")
