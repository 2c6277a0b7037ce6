"""AFL (Goetz et al., arXiv:1909.12641, 2019).

Active federated learning: a client with n examples has the value v = sum of its losses / sqrt(n),
known since its last round. The share alpha1 of the clients with the smallest values counts as
-infinity. Then 1 - alpha3 of the cohort is drawn with probabilities in proportion to exp(alpha2 v),
the rest uniformly from the other clients. A client that was never seen counts as -infinity. The
losses are those of the model that the client received.

The paper does not say how alpha3 of the cohort is rounded. Here it is to the nearest number: with
alpha3 = 0.1 a cohort of five has no client that is drawn uniformly, so the first cohort takes part
in every round. Take a larger alpha3 for small cohorts.

Run: raysim run quickstart algorithm=afl
"""

from dataclasses import dataclass

import numpy as np

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative, Share


@dataclass(frozen=True)
class AFLClient(ClientRule):
    """Local SGD that reports the loss of the received model."""

    def init(self, shared, client_state, data, task):
        return {"loss": task.full_loss(shared["x"], data)}

    def finish(self, shared, state, client_state, data, task):
        sent, kept = super().finish(shared, state, client_state, data, task)
        return {**sent, "metric/loss": state["loss"]}, kept


@dataclass(frozen=True)
class AFLServer(FedAvgServer):
    """FedAvg with clients that are drawn by their loss."""

    alpha1: Share = 0.75
    """Share of the clients with the smallest values that is left out."""
    alpha2: NonNegative = 0.01
    """Factor of the value in the logarithm of the probability."""
    alpha3: Share = 0.1
    """Share of the cohort that is drawn uniformly."""

    def select(self, state, pool, rng):
        value = np.nan_to_num(np.sqrt(pool.samples) * pool.metric("loss"), nan=-np.inf)
        smallest = np.argsort(value, kind="stable")[: int(self.alpha1 * len(value))]
        value[smallest] = -np.inf
        n_drawn = min(pool.size - round(self.alpha3 * pool.size), np.isfinite(value).sum())
        keys = self.alpha2 * value + rng.gumbel(size=len(value))  # the largest: draws by exp
        order = np.argsort(-keys)
        others = rng.permutation(order[n_drawn:])[: pool.size - n_drawn]
        return pool.ids[np.concatenate([order[:n_drawn], others])]


Algorithm("afl", AFLClient, AFLServer, "Goetz 2019", traffic="down P, up P + 1")
