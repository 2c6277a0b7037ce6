"""ClippedClustering (Li et al., IEEE Transactions on Big Data 2023).

Updates are scaled down to tau, the median norm of all updates so far (of the last
1000), and divided into two clusters by their cosines (agglomerative, average linkage). The server
moves along the mean of the larger cluster.

Run: raysim run quickstart algorithm=clipped_clustering
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, ServerRule

MEMORY = 1000
"""Norms that are remembered."""


@dataclass(frozen=True)
class ClippedClusteringServer(ServerRule):
    """Mean of the larger of two clusters of updates of bounded length."""

    name = "clipped_clustering"
    counts_equally = True
    weights_after_training = True
    uploads = {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "norms": x0.new_zeros(MEMORY), "count": torch.zeros(())}

    def update(self, state, reports):
        from scipy.cluster.hierarchy import fcluster, linkage  # slow to import
        from scipy.spatial.distance import squareform

        deltas = reports.per_client("delta")
        norms = deltas.norm(dim=1)
        known = torch.cat([state["norms"][: int(state["count"])], norms])[-MEMORY:]
        tau = known.quantile(0.5)
        clipped = (tau / norms.clamp(min=1e-12)).clamp(max=1)[:, None] * deltas
        labels = np.ones(len(deltas), dtype=int)
        if len(deltas) > 2:
            units = deltas / norms.clamp(min=1e-12)[:, None]
            distances = (1 - units @ units.T).clamp(min=0).double().cpu().numpy()
            tree = linkage(squareform(distances, checks=False), "average")
            labels = fcluster(tree, 2, "maxclust")
        larger = torch.from_numpy(labels == np.bincount(labels).argmax()).to(deltas.device)
        reports.set_weights((larger.double() / larger.sum()).tolist())
        kept = torch.zeros_like(state["norms"])
        kept[: len(known)] = known
        x = state["x"] - self.lr * clipped[larger].mean(0)
        return {"x": x, "norms": kept, "count": torch.full_like(state["count"], len(known))}


Algorithm(
    "clipped_clustering",
    FedAvgClient,
    ClippedClusteringServer,
    "Li S. 2023",
    state="server 1000, client 0",
)
