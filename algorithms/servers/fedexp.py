"""FedExP (Jhunjhunwala et al., ICLR 2023).

The server extrapolates: x <- x - eta mean_i delta_i with
eta = max(1, mean_i |delta_i|² / (2 (|mean_i delta_i|² + epsilon))). The paper evaluates the mean of
the last two models. The authors' code has M epsilon for M clients in place of epsilon, lowers it in
each round, and weighs clients by samples in both means (server.weights=samples).

Run: raysim run quickstart algorithm=fedexp
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, Logged, ServerRule


@dataclass(frozen=True)
class FedExPServer(ServerRule):
    """Mean of the updates with a step size from their spread."""

    logs = (Logged("eta", "factor by which FedExP extrapolates the mean update"),)
    epsilon: float = 0.001
    """Keeps the step size from growing when updates vanish."""

    @property
    def uploads(self):
        return {"delta": "per_client"}

    def update(self, state, reports):
        mean, deltas = reports.mean("delta"), reports.per_client("delta")
        squares = deltas.new_tensor(reports.weights) @ deltas.square().sum(1)
        eta = (squares / (2 * (mean.square().sum() + self.epsilon))).clamp(min=1)
        reports.log(eta=eta)
        return {"x": state["x"] - self.lr * eta * mean}


Algorithm("fedexp", FedAvgClient, FedExPServer, "Jhunjhunwala 2023")
