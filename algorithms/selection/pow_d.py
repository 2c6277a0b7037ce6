"""Power-of-choice with losses of the current model, pow-d (Cho et al., AISTATS 2022).

d candidates are drawn by their samples, without replacement. Each evaluates the current model on
its own training examples, and those with the largest loss are selected.

Run: raysim run quickstart algorithm=pow_d algorithm.d=30
"""

from dataclasses import dataclass

import numpy as np

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, PositiveInt


@dataclass(frozen=True)
class PowDServer(FedAvgServer):
    """FedAvg with those of d candidates that have the largest loss of the current model."""

    name = "pow_d"
    d: PositiveInt = 20
    """Number of candidates; at least `schedule.cohort` are drawn."""

    def candidates(self, state, pool, rng):
        d = min(max(self.d, pool.size), len(pool.ids))
        return rng.choice(pool.ids, d, replace=False, p=pool.samples / pool.samples.sum())

    def select(self, state, pool, rng):
        by_loss = np.argsort(-pool.current_loss)  # nan, which is no candidate, comes last
        known = np.count_nonzero(~np.isnan(pool.current_loss))
        return pool.ids[by_loss[: min(pool.size, known)]]


Algorithm("pow_d", FedAvgClient, PowDServer, "Cho 2022", traffic="down P for candidates too, up P")
