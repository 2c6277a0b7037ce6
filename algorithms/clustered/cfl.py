"""CFL, clustered federated learning (Sattler et al., IEEE TNNLS 2020).

FedAvg in each cluster of clients. A cluster is near a common stationary point if the mean of its
updates is shorter than eps1, although one of them is longer than eps2. It is then split in two so
that the largest cosine between updates of different halves is as small as possible, which single
linkage does. The paper's further condition for a split, which compares gamma_max with the
largest cosine across, is left out. Means are unweighted. All clients take part in each round.
Good values of eps1 and eps2 depend on net and step sizes. The authors' code has 0.4 and 1.6, splits
after round 20 and clusters of more than two clients only, by complete linkage, and averages each
half by itself from the round of the split on; here the halves part in the next round.

Run: raysim run quickstart algorithm=cfl schedule.cohort=100 partition.test.fraction=0.2
evaluate.every=0 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, ServerRule


@dataclass(frozen=True)
class CFLServer(ServerRule):
    """FedAvg in clusters that are split by the cosines of their updates."""

    counts_equally = True
    eps1: NonNegative = 0.4
    """Largest norm of a cluster's mean update for a split."""
    eps2: NonNegative = 0.6
    """Norm that an update of the cluster must exceed for a split."""
    provides = ("x", "models")
    uploads = {"delta": "per_client"}

    def init(self, x0, problem):
        cluster = x0.new_zeros(problem.n_clients).long()
        return {"x": x0, "models": x0.repeat(problem.n_clients, 1), "cluster": cluster}

    def sent_to(self, shared, client):
        return {"x": shared["models"][client]}

    def update(self, state, reports):
        from scipy.cluster.hierarchy import fclusterdata  # slow to import

        models, cluster = state["models"].clone(), state["cluster"].clone()
        ids = cluster.new_tensor(reports.ids)
        for c in cluster[ids].unique():
            mine = cluster[ids] == c
            deltas = reports.per_client("delta")[mine]
            models[cluster == c] -= self.lr * deltas.mean(0)
            is_stationary = len(deltas) > 1 and deltas.mean(0).norm() < self.eps1
            if is_stationary and deltas.norm(dim=1).max() > self.eps2:
                # Of vectors of length 1 the nearest ones have the largest cosine.
                units = deltas / deltas.norm(dim=1, keepdim=True).clamp(min=1e-30)
                half = fclusterdata(units.cpu(), 2, "maxclust", method="single")
                cluster[ids[mine][half == 2]] = cluster.max() + 1
        return {**state, "models": models, "cluster": cluster}


Algorithm(
    "cfl",
    FedAvgClient,
    CFLServer,
    "Sattler 2020",
    state="server N (P + 1), client 0",
    traffic="down P, up P",
)
