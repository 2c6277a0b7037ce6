"""DynSGD: stale updates get smaller weights (Jiang J., Cui, Zhang, Yu, SIGMOD 2017).

    server   p_i ~ 1 / (s_i + 1);    x <- x - server.lr sum_i p_i d_i
             d_i = x_{b_i} - y_i, staleness s_i = t - b_i

State: none. Traffic: P down, P up.

The original is a parameter server with one arrival per step, scaled by 1 / (s + 1) and not
normalised: `normalise: false`, p_i = 1 / (K (s_i + 1)). For K arrivals Jiang X. et al. 2023
normalise the weights to sum to one. With equal staleness the method is FedAvg. `weights: samples`
multiplies p_i by n_i.
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, Cohort, normalised

KASYNC = {"schedule": {"name": "kasync"}}
"""Defaults of asynchronous methods: the K-async schedule."""


@dataclass(frozen=True)
class DynSGDServer(FedAvgServer):
    """Weighted average in which weights fall with staleness."""

    normalise: bool = True
    """Divide the weights by their sum."""

    def weigh(self, cohort: Cohort) -> list[float]:
        weights = [
            w / (s + 1) for w, s in zip(super().weigh(cohort), cohort.staleness, strict=True)
        ]
        return normalised(weights) if self.normalise else weights


Algorithm("dynsgd", FedAvgClient, DynSGDServer, "Jiang J. 2017", defaults=KASYNC)
