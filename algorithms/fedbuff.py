"""FedBuff: buffered asynchronous aggregation (Nguyen et al., AISTATS 2022).

    server   m <- beta1 m + (1/K) sum_i d_i / sqrt(1 + s_i);    x <- x - server.lr m
             after every K arrivals; beta1 = 0 by default

State: server P. Traffic: P down, P up.

The sum is divided by K, not by the sum of the factors. The method runs on the `buffered` schedule:
when a client arrives, another one starts at once from the newest model. That requires fewer clients
in flight than there are clients (`schedule.concurrency`, by default N - K). Without staleness and
with beta1 = 0 the method is FedAvg. `weights: samples` uses n_i / sum n_j for 1/K.

With its polynomial weight of exponent 0.5, the authors' simulator FLSim divides the factor of an
update by that of an update with `avg_staleness` (1 by default), which gives sqrt(2 / (1 + s)); its
default weight is constant. Its default reducer leaves out 1/K. So server.lr times sqrt(2) K gives
its step with the polynomial weight.
"""

from dataclasses import dataclass
from math import sqrt

from raysim.algorithms.fedavg import FedAvgClient
from raysim.algorithms.fedavgm import FedAvgMServer
from raysim.rules import Algorithm, Cohort, UnitScheduled


@dataclass(frozen=True)
class FedBuffServer(FedAvgMServer):
    """Average of updates that are scaled down with staleness, with optional momentum."""

    beta1: UnitScheduled = 0.0
    """Momentum."""

    def weigh(self, cohort: Cohort) -> list[float]:
        return [
            w / sqrt(1 + s) for w, s in zip(super().weigh(cohort), cohort.staleness, strict=True)
        ]


Algorithm(
    "fedbuff",
    FedAvgClient,
    FedBuffServer,
    "Nguyen 2022",
    state="server P, client 0",
    defaults={"schedule": {"name": "buffered"}},
)
