"""Norm bound with weak noise (Sun et al., arXiv:1911.07963, 2019).

Updates that are longer than M are scaled down to the length M. The server adds Gaussian noise to
their mean: x <- x - lr (mean_i delta_i min(1, M / |delta_i|) + sigma z).

Run: raysim run quickstart algorithm=norm_bound algorithm.bound=0.5
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegative, Positive, ServerRule


@dataclass(frozen=True)
class NormBoundServer(ServerRule):
    """Mean of updates of bounded length, with noise."""

    name = "norm_bound"
    bound: Positive = 1.0
    """M, the largest length of an update."""
    sigma: NonNegative = 0.0
    """Standard deviation of the noise in each coordinate."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        deltas = reports.per_client("delta")
        factors = (self.bound / deltas.norm(dim=1)).clamp(max=1)
        mean = (deltas.new_tensor(reports.weights) * factors) @ deltas
        z = mean.new_tensor(reports.rng("noise").standard_normal(len(mean)))
        return {"x": state["x"] - self.lr * (mean + self.sigma * z)}


Algorithm("norm_bound", FedAvgClient, NormBoundServer, "Sun 2019")
