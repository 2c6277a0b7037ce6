"""SignGuard (Xu et al., ICDCS 2022).

Two filters. An update's norm divided by the median norm must be in [lower, upper]. And updates are
clustered by their shares of positive, zero and negative entries on random coordinates (MeanShift),
of which the largest cluster counts. The server moves along the mean of the updates that pass both,
each scaled down to the median norm. If no update passes both, those of the first filter count.

The authors' code takes the signs of consecutive coordinates from a random one on, divides each
share by its largest value before it clusters, and starts MeanShift from binned points. With an even
number of updates it scales down to the lower of the two middle norms.

Run: raysim run quickstart algorithm=signguard
"""

from dataclasses import dataclass

import numpy as np
import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, ServerRule, Share


@dataclass(frozen=True)
class SignGuardServer(ServerRule):
    """Mean of the updates whose norms and signs are like those of most others."""

    counts_equally = True
    weights_after_training = True
    uploads = {"delta": "per_client"}
    lower: NonNegative = 0.1
    """Smallest norm, in units of the median norm."""
    upper: NonNegative = 3.0
    """Largest norm, in units of the median norm."""
    share: Share = 0.1
    """Share of the coordinates whose signs are compared."""

    def check(self, problem):
        # Its import draws from Python's generator, which no round may do.
        import sklearn.cluster  # noqa: F401

    def update(self, state, reports):
        deltas = reports.per_client("delta")
        norms = deltas.norm(dim=1)
        median = norms.quantile(0.5)
        kept = (norms >= self.lower * median) & (norms <= self.upper * median)
        size = max(int(self.share * deltas.shape[1]), 1)
        chosen = reports.rng("coordinates").choice(deltas.shape[1], size, replace=False)
        signs = deltas[:, torch.from_numpy(chosen).to(deltas.device)].sign()
        shares = torch.stack([(signs == sign).double().mean(1) for sign in (1, 0, -1)], 1)
        alike = torch.from_numpy(largest_cluster(shares.cpu().numpy())).to(deltas.device)
        kept = kept & alike if (kept & alike).any() else kept
        reports.set_weights((kept.double() / kept.sum()).tolist())
        factors = (median / norms.clamp(min=1e-12)).clamp(max=1)
        return {"x": state["x"] - self.lr * (factors[:, None] * deltas)[kept].mean(0)}


def largest_cluster(features):
    """Return a mask [K] of the rows of features [K, 3] in the largest cluster."""
    from sklearn.cluster import MeanShift, estimate_bandwidth  # slow to import

    width = estimate_bandwidth(features, quantile=0.5, n_samples=50, random_state=0)
    if width < 1e-9:  # each row has K // 2 that are the same, itself among them
        same = (abs(features[:, None] - features) < 1e-9).all(2)
        counts = same.sum(1)
        return counts == counts.max()  # halves are equally large, and both are kept
    labels = MeanShift(bandwidth=width, cluster_all=False).fit(features).labels_
    return labels == np.bincount(labels[labels >= 0]).argmax()


Algorithm("signguard", FedAvgClient, SignGuardServer, "Xu J. 2022")
