"""DnC, divide and conquer (Shejwalkar and Houmansadr, NDSS 2021).

On a random subset of the coordinates, updates are outliers if they are far from the mean along the
direction of the largest variance, the top right singular vector of the centred updates. Each
iteration keeps the K - filter · attackers updates with the smallest squared projections on it. The
server moves along the mean of the updates that all iterations keep (if there are none, of those
that most iterations keep). Some implementations take the mean of those that any iteration keeps.

Run: raysim run quickstart algorithm=dnc
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, NonNegativeInt, PositiveInt, ServerRule


@dataclass(frozen=True)
class DnCServer(ServerRule):
    """Mean of the updates without outliers along the direction of their largest variance."""

    counts_equally = True
    weights_after_training = True
    attackers_key = "attackers"
    uploads = {"delta": "per_client"}
    attackers: NonNegativeInt = 1
    """f, the number of attackers in a round."""
    filter: NonNegative = 1.0
    """Updates that are left out in an iteration, in units of `attackers`."""
    coordinates: PositiveInt = 10_000
    """Coordinates of an iteration."""
    iterations: PositiveInt = 1
    """Number of iterations."""

    def check(self, problem):
        n_filtered = int(self.filter * self.attackers)
        if n_filtered >= problem.cohort:
            raise ValueError(
                f"attackers: filter * attackers = {n_filtered} must be below schedule.cohort = "
                f"{problem.cohort}; lower attackers or filter, or raise the cohort"
            )

    def update(self, state, reports):
        deltas, rng = reports.per_client("delta"), reports.rng("coordinates")
        n_kept = max(len(deltas) - int(self.filter * self.attackers), 1)
        votes = torch.zeros(len(deltas), device=deltas.device)
        for _ in range(self.iterations):
            size = min(self.coordinates, deltas.shape[1])
            chosen = torch.from_numpy(rng.choice(deltas.shape[1], size, replace=False))
            centred = deltas[:, chosen.to(deltas.device)]
            centred = centred - centred.mean(0)
            v = torch.linalg.svd(centred, full_matrices=False).Vh[0]
            votes[(centred @ v).square().argsort(stable=True)[:n_kept]] += 1
        kept = votes == votes.max()
        reports.set_weights((kept.double() / kept.sum()).tolist())
        return {"x": state["x"] - self.lr * deltas[kept].mean(0)}


Algorithm("dnc", FedAvgClient, DnCServer, "Shejwalkar 2021")
