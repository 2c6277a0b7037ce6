from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgClient
from raysim.rules import ClientRule


@dataclass(frozen=True)
class Leak(ClientRule):
    said: bool = False

    @property
    def unprotected_uploads(self):
        return ("delta",) if self.said else ()

    def direction(self, shared, state, batch, task):
        return 0 * task.grad(state["w"], batch) + task.sample_grads(state["w"], batch)[0].mean(0)


@dataclass(frozen=True)
class Whole(FedAvgClient):
    def init(self, shared, client_state, data, task):
        return {"g": task.full_grad(shared["x"], data)}
