"""Bulyan (El Mhamdi et al., ICML 2018).

Krum selects K - 2 f of the K updates, one after the other. In each coordinate, the K - 4 f of them
that are nearest to their median are averaged; of an even number of values it is the lower one of
the two in the middle.

Run: raysim run quickstart algorithm=bulyan schedule.cohort=7
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import sort_coordinates
from raysim.rules import Algorithm, NonNegativeInt, ServerRule

EXACT = "donot_use_mm_for_euclid_dist"  # a matrix product cancels if updates are alike


@dataclass(frozen=True)
class BulyanServer(ServerRule):
    """x <- x - lr * mean of the selected values that are nearest to their median."""

    counts_equally = True
    weights_after_training = True
    attackers_key = "attackers"
    attackers: NonNegativeInt = 1
    """f, the number of attackers in a round of at least 4 f + 3 clients."""

    def check(self, problem):
        needed = 4 * self.attackers + 3
        if problem.cohort < needed:
            raise ValueError(
                f"attackers: Bulyan with {self.attackers} attackers needs schedule.cohort >= 4 "
                f"attackers + 3 = {needed}, and it is {problem.cohort}; raise it, or lower "
                "attackers"
            )

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        deltas, f = reports.per_client("delta"), self.attackers
        squared = torch.cdist(deltas, deltas, compute_mode=EXACT).square()
        left, selected = list(range(len(deltas))), []
        while len(selected) < max(len(deltas) - 2 * f, 1):
            neighbours = max(len(left) - f - 2, 1)
            ascending = squared[left][:, left].sort(dim=1).values
            scores = ascending[:, 1 : neighbours + 1].sum(1).tolist()
            # Of two that are each other's one neighbour, the one nearer to all others is taken.
            ranks = list(zip(scores, ascending.sum(1).tolist(), strict=True))
            selected.append(left.pop(ranks.index(min(ranks))))
        reports.set_weights((k in selected) / len(selected) for k in range(len(deltas)))
        chosen = deltas[selected]
        # `Tensor.median` has no deterministic kernel on a GPU.
        median = sort_coordinates(chosen)[(len(chosen) - 1) // 2]
        gaps = (chosen - median).abs()
        nearest = gaps.argsort(dim=0)[: max(len(chosen) - 2 * f, 1)]
        return {"x": state["x"] - self.lr * chosen.gather(0, nearest).mean(0)}


Algorithm("bulyan", FedAvgClient, BulyanServer, "El Mhamdi 2018")
