"""REFL: staleness-aware aggregation (Abdelmoniem, Sahu, Canini, Fahmy, EuroSys 2023).

    server   F = fresh updates (s = 0), u_F their mean
             w_k = 1 for k in F, else (1 - beta) / (s_k + 1) + beta (1 - exp(-L_k / L_max))
             L_k = |u_F - u_k|^2 / ((|F| + 1)^2 |u_F|^2),  L_max the largest of the round
             p = w / sum w;    x <- x - server.lr sum_k p_k u_k;    u_k = x_{b_k} - y_k

State: none; the K updates are held for the round. Traffic: P down, P up.

A stale update is damped by its age and boosted by its deviation from u_F. In L_k / L_max everything
but |u_F - u_k|^2 cancels. The code of Abdelmoniem 2023 divides the exponential by 10 (`boost_scale:
10`), so every stale update is boosted by 0.90 to 0.96 beta whatever its deviation. A round without
fresh updates is common in K-async and not covered by the paper: then F are the least stale updates,
with weight 1 / (s + 1). If u_F = 0 or nothing deviates there is no boost. `weights: samples`
multiplies w_k by n_k. REFL's client selection and adaptive rounds are not part of this file.
"""

from dataclasses import dataclass
from math import exp
from typing import Annotated

from pydantic import Field

from raysim.algorithms.dynsgd import KASYNC
from raysim.algorithms.fedavg import FedAvgClient
from raysim.numerics import norm, weighted_sum
from raysim.rules import Algorithm, Logged, Reports, ServerRule, State, Uploads, normalised


@dataclass(frozen=True)
class REFLServer(ServerRule):
    """Average in which stale updates weigh less, and more if they deviate from the fresh ones."""

    beta: Annotated[float, Field(ge=0, le=1)] = 0.35
    """Share of the deviation in a stale update's weight."""
    boost_scale: Annotated[float, Field(ge=1)] = 1.0
    """Divisor of the exponential; 10 in the code of Abdelmoniem 2023."""

    weights_after_training = True

    logs = (Logged("fresh", "least stale updates that enter the mean", "updates"),)

    @property
    def uploads(self) -> Uploads:
        return {"delta": "per_client"}

    def update(self, state: State, reports: Reports) -> State:
        updates, s = reports.rows["delta"], reports.staleness
        youngest = min(s)
        fresh = [u for u, age in zip(updates, s, strict=True) if age == youngest]
        u_F = weighted_sum(fresh, [1 / len(fresh)] * len(fresh))
        deviation = [norm(u_F - u) ** 2 for u in updates]
        largest = max(
            (d for d, age in zip(deviation, s, strict=True) if age > youngest), default=0.0
        )
        boosts = largest > 0 and norm(u_F) > 0
        weights = []
        for age, d, weight in zip(s, deviation, reports.weights, strict=True):
            boost = 1 - exp(-d / largest) / self.boost_scale if boosts else 0.0
            w = (
                1 / (age + 1)
                if age == youngest
                else (1 - self.beta) / (age + 1) + self.beta * boost
            )
            weights.append(w * weight)
        p = normalised(weights)
        reports.set_weights(p)
        reports.log(fresh=len(fresh))
        return {"x": state["x"] - self.lr * weighted_sum(updates, p)}


Algorithm("refl", FedAvgClient, REFLServer, "Abdelmoniem 2023", defaults=KASYNC)
