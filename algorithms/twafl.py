"""TWAFL, its temporally weighted aggregation — Chen, Sun, Jin, TNNLS 31(10), 2020.

    server   p_i ∝ n_i (e/2)^{-s_i};    x <- x - server.lr Σ_i p_i d_i        d_i = x_{b_i} - y_i, s_i = t - b_i

Keeps nothing; sends d floats down, d up. `weights: uniform` leaves n_i out, as Zhou et al. 2022 do where they compare
with it. The paper multiplies all clients' latest models by these factors and does not normalise; here, as in that
comparison, the weights of a round's arrivals add up to one. The other half of the method, deep layers that move less
often than shallow ones, is not part of this.
"""

from dataclasses import dataclass
from math import e
from typing import Literal

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedavg import FedAvgClient, FedAvgServer
from raysim.rules import Algorithm, normalised


@dataclass(frozen=True)
class TWAFLServer(FedAvgServer):
    """Averaging with weights that fall exponentially with staleness."""

    weights: Literal["uniform", "samples"] = "samples"

    def weigh(self, cohort):
        weights = zip(super().weigh(cohort), decay(cohort.staleness), strict=True)
        return normalised(w * by for w, by in weights)


def decay(staleness):
    """(e/2)^{-s}, up to a factor that is the same for all: the least stale has 1, however stale it is, so that not all
    can vanish."""
    least = min(staleness)
    return [(e / 2) ** (least - s) for s in staleness]


Algorithm("twafl", FedAvgClient, TWAFLServer, "Chen 2020", defaults=KASYNC)
