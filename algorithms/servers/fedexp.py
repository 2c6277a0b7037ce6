"""FedExP (Jhunjhunwala et al., ICLR 2023).

The server extrapolates: x <- x - eta mean_i delta_i with eta = max(1, mean_i |delta_i|² / (2
(|mean_i delta_i|² + epsilon))). The mean of the last two models is evaluated, since the models
oscillate. The authors' code has M epsilon for M clients in place of epsilon, lowers it in each
round, weighs clients by samples in both means (algorithm.weights=samples), and evaluates the last
model alone after the first round.

Run: raysim run quickstart algorithm=fedexp
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import Algorithm, Logged, NonNegative, ServerRule


@dataclass(frozen=True)
class FedExPServer(ServerRule):
    """Mean of the updates with a step size from their spread."""

    logs = (Logged("eta", "factor by which FedExP extrapolates the mean update"),)
    epsilon: NonNegative = 0.001
    """Keeps the step size from growing when updates vanish."""

    uploads = {"delta": "per_client"}

    def init(self, x0, problem):
        return {"x": x0, "last": x0}

    def for_evaluation(self, state):
        return {"x": (state["x"] + state["last"]) / 2}

    def update(self, state, reports):
        mean, deltas = reports.mean("delta"), reports.per_client("delta")
        squares = deltas.new_tensor(reports.weights) @ deltas.square().sum(1)
        eta = (squares / (2 * (mean.square().sum() + self.epsilon))).clamp(min=1)
        reports.log(eta=eta)
        return {"x": state["x"] - self.lr * eta * mean, "last": state["x"]}


Algorithm("fedexp", FedAvgClient, FedExPServer, "Jhunjhunwala 2023", state="server P, client 0")
