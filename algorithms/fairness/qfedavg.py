"""q-FedAvg (Li et al., ICLR 2020).

Fairness by weights that grow with the loss F_i of a client at x. With L = 1 / lr of the local steps
and u_i = L (x - w_i): x <- x - sum_i F_i^q u_i / sum_i (q F_i^(q-1) |u_i|² + L F_i^q).

Run: raysim run quickstart algorithm=qfedavg algorithm.q=1.0
"""

from dataclasses import dataclass

from raysim.rules import Algorithm, ClientRule, NonNegative, ServerRule, task_loss


@dataclass(frozen=True)
class QFedAvgClient(ClientRule):
    """Local SGD that sends numerator and denominator of the step."""

    sends = ("delta", "h")
    supports_dp = False  # the loss has no noise
    q: NonNegative = 1.0
    """Fairness. 0 is FedAvg."""

    def finish(self, shared, state, client_state, data, task):
        net = task.net(shared["x"], data.examples, "eval", task.global_buffers)
        F = task_loss(net, data.examples).mean().clamp(min=1e-10)
        u = (shared["x"] - state["w"]) / task.lr
        h = self.q * F ** (self.q - 1) * u.square().sum() + F**self.q / task.lr
        return {"delta": F**self.q * u, "h": h[None]}, {}


@dataclass(frozen=True)
class QFedAvgServer(ServerRule):
    """x <- x - lr * sum of the numerators / sum of the denominators."""

    counts_equally = True

    @property
    def uploads(self):
        return {"delta": "sum", "h": "sum"}

    def update(self, state, reports):
        return {"x": state["x"] - self.lr * reports.sum("delta") / reports.sum("h")}


Algorithm("qfedavg", QFedAvgClient, QFedAvgServer, "Li T. 2020b", traffic="down P, up P + 1")
