"""FedASAM (Caldarola et al., ECCV 2022).

Adaptive sharpness-aware local steps: w <- w - lr ∇f(w + rho T² g / |T g|), where g = ∇f(w) on the
same batch and T = |w| + eta, for each parameter. The authors' code has T = 1 for biases,
and moves BatchNorm statistics in both passes; here they move in the second.

Run: raysim run quickstart algorithm=fedasam
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class FedASAMClient(ClientRule):
    """Local SGD along the gradient at the worst point nearby, in units of the parameters."""

    rho: NonNegative = 0.5
    """Distance of that point."""
    eta: NonNegative = 0.2
    """Smallest unit."""

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch, mode="frozen")
        T = state["w"].abs() + self.eta
        return task.grad(state["w"] + self.rho * T**2 * g / ((T * g).norm() + 1e-12), batch)


Algorithm("fedasam", FedASAMClient, FedAvgServer, "Caldarola 2022")
