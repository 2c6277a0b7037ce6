"""DP-FTRL (Kairouz et al., ICML 2021).

x <- x_0 - lr (sum of all rounds' clipped updates + noise) / K. The noise of the sum is that of a
binary tree over the rounds: one normal vector for each node that the sum of rounds 1 to t consists
of, that is for each bit of t. No sampling of clients is needed for privacy.

Run: raysim run quickstart algorithm=dp_ftrl algorithm.noise_multiplier=0.1
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, Positive, PositiveInt, ServerRule


@dataclass(frozen=True)
class DPFTRLServer(ServerRule):
    """Sum of clipped updates with tree noise."""

    name = "dp_ftrl"
    counts_equally = True
    clip: Positive = 1.0
    """Largest length of an update."""
    noise_multiplier: NonNegative = 1.0
    """Standard deviation of a node's noise, in units of `clip`."""
    levels: PositiveInt = 12
    """Levels of the tree, for fewer than 2^levels rounds."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "nodes": x0.new_zeros(self.levels, len(x0))}

    def update(self, state, reports):
        deltas, nodes = reports.per_client("delta"), state["nodes"].clone()
        clipped = (self.clip / deltas.norm(dim=1)).clamp(max=1) @ deltas
        level = ((reports.round + 1) & -(reports.round + 1)).bit_length() - 1
        nodes[:level] = 0
        z = reports.rng("tree").standard_normal(len(clipped))
        nodes[level] = self.noise_multiplier * self.clip * nodes.new_tensor(z)
        step = (clipped + nodes.sum(0) - state["nodes"].sum(0)) / len(deltas)
        return {"x": state["x"] - self.lr * step, "nodes": nodes}


Algorithm("dp_ftrl", FedAvgClient, DPFTRLServer, "Kairouz 2021", state="server levels P, client 0")
