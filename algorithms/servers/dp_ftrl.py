"""DP-FTRL (Kairouz et al., ICML 2021).

x <- x_0 - lr (sum of all rounds' clipped updates + noise) / K for a cohort of K. The noise of
the sum is that of a binary tree over the rounds: one normal vector for each node that the sum of
rounds 1 to t consists of, that is for each bit of t. No sampling of clients is needed for privacy.

Run: raysim run quickstart algorithm=dp_ftrl algorithm.noise_multiplier=0.1
"""

from dataclasses import dataclass

import torch

from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import weighted_sum
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

    def check(self, problem):
        if problem.rounds >= 2**self.levels:
            raise ValueError(
                f"levels: a tree of {self.levels} is for fewer than {2**self.levels} rounds, and "
                f"there are {problem.rounds}; set levels to {problem.rounds.bit_length()}"
            )

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def init(self, x0, problem):
        return {
            "x": x0,
            "x0": x0,
            "sum": torch.zeros_like(x0),
            "nodes": x0.new_zeros(self.levels, len(x0)),
            "K": torch.tensor(min(problem.cohort, problem.n_nonempty)),
            "t": torch.tensor(0),
        }

    def update(self, state, reports):
        deltas, nodes = reports.per_client("delta"), state["nodes"].clone()
        factors = (self.clip / deltas.norm(dim=1)).clamp(max=1).tolist()
        total = state["sum"] + weighted_sum(list(deltas), factors)
        t = int(state["t"]) + 1
        level = (t & -t).bit_length() - 1
        nodes[:level] = 0  # whose sum is in the new node
        z = reports.rng("tree").standard_normal(len(total))
        nodes[level] = self.noise_multiplier * self.clip * nodes.new_tensor(z)
        x = state["x0"] - self.lr * (total + nodes.sum(0)) / state["K"]
        return {**state, "x": x, "sum": total, "nodes": nodes, "t": torch.tensor(t)}


Algorithm(
    "dp_ftrl", FedAvgClient, DPFTRLServer, "Kairouz 2021", state="server (3 + levels) P, client 0"
)
