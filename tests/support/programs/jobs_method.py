from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class Lazy(ClientRule):
    forget: float = 0.1

    def direction(self, shared, state, batch, task):
        return (1 - self.forget) * task.grad(state["w"], batch)


lazy = Algorithm("lazy", Lazy, FedAvgServer, "nobody 2024")
