from dataclasses import dataclass

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class Plain(ClientRule):
    factor: float = 1.0

    def direction(self, shared, state, batch, task):
        return self.factor * task.grad(state["w"], batch)


@dataclass(frozen=True)
class Padded(ClientRule):
    def direction(self, shared, state, batch, task):
        return len(batch.y) * task.grad(state["w"], batch)


plain = Algorithm("plain", Plain, FedAvgServer, "")
padded = Algorithm("padded", Padded, FedAvgServer, "")
