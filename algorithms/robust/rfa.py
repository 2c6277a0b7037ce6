"""RFA, the geometric median (Pillutla et al., IEEE Transactions on Signal Processing 2022).

The smoothed Weiszfeld algorithm approximates the point z with the smallest sum of weighted
distances to the updates: z <- sum beta_i delta_i / sum beta_i, where beta_i = p_i / max(nu, |z -
delta_i|).

Run: raysim run quickstart algorithm=rfa algorithm.weights=samples
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, NonNegativeInt, Positive, ServerRule


@dataclass(frozen=True)
class RFAServer(ServerRule):
    """x <- x - lr * geometric median of the updates, with the weights p_i of the clients."""

    weights_after_training = True
    iterations: NonNegativeInt = 3
    """Passes of the algorithm in a round. It starts at the mean."""
    nu: Positive = 1e-6
    """Smallest distance that counts."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        deltas, median = reports.per_client("delta"), reports.mean("delta")
        p = beta = deltas.new_tensor(reports.weights)
        for _ in range(self.iterations):
            beta = p / (deltas - median).norm(dim=1).clamp(min=self.nu)
            median = beta @ deltas / beta.sum()
        reports.set_weights((beta.double() / beta.double().sum()).tolist())
        return {"x": state["x"] - self.lr * median}


Algorithm("rfa", FedAvgClient, RFAServer, "Pillutla 2022")
