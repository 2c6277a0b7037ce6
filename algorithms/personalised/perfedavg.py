"""Per-FedAvg, first order (Fallah et al., NeurIPS 2020).

The global model is a good start for one step on a client's data. With two batches D and D' of the
client, u = w - alpha ∇f(w; D) and w <- w - lr ∇f(u; D'). The term with the Hessian is left out. A
client is evaluated after one step of size alpha on its own data, with the BatchNorm statistics that
this pass has moved. In local steps they move in the pass at u.

Run: raysim run quickstart algorithm=perfedavg partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class PerFedAvgClient(ClientRule):
    """Local SGD along gradients after one step on another batch."""

    alpha: float = 0.05
    """Step size of the inner step."""

    def prepare(self, shared, batch, task):
        return (batch,)

    def direction(self, shared, state, batch, task):
        gradient = task.grad(state["w"], batch.prepared[0], mode="frozen")
        return task.grad(state["w"] - self.alpha * gradient, batch)

    def evaluated(self, shared, client_state, data, task):
        x, buffers = shared["x"], task.buffers
        for batch in data.batches():
            _, buffers = task.grad_and_buffers(x, batch, buffers)
        return x - self.alpha * task.full_grad(x, data), buffers


Algorithm("perfedavg", PerFedAvgClient, FedAvgServer, "Fallah 2020")
