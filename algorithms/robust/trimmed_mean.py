"""Trimmed mean (Yin et al., ICML 2018).

In each coordinate the share beta of the largest and the share beta of the smallest values is left
out, rounded to whole values (halves to even ones). The server makes its step along the mean of the
rest.

Run: raysim run quickstart algorithm=trimmed_mean algorithm.beta=0.2
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import sort_coordinates
from raysim.rules import Algorithm, ServerRule


@dataclass(frozen=True)
class TrimmedMeanServer(ServerRule):
    """x <- x - lr * mean of the updates without the extremes, for each coordinate."""

    name = "trimmed_mean"
    counts_equally = True
    attackers_key = "beta"
    beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.1
    """Share of the clients that is left out at each end, below 0.5. Their number is rounded,
    but one or two values always remain."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        in_order = sort_coordinates(reports.per_client("delta"))
        cut = min(round(self.beta * len(in_order)), (len(in_order) - 1) // 2)
        return {"x": state["x"] - self.lr * in_order[cut : len(in_order) - cut].mean(0)}


Algorithm("trimmed_mean", FedAvgClient, TrimmedMeanServer, "Yin 2018")
