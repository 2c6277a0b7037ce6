"""FedSAM (Qu et al., ICML 2022).

Sharpness-aware local steps: w <- w - lr ∇f(w + rho g / |g|), where g = ∇f(w) on the same batch.
BatchNorm statistics move in the second pass; in a PyTorch loop, such as the code of FedASAM's
authors, they move in both.

Run: raysim run quickstart algorithm=fedsam
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class FedSAMClient(ClientRule):
    """Local SGD along the gradient at the worst point nearby."""

    rho: NonNegative = 0.05
    """Distance of that point."""

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch, mode="frozen")
        return task.grad(state["w"] + self.rho * g / (g.norm() + 1e-12), batch)


Algorithm("fedsam", FedSAMClient, FedAvgServer, "Qu 2022")
