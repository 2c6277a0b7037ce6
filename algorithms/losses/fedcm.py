"""FedCM, client-level momentum (Xu et al., arXiv:2106.10874, 2021).

Local steps w <- w - lr (alpha ∇f(w) + (1 - alpha) D), where D is the mean gradient of the last
round's steps: D <- mean_i (x - w_i) / (K_i lr) for K_i local steps. D is 0 in the first round.

Run: raysim run quickstart algorithm=fedcm
"""

from dataclasses import dataclass

from raysim.rules import Algorithm, ClientRule, ServerRule, Share


@dataclass(frozen=True)
class FedCMClient(ClientRule):
    """Local SGD along a mixture of the gradient and the last round's mean direction."""

    needs = ("x", "D")
    sends = ("delta", "mean_step")
    alpha: Share = 0.1
    """Weight of the client's own gradient."""

    @property
    def needs_plain_sgd(self):
        return "(x - w) / (K lr) is the mean direction of plain steps"

    def direction(self, shared, state, batch, task):
        return self.alpha * task.grad(state["w"], batch) + (1 - self.alpha) * shared["D"]

    def finish(self, shared, state, client_state, data, task):
        delta = shared["x"] - state["w"]
        return {"delta": delta, "mean_step": delta / (task.steps * task.lr)}, {}


@dataclass(frozen=True)
class FedCMServer(ServerRule):
    """Average of the updates, and of the clients' mean directions."""

    provides = ("x", "D")
    uploads = {"delta": "mean", "mean_step": "mean"}

    def init(self, x0, problem):
        return {"x": x0, "D": x0.new_zeros(len(x0))}

    def update(self, state, reports):
        x = state["x"] - self.lr * reports.mean("delta")
        return {"x": x, "D": reports.mean("mean_step")}


Algorithm(
    "fedcm",
    FedCMClient,
    FedCMServer,
    "Xu J. 2021",
    state="server P, client 0",
    traffic="down 2P, up 2P",
)
