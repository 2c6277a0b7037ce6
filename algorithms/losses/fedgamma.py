"""FedGAMMA (Dai et al., IEEE Transactions on Neural Networks and Learning Systems 2023).

SCAFFOLD with sharpness-aware steps: w <- w - lr (∇f(w + rho g / |g|) + c - c_i), where g = ∇f(w) on
the same batch. The control variates are SCAFFOLD's, by its option II. |g| is the norm of all
parameters together.

Run: raysim run quickstart algorithm=fedgamma
"""

from dataclasses import dataclass

from raysim.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
from raysim.rules import Algorithm, NonNegative


@dataclass(frozen=True)
class FedGAMMAClient(SCAFFOLDClient):
    """Local steps of SCAFFOLD along the gradient at the worst point nearby."""

    rho: NonNegative = 0.1
    """Distance of that point."""

    def direction(self, shared, state, batch, task):
        g = task.grad(state["w"], batch, mode="frozen")
        g = task.grad(state["w"] + self.rho * g / (g.norm() + 1e-12), batch)
        return g.sub_(state["c_i"]).add_(shared["c"])


Algorithm(
    "fedgamma",
    FedGAMMAClient,
    SCAFFOLDServer,
    "Dai 2023",
    state="server P, client P",
    traffic="down 2P, up 2P",
)
