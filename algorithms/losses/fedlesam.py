"""FedLESAM, locally estimated global perturbation (Fan et al., ICML 2024).

Sharpness-aware local steps whose perturbation points from the present global model x to x_old, the
one that the client received in its last round: w <- w - lr ∇f(w + rho (x_old - x) / |x_old - x|).
So a step needs one gradient. There is no perturbation in a client's first round.

The authors' code takes the last round's update of x for all clients, as if each had been in it, and
shifts all entries of the k-th tensor by one number: the k-th of that vector, times -rho over the
sum of the absolute values of the numbers that are used.

Run: raysim run quickstart algorithm=fedlesam
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class FedLESAMClient(ClientRule):
    """Local SGD along gradients at a point shifted towards the global model of before."""

    rho: NonNegative = 0.1
    """Length of the shift."""

    def state(self, task):
        return {"x_old": task.zeros()}

    def init(self, shared, client_state, data, task):
        gap = (client_state["x_old"] - shared["x"]) * client_state["seen"].to(shared["x"])
        return {"shift": self.rho * gap / gap.norm().clamp(min=1e-12)}

    def direction(self, shared, state, batch, task):
        return task.grad(state["w"] + state["shift"], batch)

    def finish(self, shared, state, client_state, data, task):
        return {"delta": shared["x"] - state["w"]}, {"x_old": shared["x"]}


Algorithm("fedlesam", FedLESAMClient, FedAvgServer, "Fan 2024", state="server 0, client P")
