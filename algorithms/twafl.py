"""TWAFL: temporally weighted aggregation (Chen, Sun, Jin, TNNLS 31(10), 2020).

    server   p_i ~ n_i (e/2)^-s_i;    x <- x - server.lr sum_i p_i d_i
             d_i = x_{b_i} - y_i, staleness s_i = t - b_i

State: none. Traffic: P down, P up.

`weights: uniform` leaves n_i out, as in the comparison by Zhou et al. 2022. The paper multiplies
the latest models of all clients by these factors without normalisation; here, as in that
comparison, the weights of a round's arrivals sum to one. The other half of the method, deep layers
that are updated less often than shallow ones, is not part of this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e
from typing import Literal

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, Cohort, normalised


@dataclass(frozen=True)
class TWAFLServer(FedAvgServer):
    """Weighted average in which weights fall exponentially with staleness."""

    weights: Literal["uniform", "samples"] = "samples"
    """Multiply the weights by the clients' samples, or not."""

    def weigh(self, cohort: Cohort) -> list[float]:
        weights = zip(super().weigh(cohort), decay(cohort.staleness), strict=True)
        return normalised(w * by for w, by in weights)


def decay(staleness: Sequence[int]) -> list[float]:
    """Return (e/2)^-s for each staleness, scaled so that the least stale has 1.

    The scale keeps the factors from vanishing all together.

    Args:
        staleness: staleness of each update in rounds, [K].
    """
    least = min(staleness)
    return [(e / 2) ** (least - s) for s in staleness]


Algorithm("twafl", FedAvgClient, TWAFLServer, "Chen 2020", defaults=KASYNC)
