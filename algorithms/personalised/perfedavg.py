"""Per-FedAvg (Fallah et al., NeurIPS 2020).

The global model is a good start for one step on a client's data. With two batches D and D' of the
client, u = w - alpha ∇f(w; D), v = ∇f(u; D') and w <- w - lr (v - alpha ∇²f(w; D) v). By default
the term with the Hessian is left out (FO). With delta > 0 the product with the Hessian is
(∇f(w + delta v; D) - ∇f(w - delta v; D)) / (2 delta) (HF); the paper draws a third batch for it. A
client is evaluated after one step of size alpha on its own data, with the BatchNorm statistics that
this pass has moved. In local steps they move in the pass at u.

Run: raysim run quickstart algorithm=perfedavg partition.test.fraction=0.2 evaluate.clients.every=20
"""

from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule, NonNegative


@dataclass(frozen=True)
class PerFedAvgClient(ClientRule):
    """Local SGD along gradients after one step on another batch."""

    alpha: NonNegative = 0.05
    """Step size of the inner step."""
    delta: NonNegative = 0.0
    """Step of the difference that stands for the Hessian; 0 leaves the Hessian out."""

    def prepare(self, shared, batch, task):
        return (batch,)

    def direction(self, shared, state, batch, task):
        w, other = state["w"], batch.prepared[0]
        v = task.grad(w - self.alpha * task.grad(w, other, mode="frozen"), batch)
        if not self.delta:
            return v
        after = task.grad(w + self.delta * v, other, mode="frozen")
        before = task.grad(w - self.delta * v, other, mode="frozen")
        return v - self.alpha * (after - before) / (2 * self.delta)

    def evaluated(self, shared, client_state, data, task):
        x, buffers = shared["x"], task.buffers
        for batch in data.batches():
            _, buffers = task.grad_and_buffers(x, batch, buffers)
        return x - self.alpha * task.full_grad(x, data), buffers


Algorithm("perfedavg", PerFedAvgClient, FedAvgServer, "Fallah 2020")
