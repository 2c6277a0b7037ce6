"""Krum and multi-Krum (Blanchard et al., NeurIPS 2017).

The score of an update is the sum of its squared distances to the K - f - 2 nearest other updates,
for K clients of which f may be attackers. Krum makes a step along the update with the smallest
score, multi-Krum along the mean of the m best ones.

Run: raysim run quickstart algorithm=krum algorithm.m=5
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegativeInt, PositiveInt, ServerRule

EXACT = "donot_use_mm_for_euclid_dist"  # a matrix product cancels if updates are alike


@dataclass(frozen=True)
class KrumServer(ServerRule):
    """x <- x - lr * mean of the m updates with the smallest scores."""

    counts_equally = True
    weights_after_training = True
    attackers_key = "attackers"
    attackers: NonNegativeInt = 1
    """f, the number of attackers in a round of at least 2 f + 3 clients."""
    m: PositiveInt = 1
    """Number of updates that are averaged. 1 is Krum."""

    def check(self, problem):
        needed = 2 * self.attackers + 3
        if problem.cohort < needed:
            raise ValueError(
                f"attackers: Krum with {self.attackers} attackers needs schedule.cohort >= 2 "
                f"attackers + 3 = {needed}, and it is {problem.cohort}; raise it, or lower "
                "attackers"
            )

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        deltas = reports.per_client("delta")
        neighbours = max(len(deltas) - self.attackers - 2, 1)
        squared = torch.cdist(deltas, deltas, compute_mode=EXACT).square()
        scores = squared.sort(dim=1).values[:, 1 : neighbours + 1].sum(1)
        best = scores.argsort(stable=True)[: self.m].tolist()
        reports.set_weights((k in best) / len(best) for k in range(len(deltas)))
        return {"x": state["x"] - self.lr * deltas[best].mean(0)}


Algorithm("krum", FedAvgClient, KrumServer, "Blanchard 2017")
