"""Coordinate-wise median (Yin et al., ICML 2018).

The server moves along the median of each coordinate of the updates. Of an even number of clients it
is the mean of the two values in the middle.

Run: raysim run quickstart algorithm=median
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import median_of_coordinates
from raysim.rules import Algorithm, ServerRule


@dataclass(frozen=True)
class MedianServer(ServerRule):
    """x <- x - lr * coordinate-wise median of the updates."""

    counts_equally = True

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        middle = median_of_coordinates(reports.per_client("delta"))
        return {"x": state["x"] - self.lr * middle}


Algorithm("median", FedAvgClient, MedianServer, "Yin 2018")
