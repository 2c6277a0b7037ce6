from dataclasses import dataclass
from typing import ClassVar

from raysim.algorithms.fedavg import FedAvgServer
from raysim.rules import Algorithm, ClientRule


@dataclass(frozen=True)
class Plain(ClientRule):
    factor: float = 1.0

    def direction(self, shared, state, batch, task):
        return self.factor * task.grad(state["w"], batch)


@dataclass(frozen=True)
class Remembers(ClientRule):
    calls: ClassVar[list[int]] = []

    def init(self, shared, client_state, data, task):
        self.calls.clear()  # so that a client gives the same in each round
        return {}

    def direction(self, shared, state, batch, task):
        self.calls.append(1)
        return (1 + len(self.calls) % 3) * task.grad(state["w"], batch)


plain = Algorithm("plain", Plain, FedAvgServer, "")
remembers = Algorithm("remembers", Remembers, FedAvgServer, "")
