"""Min-max (Shejwalkar and Houmansadr, NDSS 2021).

All attackers send mean - gamma * std of the honest updates, with the largest gamma for which no
honest update is further away than two honest updates are from each other. It is found by halving
steps, as in the paper's algorithm 1.

Run: raysim run methods/min_max
"""

from dataclasses import dataclass

import torch

from raysim.rules import ClientRule, Positive

EXACT = "donot_use_mm_for_euclid_dist"  # a matrix product cancels if updates are alike


@dataclass(frozen=True)
class MinMaxClient(ClientRule):
    """Collude on an update that distances do not reveal. It depends on the honest updates."""

    name = "min_max"
    attacks = True
    gamma: Positive = 10.0
    """First gamma of the search."""

    def collude(self, uploads, others, cohort):
        honest = others["delta"] if len(others["delta"]) else uploads["delta"]
        mean, std = honest.mean(0), honest.std(0, correction=0)
        largest = torch.cdist(honest, honest, compute_mode=EXACT).max()
        gamma, step = 0.0, self.gamma
        while step > 1e-5:
            distance = (mean - (gamma + step) * std - honest).norm(dim=1).max()
            gamma += step * bool(distance <= largest)
            step /= 2
        return {"delta": (mean - gamma * std).expand_as(uploads["delta"])}
