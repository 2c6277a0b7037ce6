from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, ServerRule


@dataclass(frozen=True)
class Halves(ServerRule):
    """Half of the mean, and half of the first client's upload."""

    uploads = {"delta": ("mean", "per_client")}

    def update(self, state, reports):
        return {
            "x": state["x"] - 0.5 * reports.mean("delta") - 0.5 * reports.per_client("delta")[0]
        }


pair = Algorithm("halves", FedAvgClient, Halves, "nobody 2024")
