"""Power-of-choice with known losses, rpow-d (Cho et al., AISTATS 2022).

d candidates are drawn by their samples, without replacement. Those with the largest loss are
selected. The loss is the mean training loss of a client's last round, so it costs no message; a
client that was never seen counts as infinite.

Run: raysim run quickstart algorithm=power_of_choice algorithm.d=30
"""

from dataclasses import dataclass

import numpy as np

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, PositiveInt


@dataclass(frozen=True)
class PowerOfChoiceServer(FedAvgServer):
    """FedAvg with those of d candidates that had the largest loss."""

    name = "power_of_choice"
    d: PositiveInt = 20
    """Number of candidates; at least `schedule.cohort` are drawn."""

    def select(self, state, pool, rng):
        d = min(max(self.d, pool.size), len(pool.ids))
        shares = pool.samples / pool.samples.sum()
        candidates = rng.choice(len(pool.ids), d, replace=False, p=shares)
        loss = np.nan_to_num(pool.loss[candidates], nan=np.inf)
        largest = np.argsort(-loss, kind="stable")[: pool.size]
        return pool.ids[candidates[largest]]


Algorithm("power_of_choice", FedAvgClient, PowerOfChoiceServer, "Cho 2022")
